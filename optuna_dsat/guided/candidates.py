"""All lineages of a search space as columns of numbers, and a study's trials as rows of them."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from optuna.trial import FrozenTrial

from optuna_dsat.config import ds_config
from optuna_dsat.config.knobs import NVME
from optuna_dsat.config.search_space import SearchSpace
from optuna_dsat.cost.memory import Hardware, ModelProfile
from optuna_dsat.cost.memory_posterior import Loads
from optuna_dsat.cost.step_time import PHASES, Columns
from optuna_dsat.cost.zero_states import ZeroSettings, moments, rank_host_parts
from optuna_dsat.guided.prior_knowledge import Launched
from optuna_dsat.outcome import Outcome
from optuna_dsat.trials import attributes
from optuna_dsat.trials.lineage import (
    MICRO_BATCH,
    STRUCTURE,
    Feasibility,
    canonical,
    feasibility,
    lineage_key,
    score,
    structure,
    visible_params,
)

__all__ = ["CandidateTable", "Known"]

Numbers: TypeAlias = npt.NDArray[Any]

_SIZES = {
    "reduce_bucket_size": "bucket",
    "stage3_prefetch_bucket_size": "prefetch",
    "stage3_max_live_parameters": "max_live",
    "stage3_max_reuse_distance": "max_reuse",
    "stage3_param_persistence_threshold": "persistence",
    "sub_group_size": "sub_group",
}
"""Knob -> field of ``ZeroSettings`` that it alone decides."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """The trials that say something, one element each, in the order of their numbers."""

    number: Numbers
    """Of the trial; -1 for a launch of an earlier study."""
    row: Numbers
    """Of the table."""
    micro_batch: Numbers
    value: Numbers
    """The metric; NaN where it is not known."""
    peak: Numbers
    """Measured bytes; NaN where they are not known."""
    phases: Numbers
    """Seconds, shape (4, n); NaN where they are not known."""
    overhead: Numbers
    """Seconds of the launch beside its steps; NaN where they are not known."""
    too_large: Numbers
    """Whether the device ran out of memory."""
    host_too_large: Numbers
    """Whether the host ran out of memory."""
    broken: Numbers
    fits: Numbers
    """Whether a full step was run."""
    pending: Numbers
    """Whether it is not over yet."""
    used: Mapping[int, frozenset[int]]
    """Row -> micro-batches of all its trials, whatever became of them."""

    def take(self, index: Numbers) -> Known:
        """Return some of the trials; ``used`` stays that of all."""
        taken = {one.name: getattr(self, one.name)[..., index] for one in fields(self) if one.name != "used"}
        return Known(**taken, used=self.used)

    def digest(self) -> Hashable:
        """Return what two readings have in common only if they say the same."""
        arrays = (getattr(self, one.name) for one in fields(self) if one.name != "used")
        return (*(array.tobytes() for array in arrays), frozenset(self.used.items()))


class CandidateTable:
    """All lineages of a space, and what theory says of each.

    Args:
        profile: What the profile launch taught.
        hardware: Where launches run.
        config: The user's DeepSpeed config.
        space: The search space.
    """

    def __init__(
        self, *, profile: ModelProfile, hardware: Hardware, config: Mapping[str, Any], space: SearchSpace
    ) -> None:
        self._profile = profile
        self._hardware = hardware
        self._base = ds_config.effective(config)
        self._space = space
        self.lineages = list(space.lineages())
        """Params of each row."""
        self._index = {lineage_key(params): row for row, params in enumerate(self.lineages)}
        kinds = [lineage_key({**structure(params), NVME: params.get(NVME)}) for params in self.lineages]
        numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
        self.structure = np.array([numbers[kind] for kind in kinds], dtype=np.int64)
        """Number of each row's ZeRO stage and offload."""
        self.knobs = self._codes()
        """Number of the value of each other knob, shape (rows, knobs)."""
        self.unusual = self._count_unusual()
        """Number of knobs, stage and offload aside, that are neither as the user has them nor DeepSpeed's defaults."""
        settings, scatter = self._settings_of_all()
        self.columns = Columns.of(settings, scatter)
        """What the step theory reads."""
        needs = np.array([self._bytes(one) for one in settings], dtype=np.float64).reshape(-1, 3)
        self.forward, self.others, self.host = needs.T
        """Predicted bytes: on the device at the end of the forward pass without activations, there at other moments,
        and on one host.
        """

    def row_of(self, params: Mapping[str, Any]) -> int | None:
        """Return the row of a lineage, None for one that is not of this space."""
        return self._index.get(lineage_key(params))

    def loads(self, rows: Numbers, micro_batch: Numbers) -> Loads:
        """Return rows at micro-batches as the memory belief takes them."""
        return Loads(
            lineage=rows,
            structure=self.structure[rows],
            knobs=self.knobs[rows],
            micro_batch=np.asarray(micro_batch, dtype=np.float64),
            forward=self.forward[rows],
            others=self.others[rows],
            scattered=1 - self.columns.contiguous[rows],
        )

    def _codes(self) -> Numbers:
        names = [tuned.name for tuned in self._space.knobs if tuned.name not in (*STRUCTURE, NVME)]
        values: list[dict[Any, int]] = [{} for _ in names]
        codes = [
            [ids.setdefault(canonical(params.get(name)), len(ids)) for name, ids in zip(names, values, strict=True)]
            for params in self.lineages
        ]
        return np.array(codes, dtype=np.int64).reshape(len(self.lineages), len(names))

    def _count_unusual(self) -> Numbers:
        usual: dict[tuple[str, int], Any] = {}
        counts = []
        for params in self.lineages:
            count = 0
            for name, value in params.items():
                if name in (*STRUCTURE, NVME):
                    continue
                place = (name, params["zero_stage"])
                if place not in usual:
                    usual[place] = self._space.usual(name, params)
                count += value != usual[place]
            counts.append(count)
        return np.array(counts, dtype=np.float64)

    def _settings_of_all(self) -> tuple[list[ZeroSettings], list[bool]]:
        """Read every lineage's config; those that differ in sizes alone are read once."""
        known: dict[str, tuple[ZeroSettings, bool]] = {}
        settings, scatter = [], []
        for params in self.lineages:
            kind = lineage_key({name: value for name, value in params.items() if name not in _SIZES})
            if kind not in known:
                overlay = self._space.overlay({**params, MICRO_BATCH: self._space.micro_batches[0]})
                known[kind] = self._settings(ds_config.merge(self._base, overlay))
            sizes: dict[str, Any] = {field: int(params[name]) for name, field in _SIZES.items() if name in params}
            settings.append(replace(known[kind][0], **sizes))
            scatter.append(known[kind][1])
        return settings, scatter

    def _settings(self, config: Mapping[str, Any]) -> tuple[ZeroSettings, bool]:
        settings = ZeroSettings.of(
            config,
            params=self._profile.params,
            trainable=self._profile.trainable_params,
            largest_layer=self._profile.largest_layer_params,
            param_bytes=self._profile.param_bytes,
            activation_bytes=self._profile.activation_bytes_per_sample,
            optimizer=self._profile.optimizer,
            ranks=self._hardware.world_size,
            on_cpu=self._hardware.device == "cpu",
        )
        zero = config.get("zero_optimization") or {}
        return settings, zero.get("reduce_scatter") is not False

    def _bytes(self, settings: ZeroSettings) -> tuple[int, int, int]:
        """Return the bytes on the device at the end of the forward pass and at other moments, and on the host."""
        host = sum(rank_host_parts(settings).values())
        beside = host if self._hardware.device == "cpu" else 0
        found = {moment.name: moment.bytes_at(0) + beside for moment in moments(settings)}
        others = max(size for name, size in found.items() if name != "forward")
        return (
            found["forward"],
            others,
            0 if beside else host * min(self._hardware.ranks_per_node, self._hardware.world_size),
        )

    def read(self, trials: Sequence[FrozenTrial]) -> Known:
        """Read the trials of lineages of this space."""
        used: dict[int, set[int]] = {}
        found: list[tuple[int, int, FrozenTrial, Feasibility, bool]] = []
        for trial in trials:
            knobs = visible_params(trial)
            size = knobs.pop(MICRO_BATCH, None)
            row = self._index.get(lineage_key(knobs))
            if row is None or isinstance(size, bool) or not isinstance(size, int):
                continue
            used.setdefault(row, set()).add(size)
            says, pending = feasibility(trial), not trial.state.is_finished()
            if pending or says is not Feasibility.UNKNOWN:
                found.append((row, size, trial, says, pending))
        nothing = dict.fromkeys((*PHASES, "latency"), math.nan)
        rows = [{**nothing, **(trial.user_attrs.get(attributes.METRICS) or {})} for _, _, trial, _, _ in found]
        phases = np.array([[one[name] for name in (*PHASES[:3], "latency")] for one in rows]).reshape(-1, 4).T
        phases[3] -= phases[:3].sum(axis=0)
        phases[:, ~(phases > 0).all(axis=0)] = math.nan
        outcomes = [trial.user_attrs.get(attributes.OUTCOME) for _, _, trial, _, _ in found]
        scores = [score(trial) if says is Feasibility.FITS else None for _, _, trial, says, _ in found]
        host = np.array([outcome == Outcome.HOST_OUT_OF_MEMORY for outcome in outcomes], dtype=bool)
        data = np.array([outcome == Outcome.OUT_OF_DATA for outcome in outcomes], dtype=bool)
        overheads = [trial.user_attrs.get(attributes.OVERHEAD_S, math.nan) for _, _, trial, _, _ in found]
        says_all = [says for _, _, _, says, _ in found]
        return Known(
            number=np.array([trial.number for _, _, trial, _, _ in found], dtype=np.int64),
            row=np.array([row for row, *_ in found], dtype=np.int64),
            micro_batch=np.array([size for _, size, *_ in found], dtype=np.float64),
            value=np.array([value if value is not None and value > 0 else math.nan for value in scores]),
            peak=np.array([trial.user_attrs.get(attributes.PEAK_BYTES) or math.nan for _, _, trial, _, _ in found]),
            phases=phases,
            overhead=np.array(overheads, dtype=np.float64),
            too_large=np.array([one is Feasibility.TOO_LARGE for one in says_all], dtype=bool) & ~host & ~data,
            host_too_large=host,
            broken=np.array([one is Feasibility.BROKEN for one in says_all], dtype=bool),
            fits=np.array([one is Feasibility.FITS for one in says_all], dtype=bool),
            pending=np.array([pending for *_, pending in found], dtype=bool),
            used={row: frozenset(sizes) for row, sizes in used.items()},
        )

    def recall(self, launches: Sequence[Launched], *, metric: str) -> Known:
        """Read launches of an earlier study; those of lineages that are not of this space are passed over.

        Args:
            launches: The launches.
            metric: Name of the metric that is optimised.
        """
        found = [(self._index.get(lineage_key(one.params)), one) for one in launches]
        rows = [(row, one) for row, one in found if row is not None]
        count = len(rows)
        values = [one.metrics.get(metric, math.nan) if one.fits else math.nan for _, one in rows]
        fits = np.array([one.fits for _, one in rows], dtype=bool)
        return Known(
            number=np.full(count, -1, dtype=np.int64),
            row=np.array([row for row, _ in rows], dtype=np.int64),
            micro_batch=np.array([one.micro_batch for _, one in rows], dtype=np.float64),
            value=np.array([value if value > 0 else math.nan for value in values], dtype=np.float64),
            peak=np.array([one.peak_bytes or math.nan for _, one in rows], dtype=np.float64),
            phases=np.full((4, count), math.nan),
            overhead=np.full(count, math.nan),
            too_large=~fits,
            host_too_large=np.zeros(count, dtype=bool),
            broken=np.zeros(count, dtype=bool),
            fits=fits,
            pending=np.zeros(count, dtype=bool),
            used={},
        )
