"""One page of what a proof says: what was proven, on which GPU, and what fell short."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.prove_gpu.proof import STAND_IN_NOTE, Record, Status

__all__ = ["page"]

HEADINGS = {
    Status.PROVEN: "Proven",
    Status.RAN: "Ran, which proves nothing about values or speed",
    Status.FELL_SHORT: "Fell short",
    Status.FAILED: "Failed",
    Status.NOT_RUN: "Not run",
}


def page(machine: Mapping[str, Any], records: Sequence[Record], *, written: str, left: Sequence[str]) -> str:
    """Return the page as Markdown.

    Args:
        machine: ``Machine.to_json``.
        records: What is over.
        written: When, for people.
        left: Names of the checks that are still to do.
    """
    gpus: list[str] = machine.get("gpus", [])
    shown = ", ".join(f"{gpus.count(name)} x {name}" for name in sorted(set(gpus))) or "no GPU"
    versions: Mapping[str, str] = machine.get("versions", {})
    counts = {status: sum(record.status is status for record in records) for status in Status}
    lines = [
        "# What was proven on a GPU",
        "",
        f"{shown}, {machine.get('memory_bytes', 0) / 2**30:.1f} GiB each; driver {machine.get('driver', '?')}, "
        f"CUDA {machine.get('cuda', '?')}; {machine.get('cores', '?')} cores, "
        f"{machine.get('host_memory_bytes', 0) / 2**30:.0f} GiB of host memory.",
        ", ".join(f"{name} {version}" for name, version in versions.items()) + f"; {written}.",
        *(
            ["", f"**The GPU is a stand-in, whose kernels compute nothing.** {STAND_IN_NOTE}"]
            * bool(machine.get("stand_in"))
        ),
        "",
        ", ".join(f"{count} {status.value.replace('_', ' ')}" for status, count in counts.items() if count) + ".",
    ]
    if left:
        lines.append(f"**Not at its end: {len(left)} checks are still to do ({', '.join(left)}).**")
    for status, heading in HEADINGS.items():
        result = [record for record in records if record.status is status]
        if result:
            lines += ["", f"## {heading}", "", "| check | what was asked | what came out | s |", "|---|---|---|--:|"]
        for record in result:
            cells = (record.name, record.asked, record.why, f"{record.seconds:.0f}")
            lines.append("| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([*lines, "", "Figures, commands and versions of each check are in proof.json."]) + "\n"
