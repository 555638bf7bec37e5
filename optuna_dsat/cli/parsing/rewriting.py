"""Rewriting of arguments before they are parsed."""

from __future__ import annotations

__all__ = ["COUNTS", "lift_option", "spread_numbers"]

COUNTS = ("--zero-stages", "--gpus-per-trial", "--cpu-ranks")
"""Options that accept several numbers."""


def spread_numbers(argv: list[str], *options: str) -> list[str]:
    """Rewrite ``option 1 2 3`` as ``option 1,2,3`` for each of ``options``, because an option takes a single value.

    Arguments after ``--`` stay unchanged.
    """
    result: list[str] = []
    index = 0
    while index < len(argv) and argv[index] != "--":
        result.append(argv[index])
        index += 1
        if result[-1] in options:
            end = index
            while end < len(argv) and argv[end].replace(",", "").isdigit():
                end += 1
            if end > index + 1:
                result.append(",".join(argv[index:end]))
                index = end
    return [*result, *argv[index:]]


def lift_option(argv: list[str], option: str) -> list[str]:
    """Move ``option VALUE`` to the front of ``argv``, where options of all commands are parsed.

    Arguments after ``--`` stay unchanged.
    """
    end = argv.index("--") if "--" in argv else len(argv)
    front: list[str] = []
    rest: list[str] = []
    index = 0
    while index < end:
        if argv[index] == option:
            front += argv[index : min(index + 2, end)]
            index += 2
        else:
            (front if argv[index].startswith(f"{option}=") else rest).append(argv[index])
            index += 1
    return [*front, *rest, *argv[end:]]
