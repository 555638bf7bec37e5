"""Follow a single launch to its end."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from optuna_dsat.launch.machine.nvml import DeviceError
from optuna_dsat.launch.measurement import GlobalStep, LaunchRecord
from optuna_dsat.launch.protocol import (
    Finished,
    Holder,
    Launcher,
    LaunchReport,
    LaunchRequest,
    Observed,
    SlotsBusyError,
)
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.events import Event

DEFAULT_LIMIT_S = 600.0
_QUIET_S = 2.0
"""Shortest reported wait."""
_REMEDIES = (
    "Free them, or tune with fewer: --gpus-per-trial N, CUDA_VISIBLE_DEVICES=... for some, --only-free-gpus for those "
    "that are free at the start. --wait-for-gpus says how long to wait."
)


class SlotWait:
    """Reports who holds the slots that a launch waits for, and limits the wait while the holders stay the same.

    Call ``check`` repeatedly while slots are missing, and ``reset`` once the launch has started or is given up. A
    ``limit_s`` of 0 fails at once. ``on_phase`` gets an empty text at the end of a reported wait.
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
        """Record that slots are still missing.

        Raises:
            DeviceError: If the holders have been the same for longer than the limit; names them.
        """
        now = self._clock()
        holders = self._holders()
        if any(holder.own for holder in holders):
            self.reset()  # the launcher reports its own launches that do not end
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
        """Report that a launch is repeated for an external reason."""
        self._on_notice(f"Launched again: {message}.")

    def reset(self) -> None:
        """Record that no slots are missing."""
        if self._reported is not None:
            self._on_phase("")
        self._begun = self._state = self._reported = None

    def _needed(self) -> str:
        return "a free slot" if self._slots == 1 else f"{self._slots} free slots"

    def _at_the_limit(self, holders: Sequence[Holder]) -> str:
        resume = f" Nothing is lost: `optuna-dsat resume {shlex.quote(self._study)}` continues." if self._study else ""
        waited = f" in {self._limit_s:g} s" if self._limit_s else ""
        return (
            f"A launch needs {self._needed()}, and there were too few{waited}. {_sentence(holders)} {_REMEDIES}{resume}"
        )


def _sentence(holders: Sequence[Holder]) -> str:
    from optuna_dsat.launch.machine.owners import holders_in_words

    words = holders_in_words(holders)
    return f"Not free: {words}." if words else "What holds them is not known."


MOST_KILLED = 3
"""Maximum repetitions of a launch that others have killed."""

_RETRY_S = 0.5
"""Interval between attempts to start."""
_POLL_S = 0.05
"""Poll time between attempts; the launcher may raise because its devices do not become free."""


def follow(
    launcher: Launcher,
    request: LaunchRequest,
    on_event: Callable[[Event], None] = lambda _: None,
    *,
    enough: Callable[[Sequence[GlobalStep]], bool] = lambda _: False,
    on_step: Callable[[GlobalStep], None] = lambda _: None,
    wait: SlotWait | None = None,
) -> tuple[LaunchRecord, LaunchReport]:
    """Run a launch to its end and return its record and report; waits while others hold the slots.

    No other launch of the launcher may be running. A launch that others kill is repeated a few times, with a notice
    through ``wait``; without it, the wait is ten minutes. ``enough`` gets the counted steps after each global step; if
    it returns True, the launch ends as measured.

    Raises:
        DeviceError: If others hold the slots for longer than ``wait`` allows.
    """
    wait = SlotWait(launcher.holders, slots=request.slots) if wait is None else wait
    killed = 0
    while True:
        record = LaunchRecord(world_size=request.slots, start_profile_step=request.start_profile_step)
        report: LaunchReport | None = None
        _start(launcher, request, wait)
        while report is None:
            (wait.check if request.launch_id in launcher.waiting else wait.reset)()
            for update in launcher.poll(1.0):
                if isinstance(update, Observed):
                    step = record.add(update.event)
                    on_event(update.event)
                    if step is not None:
                        on_step(step)
                    if step is not None and step.step < request.end_profile_step and enough(record.counted):
                        message = f"measured to step {step.step}: the step time is known"
                        launcher.stop(request.launch_id, outcome=Outcome.MEASURED, message=message)
                elif isinstance(update, Finished) and update.launch_id == request.launch_id:
                    report = update.report
        killed += report.outcome is Outcome.KILLED
        if report.outcome is not Outcome.KILLED or killed > MOST_KILLED:
            return record, report
        wait.repeat(report.message)


def _start(launcher: Launcher, request: LaunchRequest, wait: SlotWait) -> None:
    while True:
        if launcher.free_slots >= request.slots:
            with suppress(SlotsBusyError):  # another tuner on this machine took them first
                launcher.start(request)
                return
        wait.check()
        time.sleep(_RETRY_S)
        launcher.poll(_POLL_S)
