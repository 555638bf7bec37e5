"""Progress events as lines of text: what scrolls by on a terminal, and the whole output in a pipe."""

from __future__ import annotations

import sys

from optuna_dsat.escape.terminal import say
from optuna_dsat.outcome import Outcome
from optuna_dsat.study import progress
from optuna_dsat.words import bytes_in_words, metric_in_words

__all__ = ["LineView", "lines_of"]


def lines_of(event: progress.ProgressEvent, metric: str) -> list[str]:
    """Return the lines of an event; none for single steps.

    Args:
        event: The event.
        metric: The metric that the search optimises.
    """
    if isinstance(event, progress.Message):
        return [event.text]
    if isinstance(event, progress.ProfileStarted):
        return [f"Profile launch at micro-batch {event.micro_batch}, {event.words} ..."]
    if isinstance(event, progress.ProfileFinished):
        return _profile_lines(event)
    if isinstance(event, progress.SearchStarted):
        before = f", {event.launched} made before" if event.launched else ""
        lines = [f"Study {event.study}: {event.max_trials} launches{before}, optimising {event.metric}."]
        for name, one in (("Best in the search so far", event.best), ("Confirmed so far", event.confirmed)):
            if one is not None:
                lines.append(f"{name}: trial {one.number}, {metric_in_words(event.metric, one.value)}, {one.words}.")
        return lines
    if isinstance(event, progress.TrialStarted):
        again = f" (attempt {event.attempt + 1})" if event.attempt else ""
        return [f"Trial {event.number}{again}: {event.words} ..."]
    if isinstance(event, progress.TrialDropped):
        return [f"Trial {event.number} was given to another worker; its result is dropped."]
    if isinstance(event, progress.TrialFinished):
        return [_finished_line(event, metric)]
    if isinstance(event, progress.FinalistStarted):
        return [f"Round {event.round}, trial {event.number}: {event.words}, measured again with more steps ..."]
    if isinstance(event, progress.FinalistMeasured):
        return [_finalist_line(event, metric)]
    return []


def _profile_lines(event: progress.ProfileFinished) -> list[str]:
    profile = event.profile
    how = "measured before, no launch needed" if event.reused else f"measured with {event.measured_with}"
    largest = ", ".join(f"ZeRO {stage}: {size}" for stage, size in sorted(event.largest_micro_batches.items()))
    return [
        f"Profile ({how}): {profile.params / 1e6:.4g} M parameters ({profile.trainable_params / 1e6:.4g} M trainable), "
        f"{bytes_in_words(profile.activation_bytes_per_sample)} of activations and "
        f"{profile.flops_per_sample / 1e9:.4g} GFLOP per sample, "
        f"{bytes_in_words(profile.device_memory_bytes)} of memory per rank.",
        f"Largest micro-batch by the memory model: {largest}.",
    ]


def _finished_line(event: progress.TrialFinished, metric: str) -> str:
    text = f"Trial {event.number}: {event.words}: {event.outcome.value}"
    if event.value is not None:
        text += f", {metric_in_words(metric, event.value)}"
    if event.speed_up is not None:
        text += ", your own config" if event.own else f", {event.speed_up:.2f}x your config"
    if event.best:
        text += ", best in the search so far"
    if event.outcome not in (Outcome.MEASURED, Outcome.PRUNED):
        text += f" ({event.message})"
    return text


def _finalist_line(event: progress.FinalistMeasured, metric: str) -> str:
    if event.value is None or event.low is None or event.high is None:
        return f"Round {event.round}, trial {event.number}: {event.words}: {event.message}"
    return (
        f"Round {event.round}, trial {event.number}: {event.words}: {metric_in_words(metric, event.value)} "
        f"(95 % between {metric_in_words(metric, event.low)} and {metric_in_words(metric, event.high)})"
    )


class LineView:
    """Prints each event as plain lines: for pipes and logs."""

    def __init__(self) -> None:
        self._metric = ""

    def __call__(self, event: progress.ProgressEvent) -> None:
        """Print the event's lines."""
        if isinstance(event, progress.SearchStarted):
            self._metric = event.metric
        for line in lines_of(event, self._metric):
            say(line, file=sys.stderr)
