"""The top of a report: the answers, each with its bars, and key figures of result, search and slots."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from optuna_dsat.metrics import LARGER_IS_BETTER
from optuna_dsat.report.facts import Training, TrainingTime, slot_seconds, training_times
from optuna_dsat.report.view import StudyView
from optuna_dsat.store import StoredLaunch
from optuna_dsat.study.confirm.loss_check import is_of_losses
from optuna_dsat.study.confirm.measured import Measured
from optuna_dsat.study.confirm.words import answers_in_words, ratio_in_words
from optuna_dsat.words import (
    bytes_in_words,
    count_in_words,
    duration_in_words,
    metric_in_words,
    share_in_words,
    slot_name,
    slot_time_in_words,
    step_time_in_words,
    things_in_words,
)


@dataclass(frozen=True, kw_only=True)
class Card:
    """A key figure."""

    heading: str
    value: str
    remark: str = ""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """The speed of a config as a bar; lengths are in percent of the longest."""

    name: str
    value: str
    length: float
    low: float | None
    """Ends of the 95% confidence interval; None without."""
    high: float | None
    is_user_config: bool


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The fastest config, at the global batch of the user's config or at any."""

    heading: str
    figure: str
    """The speed-up, or a substitute."""
    caption: str
    """Unit and certainty of the figure."""
    number: int
    """Its trial."""
    words: str
    """Its configuration."""
    batch: str
    """Its global batch compared with the user's; empty without a baseline."""
    is_other_batch: bool
    """Whether the global batch differs from the user's."""
    text: str
    """The answer as a sentence."""
    bars: tuple[Bar, ...]
    is_gain: bool
    """Whether another config than the user's is the answer."""


def answers_of(view: StudyView) -> list[Answer]:
    """Return the answers of a study: the result, and before it the answer at the user's global batch if it differs."""
    verdict = view.verdict
    if verdict is None:
        return []
    best = "Best" if view.end_reason is not None else "Best so far"
    others = [item for item in verdict.measured.values() if not item.is_user_config and item.speed_up is not None]
    others.sort(key=lambda item: (item.rounds, 0.0 if item.speed_up is None else item.speed_up.value), reverse=True)
    texts = answers_in_words(verdict, metric=view.metric, device=view.spec.device)
    if len(texts) == 1 or verdict.same_batch is None:
        return [_answer(view, verdict.result, best, texts[-1], others)]
    alike = [item for item in others if item.train_batch_size == verdict.same_batch.train_batch_size]
    return [
        _answer(view, verdict.same_batch, f"{best} at your global batch", texts[0], alike),
        _answer(view, verdict.result, f"{best} at another global batch", texts[1], others),
    ]


def _answer(view: StudyView, best: Measured, heading: str, text: str, others: Sequence[Measured]) -> Answer:
    """Return an answer; if it is the user's config, with the bar of the first of the ``others``."""
    baseline, batch, is_other = view.baseline, "", False
    bars = [best, *others[:1]] if best.is_user_config else [best] if baseline is None else [baseline, best]
    figure, caption = _speed(view, best), "your config" if best.is_user_config else "your config is not measured"
    if best.is_user_config and others:
        by_rounds = view.verdict is not None and view.verdict.is_by_rounds
        figure, caption = "No gain", f"nothing faster than your config was {'confirmed' if by_rounds else 'measured'}"
    elif best.speed_up is not None and not best.is_user_config:
        figure, _, caption = ratio_in_words(best.speed_up, to="your config").partition(" ")
        caption += "" if best.speed_up.rounds else ", by the few steps of the search, not confirmed"
    if baseline is not None and not best.is_user_config:
        is_other = baseline.train_batch_size != best.train_batch_size
        before, after = count_in_words(baseline.train_batch_size), count_in_words(best.train_batch_size)
        change = f"{before} \u2192 {after}: not the same training" if is_other else f"{after}, as yours"
        batch = f"global batch {change}"
    return Answer(
        heading=heading,
        figure=figure,
        caption=caption,
        number=best.number,
        words=best.words,
        batch=batch,
        is_other_batch=is_other,
        text=text,
        bars=tuple(_bar(view, item) for item in bars),
        is_gain=not best.is_user_config,
    )


def _speed(view: StudyView, measured: Measured) -> str:
    """Return the speed of a config: in samples/s, unless a time is optimised."""
    if view.metric in LARGER_IS_BETTER:
        return view.speed(measured).brief
    return metric_in_words(view.metric, measured.value, device=view.spec.device)


def _bar(view: StudyView, item: Measured) -> Bar:
    known = () if view.verdict is None else view.verdict.measured.values()
    longest = max(other.interval.high or other.value for other in (item, *known)) or 1.0
    low, high = (None if end is None else 100 * end / longest for end in (item.interval.low, item.interval.high))
    return Bar(
        name="your config" if item.is_user_config else f"trial {item.number}",
        value=_speed(view, item),
        length=100 * item.value / longest,
        low=low,
        high=high,
        is_user_config=item.is_user_config,
    )


def cards_of(view: StudyView, training: Training) -> Iterator[Card]:
    """Yield the key figures of a study: steps and memory of the result, savings of a training, cost of the search."""
    verdict = view.verdict
    if verdict is not None:
        yield from _beside(view, verdict.result, None if verdict.is_baseline else verdict.baseline)
        times = training_times(view, training)
        if times is not None:
            yield _training(times, view.spec.device)
    yield from _search(view)


def _beside(view: StudyView, best: Measured, baseline: Measured | None) -> Iterator[Card]:
    """Yield further figures of the result, compared with the user's own config."""
    rates = [("Tokens", "tokens_per_s")] if view.metric in LARGER_IS_BETTER else [
        ("Samples", "throughput"), ("Tokens", "tokens_per_s")
    ]  # fmt: skip
    for heading, name in rates:
        value, yours = best.metrics.get(name), None if baseline is None else baseline.metrics.get(name)
        if value:
            remark = f"yours {metric_in_words(name, yours)}" if yours else ""
            yield Card(heading=heading, value=metric_in_words(name, value), remark=remark)
    if best.step_s and view.metric != "latency":
        remark = f"for {things_in_words(best.train_batch_size, 'sample')}"
        if baseline is not None and baseline.step_s:
            remark += f"; yours {step_time_in_words(baseline.step_s)} for {count_in_words(baseline.train_batch_size)}"
        yield Card(heading="One step", value=step_time_in_words(best.step_s), remark=remark)
    if best.peak_bytes > 0:
        memory = 0 if view.profiled is None else view.profiled.profile.device_memory_bytes
        share = f"{share_in_words(best.peak_bytes / memory)} of {bytes_in_words(memory)} " if memory else ""
        yield Card(heading="Peak memory", value=bytes_in_words(best.peak_bytes), remark=f"{share}on the fullest rank")
    flops, reached = best.metrics.get("FLOPS_per_gpu") or 0.0, view.utilisation(best)
    shown = metric_in_words("FLOPS_per_gpu", flops, device=view.spec.device)
    if reached is not None:
        own_share = None if baseline is None else view.utilisation(baseline)
        remark = f"of the GPU's peak: {shown}" + ("" if own_share is None else f"; yours {own_share:.1%}")
        yield Card(heading="MFU", value=f"{reached:.1%}", remark=remark)
    elif flops:
        yield Card(heading="Arithmetic", value=shown, remark="forward and backward; the device's peak is not known")


def _training(times: TrainingTime, device: str) -> Card:
    """Return the time of a whole training, and the time saved against the user's own config."""
    at = "" if times.price_per_gpu_hour is None else f"at {times.price_per_gpu_hour:,.2f} per {slot_name(device)} hour"
    epochs = "An epoch" if times.epochs == 1 else f"{times.epochs:g} epochs"
    saved = times.saved_slot_hours
    if times.own_s is None or not saved:
        costs = "" if times.price is None else f": {times.price:,.2f} {at}"
        remark = f"on {things_in_words(times.samples, 'sample')}{costs}"
        return Card(heading=epochs, value=duration_in_words(times.best_s), remark=remark)
    words = f"{'saves' if saved >= 0 else 'costs'} {slot_time_in_words(abs(saved) * 3600, device)}"
    if times.saved_price is not None:
        words += f", {abs(times.saved_price):,.2f} {at}"
    instead = f"instead of {duration_in_words(times.own_s)}"
    return Card(
        heading=epochs,
        value=duration_in_words(times.best_s),
        remark=f"{instead}: {words} on {things_in_words(times.samples, 'sample')}",
    )


_BESIDE = ("profile", "measure finalists again", "compare losses")
"""Purposes of launches outside the search."""


def _what_for(launch: StoredLaunch) -> str:
    if launch.purpose == "confirm":
        return _BESIDE[2 if is_of_losses(launch.report.launch_id) else 1]
    return launch.purpose


def _search(view: StudyView) -> Iterator[Card]:
    counts = Counter(_what_for(row) for row in view.launches)
    beside = [f"{counts[what]} to {what}" for what in _BESIDE if counts[what]]
    used = f"{view.trials_done} of {view.spec.max_trials}"
    yield Card(heading="Trials", value=used, remark=f"further launches: {', '.join(beside)}" if beside else "")
    if view.launches:
        used = slot_time_in_words(slot_seconds(view.launches), view.spec.device)
        spent = duration_in_words(search_seconds(view.launches))
        yield Card(heading="Time of the search", value=spent, remark=f"{used} of launches")


_PAUSE_S = 60.0
"""Minimum length of a gap on all slots that counts as a pause, in seconds ..."""
_PAUSE_LAUNCHES = 5.0
"""... and in median launch durations; both must be exceeded."""
_Time = tuple[float, float]
"""Start and end, as Unix times in seconds."""


def search_seconds(launches: Sequence[StoredLaunch]) -> float:
    """Return the time from the start of the first launch to the end of the last, without pauses."""
    reports = (row.report for row in launches)
    times = sorted((report.started_at, report.started_at + report.held_s) for report in reports)
    return sum(end - start for start, end in _periods(times))


def _periods(times: Sequence[_Time]) -> Iterator[_Time]:
    """Yield the periods without a pause; ``times`` are of all launches, by start."""
    if not times:
        return
    pause_s = max(_PAUSE_S, _PAUSE_LAUNCHES * statistics.median(end - start for start, end in times))
    begun, over = times[0]
    for start, end in times[1:]:
        if start - over > pause_s:
            yield begun, over
            begun = start
        over = max(over, end)
    yield begun, over
