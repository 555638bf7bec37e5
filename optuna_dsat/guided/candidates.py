"""All lineages of a search space as arrays, and a study's trials as observations of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from optuna.trial import FrozenTrial

from optuna_dsat.config import ds_config
from optuna_dsat.config.conditions import NVME
from optuna_dsat.config.knob_values import KNOB_OF
from optuna_dsat.config.knobs import KNOBS
from optuna_dsat.config.search_space import SearchSpace
from optuna_dsat.cost.memory import Hardware, ModelProfile, rank_host_parts, zero_settings
from optuna_dsat.cost.memory_posterior import MemoryInputs
from optuna_dsat.cost.numbers import Numbers
from optuna_dsat.cost.step_time import PHASES, Columns
from optuna_dsat.cost.zero_states import ZeroSettings, moments
from optuna_dsat.guided.diagnosis import Components
from optuna_dsat.guided.prior_knowledge import EarlierLaunch
from optuna_dsat.guided.residual_gp import knob_kernel
from optuna_dsat.outcome import Outcome
from optuna_dsat.trials import attributes
from optuna_dsat.trials.lineage import (
    MICRO_BATCH,
    STRUCTURE,
    ZERO_STAGE,
    Feasibility,
    feasibility,
    lineage_key,
    score,
    visible_params,
)

_SIZES = {
    "reduce_bucket_size": "bucket",
    "stage3_prefetch_bucket_size": "prefetch",
    "stage3_max_live_parameters": "max_live",
    "stage3_max_reuse_distance": "max_reuse",
    "stage3_param_persistence_threshold": "persistence",
}
"""Knob -> the only field of ``ZeroSettings`` and ``Columns`` that depends on it. Most rows differ in these only."""

_DEFAULTS = {knob.name: knob.default for knob in KNOBS}

_BUFFERS = (
    "reduce_bucket_size",
    "stage3_prefetch_bucket_size",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
)
"""Knobs whose value is a number of elements on the device."""


@dataclass(frozen=True, kw_only=True)
class Observations:
    """The n informative or pending trials, by number; each array has length n unless its shape is given."""

    number: Numbers
    """Number of the trial; -1 for a launch of an earlier study."""
    row: Numbers
    """Row of the lineage in the table."""
    micro_batch: Numbers
    accumulation: Numbers
    """Gradient accumulation steps."""
    value: Numbers
    """The metric; NaN if not measured."""
    peak: Numbers
    """Peak in bytes; NaN if not measured."""
    phases: Numbers
    """Seconds, shape (4, n), in the order of ``PHASES``; NaN if not measured."""
    overhead: Numbers
    """Launch seconds outside training steps; NaN if not measured, or without a start."""
    device_out_of_memory: Numbers
    """Whether the device ran out of memory."""
    host_out_of_memory: Numbers
    """Whether the host ran out of memory."""
    broken: Numbers
    """Whether the configuration fails at any micro-batch."""
    fits: Numbers
    """Whether a full step ran."""
    pending: Numbers
    """Whether the trial is not finished."""
    launch: Numbers
    """Index of the launch, shared by the trials that it measured; -1 for a launch of an earlier study."""
    used: Mapping[int, frozenset[int]]
    """Row -> micro-batches of all its trials with the space's accumulation, regardless of outcome."""
    waiting: int = -1
    """Index of the launch whose ranks wait for another trial; -1 for none."""
    climbs: bool = False
    """Whether launches measure several trials, and so can climb to larger micro-batches."""

    def take(self, index: Numbers) -> Observations:
        """Return the trials at an index array; ``used`` still covers all trials."""
        taken = {name: getattr(self, name)[..., index] for name in self._arrays()}
        return Observations(**taken, used=self.used, waiting=self.waiting, climbs=self.climbs)

    def digest(self) -> Hashable:
        """Return a key that is equal for equal observations."""
        arrays = (getattr(self, name) for name in self._arrays())
        return (*(array.tobytes() for array in arrays), frozenset(self.used.items()), self.waiting)

    @classmethod
    def _arrays(cls) -> list[str]:
        """Return the names of the arrays."""
        return [field_.name for field_ in fields(cls) if field_.name not in ("used", "waiting", "climbs")]


class CandidateTable:
    """All lineages of a space, with the inputs of the cost models for each; must not be modified."""

    def __init__(
        self, *, profile: ModelProfile, hardware: Hardware, config: Mapping[str, Any], space: SearchSpace
    ) -> None:
        self._profile = profile
        self._hardware = hardware
        self._base = ds_config.effective(config)
        self._space = space
        self.lineages = space.lineages()
        """Params of each row."""
        self._index = {frozenset(params.items()): row for row, params in enumerate(self.lineages)}
        self._group, _ = _indices(map(_without_sizes, self.lineages))
        """Index of each row's group: rows of a group have the same knobs, and differ in the values of ``_SIZES``."""
        _, firsts = np.unique(self._group, return_index=True)
        groups = [self.lineages[row] for row in firsts]
        self.structure = self._of_groups(tuple(params.get(name) for name in (*STRUCTURE, NVME)) for params in groups)
        """Index of each row's structure: ZeRO stage and offload, NVMe apart from CPU."""
        self.relatives = np.column_stack([self._of_groups(params.get(name) for params in groups) for name in STRUCTURE])
        """Index of each row's ZeRO stage, offload of the optimizer and offload of the parameters, shape (rows, 3)."""
        self.knobs, self._values = self._codes()
        """Index of the value of each other knob, shape (rows, knobs)."""
        self.engine = self._engines(groups)
        """Index of each row's settings that a running engine cannot change: rows of an index continue each other."""
        effects = {knob.name: knob.effect for knob in KNOBS}
        scales = [effects[name] for name in self._values]
        self.knob_kernels = [
            scale**2 * knob_kernel(value) for scale, value in zip(scales, self._values.values(), strict=True)
        ]
        """For each other knob, the covariance of its values' effects."""
        stages = np.array([params[ZERO_STAGE] for params in groups], dtype=np.int64)[self._group]
        self.components = Components.of(
            stages,
            self.relatives,
            self.structure,
            self.knobs,
            has_value=[np.diag(kernel) > 0 for kernel in self.knob_kernels],
        )
        """Components of each row that may make launches fail."""
        self.non_default_knobs = self._count_non_default_knobs(stages)
        """Number of knobs per row, except stage and offload, that differ from the user's config (else the default)."""
        settings, sizes = self._settings(groups), self._sizes()
        columns = Columns.of(settings).take(self._group)
        given = {name: np.where(size < 0, getattr(columns, name), size) for name, size in sizes.items()}
        self.columns = replace(columns, **given)
        """Inputs of the step-time model."""
        self.kinds = np.column_stack([self.columns.stage == 3, self.columns.offload, self.columns.offload_param])
        """Whether each row has ZeRO 3, an offloaded optimizer, offloaded parameters: 0 or 1, shape (rows, 3)."""
        activations = np.array([setting.activation_bytes for setting in settings], dtype=np.float64)
        activations /= max(1.0, profile.activation_bytes_per_sample)
        self.activations = np.where(activations > 0, activations, 1.0)[self._group]
        """Activations per sample of each row, relative to the model without checkpointing."""
        self.forward, self.others, self.host = np.empty((3, len(self.lineages)))
        """Predicted bytes: on the device at the end of the forward pass without activations, on the device at other
        moments, and on a host.
        """
        for number, setting in enumerate(settings):
            rows = np.flatnonzero(self._group == number)
            common: dict[str, Any] = {name: size[rows] for name, size in sizes.items() if size[rows[0]] >= 0}
            self.forward[rows], self.others[rows], self.host[rows] = self._bytes(replace(setting, **common))
        self.buffers = self._buffers()
        """Bytes on the device of each knob's value in excess of its cheapest value: as predicted, then bytes missing
        from the prediction, shape (rows, 2 knobs).
        """

    def marginal_means(self, values: Numbers) -> Numbers:
        """Return the means of values over the rows with equal structure and knob value, shape (rows, knobs)."""
        result = np.zeros(self.knobs.shape)
        for group in np.unique(self.structure):
            rows = np.flatnonzero(self.structure == group)
            for place in range(self.knobs.shape[1]):
                index = self.knobs[rows, place]
                result[rows, place] = (np.bincount(index, values[rows]) / np.maximum(1, np.bincount(index)))[index]
        return result

    def _buffers(self) -> Numbers:
        """Return the bytes on the device of each knob's value beyond its cheapest in the structure, (rows, 2 knobs).

        The second half is the size of a buffer with as many elements, as far as the formulas contain less.
        """
        result = self.marginal_means(self.forward)
        possible = np.zeros(result.shape)
        for place, (name, values) in enumerate(self._values.items()):
            if name in _BUFFERS:
                elements = np.array([float(value or 0) for value in values])[self.knobs[:, place]]
                possible[:, place] = np.minimum(elements, self._profile.params) * self._profile.param_bytes
        for group in np.unique(self.structure):
            members = np.flatnonzero(self.structure == group)
            result[members] -= result[members].min(axis=0)
            possible[members] -= possible[members].min(axis=0)
        return np.concatenate([result, np.maximum(0.0, possible - result)], axis=1)

    def row_index(self, params: Mapping[str, Any]) -> int | None:
        """Return the row of a lineage, None if it is not in this space; a micro-batch among the params is ignored."""
        try:
            row = self._index.get(frozenset(item for item in params.items() if item[0] != MICRO_BATCH))
        except TypeError:  # another study's value may not be hashable
            return None
        is_same = row is not None and lineage_key(params) == lineage_key(self.lineages[row])  # True equals 1
        return row if is_same else None

    def neighbours(self, row: int) -> Numbers:
        """Return the rows that differ from a row in a single knob, and not in the structure."""
        differing = (self.knobs != self.knobs[row]).sum(axis=1)
        return np.flatnonzero((self.structure == self.structure[row]) & (differing == 1))

    def never_measured(self, rows: Numbers, measured: Numbers) -> Numbers:
        """Return a mask of rows with ZeRO 3, an offload or a flag's value (of large effect) that none measured has."""
        result: Numbers = (self.kinds[rows] > self.kinds[measured].max(axis=0, initial=0.0)).any(axis=1)
        for place, kernel in enumerate(self.knob_kernels):
            values = self.knobs[rows, place]
            is_flag = not np.any(kernel - np.diag(np.diag(kernel)))
            if is_flag and kernel.max() >= 1 and len(measured):
                result |= (np.diag(kernel)[values] > 0) & ~np.isin(values, self.knobs[measured, place])
        return result

    def continues(self, rows: Numbers, observations: Observations) -> Numbers:
        """Return a mask of rows that the ranks that wait for another trial can measure."""
        if observations.waiting < 0:
            return np.zeros(len(rows), dtype=bool)
        measured = observations.row[observations.launch == observations.waiting][0]
        result: Numbers = self.engine[rows] == self.engine[measured]
        return result

    def memory_inputs(self, rows: Numbers, micro_batch: Numbers) -> MemoryInputs:
        """Return the inputs of the memory posterior for rows at micro-batches."""
        return MemoryInputs(
            lineage=rows,
            structure=self.structure[rows],
            relatives=self.relatives[rows],
            knobs=self.knobs[rows],
            micro_batch=np.asarray(micro_batch, dtype=np.float64),
            activations=self.activations[rows],
            forward=self.forward[rows],
            others=self.others[rows],
            buffers=self.buffers[rows],
            non_contiguous=1 - self.columns.contiguous[rows],
        )

    def _of_groups(self, items: Iterable[Hashable]) -> Numbers:
        """Return for each row the index of its group's item among the different items."""
        result: Numbers = _indices(items)[0][self._group]
        return result

    def _codes(self) -> tuple[Numbers, dict[str, list[Any]]]:
        """Return the index of each knob's value, shape (rows, knobs), and the values of each, None if unset.

        Knobs of the structure are left out.
        """
        names = [tuned.name for tuned in self._space.knobs if tuned.name not in (*STRUCTURE, NVME)]
        coded = [_indices(params.get(name) for params in self.lineages) for name in names]
        codes = np.zeros((len(self.lineages), len(coded)), dtype=np.int64)
        for place, (indices, _) in enumerate(coded):
            codes[:, place] = indices
        return codes, {
            name: [ds_config.canonical_number(value) for value in values]
            for name, (_, values) in zip(names, coded, strict=True)
        }

    def _engines(self, groups: Sequence[Mapping[str, Any]]) -> Numbers:
        """Return the index of each row's settings that a running engine cannot change.

        Whether it can change a knob does not depend on ``_SIZES``.
        """
        static = [
            {name for name in params if name not in KNOB_OF or not KNOB_OF[name].is_live(params)} for params in groups
        ]
        result = self._of_groups(
            frozenset((name, params[name]) for name in names if name not in _SIZES)
            for names, params in zip(static, groups, strict=True)
        )
        for place, (name, values) in enumerate(self._values.items()):
            if name in _SIZES:
                is_static = np.array([name in names for names in static])[self._group]
                result = result * (len(values) + 1) + np.where(is_static, self.knobs[:, place] + 1, 0)
        return result

    def _count_non_default_knobs(self, stages: Numbers) -> Numbers:
        result = np.zeros(len(self.lineages))
        for place, (name, values) in enumerate(self._values.items()):
            is_set = np.array([value is not None for value in values])[self.knobs[:, place]]
            for stage in np.unique(stages[is_set]):
                usual = self._space.usual(name, {ZERO_STAGE: int(stage)})
                differs = np.array([value != usual for value in values])[self.knobs[:, place]]
                result += is_set & (stages == stage) & differs
        return result

    def _settings(self, groups: Sequence[Mapping[str, Any]]) -> list[ZeroSettings]:
        """Return the settings of the first row of each group."""
        size = self._space.micro_batches[0]
        overlays = [self._space.overlay({**params, MICRO_BATCH: size}) for params in groups]
        return [
            zero_settings(self._profile, ds_config.merge(self._base, overlay), self._hardware) for overlay in overlays
        ]

    def _sizes(self) -> dict[str, Numbers]:
        """Return the values of ``_SIZES`` by field, for each row; -1 where the row lacks the knob."""
        return {
            _SIZES[name]: np.array([-1 if value is None else int(value) for value in values])[self.knobs[:, place]]
            for place, (name, values) in enumerate(self._values.items())
            if name in _SIZES
        }

    def _bytes(self, settings: ZeroSettings) -> tuple[Any, Any, Any]:
        """Return the bytes on the device at the end of the forward pass and at other moments, and on the host.

        They are arrays where the sizes of the settings are.
        """
        host = sum(rank_host_parts(settings).values())
        beside = host if self._hardware.device == "cpu" else 0
        result = {moment.name: moment.bytes_at(0) + beside for moment in moments(settings)}
        others = [size for name, size in result.items() if name != "forward"]
        return (
            result["forward"],
            functools.reduce(np.maximum, others),
            0 if beside else host * min(self._hardware.ranks_per_node, self._hardware.world_size),
        )

    def observations_of_trials(self, trials: Sequence[FrozenTrial]) -> Observations:
        """Return the observations of a study's trials; trials of other spaces are skipped."""
        used: dict[int, set[int]] = {}
        result: list[tuple[int, int, int, FrozenTrial, Feasibility, bool]] = []
        for trial in trials:
            knobs = visible_params(trial)
            size, given = knobs.pop(MICRO_BATCH, None), knobs.pop(ds_config.GRADIENT_ACCUMULATION, None)
            row = self._row_of(knobs)
            if row is None or isinstance(size, bool) or not isinstance(size, int):
                continue
            steps = given or self._space.searched_accumulation(size)
            if steps == self._space.accumulation(size):
                used.setdefault(row, set()).add(size)
            shown, pending = feasibility(trial), not trial.state.is_finished()
            if pending or shown is not Feasibility.UNKNOWN:
                result.append((row, size, steps, trial, shown, pending))
        shows, trials = [shown for *_, shown, _ in result], [trial for *_, trial, _, _ in result]
        nothing = dict.fromkeys((*PHASES, "latency"), math.nan)
        rows = [{**nothing, **(trial.user_attrs.get(attributes.METRICS) or {})} for trial in trials]
        phases = np.array([[launch[name] for name in (*PHASES[:3], "latency")] for launch in rows]).reshape(-1, 4).T
        phases[3] -= phases[:3].sum(axis=0)
        phases[:, ~(phases > 0).all(axis=0)] = math.nan
        outcomes = [trial.user_attrs.get(attributes.OUTCOME) for trial in trials]
        scores = [
            score(trial) if shown is Feasibility.FITS else None for trial, shown in zip(trials, shows, strict=True)
        ]
        host = np.array([outcome == Outcome.HOST_OUT_OF_MEMORY for outcome in outcomes], dtype=bool)
        data = np.array([outcome == Outcome.OUT_OF_DATA for outcome in outcomes], dtype=bool)
        overheads = [
            math.nan
            if attributes.ROOT_LAUNCH in trial.user_attrs
            else trial.user_attrs.get(attributes.OVERHEAD_S, math.nan)
            for trial in trials
        ]
        launches: dict[str, int] = {}
        launch = [launches.setdefault(attributes.root_launch(trial), len(launches)) for trial in trials]
        return Observations(
            number=np.array([trial.number for trial in trials], dtype=np.int64),
            row=np.array([row for row, *_ in result], dtype=np.int64),
            micro_batch=np.array([size for _, size, *_ in result], dtype=np.float64),
            accumulation=np.array([steps for _, _, steps, *_ in result], dtype=np.float64),
            value=np.array([value if value is not None and value > 0 else math.nan for value in scores]),
            peak=np.array([trial.user_attrs.get(attributes.PEAK_BYTES) or math.nan for trial in trials]),
            phases=phases,
            overhead=np.array(overheads, dtype=np.float64),
            device_out_of_memory=np.array([shown is Feasibility.TOO_LARGE for shown in shows], dtype=bool)
            & ~host
            & ~data,
            host_out_of_memory=host,
            broken=np.array([shown is Feasibility.BROKEN for shown in shows], dtype=bool),
            fits=np.array([shown is Feasibility.FITS for shown in shows], dtype=bool),
            pending=np.array([pending for *_, pending in result], dtype=bool),
            launch=np.array(launch, dtype=np.int64),
            waiting=launches.get(attributes.waiting_launch(trials) or "", -1),
            climbs=any(attributes.ROOT_LAUNCH in trial.user_attrs for trial in trials),
            used={row: frozenset(sizes) for row, sizes in used.items()},
        )

    def _row_of(self, params: Mapping[str, Any]) -> int | None:
        """Return the row of params, of which an earlier study or version may have searched other knobs."""
        row = self.row_index(params)
        if row is None and ZERO_STAGE in params:
            completed = self._space.completed(params)
            if all(completed.get(name, _DEFAULTS.get(name)) == value for name, value in params.items()):
                row = self.row_index(completed)
        return row

    def observations_of_launches(self, launches: Sequence[EarlierLaunch], *, metric: str) -> Observations:
        """Return the observations of an earlier study's launches; launches outside the space are skipped."""
        result = [(self._row_of(launch.params), launch) for launch in launches]
        rows = [(row, launch) for row, launch in result if row is not None]
        count = len(rows)
        values = [launch.metrics.get(metric, math.nan) if launch.fits else math.nan for _, launch in rows]
        fits = np.array([launch.fits for _, launch in rows], dtype=bool)
        return Observations(
            number=np.full(count, -1, dtype=np.int64),
            row=np.array([row for row, _ in rows], dtype=np.int64),
            micro_batch=np.array([launch.micro_batch for _, launch in rows], dtype=np.float64),
            accumulation=np.array(
                [launch.accumulation or self._space.searched_accumulation(launch.micro_batch) for _, launch in rows],
                dtype=np.float64,
            ),
            value=np.array([value if value > 0 else math.nan for value in values], dtype=np.float64),
            peak=np.array([launch.peak_bytes or math.nan for _, launch in rows], dtype=np.float64),
            phases=np.full((4, count), math.nan),
            overhead=np.full(count, math.nan),
            device_out_of_memory=~fits,
            host_out_of_memory=np.zeros(count, dtype=bool),
            broken=np.zeros(count, dtype=bool),
            fits=fits,
            pending=np.zeros(count, dtype=bool),
            launch=np.full(count, -1, dtype=np.int64),
            used={},
        )


def _indices(items: Iterable[Hashable]) -> tuple[Numbers, list[Any]]:
    """Return for each item the index of its value among the different ones, and these in the order of their coming."""
    ids: dict[Hashable, int] = {}
    return np.array([ids.setdefault(item, len(ids)) for item in items], dtype=np.int64), list(ids)


def _without_sizes(params: Mapping[str, Any]) -> Hashable:
    """Return a lineage's knobs with their values, except for values of ``_SIZES``."""
    return tuple((name, None if name in _SIZES else value) for name, value in params.items())


_MOST_TABLES = 4
_tables: dict[str, CandidateTable] = {}
"""Recent tables by the text of their arguments."""


def candidate_table(
    *, profile: ModelProfile, hardware: Hardware, config: Mapping[str, Any], space: SearchSpace
) -> CandidateTable:
    """Return the table of a space, cached: it takes a third of a second, and warm starts often share the space."""
    text = repr((profile, hardware, config, space))
    table = _tables.pop(text, None) or CandidateTable(profile=profile, hardware=hardware, config=config, space=space)
    _tables[text] = table  # the latest last
    if len(_tables) > _MOST_TABLES:
        del _tables[next(iter(_tables))]
    return table


def are_simpler(parts: Numbers, others: Numbers) -> Numbers:
    """Return whether no part of a structure, such as stage and offloads, exceeds that of another, and one is less.

    Shapes (n, parts), or (parts,) of a single structure.
    """
    return np.asarray((parts <= others).all(axis=1) & (parts < others).any(axis=1))


def rank_within(groups: Numbers) -> Numbers:
    """Return for each element the number of earlier elements of the same group."""
    order = np.argsort(groups, kind="stable")
    ordered = groups[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    ranks = np.empty(len(groups), dtype=np.int64)
    ranks[order] = np.arange(len(groups)) - np.repeat(starts, np.diff(np.append(starts, len(groups))))
    return ranks
