"""The news of a search as lines of text: what scrolls by on a terminal, and all there is in a pipe."""

from __future__ import annotations

import sys

from optuna_dsat.outcome import Outcome
from optuna_dsat.study import progress
from optuna_dsat.words import bytes_in_words, metric_in_words

__all__ = ["Lines", "lines_of"]


def lines_of(news: progress.ProgressEvent, metric: str) -> list[str]:
    """Return the lines that a piece of news is worth."""
    if isinstance(news, progress.Message):
        return [news.text]
    if isinstance(news, progress.ProfileStarted):
        return [f"Profile launch at micro-batch 1, {news.words} ..."]
    if isinstance(news, progress.ProfileFinished):
        return _profile_lines(news)
    if isinstance(news, progress.SearchStarted):
        before = f", {news.launched} made before" if news.launched else ""
        lines = [f"Study {news.study}: {news.max_trials} launches{before}, optimising {news.metric}."]
        if news.best is not None:
            lines.append(f"Best so far: {metric_in_words(news.metric, news.best.value)}, {news.best.words}.")
        return lines
    if isinstance(news, progress.TrialStarted):
        again = f" (attempt {news.attempt + 1})" if news.attempt else ""
        return [f"Trial {news.number}{again}: {news.words} ..."]
    if isinstance(news, progress.TrialDropped):
        return [f"Trial {news.number} was given to another worker; its result is dropped."]
    if isinstance(news, progress.TrialFinished):
        return [_finished_line(news, metric)]
    if isinstance(news, progress.FinalistStarted):
        return [f"Finalist {news.number}: {news.words}, measured again with more steps ..."]
    if isinstance(news, progress.FinalistMeasured):
        return [_finalist_line(news, metric)]
    return []


def _profile_lines(news: progress.ProfileFinished) -> list[str]:
    profile = news.profile
    how = "measured before, no launch needed" if news.reused else f"measured with {news.measured_with}"
    largest = ", ".join(f"ZeRO {stage}: {size}" for stage, size in sorted(news.largest_micro_batches.items()))
    return [
        f"Profile ({how}): {profile.params / 1e6:.4g} M parameters ({profile.trainable_params / 1e6:.4g} M trainable), "
        f"{bytes_in_words(profile.activation_bytes_per_sample)} of activations and "
        f"{profile.flops_per_sample / 1e9:.4g} GFLOP per sample, "
        f"{bytes_in_words(profile.device_memory_bytes)} of memory per rank.",
        f"Largest micro-batch by the memory model: {largest}.",
    ]


def _finished_line(news: progress.TrialFinished, metric: str) -> str:
    text = f"Trial {news.number}: {news.words}: {news.outcome.value}"
    if news.value is not None:
        text += f", {metric_in_words(metric, news.value)}"
    if news.speed_up is not None:
        text += ", your own config" if news.own else f", {news.speed_up:.2f}x your config"
    if news.best:
        text += ", best so far"
    if news.outcome not in (Outcome.MEASURED, Outcome.PRUNED):
        text += f" ({news.message})"
    return text


def _finalist_line(news: progress.FinalistMeasured, metric: str) -> str:
    if news.value is None or news.low is None or news.high is None:
        return f"Finalist {news.number}: {news.words}: {news.message}"
    return (
        f"Finalist {news.number}: {news.words}: {metric_in_words(metric, news.value)} "
        f"(95 % between {metric_in_words(metric, news.low)} and {metric_in_words(metric, news.high)})"
    )


class Lines:
    """Prints each piece of news as plain lines: for pipes and logs."""

    def __init__(self) -> None:
        self._metric = ""

    def __call__(self, news: progress.ProgressEvent) -> None:
        """Print what is worth a line; single steps are not."""
        if isinstance(news, progress.SearchStarted):
            self._metric = news.metric
        for line in lines_of(news, self._metric):
            print(line, file=sys.stderr, flush=True)
