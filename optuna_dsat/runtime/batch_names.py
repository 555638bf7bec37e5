"""Names that mean a batch size of training or a ZeRO stage, among options and settings of a script."""

from __future__ import annotations

import re
from functools import cache

__all__ = ["means_batch", "means_elsewhere", "means_length", "means_stage", "names_training_batch"]

_BATCH = re.compile(r"batch|(^|[-_.])(m?bsz?|mbs|b)(=?$|[-_.=])", re.IGNORECASE)
"""Names that mean a batch size."""
_ELSEWHERE = re.compile(r"eval|valid|test|predict|infer|generat", re.IGNORECASE)
"""Names that mean another one than that of training."""
_LENGTH = re.compile(r"bptt|seq|len|context|ctx|block|window|token", re.IGNORECASE)
"""Names that mean the length of what is trained on."""
_STAGE = re.compile(r"stage(?!s)|zero", re.IGNORECASE)
"""Names that may mean a ZeRO stage; 'stages' are counted."""


def means_batch(name: str) -> bool:
    """Whether a name means a batch size, of training or another."""
    return _BATCH.search(name) is not None


def means_elsewhere(name: str) -> bool:
    """Whether a name means something of evaluation and its like."""
    return _ELSEWHERE.search(name) is not None


def means_length(name: str) -> bool:
    """Whether a name means the length of a sequence, and no batch size."""
    return _LENGTH.search(name) is not None and not means_batch(name)


def means_stage(name: str) -> bool:
    """Whether a name may mean a ZeRO stage."""
    return _STAGE.search(name) is not None


@cache  # asked of every option of the script at each forward pass
def names_training_batch(name: str) -> bool:
    """Whether a name means a batch size of training."""
    return means_batch(name) and not means_elsewhere(name)
