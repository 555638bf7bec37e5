"""Progress events as lines of text: the scrolling part on a terminal, and the complete output in a pipe."""

from __future__ import annotations

import sys
import threading
import time

from optuna_dsat.escape.terminal import say_prose
from optuna_dsat.metrics import Interval
from optuna_dsat.outcome import Outcome
from optuna_dsat.study import progress
from optuna_dsat.words import (
    bytes_in_words,
    duration_in_words,
    flops_in_words,
    largest_in_words,
    model_in_words,
    outcome_in_words,
    params_in_words,
    things_in_words,
    times_in_words,
)

_QUIET_S = 2.0
"""Shortest phase to print, in seconds."""


def lines_of(event: progress.ProgressEvent) -> list[str]:
    """Return the lines of an event; none for single steps and phases."""
    if isinstance(event, progress.Message):
        return [event.text]
    if isinstance(event, progress.ProfileStarted):
        return [f"Profile launch at micro-batch {event.micro_batch}, {event.words} ..."]
    if isinstance(event, progress.ProfileFinished):
        return _profile_lines(event)
    if isinstance(event, progress.SearchStarted):
        return _search_lines(event)
    if isinstance(event, progress.TrialStarted):
        again = f" (attempt {event.attempt + 1})" if event.attempt else ""
        why = f" ({event.reason})" if event.reason else ""
        return [f"Trial {event.number}{again}: {event.words}{why} ..."]
    if isinstance(event, progress.TrialDropped):
        return [f"Trial {event.number} was given to another worker; its result is dropped."]
    if isinstance(event, progress.TrialFinished):
        return [_finished_line(event)]
    if isinstance(event, progress.FinalistStarted):
        return [f"Round {event.round}, trial {event.number}: {event.words}, measured again with more steps ..."]
    if isinstance(event, progress.FinalistMeasured):
        return [_finalist_line(event)]
    return []


def _profile_lines(event: progress.ProfileFinished) -> list[str]:
    profile = event.profile
    how = "measured before, no launch needed" if event.reused else f"measured with {event.measured_with}"
    sizes = {stage: largest_in_words(size) for stage, size in sorted(event.largest_micro_batches.items())}
    largest = ", ".join(f"ZeRO {stage}: {size}" for stage, size in sizes.items())
    if len(sizes) > 1 and len(set(sizes.values())) == 1:
        largest = f"{next(iter(sizes.values()))} at any ZeRO stage"
    trained = profile.trainable_params
    frozen = "" if trained == profile.params else f" ({params_in_words(trained)} trainable)"
    flops = f" and {flops_in_words(profile.flops_per_sample)}" if profile.flops_per_sample > 0 else ""
    return [
        f"Profile ({how}): {model_in_words(profile.params, pipeline=event.pipeline)}{frozen}, "
        f"{bytes_in_words(profile.activation_bytes_per_sample)} of activations{flops} per sample. "
        f"Each rank has {bytes_in_words(profile.device_memory_bytes)} of memory.",
        f"Largest micro-batch by the memory model: {largest}.",
    ]


def _search_lines(event: progress.SearchStarted) -> list[str]:
    before = f", {event.launched} made before" if event.launched else ""
    most = things_in_words(event.max_trials, "trial")
    lines = [f"Study {event.study}: up to {most}{before}; metric: {event.metric}."]
    for name, best in (("Best in the search so far", event.best), ("Confirmed so far", event.confirmed)):
        if best is not None:
            lines.append(f"{name}: trial {best.number}, {best.speed.text}, {best.words}.")
    return lines


def _finished_line(event: progress.TrialFinished) -> str:
    is_measured = event.outcome is Outcome.MEASURED and event.speed is not None
    text = f"Trial {event.number}: {event.words}: {'' if is_measured else outcome_in_words(event.outcome)}"
    if event.speed is not None:
        text += f"{'' if is_measured else ', '}{event.speed.brief}"
    if event.speed_up is not None:
        text += ", your config" if event.own else f", {times_in_words(event.speed_up)}x your config"
    if event.best:
        text += ", best so far"
    if event.outcome is not Outcome.MEASURED and event.message:
        text += f" ({event.message})"
    return text


def _finalist_line(event: progress.FinalistMeasured) -> str:
    begin = f"Round {event.round}, trial {event.number}: {event.words}"
    if event.speed is None or event.value is None or event.low is None or event.high is None:
        return f"{begin}: {event.message}"
    around = max(event.high - event.value, event.value - event.low) / event.value
    interval = f"95% within \u00b1{around:.1%}"
    if around >= 1:
        ends = Interval(value=event.value, low=max(0.0, event.low), high=max(0.0, event.high))
        interval = event.speed.between(ends)
    return f"{begin}: {event.speed.brief} ({interval})"


class LineView:
    """Prints each event as plain lines: for pipes and logs."""

    def __init__(self) -> None:
        self._search: progress.SearchStarted | None = None
        self._phase: _ToldPhase | None = None

    def __call__(self, event: progress.ProgressEvent) -> None:
        """Print the event's lines."""
        if isinstance(event, progress.SearchStarted):
            self._search = event
        if isinstance(event, progress.Phase):
            self._enter(event)
        for line in lines_of(event):
            say_prose(f"{line}{self._so_far(event)}", file=sys.stderr)

    def _so_far(self, event: progress.ProgressEvent) -> str:
        """Return the progress of the search, for the end of the line of a finished launch."""
        if not isinstance(event, progress.TrialFinished) or self._search is None:
            return ""
        done = max(0, event.launched - event.running)
        running = f", {event.running} running" if event.running else ""
        return f"; {done} of {self._search.max_trials} done{running}"

    def close(self) -> None:
        """Stop printing phases."""
        self._enter(progress.Phase(words=""))

    def _enter(self, event: progress.Phase) -> None:
        if self._phase is not None:
            self._phase.end()
        self._phase = _ToldPhase(event.words) if event.words and not event.said else None


class _ToldPhase:
    """A phase that is printed after a delay, and at its end with its duration."""

    def __init__(self, words: str) -> None:
        self._words = words[:1].upper() + words[1:]
        self._began = time.monotonic()
        self._told = False
        self._timer = threading.Timer(_QUIET_S, self._tell)
        self._timer.daemon = True
        self._timer.start()

    def _tell(self) -> None:
        self._told = True
        say_prose(f"{self._words} ...", file=sys.stderr)

    def end(self) -> None:
        """End the phase, after waiting for a line that is being written."""
        self._timer.cancel()
        self._timer.join()
        if self._told:
            took = duration_in_words(time.monotonic() - self._began)
            say_prose(f"{self._words.partition(' (')[0]} took {took}.", file=sys.stderr)
