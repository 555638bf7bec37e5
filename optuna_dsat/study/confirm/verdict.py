"""The verdict on a study: the selected config, its certainty, and its limitations.

A pure function of the stored trials and rounds. The result, the command line, the report and Python show this verdict.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

from optuna.trial import FrozenTrial

from optuna_dsat.config import ds_config
from optuna_dsat.config.record import Record
from optuna_dsat.guided.joint_estimate import JointEstimate
from optuna_dsat.metrics import Interval, speed_up
from optuna_dsat.study.confirm.measured import Measured, may_be_result
from optuna_dsat.study.confirm.rounds import (
    MIN_ROUNDS,
    PRECISION,
    Noise,
    Rounds,
    Undecided,
    mean_in_rounds,
    mean_metrics,
    noise_of_rounds,
    paired_ratio,
    warnings_of,
)
from optuna_dsat.study.profile.script import user_train_batch_size
from optuna_dsat.study.spec import StudySpec
from optuna_dsat.trials import attributes
from optuna_dsat.words import outcome_in_words

_ALIKE_BATCHES = 1.1
"""Global batches within this ratio count as equal: a slightly smaller batch does not justify a slower config."""
_NEARNESS = 0.25
"""Share of the tie that may be given up for settings closer to the user's config, given a posterior of their cost."""


class VerdictKind(StrEnum):
    """Kind of outcome of a study."""

    WINNER = "winner"
    """A config is faster than the user's config with 95% certainty; it is selected."""
    BASELINE_IS_BEST = "baseline_is_best"
    """Nothing is faster than the user's config by more than a tie; the user's config is selected."""
    NOT_CONFIRMED = "not_confirmed"
    """The rounds have not led to a decision, e.g. for lack of time; the user's config is selected."""
    NO_BASELINE = "no_baseline"
    """The user's config was not, or could not be, measured; the best config of the rounds is selected."""
    UNCONFIRMED = "unconfirmed"
    """Nothing was measured in two rounds (``--confirm 0``, an interruption); the search's best config is selected."""


@dataclass(frozen=True, kw_only=True)
class Verdict(Record):
    """Outcome of a study so far."""

    kind: VerdictKind
    result: Measured
    """The selected config. With rounds, it and the user's config are shown by the rounds that measured both."""
    baseline: Measured | None
    """The user's config; None if it was not measured."""
    best: Measured
    """The config with the best metric in the rounds, or in the search without rounds. It is not selected if that is
    uncertain, or if another config is as good with a smaller global batch."""
    at_user_batch: Measured | None
    """The config with the best speed-up at the global batch of the user's config, also if that could not be measured;
    None without any. The answer at that batch is ``same_batch``."""
    rounds: int
    """Number of rounds with a measurement."""
    ties: tuple[int, ...]
    """Trials that tie with the result, which was chosen by global batch, then by number of changed settings."""
    undecided: tuple[Undecided, ...]
    """Trials that the rounds do not distinguish from the result, and that were not candidates for it."""
    noise: Noise | None
    """Noise of the rounds: variation between equal launches within a round; None before two rounds."""
    warnings: tuple[str, ...]
    """Limitations of the numbers, with figures."""
    contenders: tuple[Measured, ...]
    """All configs measured in rounds, best first."""
    measured: Mapping[int, Measured]
    """Every measured trial: by the rounds if these decided and measured it, else by the search."""

    @property
    def is_by_rounds(self) -> bool:
        """Whether rounds decided, rather than the search."""
        return self.kind is not VerdictKind.UNCONFIRMED

    @property
    def is_baseline(self) -> bool:
        """Whether the result is the user's config."""
        return self.baseline is not None and self.baseline.number == self.result.number

    @property
    def same_batch(self) -> Measured | None:
        """The answer at the global batch of the user's config: that config, unless another is surely faster there.

        It is the result if that has this batch. Without rounds, or without a baseline, it is the one that was measured
        best. None without any.
        """
        best = self.at_user_batch
        at_batch = self.baseline or best
        if at_batch is not None and self.result.train_batch_size == at_batch.train_batch_size:
            return self.result
        if best is None or best.speed_up is None or not best.speed_up.rounds or best.speed_up.surely_above_1:
            return best
        return self.baseline

    @property
    def speed_up(self) -> Interval | None:
        """Ratio of the result to the user's config; None without a baseline. Without rounds of both, by the search."""
        return self.result.speed_up

    def in_rounds(self, number: int) -> Measured | None:
        """Return a trial as the rounds measured it; None if the search decided, or no round measured it."""
        result = self.measured.get(number)
        return result if result is not None and result.rounds else None

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as plain values: ``verdict`` of ``--json`` and of ``best_ds_metrics.json``."""
        result, baseline, best = self.result, self.baseline, self.best
        user = None if baseline is None else baseline.interval
        return {
            "kind": self.kind,
            "handed_over": result.number,
            "best": best.number,
            "baseline": None if baseline is None else baseline.number,
            "rounds": self.rounds,
            "speed_up": None if result.speed_up is None else asdict(result.speed_up),
            "best_ratio": None if best.speed_up is None else asdict(best.speed_up),
            "user_value": None if user is None else user.value,
            "user_low": None if user is None else user.low,
            "user_high": None if user is None else user.high,
            "value": result.value,
            "low": result.interval.low,
            "high": result.interval.high,
            "metrics": dict(result.metrics),
            "user_metrics": {} if baseline is None else dict(baseline.metrics),
            "same_batch": None if self.same_batch is None else self.same_batch.number,
            "at_user_batch": _at_batch(self.at_user_batch),
            "at_own_batch": None if result.speed_up is None else _at_batch(result),
            "ties": self.ties,
            "undecided": [asdict(number) for number in self.undecided],
            "noise": None if self.noise is None else asdict(self.noise),
            "warnings": self.warnings,
            "contenders": [contender.to_json() for contender in self.contenders],
        }


def _at_batch(measured: Measured | None) -> dict[str, Any] | None:
    if measured is None:
        return None
    row = measured.to_json()
    return {key: row[key] for key in ("number", "train_batch_size", "ratio")}


def are_alike(batch: int, other: int) -> bool:
    """Whether two global batches count as the same."""
    return max(batch, other) <= _ALIKE_BATCHES * min(batch, other)


def user_batch(measured: Sequence[FrozenTrial], *, spec: StudySpec) -> int:
    """Return the global batch of the user's config, by its trial or, if that failed, by the ranks of another trial."""
    if (baseline := attributes.user_config_trial(measured)) is not None:
        return attributes.train_batch_size(baseline, slots=spec.slots_per_trial)
    return user_train_batch_size(spec, ranks=attributes.data_parallel_size(measured[0], slots=spec.slots_per_trial))


def verdict_of(trials: Sequence[FrozenTrial], rounds: Rounds, spec: StudySpec) -> Verdict | None:
    """Return the verdict by all trials and the rounds, among trials that ``may_be_result``; None without any."""
    judge = _Judge(trials, rounds, spec)
    if not judge.permitted:
        return None
    return judge.by_rounds() if judge.paired else judge.by_search()


def noise_in_rounds(trials: Sequence[FrozenTrial], rounds: Rounds, spec: StudySpec) -> Noise | None:
    """Return the noise of the verdict; None without a verdict or two launches of a configuration."""
    judge = _Judge(trials, rounds, spec)
    return judge.noise if judge.permitted else None


class _Judge:
    """Computes the verdict on a study."""

    def __init__(self, trials: Sequence[FrozenTrial], rounds: Rounds, spec: StudySpec) -> None:
        self._rounds, self._spec = rounds, spec
        self._maximize = spec.maximize
        self._tie = spec.tie
        self._slots = spec.slots_per_trial
        measured = attributes.best_trials(trials, maximize=spec.maximize)
        self._trials = {trial.number: trial for trial in measured}
        self.permitted = [trial.number for trial in measured if may_be_result(trial, rounds, spec)]
        """Numbers of the measured trials that may be the result, the best first."""
        self._unfailed = [number for number in self.permitted if rounds.failure(number) is None] or self.permitted
        baseline = attributes.user_config_trial(trials)
        self._baseline = None if baseline is None or baseline.number not in self._trials else baseline.number
        self._values = {number: item for number, item in rounds.values().items() if number in self.permitted}
        eligible = [number for number in self._values if rounds.failure(number) is None]
        needed = _needed_rounds([len(self._values[number]) for number in eligible])
        self._eligible = [number for number in eligible if len(self._values[number]) >= needed]
        self._in_rounds = self._baseline is not None and self._baseline in eligible
        self._reference = self._baseline
        if not self._in_rounds:  # the trial with most rounds, the earliest of several
            longest = max(self._eligible, key=lambda number: (len(self._values[number]), -number), default=None)
            self._reference = longest
        self.noise = noise_of_rounds(self._values)
        self._estimate = self._estimated(rounds.estimate)

    def _estimated(self, searched: JointEstimate | None) -> JointEstimate | None:
        """Return the joint estimate of search and rounds; None without a posterior of all compared trials."""
        if searched is None or self.noise is None or not set(self._eligible) <= set(searched.numbers):
            return None
        return searched.given(self._values, noise=self.noise.relative_sd, maximize=self._maximize)

    @property
    def paired(self) -> bool:
        """Whether two rounds compare the reference (the user's config, else the trial with most rounds).

        False if the second round ended with the reference: it then does not contradict the search.
        """
        if self._reference is None or len(self._values[self._reference]) < 2:
            return False
        launched = {launch.number for launch in self._rounds.launches}
        others = {*self._rounds.chosen, *launched} - {self._reference}
        return not others or any(
            len(self._values.get(number, {})) >= 2 or self._rounds.failure(number) is not None for number in others
        )

    def by_rounds(self) -> Verdict:
        """Return the verdict by the rounds."""
        best = max(self._eligible, key=lambda number: (self._score(number), -number))
        tied = [number for number in self._eligible if number == best or self._is_tied(number, best)]
        sure = [number for number in tied if not self._in_rounds or number == self._baseline or self._is_sure(number)]
        equals = sure or self._surely_better()
        pick = self._preferred(equals)
        ties = tuple(sorted(set(equals) - {pick}))
        return self._verdict(self._kind(pick, best), pick, best, ties=ties, undecided=self._undecided(pick, equals))

    def _surely_better(self) -> list[int]:
        """Return the best trial that is surely better than the user's config, with its ties; else the user's config.

        The best trial of all may be less certain than a trial that is nearly as good.
        """
        sure = [number for number in self._eligible if self._is_sure(number)]
        if not sure:
            if self._baseline is None:
                raise RuntimeError("a reference that was measured in rounds is the baseline or eligible")
            return [self._baseline]
        first = max(sure, key=lambda number: (self._score(number), -number))
        return [number for number in sure if number == first or self._is_tied(number, first)]

    def by_search(self) -> Verdict:
        """Return the verdict by the search: the best measurement of a config that did not fail in the rounds."""
        best = self._unfailed[0]
        return self._verdict(VerdictKind.UNCONFIRMED, best, best, ties=(), undecided=())

    def _kind(self, pick: int, best: int) -> VerdictKind:
        if not self._in_rounds:
            return VerdictKind.NO_BASELINE
        if pick != self._baseline:
            return VerdictKind.WINNER
        ratio = self._ratio(best)
        if best == pick or ratio is None or ratio.surely_above_1 or ratio.half_width <= PRECISION:
            return VerdictKind.BASELINE_IS_BEST
        return VerdictKind.NOT_CONFIRMED

    def _score(self, number: int) -> float:
        """Return the log ratio of a trial to the reference, from all measurements."""
        if self._estimate is not None and self._reference in self._estimate.numbers and number in self._eligible:
            return self._estimate.log_ratio(number, self._reference)[0]
        ratio = self._against(number, self._reference)
        return -math.inf if ratio is None else math.log(ratio.value)

    def _against(self, number: int, other: int | None) -> Interval | None:
        if other is None:
            return None
        ratio = paired_ratio(self._values[number], self._values[other], maximize=self._maximize, noise=self.noise)
        return None if ratio is None else ratio.widened(self._rounds.data_error(number, other))

    def _is_sure(self, number: int) -> bool:
        ratio = self._against(number, self._baseline)
        return ratio is not None and ratio.surely_above_1

    def _is_tied(self, number: int, best: int) -> bool:
        """Whether the expected metric of a trial is within the tie of the best.

        Without a posterior, trials within one standard error are tied as well, because the best of several noisy trials
        is biased upwards.
        """
        ratio = self._against(number, best)
        return ratio is not None and self._tie > 0 and self._below(number, best, ratio) <= self._allowed(ratio)

    def _below(self, number: int, best: int, ratio: Interval) -> float:
        """Return the expected relative loss of a trial against the best, from their ratio in the rounds."""
        return 1 - (ratio.value if self._estimate is None else math.exp(self._estimate.log_ratio(number, best)[0]))

    def _allowed(self, ratio: Interval) -> float:
        """Return the relative loss against the best up to which a trial ties with it."""
        if self._estimate is not None or self.noise is None or self._tie <= 0:
            return self._tie
        return max(self._tie, self.noise.relative_sd * math.sqrt(2 / ratio.rounds))

    def _undecided(self, pick: int, equals: Sequence[int]) -> tuple[Undecided, ...]:
        """Return the trials that the rounds do not distinguish from the result, without its ties."""
        best = max(equals, key=lambda number: (self._score(number), -number))
        contenders = []
        for number in sorted(set(self._eligible) - {*equals, pick}):
            with_pick, ratio = self._against(number, pick), self._against(number, best)
            if with_pick is None or with_pick.low is None or with_pick.high is None or ratio is None:
                continue
            if with_pick.low <= 1 <= with_pick.high:
                contenders.append(
                    Undecided(
                        number=number,
                        train_batch_size=self._batches[number],
                        below=self._below(number, best, ratio),
                        best=best,
                        allowed=self._allowed(ratio),
                    )
                )
        return tuple(contenders)

    def _preferred(self, tied: Sequence[int]) -> int:
        """Choose by global batch, then by fewer differing settings (worth ``_NEARNESS`` of the tie), then by metric."""
        least = min(self._batches[number] for number in tied)
        smallest = [number for number in tied if are_alike(self._batches[number], least)]
        if self._estimate is not None and self._baseline not in smallest:
            best = max(map(self._score, smallest))
            smallest = [number for number in smallest if self._score(number) >= best - _NEARNESS * self._tie]
        return min(smallest, key=lambda number: (self._differing(number), -self._score(number)))

    @cached_property
    def _batches(self) -> dict[int, int]:
        items = self._trials.items()
        return {number: attributes.train_batch_size(trial, slots=self._slots) for number, trial in items}

    def _differing(self, number: int) -> int:
        """Return the number of settings that differ from the user's config; 0 without a baseline."""
        if self._baseline is None:
            return 0
        configs = (self._trials[item].user_attrs[attributes.CONFIG] for item in (self._baseline, number))
        first, other = (ds_config.flatten(ds_config.effective(config)) for config in configs)
        return sum(first.get(key) != other.get(key) for key in first.keys() | other.keys())

    def _ratio(self, number: int) -> Interval | None:
        """Return the ratio of a trial to the user's config: paired, else by the search."""
        if self._in_rounds and self.paired:
            return self._against(number, self._baseline) if number in self._values else None
        return self._searched_ratio(number)

    def _searched_ratio(self, number: int) -> Interval | None:
        if self._baseline is None:
            return None
        result = speed_up(self._searched(number), self._searched(self._baseline), maximize=self._maximize)
        return None if result is None else Interval(value=result)

    def _searched(self, number: int) -> float:
        return float(self._trials[number].values[0])

    def _as_searched(self, number: int) -> Measured:
        trial = self._trials[number]
        return Measured(
            trial=trial,
            train_batch_size=self._batches[number],
            interval=Interval(value=self._searched(number)),
            metrics=trial.user_attrs.get(attributes.METRICS) or {},
            speed_up=self._searched_ratio(number),
            failed=self._rounds.failure(number) is not None,
        )

    def _in_rounds_of(self, number: int, among: Collection[int] | None = None) -> Measured:
        """Return a trial as rounds measured it, or some of its rounds."""
        launches = [launch for launch in self._rounds.launches if launch.number == number]
        counted = [
            launch for launch in launches if launch.value is not None and (among is None or launch.round in among)
        ]
        failed = self._rounds.failure(number)
        left = "" if failed is None else f"{outcome_in_words(failed.outcome)}: {failed.message}"
        ratio = self._against(number, self._baseline) if self._in_rounds else None
        if not left and self._has_left(number):
            better = ratio is None or ratio.surely_above_1 or number in self._rounds.chosen
            left = "clearly worse than the best" if better else "no better than your config"
        return replace(
            self._as_searched(number),
            interval=mean_in_rounds([item.value for item in counted if item.value is not None]).widened(
                self._rounds.data_error(number)
            ),
            metrics=mean_metrics(counted) or self._trials[number].user_attrs.get(attributes.METRICS) or {},
            speed_up=ratio,
            differing=self._differing(number),
            steps=sum(launch.steps for launch in launches),
            left=left,
        )

    def _has_left(self, number: int) -> bool:
        """Return whether no further round launches a trial; it may also wait for its turn, or for an answer."""
        rounds = self._rounds
        if not rounds.chosen or number in rounds.begun(rounds.last):
            return False
        ratio = self._against(number, max(self._eligible, key=self._score))
        is_worse = ratio is not None and ratio.rounds >= MIN_ROUNDS and ratio.surely_below(1 - self._tie)
        return number not in rounds.chosen or is_worse

    def _decided(self, number: int, among: Collection[int] | None = None) -> Measured:
        """Return a trial as decided: by the rounds if these decide, with the speed-up of the search if need be."""
        if not self.paired or number not in self._values:
            return self._as_searched(number)
        result = self._in_rounds_of(number, among)
        return result if self._in_rounds else replace(result, speed_up=self._searched_ratio(number))

    def _at_batch(self, batch: int) -> Measured | None:
        """Return the trial with the best speed-up, or metric, at a global batch, by the rounds if there are any."""
        numbers = [n for n in (self._eligible if self.paired else self._unfailed) if self._batches[n] == batch]
        if self._baseline is None:
            best = max(numbers, key=self._score) if self.paired and numbers else next(iter(numbers), None)
            return None if best is None else self._decided(best)
        known = [(ratio.value, n) for n in numbers if (ratio := self._ratio(n)) is not None]
        return self._decided(max(known, key=lambda ratio: ratio[0])[1]) if known else None

    def _verdict(
        self, kind: VerdictKind, pick: int, best: int, *, ties: tuple[int, ...], undecided: tuple[Undecided, ...]
    ) -> Verdict:
        user, both = self._baseline, None
        if user is not None and self._in_rounds and self.paired:
            both = self._values[pick].keys() & self._values[user].keys()
        result = self._decided(pick, both)
        baseline = None if user is None else self._as_searched(user) if both is None else self._decided(user, both)
        contenders = [self._in_rounds_of(number) for number in self._values]
        contenders.sort(key=lambda ratio: (-self._score(ratio.number), ratio.number))
        measured = {number: self._as_searched(number) for number in self._trials}
        if self.paired:
            measured |= {
                item.number: item for item in (*contenders, *([baseline, result] if both and baseline else []))
            }
        return Verdict(
            kind=kind,
            result=result,
            baseline=baseline,
            best=self._decided(best),
            rounds=len({launch.round for launch in self._rounds.launches if launch.value is not None}),
            at_user_batch=self._at_batch(user_batch([*self._trials.values()], spec=self._spec)),
            ties=ties,
            undecided=undecided,
            noise=self.noise,
            warnings=warnings_of(
                self._rounds,
                searched={item: self._searched(item) for item in (pick, user) if self.paired and item is not None},
                baseline=user,
                noise=self.noise,
                tie=self._tie,
            ),
            contenders=tuple(contenders),
            measured=measured,
        )


def _needed_rounds(counts: Sequence[int]) -> int:
    """Return the rounds that a trial needs to be compared: as many as two trials have, up to ``MIN_ROUNDS``.

    A single trial may be ahead because of an unfinished round. Trials with one round are not compared with trials that
    have more.
    """
    first, second = (*sorted(counts, reverse=True), 0, 0)[:2]
    return min(MIN_ROUNDS, max(second, min(first, 2)))
