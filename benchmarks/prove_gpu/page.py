"""One page of what a proof says: what was proven, on which GPU, and what fell short."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    return "\n".join([*_head(machine, written), *_summary(records, left), *_sections(records, machine)]) + "\n"


def _head(machine: Mapping[str, Any], written: str) -> Iterator[str]:
    yield "# What was proven on a GPU"
    yield ""
    gpus: list[str] = machine.get("gpus", [])
    names = sorted(set(gpus))
    shown = ", ".join(f"{gpus.count(name)} x {name}" for name in names) or "no GPU"
    memory_gib = machine.get("memory_bytes", 0) / 2**30
    yield (
        f"{shown}, {memory_gib:.1f} GiB each; driver {machine.get('driver', '?')}, CUDA {machine.get('cuda', '?')}; "
        f"{machine.get('cores', '?')} cores, {machine.get('host_memory_bytes', 0) / 2**30:.0f} GiB of host memory."
    )
    versions: Mapping[str, str] = machine.get("versions", {})
    yield ", ".join(f"{name} {version}" for name, version in versions.items()) + f"; {written}."
    if machine.get("stand_in"):
        yield ""
        yield f"**This machine's GPU is a stand-in; its kernels compute nothing.** {STAND_IN_NOTE}"
    yield ""


def _summary(records: Sequence[Record], left: Sequence[str]) -> Iterator[str]:
    counts = {status: sum(record.status is status for record in records) for status in Status}
    words = {Status.RAN: "ran on a stand-in", Status.FELL_SHORT: "fell short", Status.NOT_RUN: "not run"}
    yield ", ".join(f"{count} {words.get(status, status.value)}" for status, count in counts.items() if count) + "."
    if left:
        yield f"**Not at its end: {len(left)} checks are still to do ({', '.join(left)}).**"


def _sections(records: Sequence[Record], machine: Mapping[str, Any]) -> Iterator[str]:
    headings = {**HEADINGS, Status.PROVEN: "Proven to run, on a stand-in"} if machine.get("stand_in") else HEADINGS
    for status, heading in headings.items():
        found = [record for record in records if record.status is status]
        if not found:
            continue
        yield from ("", f"## {heading}", "", "| check | what was asked | what came out | s |", "|---|---|---|--:|")
        for record in found:
            cells = (record.name, record.asked, record.why, f"{record.seconds:.0f}")
            yield "| " + " | ".join(_cell(cell) for cell in cells) + " |"
    yield ""
    yield "Figures, commands and versions of each check are in proof.json."


def _cell(text: str) -> str:
    """Return a text that stays within one cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")
