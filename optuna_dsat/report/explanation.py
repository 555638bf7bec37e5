"""Why a study's winner wins: against the user's own config, knob by knob, and what would make it faster still.

A knob's contribution is the winner's metric over the metric with the user's value of this knob and the winner's values
of all others. Where launches of the winner's structure differ in this knob only, it is measured: the geometric mean of
their ratios. Elsewhere it is predicted by the models that guided search fits to all launches of the study, whatever
method searched. The contributions need not multiply to the speed-up: knobs interact.

What bounds the winner is its predicted step by resource (``StepTimeModel.bounds``). What to change or buy next is the
same model evaluated with one thing changed, so it holds as far as the model does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from optuna.trial import FrozenTrial

from optuna_dsat.cost.gpus import gpu_of_device
from optuna_dsat.errors import UsageError
from optuna_dsat.guided.planner import GuidedPlanner
from optuna_dsat.guided.residual_gp import NOISE_SD
from optuna_dsat.metrics import LARGER_IS_BETTER
from optuna_dsat.store import Store
from optuna_dsat.study.methods import make_planner
from optuna_dsat.study.standing import Standing, compared, speed_up_over
from optuna_dsat.study.stored import read_stored
from optuna_dsat.trials import attributes
from optuna_dsat.trials.lineage import MICRO_BATCH, STRUCTURE, Feasibility, feasibility, score, visible_params
from optuna_dsat.words import bytes_in_words, config_in_words

__all__ = ["Contribution", "Explanation", "explain", "explain_study"]

_WORTH_SAYING = 0.02
"""Least relative gain of a change that is proposed."""
_FULL = 0.85
"""Share of the device's memory from which it is taken to limit the micro-batch."""
_IDLE_GPU = 0.3
"""Share of a GPU's peak FLOPS below which a step bound by computation is limited by the model, not by the GPU."""


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """The effect of one knob."""

    knob: str
    user: Any
    """The user's value."""
    winner: Any
    factor: float | None
    """The winner's metric over that with the user's value, above 1 if the winner's is better; None if the user's value
    would not run.
    """
    low: float | None
    high: float | None
    """Ends of the 95 % interval; None without ``factor``."""
    source: str
    """``measured`` or ``model``."""
    pairs: int = 0
    """Pairs of launches that were compared; 0 if predicted."""
    note: str = ""
    """Why there is no factor; empty if there is one."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Why the winner wins."""

    metric: str
    winner: int
    """Number of the trial."""
    value: float
    """Its metric."""
    user_value: float | None
    """The metric of the user's own config; None if it was not measured."""
    speed_up: float | None
    """None if the user's own config was not measured."""
    contributions: tuple[Contribution, ...]
    """Largest effect first."""
    bounds: Mapping[str, float]
    """compute, link, host, memory, overhead -> share of the winner's step."""
    peak_bytes: int | None
    """Measured peak of the worst rank; None if it was not measured."""
    device_bytes: int
    """Memory of one device."""
    utilisation: float | None
    """Share of the GPU's peak FLOPS; None for a GPU that is not in the table."""
    proposals: tuple[str, ...]
    """What to change or buy next, largest gain first."""

    @property
    def bound(self) -> str:
        """The largest of ``bounds``."""
        return max(self.bounds, key=lambda name: self.bounds[name])

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {**asdict(self), "bound": self.bound}


def explain_study(store: Store, name: str) -> tuple[Explanation, str]:
    """Return why a stored study's winner wins, and its configuration in words.

    Raises:
        UsageError: If there is no such study, nothing of it was measured, or its profile is gone.
    """
    study = read_stored(store, name)
    if study.profiled is None or study.best is None:
        raise UsageError(f"Nothing of the study {name!r} was measured: there is nothing to explain.")
    planner = make_planner(study.spec, study.profiled, study.space, prior_knowledge=study.prior_knowledge)
    found = explain(study.trials, planner=planner, winner=study.best, baseline=study.baseline)
    return found, config_in_words(study.best.trial.user_attrs[attributes.CONFIG])


def explain(
    trials: Sequence[FrozenTrial],
    *,
    planner: GuidedPlanner,
    winner: Standing,
    baseline: Standing | None,
) -> Explanation:
    """Explain a study's winner.

    Args:
        trials: The study's trials.
        planner: The guided planner of the study's space.
        winner: The winning trial.
        baseline: The user's own config; None if it was not measured.
    """
    larger = planner.problem.metric in LARGER_IS_BETTER
    user = {} if baseline is None else visible_params(baseline.trial)
    best = visible_params(winner.trial)
    found = list(_contributions(trials, planner, winner=best, user=user))
    found.sort(key=lambda one: -abs(math.log(one.factor)) if one.factor else 0.0)
    knobs, size = _split(best)
    expected = planner.predict(trials, [(knobs, size)])[0]
    seconds = {} if expected is None else dict(expected.bounds)
    total = sum(seconds.values())
    bounds = {name: part / total for name, part in seconds.items()} if total else {"compute": 1.0}
    return Explanation(
        metric=planner.problem.metric,
        winner=winner.trial.number,
        value=winner.value,
        user_value=None if baseline is None else compared(baseline, winner)[0],
        speed_up=None if baseline is None else speed_up_over(baseline, winner, maximize=larger),
        contributions=tuple(found),
        bounds=bounds,
        peak_bytes=winner.trial.user_attrs.get(attributes.PEAK_BYTES),
        device_bytes=planner.problem.device_bytes,
        utilisation=_utilisation(winner.trial, planner),
        proposals=tuple(_proposals(trials, planner, winner.trial, bounds)),
    )


def _split(params: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    knobs = {name: value for name, value in params.items() if name != MICRO_BATCH}
    return knobs, int(params[MICRO_BATCH])


def _contributions(
    trials: Sequence[FrozenTrial], planner: GuidedPlanner, *, winner: dict[str, Any], user: dict[str, Any]
) -> Iterator[Contribution]:
    """Yield one contribution for each knob in which winner and user differ."""
    if MICRO_BATCH not in winner or not user:
        return
    before = planner.problem.space.completed(user) | {MICRO_BATCH: user.get(MICRO_BATCH)}
    for knob, value in winner.items():
        own = before.get(knob, value)
        if own == value or own is None:
            continue
        knobs, size = _split({**winner, knob: own})
        other = {**planner.problem.space.completed(knobs), MICRO_BATCH: size}
        measured = _measured(trials, planner, winner, other)
        yield measured if measured is not None else _modelled(trials, planner, knob, winner, other)


def _measured(
    trials: Sequence[FrozenTrial], planner: GuidedPlanner, winner: dict[str, Any], other: dict[str, Any]
) -> Contribution | None:
    """Compare launches that differ as winner and other do, and in nothing else; None if there are none."""
    differing = {name for name in winner.keys() | other.keys() if winner.get(name) != other.get(name)}
    kept = [name for name in STRUCTURE if name not in differing]
    knob = _named(winner, other, differing)
    ours: dict[str, list[float]] = {}
    theirs: dict[str, list[float]] = {}
    for trial in trials:
        params, shown = visible_params(trial), score(trial)
        if feasibility(trial) is not Feasibility.FITS or not shown:
            continue
        if any(params.get(name) != winner.get(name) for name in kept):
            continue  # the effect of a knob depends on the structure
        rest = str(sorted((name, value) for name, value in params.items() if name not in differing))
        part = {name: params.get(name) for name in differing}
        for chosen, side in ((ours, winner), (theirs, other)):
            if part == {name: side.get(name) for name in differing}:
                chosen.setdefault(rest, []).append(shown)
    sign = 1 if planner.problem.metric in LARGER_IS_BETTER else -1
    logs = [sign * math.log(a / b) for rest in ours.keys() & theirs.keys() for a in ours[rest] for b in theirs[rest]]
    if not logs:
        return None
    mean, spread = sum(logs) / len(logs), NOISE_SD * math.sqrt(2 / len(logs))
    return Contribution(
        knob=knob,
        user=other.get(knob),
        winner=winner.get(knob),
        factor=math.exp(mean),
        low=math.exp(mean - 1.96 * spread),
        high=math.exp(mean + 1.96 * spread),
        source="measured",
        pairs=len(logs),
    )


def _named(winner: Mapping[str, Any], other: Mapping[str, Any], differing: set[str]) -> str:
    """Return the knob that was changed; others that differ follow from it: they apply to one side only."""
    return next(name for name in winner if name in differing and name in other)


def _modelled(
    trials: Sequence[FrozenTrial], planner: GuidedPlanner, knob: str, winner: dict[str, Any], other: dict[str, Any]
) -> Contribution:
    here, there = planner.predict(trials, [_split(winner), _split(other)])
    unknown = Contribution(
        knob=knob,
        user=other.get(knob),
        winner=winner.get(knob),
        factor=None,
        low=None,
        high=None,
        source="model",
        note="outside the search space",
    )
    if here is None or there is None:
        return unknown
    if there.fits < 0.5 or there.peak_bytes > planner.problem.device_bytes:
        needs = f"{bytes_in_words(there.peak_bytes)} of {bytes_in_words(planner.problem.device_bytes)}"
        return replace(unknown, note=f"model: with it this micro-batch is not expected to fit ({needs})")
    sign = 1 if planner.problem.metric in LARGER_IS_BETTER else -1
    mean, spread = sign * math.log(here.value / there.value), math.hypot(here.spread, there.spread)
    return Contribution(
        knob=knob,
        user=other.get(knob),
        winner=winner.get(knob),
        factor=math.exp(mean),
        low=math.exp(mean - 1.96 * spread),
        high=math.exp(mean + 1.96 * spread),
        source="model",
    )


def _utilisation(winner: FrozenTrial, planner: GuidedPlanner) -> float | None:
    """Return the share of the GPU's peak FLOPS that the winner reached; None if either is unknown."""
    gpu = gpu_of_device(planner.problem.profile.device_name)
    reached = (winner.user_attrs.get(attributes.METRICS) or {}).get("FLOPS_per_gpu")
    return None if gpu is None or not reached else float(reached) / (gpu.tflops * 1e12)


def _proposals(
    trials: Sequence[FrozenTrial], planner: GuidedPlanner, winner: FrozenTrial, bounds: Mapping[str, float]
) -> Iterator[str]:
    """Yield what to change or buy, largest gain first."""
    gains = sorted(_gains(trials, planner, winner, bounds), reverse=True)
    for gain, text in gains:
        if gain >= _WORTH_SAYING:
            yield f"{text}: about {gain:.0%} faster."
    utilisation = _utilisation(winner, planner)
    if bounds.get("compute", 0) >= 0.7:
        if utilisation is not None and utilisation < _IDLE_GPU:
            yield (
                f"Computation takes {bounds['compute']:.0%} of a step but reaches {utilisation:.0%} of the GPU's peak: "
                "look at the model itself (fused attention, half precision, shapes that are multiples of 64, "
                "torch.compile)."
            )
        else:
            yield (
                f"Computation takes {bounds['compute']:.0%} of a step: no setting of DeepSpeed changes that much; "
                "faster or more GPUs do, and less recomputation where memory allows."
            )


def _gains(
    trials: Sequence[FrozenTrial], planner: GuidedPlanner, winner: FrozenTrial, bounds: Mapping[str, float]
) -> Iterator[tuple[float, str]]:
    """Yield relative gains in samples per second, with what brings them."""
    knobs, size = _split(visible_params(winner))
    row = planner.problem.table.row_index(knobs)
    if row is None:
        return
    peak = winner.user_attrs.get(attributes.PEAK_BYTES) or 0
    if peak > _FULL * planner.problem.device_bytes:
        gain = planner.rate_ratio(trials, row, size, larger_batch=2) - 1
        yield gain, f"Memory stops the micro-batch at {size}; devices with room for {2 * size} samples"
    if bounds.get("link", 0) > 0:
        yield 1 / (1 - bounds["link"] / 2) - 1, "A link between the GPUs of twice the bandwidth"
        gain = planner.rate_ratio(trials, row, size, more_steps=4) - 1
        stage = int(knobs.get("zero_stage", 0))
        yield (
            gain,
            (
                "Four times the gradient accumulation steps, where the larger global batch suits the training "
                f"(ZeRO {stage} then exchanges less per sample)"
            ),
        )
    if bounds.get("host", 0) > 0:
        yield (
            1 / (1 - bounds["host"]) - 1,
            "GPUs enough to hold what is offloaded to the host",
        )
