"""One launch followed to its end, while no other runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from optuna_dsat.launch.measurement import GlobalStep, LaunchRecord
from optuna_dsat.launch.protocol import Finished, Launcher, LaunchReport, LaunchRequest, Observed, SlotsBusyError
from optuna_dsat.launch.waiting import SlotWait
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.events import Event

__all__ = ["MOST_KILLED", "follow"]

MOST_KILLED = 3
"""Further launches of one that others have killed."""

_RETRY_S = 0.5
"""Pause between two attempts to start."""
_POLL_S = 0.05
"""Poll during that pause, in which a launcher may raise because its devices do not become free."""


def follow(
    launcher: Launcher,
    request: LaunchRequest,
    on_event: Callable[[Event], None] = lambda _: None,
    *,
    enough: Callable[[Sequence[GlobalStep]], bool] = lambda _: False,
    on_step: Callable[[GlobalStep], None] = lambda _: None,
    wait: SlotWait | None = None,
) -> tuple[LaunchRecord, LaunchReport]:
    """Run one launch to its end and return its record and report; waits while others hold the slots.

    A launch that others kill is repeated a few times, with a notice through ``wait``.

    Args:
        launcher: Where to launch; no other launch of it may be running.
        request: The launch.
        on_event: Called with each event.
        enough: Called with the counted steps after each global step; the launch ends as measured once it returns True.
        on_step: Called with each global step.
        wait: Reports who holds the slots and limits the wait; None for ten minutes without notices.

    Raises:
        DeviceError: If others hold the slots for longer than ``wait`` allows.
    """
    wait = SlotWait(launcher.holders, slots=request.slots) if wait is None else wait
    for _ in range(MOST_KILLED):
        record, report = _follow_once(launcher, request, on_event, enough=enough, on_step=on_step, wait=wait)
        if report.outcome is not Outcome.KILLED:
            return record, report
        wait.repeat(report.message)
    return _follow_once(launcher, request, on_event, enough=enough, on_step=on_step, wait=wait)


def _follow_once(
    launcher: Launcher,
    request: LaunchRequest,
    on_event: Callable[[Event], None],
    *,
    enough: Callable[[Sequence[GlobalStep]], bool],
    on_step: Callable[[GlobalStep], None],
    wait: SlotWait,
) -> tuple[LaunchRecord, LaunchReport]:
    record = LaunchRecord(world_size=request.slots, start_profile_step=request.start_profile_step)
    _start(launcher, request, wait)
    while True:
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
                return record, update.report


def _start(launcher: Launcher, request: LaunchRequest, wait: SlotWait) -> None:
    while not _try_start(launcher, request):
        wait.check()
        time.sleep(_RETRY_S)
        launcher.poll(_POLL_S)


def _try_start(launcher: Launcher, request: LaunchRequest) -> bool:
    """Start a launch if its slots are free; return whether they were."""
    if launcher.free_slots < request.slots:
        return False
    try:
        launcher.start(request)
    except SlotsBusyError:  # another tuner on this machine was faster
        return False
    return True
