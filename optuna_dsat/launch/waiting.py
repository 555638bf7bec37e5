"""A bounded wait for slots that others hold, with notices of who holds them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from optuna_dsat.launch.nvml import DeviceError
from optuna_dsat.launch.protocol import Holder

__all__ = ["DEFAULT_LIMIT_S", "SlotWait"]

DEFAULT_LIMIT_S = 600.0
_QUIET_S = 2.0
"""Shortest wait that is reported."""
_REMEDIES = (
    "Free them, or tune with fewer: --gpus-per-trial N, CUDA_VISIBLE_DEVICES=... for some, --only-free-gpus for those "
    "that are free at the start. --wait-for-gpus says how long to wait."
)


class SlotWait:
    """Reports who holds the slots that a launch waits for, and limits the wait while the holders stay the same.

    Call ``check`` repeatedly while slots are missing, and ``reset`` once the launch has started or is given up.

    Args:
        holders: Returns the present holders of the slots that are not free.
        slots: Slots of a launch.
        limit_s: Longest wait in seconds since the holders last changed; 0 to fail at once.
        study: Name of the study to resume after a failure; empty for none.
        on_notice: Called with who holds what, once per change.
        on_phase: Called with what is waited for once that is reported, and with nothing once it is over.
        clock: Monotonic time in seconds.
    """

    def __init__(
        self,
        holders: Callable[[], Sequence[Holder]],
        *,
        slots: int,
        limit_s: float = DEFAULT_LIMIT_S,
        study: str = "",
        on_notice: Callable[[str], None] = lambda _: None,
        on_phase: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._holders = holders
        self._slots = slots
        self._limit_s = limit_s
        self._study = study
        self._on_notice = on_notice
        self._on_phase = on_phase
        self._clock = clock
        self._begun: float | None = None
        self._changed = 0.0
        self._state: frozenset[tuple[str, str, float]] | None = None
        self._reported: frozenset[tuple[str, str]] | None = None

    def check(self) -> None:
        """Note that slots are still missing.

        Raises:
            DeviceError: If the holders have been the same for longer than the limit; names them.
        """
        now = self._clock()
        holders = self._holders()
        if any(holder.own for holder in holders):
            self.reset()  # the launcher itself reports a launch that does not end
            return
        state = frozenset((holder.device, holder.who, holder.since) for holder in holders)
        if self._begun is None:
            self._begun = now
        if state != self._state:
            self._state, self._changed = state, now
        if now - self._changed >= self._limit_s:
            raise DeviceError(self._at_the_limit(holders))
        reported = frozenset((holder.device, holder.who) for holder in holders)
        if reported != self._reported and now - self._begun >= _QUIET_S:
            self._reported = reported
            self._on_notice(
                f"Waiting for {self._needed()}, for {self._limit_s:g} s at most while this does not change "
                f"(--wait-for-gpus). {_sentence(holders)}"
            )
            devices = ", ".join(dict.fromkeys(holder.device for holder in holders))
            self._on_phase(f"waiting for {devices or self._needed()}")

    def repeat(self, message: str) -> None:
        """Report that a launch is repeated for a reason that is not its own."""
        self._on_notice(f"Launched again: {message}.")

    def reset(self) -> None:
        """Note that no slots are missing."""
        if self._reported is not None:
            self._on_phase("")
        self._begun = self._state = self._reported = None

    def _needed(self) -> str:
        return "a free slot" if self._slots == 1 else f"{self._slots} free slots"

    def _at_the_limit(self, holders: Sequence[Holder]) -> str:
        resume = f" Nothing is lost: `optuna-dsat resume {self._study}` goes on." if self._study else ""
        waited = f" in {self._limit_s:g} s" if self._limit_s else ""
        return (
            f"A launch needs {self._needed()}, and there were too few{waited}. {_sentence(holders)} {_REMEDIES}{resume}"
        )


def _sentence(holders: Sequence[Holder]) -> str:
    from optuna_dsat.launch.holders import holders_in_words

    words = holders_in_words(holders)
    return f"Not free: {words}." if words else "What holds them is not known."
