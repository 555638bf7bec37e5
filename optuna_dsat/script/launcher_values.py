"""Values of launchers' options that their parsers let through and their launch would refuse later.

Each function raises ``ValueError`` with the option and its value.
"""

from __future__ import annotations

__all__ = ["MOST_SLOTS", "at_least_one", "gpu_indices", "nodes_of_torchrun", "ranks_of_torchrun", "slots_of"]

MOST_SLOTS = 1024
"""Most slots of one machine that ``--include`` and ``--exclude`` may name."""
_DEVICES = frozenset({"auto", "cpu", "gpu", "xpu", "npu", "hpu", "mlu", "musa", "sdaa", "privateuseone"})
"""What ``--nproc-per-node`` may name instead of a number: torch's own words, and backends that others register."""


def _whole(text: str) -> int | None:
    """Return a whole number; None if the text is none, or has more digits than any count."""
    try:
        return int(text) if len(text) < 20 else None
    except ValueError:
        return None


def at_least_one(value: int, option: str) -> int:
    """Return a count.

    Args:
        value: The count.
        option: The option that gives it.

    Raises:
        ValueError: If it is less than 1.
    """
    if value < 1:
        raise ValueError(f"{option} is at least 1; got {value}")
    return value


def ranks_of_torchrun(text: str) -> int | None:
    """Return the ranks of ``--nproc-per-node``; None where it names a kind of device.

    Raises:
        ValueError: If it is neither a count nor a kind of device.
    """
    ranks = _whole(text)
    if ranks is not None:
        return at_least_one(ranks, "--nproc-per-node")
    if text not in _DEVICES:
        raise ValueError(f"--nproc-per-node is a number, or auto, cpu, gpu or xpu; got {text!r}")
    return None


def nodes_of_torchrun(text: str) -> int:
    """Return the most nodes of ``--nnodes``, a number or ``LEAST:MOST``.

    Raises:
        ValueError: If it is neither, or there are none.
    """
    ends = [_whole(part) for part in text.split(":")]
    known = [one for one in ends if one is not None]
    if len(known) != len(ends) or len(ends) > 2 or not 1 <= known[0] <= known[-1]:
        raise ValueError(f"--nnodes is a number from 1, or LEAST:MOST; got {text!r}")
    return known[-1]


def gpu_indices(text: str, option: str) -> str:
    """Return GPUs as they are given: indices, or identifiers as ``GPU-...`` and ``MIG-...``.

    Args:
        text: The GPUs, separated by commas.
        option: The option that gives them.

    Raises:
        ValueError: If one is neither.
    """
    for part in text.split(","):
        if not part.strip().isdecimal() and not part.strip().startswith(("GPU-", "MIG-")):
            raise ValueError(f"{option} is a list of GPUs as 0,1; got {text!r}")
    return text


def slots_of(text: str, option: str) -> list[int]:
    """Return the slots that ``0,2-3`` names.

    Args:
        text: The slots; empty for all.
        option: The option that gives them.

    Raises:
        ValueError: If a part is no slot or range of slots, or there are more than ``MOST_SLOTS``.
    """
    found: list[int] = []
    for part in text.split(",") if text else ():
        first, dash, last = part.partition("-")
        ends = [_whole(first), _whole(last) if dash else _whole(first)]
        low, high = (-1 if one is None else one for one in ends)
        if not 0 <= low <= high or len(found) + high - low >= MOST_SLOTS:
            raise ValueError(f"{option} names slots as 0,2-3, at most {MOST_SLOTS}; got {part!r}")
        found += range(low, high + 1)
    return found
