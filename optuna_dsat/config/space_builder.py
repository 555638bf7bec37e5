"""The search space: which knobs are searched, over which choices, under which conditions; params <-> config.

A configuration is a dict of *params*, named after DeepSpeed's keys: ``zero_stage`` first, then the knobs that
apply, ``train_micro_batch_size_per_gpu`` last. All but the micro-batch are categorical.

- A list in the user's config narrows a knob to these values.
- ``fix`` holds a knob at one value: it is no parameter, but is laid over the user's config where it applies.
- ``no_tune`` leaves a knob as the user's config has it.
- ``zero_stage`` and the micro-batch stay parameters even when held: they then have one value.
- The user's present value is always among the choices, unless a list, ``fix`` or the stages asked for say
  otherwise.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from optuna_dsat.config import ds_config as configs
from optuna_dsat.config.ds_config import MICRO_BATCH, ZERO
from optuna_dsat.config.knobs import (
    KNOBS,
    NVME,
    OFFLOAD_OPTIMIZER,
    OFFLOAD_PARAM,
    ZERO_STAGE,
    Knob,
    Site,
    known_names,
    normalise,
)
from optuna_dsat.config.search_space import (
    KnobRow,
    Role,
    SearchSpace,
    TunedKnob,
    capped,
    device_of,
)
from optuna_dsat.config.search_space import (
    present as read_present,
)
from optuna_dsat.errors import ConfigError

__all__ = ["KnobRow", "Role", "SearchSpace", "TunedKnob", "build_space"]

_BY_NAME = MappingProxyType({knob.name: knob for knob in KNOBS})
_LEGACY = MappingProxyType({
    "cpu_offload": OFFLOAD_OPTIMIZER,
    "cpu_offload_param": OFFLOAD_PARAM,
    "prefetch_bucket_size": "stage3_prefetch_bucket_size",
    "param_persistence_threshold": "stage3_param_persistence_threshold",
    "max_live_parameters": "stage3_max_live_parameters",
    "max_reuse_distance": "stage3_max_reuse_distance",
})  # fmt: skip
"""Other spellings of knobs that DeepSpeed accepts: removed where we set the knob, or there would be two
values.
"""
_TESTED_OPTIMIZERS = frozenset({"adam", "adamw", "adagrad", "lion", "muon"})
"""Config names whose classes are in ``deepspeed.runtime.zero.utils.ZERO_SUPPORTED_OPTIMIZERS``."""


def build_space(
    ds_config: Mapping[str, Any],
    *,
    zero_stages: Collection[int] = (1, 2, 3),
    fix: Mapping[str, Any] = MappingProxyType({}),
    no_tune: Collection[str] = (),
    nvme_path: str | None = None,
    params: int | None = None,
    micro_batch_cap: int = 2**16,
    pipeline: bool = False,
    device: str = "cuda",
    gradient_accumulation_steps: int | None = None,
    samples_per_rank: int | None = None,
    max_samples_per_rank: int | None = None,
) -> SearchSpace:
    """Build the search space of a study.

    Args:
        ds_config: The user's DeepSpeed config as read, lists included.
        zero_stages: Stages to search; a list of stages in the config narrows them further.
        fix: Knobs to hold, with their values (numbers, flags, or the same as text).
        no_tune: Knobs to leave as the config has them.
        nvme_path: Folder to offload to; None keeps NVMe out, unless the config itself offloads there.
        params: Parameters of the model: sizes at or above it behave alike and become one choice.
        micro_batch_cap: Largest micro-batch; the same for the whole study.
        pipeline: Whether the script trains a pipeline module: ZeRO 0 and 1 only.
        device: ``cuda`` or ``cpu``.
        gradient_accumulation_steps: What overlays say; None for the config's own number (1 where it has none). Give
            :func:`optuna_dsat.config.ds_config.batch_triangle`'s where the config implies it by its
            ``train_batch_size``.
        samples_per_rank: Samples of one global step on one rank that every configuration keeps: micro-batches are
            then its divisors, and accumulation makes up the rest.
        max_samples_per_rank: Most samples of one global step on one rank.

    Raises:
        ConfigError: If a knob is unknown or both fixed and left alone, a value has the wrong type, or no
            stage is left.
    """
    space = _Builder(
        config=ds_config,
        fix=fix,
        no_tune=frozenset(no_tune),
        nvme_path=nvme_path,
        params=params,
        samples_per_rank=samples_per_rank,
    ).build(
        zero_stages=zero_stages,
        cap=min(micro_batch_cap, max_samples_per_rank or micro_batch_cap),
        pipeline=pipeline,
        device=device,
    )
    return replace(
        space,
        gradient_accumulation_steps=gradient_accumulation_steps or space.gradient_accumulation_steps,
        samples_per_rank=samples_per_rank,
        max_samples_per_rank=max_samples_per_rank,
    )


@dataclass(frozen=True, kw_only=True)
class _Builder:
    """What the steps of :func:`build_space` share."""

    config: Mapping[str, Any]
    fix: Mapping[str, Any]
    no_tune: frozenset[str]
    nvme_path: str | None
    params: int | None
    samples_per_rank: int | None

    def build(self, *, zero_stages: Collection[int], cap: int, pipeline: bool, device: str) -> SearchSpace:
        self._check_names()
        plain = configs.effective({ZERO: {}, **self.config})
        zero = plain[ZERO]
        for knob in (one for one in KNOBS if one.name != NVME):
            read_present(knob, zero)  # refuses what is no value of the knob, whether it is searched or not
        stage = TunedKnob(knob=_BY_NAME[ZERO_STAGE], choices=self._stages(zero, zero_stages, pipeline=pipeline))
        offloads = self._offload_knobs(zero)
        others = [
            self._knob(knob, zero)
            for knob in KNOBS
            if knob.kind in ("flag", "size") and knob.name != NVME and (not knob.inert or self._named(knob))
        ]
        knobs = [stage, *offloads, *others]
        knobs.sort(key=lambda tuned: KNOBS.index(tuned.knob))
        accumulation = plain.get(configs.GRADIENT_ACCUMULATION)
        low, high = self._micro_batches(plain, cap)
        values = self._micro_batch_values(low, high)
        return SearchSpace(
            knobs=tuple(knobs),
            micro_batches=(low, high) if values is None else (values[0], values[-1]),
            micro_batch_values=values,
            site=_site(plain, pipeline=pipeline, nvme_only=any(t.name == NVME and all(t.choices) for t in offloads)),
            device=device,
            params=self.params,
            nvme_path=self.nvme_path,
            gradient_accumulation_steps=1 if accumulation in (None, configs.AUTO) else int(accumulation),
            user_zero=zero,
            legacy_keys=self._legacy_keys(),
            allow_untested_optimizer=_needs_permission(plain),
        )

    def _check_names(self) -> None:
        for name in [*self.fix, *self.no_tune]:
            if name != MICRO_BATCH and (name not in _BY_NAME or name == NVME):
                raise ConfigError(f"{name} is not a knob. The knobs are {known_names()}.")
        both = sorted(self.no_tune & self.fix.keys())
        if both:
            raise ConfigError(f"{both[0]} is given to both --fix and --no-tune; use one of them.")
        zero = self.config.get(ZERO)
        sections = {"stage", *(knob.path[1] for knob in KNOBS)} | _LEGACY.keys()
        for key, value in zero.items() if isinstance(zero, Mapping) else ():
            if isinstance(value, list) and key not in sections:
                raise ConfigError(f"{ZERO}.{key} is a list, but not a knob. The knobs are {known_names()}.")

    def _named(self, knob: Knob) -> bool:
        """Whether the user asks for this knob by name: a list in the config, or ``fix``."""
        return knob.name in self.fix or self._listed(knob) is not None

    def _listed(self, knob: Knob) -> tuple[Any, ...] | None:
        """Return the values the user lists for a knob, None where there is no list."""
        zero = configs.zero_section(self.config)
        value = zero.get(knob.path[1])
        if knob.kind == "device" and isinstance(value, Mapping):
            value = value.get("device")
        if value == configs.ALL:
            return knob.choices
        if not isinstance(value, list):
            return None
        return _unique(normalise(knob.name, knob.kind, one) for one in value)

    def _stages(self, zero: Mapping[str, Any], asked: Collection[int], *, pipeline: bool) -> tuple[int, ...]:
        knob = _BY_NAME[ZERO_STAGE]
        stages = _unique(normalise("--zero-stages", "stage", stage) for stage in asked)
        narrowed = self._listed(knob)
        reason = f"--zero-stages asks for {list(stages)}"
        if ZERO_STAGE in self.fix:
            narrowed = (normalise(ZERO_STAGE, "stage", self.fix[ZERO_STAGE]),)
        elif ZERO_STAGE in self.no_tune:
            narrowed = (read_present(knob, zero),)
        if narrowed is not None:
            reason += f", the config, --fix or --no-tune for {list(narrowed)}"
            stages = tuple(stage for stage in stages if stage in narrowed)
        if pipeline:
            reason += ", and pipeline parallelism runs with ZeRO 0 and 1 only"
            stages = tuple(stage for stage in stages if stage <= 1)
        if _other_accumulation(self.config):
            reason += ", and ZeRO 0 cannot accumulate gradients in another type than the model's (data_types)"
            stages = tuple(stage for stage in stages if stage > 0)
        if not stages:
            raise ConfigError(f"No ZeRO stage is left to search: {reason}. Widen one of them.")
        return tuple(sorted(stages))

    def _knob(self, knob: Knob, zero: Mapping[str, Any]) -> TunedKnob:
        present = read_present(knob, zero)
        if knob.name in self.fix:
            value = normalise(knob.name, knob.kind, self.fix[knob.name])
            return TunedKnob(knob=knob, choices=(value,), role=Role.FIXED)
        if knob.name in self.no_tune:
            return TunedKnob(knob=knob, choices=(present,), role=Role.KEPT)
        listed = self._listed(knob)
        choices: Iterable[Any] = (*knob.choices, present) if listed is None else listed
        if knob.kind == "size" and listed is None:
            choices = (capped(knob.name, value, self.params) for value in choices)
        elif knob.kind == "size":
            choices = _distinct(knob.name, choices, self.params)
        return TunedKnob(knob=knob, choices=tuple(sorted(_unique(choices))))

    def _offload_knobs(self, zero: Mapping[str, Any]) -> list[TunedKnob]:
        result = [self._offload_knob(_BY_NAME[OFFLOAD_PARAM], zero)]
        allowed = self._offload_knob(_BY_NAME[OFFLOAD_OPTIMIZER], zero)
        if allowed.role is Role.KEPT:
            return [*result, allowed]
        values = _unique("cpu" if value == "nvme" else value for value in allowed.choices)
        result.append(TunedKnob(knob=allowed.knob, choices=values, role=allowed.role))
        if "nvme" in allowed.choices:
            to_nvme = (False, True) if "cpu" in allowed.choices else (True,)
            result.append(TunedKnob(knob=_BY_NAME[NVME], choices=to_nvme, role=allowed.role))
        return result

    def _offload_knob(self, knob: Knob, zero: Mapping[str, Any]) -> TunedKnob:
        own = zero.get(knob.name)
        own_path = own.get("nvme_path") if isinstance(own, Mapping) else None
        present = device_of(zero, knob.name)
        if knob.name in self.no_tune:
            return TunedKnob(knob=knob, choices=(present,), role=Role.KEPT)
        listed = self._listed(knob)
        if knob.name in self.fix:
            tuned = TunedKnob(
                knob=knob, choices=(normalise(knob.name, "device", self.fix[knob.name]),), role=Role.FIXED
            )
        elif listed is not None and not self._says_all(knob):
            tuned = TunedKnob(knob=knob, choices=listed)
        else:
            more = ("nvme",) if self.nvme_path else ()
            tuned = TunedKnob(knob=knob, choices=_unique((*knob.choices, *more, present)))
        if "nvme" in tuned.choices and not (self.nvme_path or own_path):
            raise ConfigError(f"{knob.name} may be nvme, but no folder is known: give --nvme-path.")
        return tuned

    def _says_all(self, knob: Knob) -> bool:
        value = configs.zero_section(self.config).get(knob.path[1])
        return configs.ALL in (value, value.get("device") if isinstance(value, Mapping) else None)

    def _micro_batches(self, plain: Mapping[str, Any], cap: int) -> tuple[int, int]:
        listed = self.config.get(MICRO_BATCH)
        present = plain.get(MICRO_BATCH)
        if MICRO_BATCH in self.fix:
            held = normalise(MICRO_BATCH, "count", self.fix[MICRO_BATCH])
            return held, held
        if MICRO_BATCH in self.no_tune:
            held = 1 if present in (None, configs.AUTO) else normalise(MICRO_BATCH, "count", present)
            return held, held
        section = configs.parse_autotuning(self.config)
        low = section.min_train_micro_batch_size_per_gpu or 1
        high = section.max_train_micro_batch_size_per_gpu or max(low, cap)
        if isinstance(listed, list) and listed:
            values = [normalise(MICRO_BATCH, "count", value) for value in listed]
            bounded = section.max_train_micro_batch_size_per_gpu is not None
            low, high = max(low, min(values)), min(high, max(values)) if bounded else max(values)
        if low > high:
            raise ConfigError(
                f"{MICRO_BATCH} would have to be at least {low} and at most {high}: the list in the config "
                "and the bounds of its autotuning section contradict each other."
            )
        return low, max(low, min(high, cap))

    def _micro_batch_values(self, low: int, high: int) -> tuple[int, ...] | None:
        """Return the only micro-batches allowed: those listed, and those that divide the held global batch."""
        listed = self.config.get(MICRO_BATCH)
        held = MICRO_BATCH in self.fix or MICRO_BATCH in self.no_tune
        allowed: Iterable[int] | None = None
        if isinstance(listed, list) and not held:
            allowed = [normalise(MICRO_BATCH, "count", value) for value in listed]
        if self.samples_per_rank is not None:
            of_batch = range(1, self.samples_per_rank + 1) if allowed is None else allowed
            allowed = [value for value in of_batch if self.samples_per_rank % value == 0]
        if allowed is None:
            return None
        values = tuple(sorted({value for value in allowed if low <= value <= high}))
        if not values and listed and not self.samples_per_rank:
            values = (min(normalise(MICRO_BATCH, "count", value) for value in listed),)
        if not values:
            raise ConfigError(
                f"No {MICRO_BATCH} is left to search: --train-batch-size gives each rank {self.samples_per_rank} "
                f"samples, and none {'of the list in the config' if listed else 'that is allowed'} divides them."
            )
        return values

    def _legacy_keys(self) -> tuple[str, ...]:
        zero = self.config.get(ZERO)
        present = zero.keys() if isinstance(zero, Mapping) else ()
        legacy = [key for key, name in _LEGACY.items() if key in present and name not in self.no_tune]
        if "cpu_offload_use_pin_memory" in present and not self.no_tune & {OFFLOAD_OPTIMIZER, OFFLOAD_PARAM}:
            legacy.append("cpu_offload_use_pin_memory")
        return tuple(legacy)


_DTYPES = MappingProxyType({"float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float32": "fp32", "float": "fp32"})


def _types(config: Mapping[str, Any]) -> tuple[str, str]:
    """Return the types of model and accumulated gradients: ``fp16``, ``bf16`` or ``fp32``."""
    enabled = [key for key in ("fp16", "bf16") if (config.get(key) or {}).get("enabled") is True]
    model = enabled[0] if enabled else "fp32"
    given = (config.get("data_types") or {}).get("grad_accum_dtype")
    return model, model if given in (None, configs.AUTO) else _DTYPES.get(given, given)


def _other_accumulation(config: Mapping[str, Any]) -> bool:
    """Whether ``engine._do_optimizer_sanity_check`` refuses the config without ZeRO."""
    model, accumulated = _types(config)
    return model != accumulated


def _site(plain: Mapping[str, Any], *, pipeline: bool, nvme_only: bool) -> Site:
    predivide = plain.get("gradient_predivide_factor", 1.0)
    return Site(
        pipeline=pipeline,
        bf16_optimizer=_types(plain) == ("bf16", "fp32"),
        prescaled=bool(plain.get("prescale_gradients", False)) or predivide not in (1, configs.AUTO),
        sequential=plain[ZERO].get("stage3_allgather_sequential") is True,
        nvme_only=nvme_only,
    )


def _needs_permission(plain: Mapping[str, Any]) -> bool:
    name = str((plain.get("optimizer") or {}).get("type") or "").lower()
    return name not in _TESTED_OPTIMIZERS and "zero_allow_untested_optimizer" not in plain


def _distinct(name: str, sizes: Iterable[int], params: int | None) -> Iterable[int]:
    """Return the sizes that behave differently: of those that no model's parameters fill, the smallest."""
    if params is None:
        return sizes
    limit = configs.size_limit(name, params)
    known = sorted(sizes)
    return [size for size in known if size < limit] + [size for size in known if size >= limit][:1]


def _unique(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(values))
