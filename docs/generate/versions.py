"""Write the table of versions of ``docs/how-to/environments.md`` from the results of ``make test-versions``."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / ".cache" / "environments" / "results"
PAGE = ROOT / "docs" / "how-to" / "environments.md"
BEGIN, END = "<!-- versions -->\n", "<!-- end of versions -->\n"


def table() -> str:
    """Return the table: a row for each version of DeepSpeed, a column for each job."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))]
    jobs = list(dict.fromkeys(record["job"] for record in records))
    rows: dict[str, dict[str, str]] = {}
    for record in records:
        row = rows.setdefault(record["deepspeed"], {"torch": record["torch"], "python": record["python"]})
        row[record["job"]] = record["result"]
    lines = [f"| DeepSpeed | torch | {' | '.join(jobs)} |", f"|---|---|{'---|' * len(jobs)}"]
    for version, row in rows.items():
        lines.append(f"| {version} | {row['torch']} | {' | '.join(row.get(job, 'not run') for job in jobs)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Replace the table in the page."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
