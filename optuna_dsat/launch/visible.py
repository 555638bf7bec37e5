"""The GPUs that ``CUDA_VISIBLE_DEVICES`` names, parsed as CUDA does, and the entries that CUDA ignores.

By the CUDA programming guide (environment variables) entries are indices or UUIDs, which may be shortened to a unique
prefix, and parsing ends at the first invalid one. Other rules are those of ``torch/cuda/__init__.py`` of
torch 2.13 (``_parse_visible_devices``, ``_transform_uuid_to_ordinals``): the first entry decides whether indices,
``GPU-`` or ``MIG-`` entries are read and an entry of another kind ends the list; a number counts up to its last digit
(``1gpu2`` is 1). A GPU that is named twice leaves CUDA with none; here it counts once, since every launch gets
a variable of its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from optuna_dsat.words import things_in_words

__all__ = ["VARIABLE", "Visible", "is_part", "read_visible"]

VARIABLE = "CUDA_VISIBLE_DEVICES"
_NUMBER = re.compile(r"\+?(\d+)")
_GPU, _PART = "GPU-", "MIG-"


@dataclass(frozen=True, kw_only=True)
class Visible:
    """The GPUs that the variable makes visible."""

    gpus: tuple[str, ...]
    """Index of each GPU as text; the UUID of a MIG instance, or of a GPU that does not report its own."""
    by_uuid: bool = False
    """Whether the variable names GPUs by UUIDs."""
    notices: tuple[str, ...] = ()
    """Lines for the user on ignored entries."""


def is_part(gpu: str) -> bool:
    """Whether this is the UUID of a MIG instance."""
    return gpu.startswith(_PART)


def read_visible(text: str | None, uuids: Sequence[str]) -> Visible:
    """Return the GPUs that ``text`` names, in its order; all for None.

    Args:
        text: Value of the variable; None if it is not set.
        uuids: UUID of each GPU of the machine by index; empty if it is not available.
    """
    if text is None:
        return Visible(gpus=tuple(map(str, range(len(uuids)))))
    entries = [entry.strip() for entry in text.split(",")]
    found: list[str] = []
    twice: list[str] = []
    ended: str | None = None
    for place, entry in enumerate(entries):
        gpu, why = _resolve(entry, entries[0], uuids)
        if gpu is None:
            if entry not in ("-1", "") or place + 1 < len(entries):
                rest = ",".join(entries[place:])
                ended = f"{VARIABLE} is {text!r}: {why}, so CUDA ignores {rest!r}."
            break
        (twice if gpu in found else found).append(gpu)
    notices = [] if ended is None else [ended]
    if twice:
        names = ", ".join(dict.fromkeys(twice))
        notices.append(
            f"{VARIABLE} is {text!r}: GPU {names} counts once; CUDA itself sees no GPU where one is repeated."
        )
    return Visible(gpus=tuple(found), by_uuid=entries[0].startswith(_GPU), notices=tuple(notices))


def _resolve(entry: str, first: str, uuids: Sequence[str]) -> tuple[str | None, str]:
    """Return the GPU that an entry names; None and the reason if it names none or differs in kind from the first."""
    number = _NUMBER.match(entry)
    kinds = [next((kind for kind in (_GPU, _PART) if one.startswith(kind)), "") for one in (entry, first)]
    if kinds[0] != kinds[1]:
        return None, f"{entry!r} is of another kind than {first!r}, and indices, GPU- and MIG- UUIDs cannot be mixed"
    if kinds[0] == _PART:
        return entry, ""
    if kinds[0] == _GPU:
        return _by_uuid(entry, uuids)
    if number is None:
        return None, f"{entry!r} is no device"
    index = int(number.group(1))
    if index >= len(uuids):
        return None, f"{entry!r} is none of this machine's {things_in_words(len(uuids), 'GPU')}"
    return str(index), ""


def _by_uuid(entry: str, uuids: Sequence[str]) -> tuple[str | None, str]:
    matching = [index for index, uuid in enumerate(uuids) if uuid and uuid.startswith(entry)]
    if not matching and not all(uuids):
        return entry, ""  # possibly that of a GPU which does not report its own
    if not matching:
        return None, f"{entry!r} is none of this machine's GPUs"
    if len(matching) > 1:
        return None, f"{entry!r} may be GPU {' or '.join(map(str, matching))}"
    return str(matching[0]), ""
