"""Describe a verdict: the selected config, its certainty and its limitations."""

from __future__ import annotations

from collections.abc import Sequence

from optuna_dsat.metrics import Interval
from optuna_dsat.study.confirm.measured import Measured
from optuna_dsat.study.confirm.rounds import Undecided
from optuna_dsat.study.confirm.verdict import Verdict, VerdictKind
from optuna_dsat.words import things_in_words, times_in_words

__all__ = ["headline", "how_known", "ratio_in_words", "value_in_words", "verdict_in_words"]


def verdict_in_words(verdict: Verdict, *, metric: str, device: str = "cuda") -> tuple[str, ...]:
    """Return a verdict as lines of text: the headline, speed-ups by global batch, ties, noise and warnings."""
    lines = [headline(verdict, metric=metric, device=device), _by_batch(verdict), _ties(verdict), _noise(verdict)]
    return (*filter(None, lines), *(f"Warning: {warning}" for warning in verdict.warnings))


def headline(verdict: Verdict, *, metric: str, device: str = "cuda") -> str:
    """Describe the selected config and its comparison with the user's config, in one or two sentences."""
    value = verdict.result.speed(metric=metric, device=device).text
    own = "" if verdict.baseline is None else verdict.baseline.speed(metric=metric, device=device).text
    name = "Your config" if verdict.is_baseline else f"Trial {verdict.result.number}"
    if verdict.kind is VerdictKind.WINNER and verdict.speed_up is not None:
        return f"{name} is {ratio_in_words(verdict.speed_up)} your config: {value} against {own}."
    if verdict.kind is VerdictKind.BASELINE_IS_BEST:
        other = _runner_up(verdict)
        if other is not None and other.speed_up is not None and other.speed_up.surely_above_1:
            return (
                f"Your config is the result: {value}. By the rounds alone trial {other.number} is "
                f"{ratio_in_words(other.speed_up)} it; search and rounds together do not say so."
            )
        return f"Your config is the best found: {value}.{_runner_up_in_words(other)}"
    if verdict.kind is VerdictKind.NOT_CONFIRMED:
        return (
            f"Nothing is surely better than your config, {value}, which is the result: the time of the "
            f"confirmation ended first.{_runner_up_in_words(_runner_up(verdict))} `optuna-dsat resume` with a larger "
            "--confirm-time goes on."
        )
    if verdict.kind is VerdictKind.NO_BASELINE:
        words = f"{name} is the best of what was measured again: {value}."
        if verdict.speed_up is None:
            return f"{words} Your config was not measured."
        return (
            f"{words} Your config could not be measured again. In the search it reached {own}, and this one "
            f"{times_in_words(verdict.speed_up.value)} times as much as that."
        )
    words = f"{name} measured best in the search: {value}. It was not confirmed."
    if verdict.speed_up is None or verdict.is_baseline:
        return words
    return f"{words} Your config reached {own}; that is {times_in_words(verdict.speed_up.value)} times as good."


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


def ratio_in_words(ratio: Interval) -> str:
    """Return a speed-up such as ``1.52 times (95% between 1.49 and 1.55, 4 rounds) as good as``."""
    if ratio.low is None or ratio.high is None:
        return f"{times_in_words(ratio.value)} times as good as"
    between = f"95% between {times_in_words(ratio.low)} and {times_in_words(ratio.high)}"
    return f"{times_in_words(ratio.value)} times ({between}, {things_in_words(ratio.rounds, 'round')}) as good as"


def _runner_up(verdict: Verdict) -> Measured | None:
    """Return the best config of the rounds except the user's; None if the rounds compare no other config."""
    others = [
        contender for contender in verdict.contenders if not contender.is_user_config and contender.speed_up is not None
    ]
    return next(
        (contender for contender in others if contender.number == verdict.best.number), others[0] if others else None
    )


def _runner_up_in_words(other: Measured | None) -> str:
    if other is None or other.speed_up is None:
        return ""
    return f" The best other, trial {other.number}, is {ratio_in_words(other.speed_up)} it."


def _by_batch(verdict: Verdict) -> str:
    """Return the speed-ups at the user's and at the winner's global batch; empty if these are the same."""
    own, winners = verdict.at_user_batch, verdict.result
    if own is None or own.speed_up is None or winners.speed_up is None:
        return ""
    if own.train_batch_size == winners.train_batch_size:
        return ""
    if own.is_user_config:
        again = " again" if verdict.is_by_rounds else ""
        words = f"nothing better than your config was measured{again}"
    else:
        words = f"trial {own.number} is {ratio_in_words(own.speed_up)} it"
    batches = [things_in_words(winner.train_batch_size, "sample") for winner in (own, winners)]
    return (
        f"At the global batch of your config, {batches[0]}, {words}; "
        f"at {batches[1]} trial {winners.number} is {ratio_in_words(winners.speed_up)} it."
    )


def _ties(verdict: Verdict) -> str:
    parts = []
    if verdict.ties:
        names = ["your config" if verdict.measured[tie].is_user_config else f"trial {tie}" for tie in verdict.ties]
        parts.append(f"Equal to the result: {_listed(names)}.")
    if verdict.undecided:
        others = _listed([_why_not(item) for item in verdict.undecided])
        parts.append(f"Not distinguished from the result by the rounds, but not equal to it: {others}.")
    if parts:
        parts.append("Of equals the smallest global batch is taken, then what is nearest to your config.")
    return " ".join(parts)


def _why_not(item: Undecided) -> str:
    """Describe a trial with the reason why it is not a tie with the result."""
    if item.below <= item.allowed:
        return f"trial {item.number} (not surely better than your config)"
    return f"trial {item.number} ({item.below:.1%} below trial {item.best}, and up to {item.allowed:.1%} is equal)"


def _noise(verdict: Verdict) -> str:
    noise, search = verdict.noise, verdict.search_noise
    if noise is None:
        return ""
    words = (
        f"Noise of the rounds: {noise.relative_sd:.1%}, the standard deviation of "
        f"{things_in_words(noise.launches, 'launch')} within their rounds."
    )
    if search is None:
        return words
    return (
        f"{words} Noise of the search: {search.relative_sd:.1%}, by which the search's values of "
        f"{things_in_words(search.launches, 'configuration')} differ from the rounds."
    )


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
