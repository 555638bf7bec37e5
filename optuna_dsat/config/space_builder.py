"""Build search spaces: the knobs to search, their choices and conditions.

A configuration is a dict of *params*, named after DeepSpeed's keys: ``zero_stage`` first, then the knobs that apply,
``train_micro_batch_size_per_gpu`` last. All except the micro-batch are categorical.

- A list in the user's config narrows a knob to these values.
- ``fix`` fixes a knob's value: it is not a parameter, but merged over the user's config where it applies.
- ``no_tune`` leaves a knob as in the user's config.
- ``zero_stage`` and the micro-batch remain parameters even if fixed: they then have a single value.
- The user's value is always among the choices, unless a list, ``fix`` or the requested stages exclude it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from optuna_dsat.config import ds_config as configs
from optuna_dsat.config.conditions import NVME, OFFLOAD_OPTIMIZER, OFFLOAD_PARAM, ZERO_STAGE, Knob, Site, needs_zero
from optuna_dsat.config.ds_config import MICRO_BATCH, MICRO_BATCH_CAP, ZERO
from optuna_dsat.config.knob_values import KNOB_OF, distinct_sizes, known_names, multiples, normalise, unique
from optuna_dsat.config.knobs import KNOBS, PARTITION_COPY, ZENFLOW
from optuna_dsat.config.search_space import Role, SearchSpace, TunedKnob, capped, device_of
from optuna_dsat.config.search_space import present as read_present
from optuna_dsat.config.structures import param_swap_settings
from optuna_dsat.errors import ConfigError

_SHARED_GROUPS = 10
"""Sub-groups of a rank's partition that allow shares of tenths on the device (``OFFLOAD_RATIO``)."""
_GROUP_UNIT = 1_000_000
_FEWER = 10
"""Ratio of a size to the only smaller choice where knobs that need a permission are searched."""
_LEGACY = configs.OLD_OFFLOADS | {old: name for old, name in configs.ZERO_ALIASES.items() if name in KNOB_OF}
"""Deprecated spelling of a knob, which DeepSpeed accepts -> the knob; overlays remove it if they set the knob."""


@dataclass(frozen=True, kw_only=True)
class SpaceRequest:
    """Inputs of a search space."""

    ds_config: Mapping[str, Any]
    """The user's DeepSpeed config as read, including lists."""
    zero_stages: Collection[int] = (1, 2, 3)
    """Stages to search; a list of stages in the config narrows them further."""
    fix: Mapping[str, Any] = field(default_factory=dict)
    """Knobs to fix, with their values (numbers, flags, or either as text)."""
    no_tune: Collection[str] = ()
    """Knobs to leave as in the config."""
    nvme_path: str | None = None
    """Folder for NVMe offload; None excludes NVMe unless the config itself offloads there."""
    params: int | None = None
    """Parameters of the model, None if unknown: sizes at or above it are equivalent and become a single choice."""
    micro_batch_cap: int = MICRO_BATCH_CAP
    """Largest micro-batch of the study."""
    pipeline: bool = False
    """Whether the script trains a pipeline module: ZeRO 0 and 1 only."""
    untested_optimizer: str = ""
    """Class of an optimizer for which only ZeRO 0 is searched; empty if there is none."""
    allow_untested_optimizer: bool = False
    """Whether configurations with ZeRO set ``zero_allow_untested_optimizer``."""
    device: str = "cuda"
    """``cuda`` or ``cpu``."""
    gradient_accumulation_steps: int | None = None
    """Accumulation steps set by overlays; None for the config's number, or 1. If the config implies the number by its
    ``train_batch_size``, pass the number from :func:`optuna_dsat.config.ds_config.batch_triangle`.
    """
    holds_accumulation: bool = False
    """True if the script accumulates by a number in its own code: every configuration then has the user's steps."""
    samples_per_rank: int | None = None
    """Samples per rank and global step that every configuration keeps: micro-batches are its divisors, and
    accumulation provides the rest. None if the global batch follows the micro-batch.
    """
    max_samples_per_rank: int | None = None
    """Largest number of samples per rank and global step, None if unbounded."""
    divisible_by: int = 1
    """Common divisor of all micro-batches, unless ``fix`` or ``no_tune`` determine the micro-batch."""
    least_micro_batch: int = 1
    """Smallest micro-batch accepted by the script, unless ``fix`` or ``no_tune`` determine the micro-batch."""
    nodes: int = 1
    """Nodes of a launch."""
    ranks_per_node: int = 1
    """Ranks of a launch on each node."""
    trainable: int | None = None
    """Trainable parameters of the model; None if all or unknown."""
    largest_layer: int | None = None
    """Parameters of the largest module that has parameters itself; None if unknown."""
    leaf_classes: Sequence[str] = ()
    """Classes of modules that ``leaf_module`` names."""
    worthwhile: Collection[str] = ()
    """Knobs that are useful for some models only (``Knob.on_demand``), and for this one."""
    permitted: Collection[str] = ()
    """Knobs that need a permission (``Knob.permission``) which is given, and that can be searched."""


def build_space(request: SpaceRequest) -> SearchSpace:
    """Build the search space of a study.

    Raises:
        ConfigError: If a knob is unknown or in both ``fix`` and ``no_tune``, a value has the wrong type, or no stage
            remains.
    """
    return _Builder(request).build()


class _Builder:
    """Builder of the space of a request."""

    def __init__(self, request: SpaceRequest) -> None:
        self._request = request
        self._no_tune = frozenset(request.no_tune)
        self._plain = configs.effective({ZERO: {}, **request.ds_config})
        self._zero = configs.knob_settings(self._plain, zero=self._plain[ZERO])
        """The user's section, lists resolved, and knobs of other sections."""
        steps = self._plain.get(configs.GRADIENT_ACCUMULATION)
        self._steps = request.gradient_accumulation_steps or (1 if steps in (None, configs.AUTO) else int(steps))
        self._zenflow = self._zero.get(ZENFLOW) is not None and ZENFLOW not in request.permitted
        """Whether every configuration has the user's ZenFlow, which replaces the accumulation of gradients."""
        self._held_steps = self._steps if request.holds_accumulation or self._zenflow else None
        """Accumulation steps of every configuration; None if each can have its own."""

    def build(self) -> SearchSpace:
        self._check_names()
        request = self._request
        for knob in (item for item in KNOBS if item.name != NVME and self._may_search(item)):
            read_present(knob, self._zero)  # rejects invalid values, also of knobs that are not searched
        stage = TunedKnob(knob=KNOB_OF[ZERO_STAGE], choices=self._stages())
        offloads = self._offload_knobs()
        others = [
            self._knob(knob)
            for knob in KNOBS
            if knob.kind not in ("stage", "device") and knob.name != NVME and self._is_searched(knob)
        ]
        knobs = sorted([stage, *offloads, *others], key=lambda tuned: KNOBS.index(tuned.knob))
        low, high = self._micro_batches()
        values = self._micro_batch_values(low, high)
        nvme_only = any(tuned.name == NVME and all(tuned.choices) for tuned in offloads)
        return SearchSpace(
            knobs=tuple(knobs),
            micro_batches=(low, high) if values is None else (values[0], values[-1]),
            micro_batch_values=values,
            site=self._site(nvme_only=nvme_only),
            device=request.device,
            params=request.params,
            nvme_path=request.nvme_path,
            swap_settings=self._swap_settings(),
            gradient_accumulation_steps=self._steps,
            holds_accumulation=self._held_steps is not None,
            samples_per_rank=request.samples_per_rank,
            max_samples_per_rank=request.max_samples_per_rank,
            user_zero=self._zero,
            legacy_keys=self._legacy_keys(),
            leaf_classes=tuple(request.leaf_classes),
            allow_untested_optimizer=request.allow_untested_optimizer,
        )

    def _check_names(self) -> None:
        both = sorted(self._no_tune & self._request.fix.keys())
        if both:
            raise ConfigError(f"{both[0]} is given to both --fix and --no-tune; use one of them.")
        zero = self._request.ds_config.get(ZERO)
        sections = {"stage", *(knob.path[1] for knob in KNOBS if knob.is_of_zero)} | _LEGACY.keys()
        for key, value in zero.items() if isinstance(zero, Mapping) else ():
            if isinstance(value, list) and key not in sections:
                wrong = f"{ZERO}.{key}"
                raise ConfigError(f"{wrong} is a list, but not a knob. The knobs are {known_names()}.", key=wrong)

    def _may_search(self, knob: Knob) -> bool:
        """Return whether a knob needs no permission, or has it."""
        return not knob.permission or knob.name in self._request.permitted

    def _is_searched(self, knob: Knob) -> bool:
        if not self._may_search(knob):
            if self._named(knob):
                raise ConfigError(f"{knob.name} is tuned or fixed {knob.where}, and that does not hold here.")
            return False
        if knob.permission and knob.name in self._no_tune:
            return False
        if knob.on_demand:
            return knob.name not in self._no_tune and (knob.name in self._request.worthwhile or self._named(knob))
        one_node = min(self._request.nodes, self._request.ranks_per_node) == 1
        useless = knob.inert or (knob.several_nodes and one_node) or (knob.several_ranks and self._world_size == 1)
        held = "overlap_comm" if configs.flatten(self._zero).get(f"{ZENFLOW}.offload") else ""  # DeepSpeed asserts it
        return not (useless or knob.name in (held, self._zenflow and "reduce_scatter")) or self._named(knob)

    @property
    def _world_size(self) -> int:
        """Ranks of a launch."""
        return self._request.nodes * self._request.ranks_per_node

    def _site(self, *, nvme_only: bool) -> Site:
        pipeline, one_rank = self._request.pipeline, self._world_size == 1
        site = site_of(self._plain, pipeline=pipeline, nvme_only=nvme_only, one_rank=one_rank, owned=self._owned)
        return replace(site, experts="Experts" in self._request.leaf_classes)  # the class in deepspeed.moe.experts

    def _swap_settings(self) -> dict[str, int]:
        """Return the settings of parameters on NVMe; empty before the model is known."""
        params, layer = self._request.params, self._request.largest_layer
        if params is None or layer is None:
            return {}
        return param_swap_settings(self._zero, params=params, largest_layer=layer, ranks=self._world_size)

    @property
    def _owned(self) -> int | None:
        """Trainable parameters of a rank's partition; None if unknown."""
        trainable = self._request.params if self._request.trainable is None else self._request.trainable
        return None if trainable is None else -(-trainable // self._world_size)

    def _named(self, knob: Knob) -> bool:
        """Return whether the user specifies this knob by a list in the config or by ``fix``."""
        return knob.name in self._request.fix or self._listed(knob) is not None

    def _listed(self, knob: Knob) -> tuple[Any, ...] | None:
        """Return the values listed by the user for a knob, None without a list."""
        value = knob.value_in(configs.zero_section(self._request.ds_config))
        if value == configs.ALL:
            return self._default_choices(knob)
        if not isinstance(value, list):
            return None
        return unique(normalise(knob.name, knob.kind, item, key=knob.key) for item in value)

    def _stages(self) -> tuple[int, ...]:
        knob = KNOB_OF[ZERO_STAGE]
        stages = unique(normalise("--zero-stages", "stage", stage) for stage in self._request.zero_stages)
        narrowed = self._listed(knob)
        reason = f"--zero-stages asks for {', '.join(map(str, stages))}"
        if self._request.untested_optimizer:
            reason = (
                f"DeepSpeed does not list {self._request.untested_optimizer} as tested with ZeRO, so that only ZeRO 0 "
                'is searched without "zero_allow_untested_optimizer": true in the config'
            )
        if ZERO_STAGE in self._request.fix:
            narrowed = (normalise(ZERO_STAGE, "stage", self._request.fix[ZERO_STAGE]),)
        elif ZERO_STAGE in self._no_tune:
            narrowed = (read_present(knob, self._zero),)
        if narrowed is not None:
            reason += f", the config, --fix or --no-tune for {', '.join(map(str, narrowed))}"
            stages = tuple(stage for stage in stages if stage in narrowed)
        if self._request.pipeline:
            reason += ", and pipeline parallelism runs with ZeRO 0 and 1 only"
            stages = tuple(stage for stage in stages if stage <= 1)
        if self._zenflow:
            reason += f", and ZenFlow runs with ZeRO 1 and 2 only (zero_optimization.{ZENFLOW})"
            stages = tuple(stage for stage in stages if stage in (1, 2, self._zero.get("stage")))
        model, accumulated = _types(self._request.ds_config)
        low = needs_zero(self._request.ds_config, searched=self._request.permitted)
        if model != accumulated or low:  # refused by ``engine._do_optimizer_sanity_check``
            reason += ", and ZeRO 0 cannot accumulate gradients in another type than the model's (data_types, bf16)"
            stages = tuple(stage for stage in stages if stage > 0)
        if not stages:
            raise ConfigError(f"No ZeRO stage is left to search: {reason}. Widen one of them.")
        return tuple(sorted(stages))

    def _knob(self, knob: Knob) -> TunedKnob:
        present = read_present(knob, self._zero)
        if knob.name in self._request.fix:
            value = normalise(knob.name, knob.kind, self._request.fix[knob.name])
            self._check_ranks(knob, (value,))
            return TunedKnob(knob=knob, choices=(value,), role=Role.FIXED)
        if knob.name in self._no_tune:
            return TunedKnob(knob=knob, choices=(present,), role=Role.KEPT)
        listed = self._listed(knob)
        choices: Iterable[Any] = (*self._default_choices(knob), present) if listed is None else listed
        if knob.kind == "modules" and listed is None:
            choices = (True,)  # ranks may wait for each other for ever otherwise
        if knob.kind == "size" and listed is None:
            choices = sizes = [capped(knob.name, value, self._request.params) for value in choices]
            if self._request.permitted:  # each of these knobs multiplies the combinations
                choices = (*sorted(size for size in sizes if _FEWER * size <= sizes[-1])[-1:], sizes[-1])
        elif knob.kind == "size":
            choices = distinct_sizes(knob.name, choices, self._request.params)
        choices = tuple(sorted(unique(choices)))
        self._check_ranks(knob, choices)
        return TunedKnob(knob=knob, choices=choices)

    def _check_ranks(self, knob: Knob, values: Iterable[Any]) -> None:
        world = self._world_size
        for value in values if knob.kind == "ranks" else ():
            if world % min(value, world):
                raise ConfigError(f"{knob.name} is {value}, which does not divide the {world} ranks of a launch.")

    def _default_choices(self, knob: Knob) -> tuple[Any, ...]:
        if knob.name == PARTITION_COPY:
            return (*knob.choices, self._request.ranks_per_node)
        if knob.name == "sub_group_size" and self._request.device == "cuda" and self._site(nvme_only=False).cpu_adam:
            # Sub-groups of which some can stay on the device, where the default is a single one.
            shared = (self._owned or 0) // _SHARED_GROUPS // _GROUP_UNIT * _GROUP_UNIT
            if shared >= _SHARED_GROUPS * _GROUP_UNIT:
                return (min(shared, knob.choices[0]), *knob.choices[1:])
        return knob.choices

    def _offload_knobs(self) -> list[TunedKnob]:
        result = [self._offload_knob(KNOB_OF[OFFLOAD_PARAM])]
        allowed = self._offload_knob(KNOB_OF[OFFLOAD_OPTIMIZER])
        if allowed.role is Role.KEPT:
            return [*result, allowed]
        values = unique("cpu" if value == "nvme" else value for value in allowed.choices)
        result.append(TunedKnob(knob=allowed.knob, choices=values, role=allowed.role))
        if "nvme" in allowed.choices:
            to_nvme = (False, True) if "cpu" in allowed.choices else (True,)
            result.append(TunedKnob(knob=KNOB_OF[NVME], choices=to_nvme, role=allowed.role))
        return result

    def _offload_knob(self, knob: Knob) -> TunedKnob:
        section = self._zero.get(knob.name)
        own_path = section.get("nvme_path") if isinstance(section, Mapping) else None
        present = device_of(self._zero, knob.name)
        if knob.name in self._no_tune:
            return TunedKnob(knob=knob, choices=(present,), role=Role.KEPT)
        listed = self._listed(knob)
        if knob.name in self._request.fix:
            tuned = TunedKnob(
                knob=knob, choices=(normalise(knob.name, "device", self._request.fix[knob.name]),), role=Role.FIXED
            )
        elif listed is not None and not self._says_all(knob):
            tuned = TunedKnob(knob=knob, choices=listed)
        else:
            more = ("nvme",) if self._request.nvme_path and self._swaps(knob) else ()
            to_host = knob.choices if self._request.device != "cpu" or self._says_all(knob) else ("none",)
            tuned = TunedKnob(knob=knob, choices=unique((*to_host, *more, present)))
        if self._zenflow and knob.name == OFFLOAD_OPTIMIZER:
            tuned = replace(tuned, choices=tuple(value for value in tuned.choices if value != "none") or tuned.choices)
        if "nvme" in tuned.choices and not (self._request.nvme_path or own_path):
            raise ConfigError(f"{knob.name} may be nvme, but no folder is known: give --nvme-path.")
        if "nvme" in tuned.choices and present != "nvme" and not self._swaps(knob):
            raise ConfigError(f"{knob.name} may be nvme, which ranks on the CPU can do in bf16 only: set bf16.enabled.")
        return tuned

    def _swaps(self, knob: Knob) -> bool:
        """Return whether ranks can have these states on NVMe.

        On devices without fp16, such as CPUs, DeepSpeed reads parameters from NVMe as bf16, whatever their type
        (``partition_parameters.InsertPostInitMethodToModuleSubClasses._set_dtype``).
        """
        exact = self._request.device != "cpu" or configs.precision_of(self._plain) == "bf16"
        return knob.name != OFFLOAD_PARAM or exact

    def _says_all(self, knob: Knob) -> bool:
        value = configs.zero_section(self._request.ds_config).get(knob.path[1])
        return configs.ALL in (value, value.get("device") if isinstance(value, Mapping) else None)

    def _micro_batches(self) -> tuple[int, int]:
        request = self._request
        cap = request.micro_batch_cap
        if request.max_samples_per_rank is not None:
            cap = max(1, min(cap, request.max_samples_per_rank // (self._held_steps or 1)))
        listed = self._request.ds_config.get(MICRO_BATCH)
        present = self._plain.get(MICRO_BATCH)
        if MICRO_BATCH in self._request.fix:
            held = normalise(MICRO_BATCH, "count", self._request.fix[MICRO_BATCH])
            return held, held
        if MICRO_BATCH in self._no_tune:
            held = 1 if present in (None, configs.AUTO) else normalise(MICRO_BATCH, "count", present)
            return held, held
        section = configs.parse_autotuning(self._request.ds_config)
        low = max(section.min_train_micro_batch_size_per_gpu or 1, self._request.least_micro_batch)
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
        """Return the allowed micro-batches: listed values, or divisors of a kept global batch; None for all."""
        listed = self._request.ds_config.get(MICRO_BATCH)
        held = MICRO_BATCH in self._request.fix or MICRO_BATCH in self._no_tune
        allowed: Iterable[int] | None = None
        if isinstance(listed, list) and not held:
            allowed = [normalise(MICRO_BATCH, "count", value) for value in listed]
        held_samples, unit = self._request.samples_per_rank, 1 if held else self._request.divisible_by
        if held_samples is not None:
            of_batch = range(max(1, low), min(high, held_samples) + 1) if allowed is None else allowed
            allowed = [value for value in of_batch if held_samples % value == 0]
            if self._held_steps is not None:
                allowed = [value for value in allowed if value * self._held_steps == held_samples]
        if unit > 1:
            allowed = [value for value in multiples(unit, high) if allowed is None or value in allowed]
        if allowed is None:
            return None
        values = tuple(sorted({value for value in allowed if low <= value <= high}))
        if not values and listed and not held_samples and unit == 1:
            values = (min(normalise(MICRO_BATCH, "count", value) for value in listed),)
        if not values and unit > 1:
            raise ConfigError(
                f"No {MICRO_BATCH} is left to search: none from {low} to {high} that list, global batch and bounds "
                f"allow is a multiple of {unit} (--divisible-by)."
            )
        if not values:
            which = "of the list in the config" if isinstance(listed, list) and not held else "that is allowed"
            into = f" into the {self._held_steps} accumulation steps of the script" if self._held_steps else ""
            raise ConfigError(
                f"No {MICRO_BATCH} is left to search: --train-batch-size or --batch keep gives each rank "
                f"{held_samples} samples, and none {which} divides them{into}."
            )
        return values

    def _legacy_keys(self) -> tuple[str, ...]:
        zero = self._request.ds_config.get(ZERO)
        present = zero.keys() if isinstance(zero, Mapping) else ()
        legacy = [key for key, name in _LEGACY.items() if key in present and name not in self._no_tune]
        if configs.OLD_PINNING in present and not self._no_tune & {OFFLOAD_OPTIMIZER, OFFLOAD_PARAM}:
            legacy.append(configs.OLD_PINNING)
        return tuple(legacy)


_DTYPES = MappingProxyType({"float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float32": "fp32", "float": "fp32"})


def _types(config: Mapping[str, Any]) -> tuple[str, str]:
    """Return the data types of model and accumulated gradients: ``fp16``, ``bf16`` or ``fp32``."""
    model = configs.precision_of(config)
    given = (config.get("data_types") or {}).get("grad_accum_dtype")
    return model, model if given in (None, configs.AUTO) else _DTYPES.get(given, given)


def site_of(
    plain: Mapping[str, Any], *, pipeline: bool, nvme_only: bool, one_rank: bool, owned: int | None = None
) -> Site:
    """Return the properties of a config, with its ZeRO section, on which the conditions of knobs depend."""
    optimizer = plain.get("optimizer") or {}
    settings = optimizer.get("params") or {}
    predivide = plain.get("gradient_predivide_factor", 1.0)
    return Site(
        pipeline=pipeline,
        bf16_optimizer=_types(plain) == ("bf16", "fp32"),
        prescaled=bool(plain.get("prescale_gradients", False)) or predivide not in (1, configs.AUTO),
        sequential=plain[ZERO].get("stage3_allgather_sequential") is True,
        nvme_only=nvme_only,
        one_rank=one_rank,
        cpu_adam=(
            str(optimizer.get("type", "")).lower() in ("adam", "adamw")
            and not settings.get("torch_adam")
            and settings.get("adam_w_mode", True) is not False
        ),
        owned=owned,
        bf16=configs.precision_of(plain) == "bf16",
    )
