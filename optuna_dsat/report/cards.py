"""The key figures at the top of a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from optuna_dsat.metrics import LARGER_IS_BETTER
from optuna_dsat.report.performance import Performance, Training, TrainingTime, performance_of, training_times
from optuna_dsat.report.slot_time import account
from optuna_dsat.report.view import StudyView
from optuna_dsat.report.winner import Winner
from optuna_dsat.store import StoredLaunch
from optuna_dsat.study.confirm.loss_check import is_of_losses
from optuna_dsat.study.confirm.rounds import Ratio, SpeedUp
from optuna_dsat.study.confirm.standing import Standing
from optuna_dsat.words import (
    bytes_in_words,
    count_in_words,
    duration_in_words,
    metric_in_words,
    range_in_words,
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


def cards_of(view: StudyView, winner: Winner | None, training: Training) -> Iterator[Card]:
    """Yield the key figures of a study: the result, its speed-ups, savings of a training, cost of the search."""
    if winner is not None:
        best = performance_of(view, winner.standing)
        own = None if view.baseline is None or winner.is_own else performance_of(view, view.baseline)
        yield _best(view, winner, best, own)
        yield from _speed_ups(view, winner)
        yield from _beside(view, best, own)
        times = training_times(view, training)
        if times is not None:
            yield _training(times, view.spec.device, is_own=winner.is_own)
    yield from _search(view)


def _best(view: StudyView, winner: Winner, best: Performance, own: Performance | None) -> Card:
    """Return the speed of the result: in samples/s, unless a time is optimised."""
    in_samples = view.metric in LARGER_IS_BETTER and best.samples_per_s is not None
    if in_samples and best.samples_per_s is not None:
        metric, value, other = "throughput", best.samples_per_s, None if own is None else own.samples_per_s
    else:
        metric, value, other = view.metric, winner.standing.value, None if own is None else own.standing.value
    scale = value / winner.standing.value if winner.standing.value else 1.0
    known = [_interval(metric, winner.standing, scale, device=view.spec.device), winner.how_known]
    if other:
        known.append(f"yours {metric_in_words(metric, other, device=view.spec.device)}")
    return Card(
        heading="Best" if winner.ended else "Best so far",
        value=metric_in_words(metric, value, device=view.spec.device),
        remark="; ".join(filter(None, known)),
    )


def _beside(view: StudyView, best: Performance, own: Performance | None) -> Iterator[Card]:
    """Yield further figures of the result, compared with the user's own config."""
    if best.samples_per_s and view.metric not in LARGER_IS_BETTER:
        remark = _yours(None if own is None else own.samples_per_s, _rate)
        yield Card(heading="Samples", value=_rate(best.samples_per_s), remark=remark)
    if best.tokens_per_s:
        remark = _yours(None if own is None else own.tokens_per_s, _tokens)
        yield Card(heading="Tokens", value=_tokens(best.tokens_per_s), remark=remark)
    if best.step_s and view.metric != "latency":
        yours = (
            f"; yours {_time(own.step_s)} for {count_in_words(own.train_batch_size)}"
            if own is not None and own.step_s
            else ""
        )
        batch = _samples(best.train_batch_size)
        yield Card(heading="One step", value=_time(best.step_s), remark=f"for {batch}{yours}")
    if best.peak_bytes > 0:
        share = f"{share_in_words(best.peak_bytes / best.device_bytes)} of " if best.device_bytes else ""
        device = f"{bytes_in_words(best.device_bytes)} " if best.device_bytes else ""
        remark = f"{share}{device}on the fullest rank"
        yield Card(heading="Peak memory", value=bytes_in_words(best.peak_bytes), remark=remark)
    if best.utilisation is not None:
        yours = "" if own is None or own.utilisation is None else f"; yours {own.utilisation:.1%}"
        flops = metric_in_words("FLOPS_per_gpu", best.flops_per_gpu or 0.0, device=view.spec.device)
        yield Card(heading="MFU", value=f"{best.utilisation:.1%}", remark=f"of the GPU's peak: {flops}{yours}")
    elif best.flops_per_gpu:
        flops = metric_in_words("FLOPS_per_gpu", best.flops_per_gpu, device=view.spec.device)
        yield Card(heading="Arithmetic", value=flops, remark="forward and backward; the device's peak is not known")


def _yours(value: float | None, words: Callable[[float], str]) -> str:
    return f"yours {words(value)}" if value else ""


def _interval(metric: str, standing: Standing, scale: float, *, device: str) -> str:
    """Return the 95% interval of a metric, obtained from the study's metric by multiplying with ``scale``."""
    if standing.low is None or standing.high is None:
        return ""
    low, high = (metric_in_words(metric, end * scale, device=device) for end in (standing.low, standing.high))
    return f"95% between {range_in_words(low, high, joint=' and ')}"


def _speed_ups(view: StudyView, winner: Winner) -> Iterator[Card]:
    """Yield the speed-up over the user's own config; at both global batches if they differ."""
    verdict = view.verdict
    if winner.is_own:
        by_rounds = verdict is not None and verdict.is_by_rounds and len(view.measured) > 1
        why = "no faster configuration could be confirmed" if by_rounds else (
            "your own config is the best that was measured"
        )  # fmt: skip
        yield Card(heading="Speed-up", value="none", remark=why)
        return
    if winner.speed_up is None or verdict is None:
        yield Card(heading="Speed-up", value="not known", remark="your own config was not measured")
        return
    equal, winners = verdict.at_user_batch, verdict.at_own_batch
    if equal is None or winners is None or equal.train_batch_size == winners.train_batch_size:
        batch = "" if winners is None else f" at your global batch of {count_in_words(winners.train_batch_size)}"
        yield Card(heading="Speed-up", value=_times(winner.speed_up), remark=_over_own(winner) + batch)
        return
    yield Card(
        heading="Speed-up",
        value=_times(winner.speed_up),
        remark=f"{_over_own(winner)}, at its global batch of {count_in_words(winners.train_batch_size)}",
    )
    yield _at_equal_batch(equal, own=verdict.baseline)


def _at_equal_batch(equal: SpeedUp, *, own: int | None) -> Card:
    heading = "Speed-up at your batch"
    if equal.number == own:
        what = f"nothing better was measured at your global batch of {count_in_words(equal.train_batch_size)}"
        return Card(heading=heading, value="none", remark=what)
    between = _between(equal.ratio)
    how = f"trial {equal.number}, at your global batch of {count_in_words(equal.train_batch_size)}"
    return Card(heading=heading, value=_times(equal.ratio.value), remark="; ".join(filter(None, [how, between])))


def _between(ratio: Ratio) -> str:
    if ratio.low is None or ratio.high is None:
        return "by the few steps of the search" if ratio.rounds == 0 else ""
    return f"95% between {times_in_words(ratio.low)} and {times_in_words(ratio.high)}"


def _over_own(winner: Winner) -> str:
    if winner.speed_up_low is None or winner.speed_up_high is None:
        return "over your own config, by the few steps of the search"
    between = f"95% between {times_in_words(winner.speed_up_low)} and {times_in_words(winner.speed_up_high)}"
    return f"over your own config, paired in rounds; {between}"


def _training(times: TrainingTime, device: str, *, is_own: bool) -> Card:
    """Return the time of a whole training, and the time saved if the result is not the user's own config."""
    epochs = "An epoch" if times.epochs == 1 else f"{times.epochs:g} epochs"
    if is_own:
        costs = "" if times.price is None else f": {times.price:,.2f} at {times.price_per_gpu_hour:g} an hour"
        return Card(
            heading=epochs, value=duration_in_words(times.best_s), remark=f"on {_samples(times.samples)}{costs}"
        )
    saved = times.saved_slot_hours
    told = f"{'saves' if saved >= 0 else 'costs'} {slot_time_in_words(abs(saved) * 3600, device)}"
    if times.saved_price is not None:
        told += f", {abs(times.saved_price):,.2f} at {times.price_per_gpu_hour:g} an hour"
    instead = f"instead of {duration_in_words(times.own_s)}"
    return Card(
        heading=epochs,
        value=duration_in_words(times.best_s),
        remark=f"{instead}: {told} on {_samples(times.samples)}",
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
        total, idle = sum(spent.seconds.values()), spent.seconds["idle"]
        used = slot_time_in_words(total - idle, view.spec.device)
        remark = f"{used} of launches; devices were idle for {share_in_words(idle / total)} of it"
        yield Card(heading="Time of the search", value=duration_in_words(spent.wall_s), remark=remark)


def _rate(samples_per_s: float) -> str:
    return metric_in_words("throughput", samples_per_s)


def _tokens(tokens_per_s: float) -> str:
    return metric_in_words("tokens_per_s", tokens_per_s)


def _time(step_s: float) -> str:
    return step_time_in_words(step_s)


def _samples(count: int) -> str:
    return things_in_words(count, "sample")


def _times(ratio: float) -> str:
    return f"{times_in_words(ratio)}\u00d7"
