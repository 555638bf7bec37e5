"""Describe a verdict: the selected config, its certainty and its limitations."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from optuna.trial import FrozenTrial

from optuna_dsat.metrics import PER_JOULE, POWER, Interval, speed_up
from optuna_dsat.study.confirm.measured import Measured
from optuna_dsat.study.confirm.rounds import Rounds, Undecided
from optuna_dsat.study.confirm.verdict import Verdict, VerdictKind
from optuna_dsat.study.spec import StudySpec
from optuna_dsat.trials import attributes
from optuna_dsat.words import count_in_words, metric_in_words, things_in_words, times_in_words

_MUCH_OUTSIDE = 0.2
"""Share of a step outside its three phases that is worth a remark."""
_FULL = 0.95
"""Share of a GPU's memory above which tensors fill it: a CUDA context and NCCL take another 1 to 2% of 80 GB."""


def verdict_in_words(verdict: Verdict, *, metric: str, device: str = "cuda") -> tuple[str, ...]:
    """Return a verdict as lines of text: its answers, then its remarks."""
    return (*answers_in_words(verdict, metric=metric, device=device), *remarks_in_words(verdict))


def answers_in_words(verdict: Verdict, *, metric: str, device: str = "cuda") -> tuple[str, ...]:
    """Return the answer as a line; if its global batch is not the user's, the answer at that batch precedes it."""
    same_batch, answer = (words(verdict, metric=metric, device=device) for words in (_at_same_batch, _answer))
    if same_batch:
        batch = things_in_words(verdict.result.train_batch_size, "sample")
        answer = f"At a global batch of {batch}: {answer[0].lower()}{answer[1:]}"
    return (same_batch, answer) if same_batch else (answer,)


def remarks_in_words(verdict: Verdict) -> tuple[str, ...]:
    """Return warnings, ties, noise, time outside the phases and energy as lines."""
    remarks = (_ties(verdict), _noise(verdict), _outside(verdict), _energy(verdict))
    return (*(f"Warning: {warning}" for warning in verdict.warnings), *filter(None, remarks))


def _at_same_batch(verdict: Verdict, *, metric: str, device: str) -> str:
    """Describe the answer at the user's global batch; empty if the result has that batch, or nothing is known of it."""
    best, same = verdict.at_user_batch, verdict.same_batch
    if best is None or same is None or same.train_batch_size == verdict.result.train_batch_size:
        return ""
    batch = f"At your global batch of {things_in_words(same.train_batch_size, 'sample')}"
    if verdict.baseline is None:
        known = "" if same.rounds else ", not confirmed"
        speed = same.speed(metric=metric, device=device).text
        return f"{batch}: trial {same.number} is the fastest that was measured: {speed}{known}."
    if verdict.baseline.failed and not same.is_user_config:
        fastest = (
            f"trial {same.number} is the fastest that did not fail: {same.speed(metric=metric, device=device).text}"
        )
        return f"{batch}: {fastest}.{_as_searched(verdict, same, metric=metric, device=device)}"
    if not same.is_user_config and same.speed_up is not None:
        confirmed = "" if same.speed_up.rounds else ", not confirmed"
        return f"{batch}: trial {same.number} is {ratio_in_words(same.speed_up, to='your config')}{confirmed}."
    if not best.is_user_config:
        return f"{batch}: nothing is significantly faster than your config.{_runner_up_in_words(verdict, best)}"
    alike = [measured for measured in verdict.measured.values() if measured.train_batch_size == best.train_batch_size]
    if len(alike) > 1:
        known = "confirmed" if verdict.is_by_rounds else "measured"
        return f"{batch}: nothing faster than your config was {known}."
    return f"{batch}: nothing but your config was measured."


def _answer(verdict: Verdict, *, metric: str, device: str) -> str:
    """Describe the selected config and its comparison with the user's config, in one or two sentences."""
    value = verdict.result.speed(metric=metric, device=device).text
    user = "" if verdict.baseline is None else verdict.baseline.speed(metric=metric, device=device).text
    name = "Your config" if verdict.is_baseline else f"Trial {verdict.result.number}"
    if len(verdict.measured) == 1:
        return f"{name} is all that was measured: {value}."
    if verdict.kind is VerdictKind.WINNER and verdict.speed_up is not None:
        return f"{name} is {ratio_in_words(verdict.speed_up, to='your config')}: {value} against {user}."
    if verdict.kind is VerdictKind.BASELINE_IS_BEST:
        other = _runner_up(verdict)
        if other is not None and other.speed_up is not None and other.speed_up.surely_above_1:
            return (
                f"Your config is the result: {value}. By the rounds alone trial {other.number} is "
                f"{ratio_in_words(other.speed_up)}; search and rounds together do not confirm it."
            )
        return f"Nothing was confirmed to be faster than your config: {value}.{_runner_up_in_words(verdict, other)}"
    if verdict.kind is VerdictKind.NOT_CONFIRMED:
        return (
            f"No config was confirmed to be faster than yours, {value}: the rounds so far leave it open."
            f"{_runner_up_in_words(verdict, _runner_up(verdict))} "
            "More rounds may decide: --confirm-time, the seconds of all rounds."
        )
    if verdict.kind is VerdictKind.NO_BASELINE:
        words = f"{name} is the fastest in the rounds: {value}."
        if verdict.speed_up is None:
            return f"{words} Your config was not measured."
        return f"{words}{_as_searched(verdict, verdict.result, metric=metric, device=device)}"
    if verdict.baseline is not None and verdict.baseline.failed and not verdict.is_baseline:
        words = f"Of the configs that did not fail, {name[0].lower()}{name[1:]} was the fastest in the search"
        return f"{words}: {value}, not confirmed.{_as_searched(verdict, verdict.result, metric=metric, device=device)}"
    words = f"{name} was the fastest in the search: {value}, not confirmed."
    if verdict.speed_up is None or verdict.is_baseline:
        return words if verdict.baseline is not None else f"{words} Your config was not measured."
    return f"{words} That is {ratio_in_words(verdict.speed_up, to='your config')}, {user}."


def _as_searched(verdict: Verdict, measured: Measured, *, metric: str, device: str) -> str:
    """Compare a config with the user's, which could not be measured again, by the search; empty for the user's."""
    if verdict.baseline is None or measured.speed_up is None:
        return ""
    user = verdict.baseline.speed(metric=metric, device=device).text
    ratio = ratio_in_words(measured.speed_up)
    return f" Your config could not be measured again; compared with its {user} in the search this is {ratio}."


def value_in_words(verdict: Verdict, *, metric: str, device: str = "cuda") -> str:
    """Describe the speed of the selected config, with the 95% interval of the metric if available."""
    speed = verdict.result.speed(metric=metric, device=device)
    between = speed.between(verdict.result.interval)
    return f"{speed.text} ({between})" if between else speed.text


def how_known(verdict: Verdict) -> str:
    """Return the source of the result's metric: the number of rounds, or the search."""
    if not verdict.is_by_rounds:
        return "by the few steps of the search, not confirmed"
    return f"confirmed in {things_in_words(verdict.result.rounds, 'round')}"


def ratio_in_words(ratio: Interval, *, to: str = "") -> str:
    """Return a speed-up such as ``1.52x as fast as your config (95% CI 1.49 to 1.55, 4 rounds)``."""
    words = f"{times_in_words(ratio.value)}x as fast" + (f" as {to}" if to else "")
    if ratio.low is None or ratio.high is None:
        return words
    interval = f"95% CI {times_in_words(ratio.low)} to {times_in_words(ratio.high)}"
    return f"{words} ({interval}, {things_in_words(ratio.rounds, 'round')})"


def _runner_up(verdict: Verdict) -> Measured | None:
    """Return the best config of the rounds, except the user's, whose launches succeeded; None without any."""
    others = [
        contender
        for contender in verdict.contenders
        if contender.speed_up is not None and not contender.is_user_config and not contender.failed
    ]
    return next(
        (contender for contender in others if contender.number == verdict.best.number), others[0] if others else None
    )


def _runner_up_in_words(verdict: Verdict, other: Measured | None) -> str:
    if other is None or other.speed_up is None:
        return ""
    name, baseline = f"trial {other.number}", verdict.baseline
    if baseline is not None and other.train_batch_size != baseline.train_batch_size:
        name += f" with a global batch of {things_in_words(other.train_batch_size, 'sample')}"
    return f" The best other, {name}, is {ratio_in_words(other.speed_up)}."


def _ties(verdict: Verdict) -> str:
    parts = []
    if verdict.ties:
        names = ["your config" if verdict.measured[tie].is_user_config else f"trial {tie}" for tie in verdict.ties]
        ties = "Among ties the smallest global batch wins, then the config closest to yours."
        parts.append(f"Equal to the result: {_listed(names)}. {ties}")
    if verdict.undecided:
        others = _listed([_why_not(item) for item in verdict.undecided])
        parts.append(f"Undecided by the rounds: {others}.")
    return " ".join(parts)


def _why_not(item: Undecided) -> str:
    """Describe a trial with the reason why it is not a tie with the result."""
    if item.below <= item.allowed:
        return f"trial {item.number} (not significantly faster than your config)"
    return f"trial {item.number} ({item.below:.1%} below trial {item.best}; up to {item.allowed:.1%} counts as equal)"


def _noise(verdict: Verdict) -> str:
    noise = verdict.noise
    if noise is None:
        return ""
    return (
        f"Noise of the rounds: {noise.relative_sd:.1%}, the standard deviation of "
        f"{things_in_words(noise.launches, 'launch')} within their rounds."
    )


def _outside(verdict: Verdict) -> str:
    """Return the share of the result's step outside the three phases; empty if it is small or a phase is unknown."""
    metrics = verdict.result.metrics
    latency, *phases = (metrics.get(name) or 0.0 for name in ("latency", "forward", "backward", "step"))
    share = 1 - sum(phases) / latency if latency and all(phases) else 0.0
    if share < _MUCH_OUTSIDE:
        return ""
    return (
        f"{share:.0%} of a step is outside forward, backward and optimizer step: data loading, or other code of the "
        "script. No DeepSpeed setting shortens that; more workers of the data loader may."
    )


def _energy(verdict: Verdict) -> str:
    """Return the samples per joule of the result and of the user's config; empty if unknown."""
    metrics, baseline = verdict.result.metrics, None if verdict.is_baseline else verdict.baseline
    if PER_JOULE not in metrics:
        return ""
    yours = None if baseline is None else baseline.metrics.get(PER_JOULE)
    compared = "" if yours is None else f", your config {metric_in_words(PER_JOULE, yours)}"
    return f"Energy: {metric_in_words(PER_JOULE, metrics[PER_JOULE])} at {metrics[POWER]:,.0f} W{compared}."


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def full_memory_in_words(
    answers: Sequence[FrozenTrial], measured: Sequence[FrozenTrial], *, memory: int, spec: StudySpec
) -> str:
    """Return a warning on answers that leave next to nothing of a GPU's memory; empty if none does.

    The next best of the ``measured`` trials that leaves more is named, for an answer at the user's global batch one at
    that batch. ``memory`` is of one GPU, in bytes. Memory of a CPU is limited by the host, not by a device.
    """
    if not memory or spec.device != "cuda":
        return ""
    batches = {trial.number: attributes.train_batch_size(trial, slots=spec.slots_per_trial) for trial in measured}
    shares = {trial.number: attributes.peak_bytes(trial) / memory for trial in measured}
    texts = []
    for answer in answers:
        if shares[answer.number] <= _FULL:
            continue
        text = (
            f"Trial {answer.number} takes up to {shares[answer.number]:.1%} of a GPU's memory: in a long training, "
            "fragmentation or a longer sample may exceed it."
        )
        alike = [trial for trial in measured if answer is answers[0] or batches[trial.number] == batches[answer.number]]
        other = next((trial for trial in alike if 0 < shares[trial.number] <= _FULL), None)
        ratio = other and speed_up(other.values[0], answer.values[0], maximize=spec.maximize)
        if other and ratio:
            worse = f"{1 - ratio:.1%} slower" if ratio < 1 else "as fast"
            text += f" Trial {other.number}, {worse}, leaves {1 - shares[other.number]:.0%}."
        texts.append(text)
    return " ".join(texts)


def running_engines_in_words(trials: Sequence[FrozenTrial], rounds: Rounds) -> str:
    """Return how measurements in running engines differ from launches; empty if none was confirmed."""
    continued = {t.number: t.values[0] for t in trials if attributes.ROOT_LAUNCH in t.user_attrs and t.values}
    apart = [
        abs(math.log(continued[number]) - statistics.fmean(map(math.log, values.values())))
        for number, values in rounds.values().items()
        if number in continued and values
    ]
    if not apart:
        return ""
    return (
        f"Trials that the search measured in a running engine ({count_in_words(len(apart))}) differ by at most "
        f"{max(apart):.1%} when they are launched again in the rounds."
    )
