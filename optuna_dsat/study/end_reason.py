"""Why a search ended, and what it may have left to gain."""

from __future__ import annotations

from enum import StrEnum

from optuna_dsat.words import gain_in_words

__all__ = ["BUDGETS", "EndReason", "headroom_in_words"]


class EndReason(StrEnum):
    """Why a search ended."""

    BUDGET = "the budget of launches is spent"
    EARLY_STOPPING = "no new best for as many launches as --early-stopping allows"
    TIMEOUT = "the time of --timeout is over"
    EXHAUSTED = "nothing that is left is expected to win"
    INTERRUPTED = "interrupted"


BUDGETS = frozenset({EndReason.BUDGET, EndReason.TIMEOUT})
"""Reasons that end a search although something may be left to gain."""


def headroom_in_words(share: float, *, spent: bool) -> str:
    """Return what may be left to gain.

    Args:
        share: As ``StudyResult.headroom``.
        spent: Whether a budget ended the search.
    """
    gain = gain_in_words(max(share, 0.001))
    more = " A larger budget may find more: --max-trials, --timeout." if spent else ""
    return f"By what the search measured, nothing is more than {gain} what it found (with 90% probability).{more}"
