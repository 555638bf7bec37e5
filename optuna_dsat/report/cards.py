"""The key figures at the top of a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from optuna_dsat.metrics import LARGER_IS_BETTER, Interval
from optuna_dsat.report.slot_time import account
from optuna_dsat.report.training import Training, TrainingTime, training_times
from optuna_dsat.report.view import StudyView
from optuna_dsat.store import StoredLaunch
from optuna_dsat.study.confirm.loss_check import is_of_losses
from optuna_dsat.study.confirm.measured import Measured
from optuna_dsat.study.confirm.verdict import Verdict
from optuna_dsat.study.confirm.words import how_known
from optuna_dsat.words import (
    bytes_in_words,
    count_in_words,
    duration_in_words,
    metric_in_words,
    share_in_words,
    slot_time_in_words,
    step_time_in_words,
    things_in_words,
    times_in_words,
)

__all__ = ["Card", "cards_of"]


@dataclass(frozen=True, kw_only=True)
class Card:
    """A key figure."""

    heading: str
    value: str
    remark: str = ""


def cards_of(view: StudyView, training: Training) -> Iterator[Card]:
    """Yield the key figures of a study: the result, its speed-ups, savings of a training, cost of the search."""
    verdict = view.verdict
    if verdict is not None:
        own = None if verdict.is_baseline else verdict.baseline
        yield _best(view, verdict, own)
        yield from _speed_ups(view, verdict)
        yield from _beside(view, verdict.result, own)
        times = training_times(view, training)
        if times is not None:
            yield _training(times, view.spec.device, is_own=verdict.result.is_user_config)
    yield from _search(view)


def _best(view: StudyView, verdict: Verdict, own: Measured | None) -> Card:
    """Return the speed of the result: in samples/s, unless a time is optimised."""

    def words(measured: Measured) -> str:
        if view.metric in LARGER_IS_BETTER:
            return view.speed(measured).brief
        return metric_in_words(view.metric, measured.value, device=view.spec.device)

    best = verdict.result
    known = [view.speed(best).between(best.interval), how_known(verdict), "" if own is None else f"yours {words(own)}"]
    heading = "Best so far" if view.end_reason is None else "Best"
    return Card(heading=heading, value=words(best), remark="; ".join(filter(None, known)))


def _beside(view: StudyView, best: Measured, own: Measured | None) -> Iterator[Card]:
    """Yield further figures of the result, compared with the user's own config."""
    rates = [("Tokens", "tokens_per_s")] if view.metric in LARGER_IS_BETTER else [
        ("Samples", "throughput"), ("Tokens", "tokens_per_s")
    ]  # fmt: skip
    for heading, name in rates:
        value, yours = best.metrics.get(name), None if own is None else own.metrics.get(name)
        if value:
            remark = f"yours {metric_in_words(name, yours)}" if yours else ""
            yield Card(heading=heading, value=metric_in_words(name, value), remark=remark)
    if best.step_s and view.metric != "latency":
        remark = f"for {things_in_words(best.train_batch_size, 'sample')}"
        if own is not None and own.step_s:
            remark += f"; yours {step_time_in_words(own.step_s)} for {count_in_words(own.train_batch_size)}"
        yield Card(heading="One step", value=step_time_in_words(best.step_s), remark=remark)
    if best.peak_bytes > 0:
        memory = 0 if view.profiled is None else view.profiled.profile.device_memory_bytes
        share = f"{share_in_words(best.peak_bytes / memory)} of {bytes_in_words(memory)} " if memory else ""
        yield Card(heading="Peak memory", value=bytes_in_words(best.peak_bytes), remark=f"{share}on the fullest rank")
    flops, reached = best.metrics.get("FLOPS_per_gpu") or 0.0, view.utilisation(best)
    shown = metric_in_words("FLOPS_per_gpu", flops, device=view.spec.device)
    if reached is not None:
        own_share = None if own is None else view.utilisation(own)
        remark = f"of the GPU's peak: {shown}" + ("" if own_share is None else f"; yours {own_share:.1%}")
        yield Card(heading="MFU", value=f"{reached:.1%}", remark=remark)
    elif flops:
        yield Card(heading="Arithmetic", value=shown, remark="forward and backward; the device's peak is not known")


def _speed_ups(view: StudyView, verdict: Verdict) -> Iterator[Card]:
    """Yield the speed-up over the user's config; at both global batches, the user's first, if they differ."""
    result, same = verdict.result, verdict.same_batch
    if result.is_user_config:
        by_rounds = verdict.is_by_rounds and len(view.measured) > 1
        why = "no faster configuration could be confirmed" if by_rounds else (
            "your config is the best that was measured"
        )  # fmt: skip
        yield Card(heading="Speed-up", value="none", remark=why)
        return
    if result.speed_up is None:
        yield Card(heading="Speed-up", value="not known", remark="your config was not measured")
        return
    over = "over your config, by the few steps of the search"
    if result.speed_up.low is not None:
        over = f"over your config, paired in rounds; {_between(result.speed_up)}"
    batch = count_in_words(result.train_batch_size)
    if same is None or same.train_batch_size == result.train_batch_size:
        yield Card(heading="Speed-up", value=_times(result.speed_up), remark=f"{over} at your global batch of {batch}")
        return
    yield _at_user_batch(same, verdict)
    yield Card(heading="Speed-up", value=_times(result.speed_up), remark=f"{over}, at its global batch of {batch}")


def _at_user_batch(same: Measured, verdict: Verdict) -> Card:
    heading, batch = "Speed-up at your batch", f"at your global batch of {count_in_words(same.train_batch_size)}"
    if same.is_user_config or same.speed_up is None:
        surely = "surely " if verdict.is_by_rounds else ""
        return Card(heading=heading, value="none", remark=f"nothing {surely}faster was measured {batch}")
    remark = "; ".join(filter(None, [f"trial {same.number}, {batch}", _between(same.speed_up)]))
    return Card(heading=heading, value=_times(same.speed_up), remark=remark)


def _between(ratio: Interval) -> str:
    if ratio.low is None or ratio.high is None:
        return "by the few steps of the search" if ratio.rounds == 0 else ""
    return f"95% CI {times_in_words(ratio.low)} to {times_in_words(ratio.high)}"


def _training(times: TrainingTime, device: str, *, is_own: bool) -> Card:
    """Return the time of a whole training, and the time saved if the result is not the user's own config."""
    epochs = "An epoch" if times.epochs == 1 else f"{times.epochs:g} epochs"
    if is_own:
        costs = "" if times.price is None else f": {times.price:,.2f} at {times.price_per_gpu_hour:g} an hour"
        remark = f"on {things_in_words(times.samples, 'sample')}{costs}"
        return Card(heading=epochs, value=duration_in_words(times.best_s), remark=remark)
    saved = times.saved_slot_hours
    words = f"{'saves' if saved >= 0 else 'costs'} {slot_time_in_words(abs(saved) * 3600, device)}"
    if times.saved_price is not None:
        words += f", {abs(times.saved_price):,.2f} at {times.price_per_gpu_hour:g} an hour"
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
    used = f"{view.launches_used} of {view.spec.max_trials}"
    yield Card(heading="Launches", value=used, remark=f"and {', '.join(beside)}" if beside else "")
    spent = account(view.launches)
    if spent.wall_s > 0:
        share = spent.idle_s / (spent.busy_s + spent.idle_s)
        used = slot_time_in_words(spent.busy_s, view.spec.device)
        remark = f"{used} of launches; devices were idle for {share_in_words(share)} of it"
        yield Card(heading="Time of the search", value=duration_in_words(spent.wall_s), remark=remark)


def _times(ratio: Interval) -> str:
    return f"{times_in_words(ratio.value)}\u00d7"
