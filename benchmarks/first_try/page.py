"""The table of a run, in Markdown, from its records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

_COLUMNS = {
    "prefix": "first try",
    "second": "with the option that the message names",
    "autotuning": "`deepspeed --autotuning`",
}
_LONGEST = 160


def page(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the table, how often each way worked, and what each said."""
    ways = [way for way in _COLUMNS if any(way in record["ways"] for record in records)]
    head = ["script", "style", *(_COLUMNS[way] for way in ways), "run on"]
    rows = [
        [f"`{record['name']}`", record["style"], *(_cell(record, way) for way in ways), _date(record)]
        for record in records
    ]
    lines = [_row(head), _row(["---"] * len(head)), *map(_row, rows), ""]
    lines += [f"- {_COLUMNS[way]}: {_counted(records, way)}" for way in ways]
    lines += ["", "What the tool said, or what was witnessed:", ""]
    lines += [f"- `{record['name']}`: {_told(record)}" for record in records]
    return "\n".join(lines) + "\n"


def not_judged(record: Mapping[str, Any]) -> str:
    """Return why a script counts as nothing, empty if it counts."""
    if record["not_judged"]:
        return str(record["not_judged"])
    if any(way["verdict"] == "worked" for way in record["ways"].values()):
        return ""  # it does train here
    alone = record["ways"].get("plain")
    return str(alone["message"]) if alone and alone["verdict"] == "not judged" else ""


def _cell(record: Mapping[str, Any], way: str) -> str:
    if not_judged(record):
        return "not judged"
    result = record["ways"].get(way)
    if not result:
        return ""
    batches, stages = result["micro_batches"], result["stages"]
    text = str(result["verdict"])
    if text == "worked" and way != "second":
        text = f"worked ({len(batches)} micro-batches, {len(stages)} stages)"
    return text if result["date"] == _date(record) else f"{text}, {result['date']}"


def _date(record: Mapping[str, Any]) -> str:
    """Return the date of a row: its first try's. Cells of another date, as of an earlier run, say theirs."""
    ways = record["ways"]
    return str((ways.get("prefix") or ways.get("plain") or {}).get("date", ""))


def _counted(records: Sequence[Mapping[str, Any]], way: str) -> str:
    of_way = [
        record["ways"][way]["verdict"] for record in records if record["ways"].get(way) and not not_judged(record)
    ]
    return ", ".join(f"{count} {verdict}" for verdict, count in Counter(of_way).most_common()) or "none run"


def _told(record: Mapping[str, Any]) -> str:
    if why := not_judged(record):
        return _text(f"not judged: {why}")
    result = record["ways"].get("prefix")
    if not result:
        return "not run"
    advice = (result.get("result") or {}).get("advice")
    return _text(f"{result['message']}{'; by hand: ' + advice if advice else ''}")


def _text(said: str) -> str:
    said = " ".join(said.split()).replace("|", "\\|").replace("<", "&lt;")
    return said if len(said) <= _LONGEST else f"{said[:_LONGEST]} ..."


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
