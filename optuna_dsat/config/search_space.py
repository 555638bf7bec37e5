"""Search spaces: suggest params, and convert between params and DeepSpeed configs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from optuna_dsat.config import ds_config as configs
from optuna_dsat.config.conditions import (
    BF16,
    BF16_MASTER,
    BF16_STATES,
    NVME,
    OFFLOAD_OPTIMIZER,
    OFFLOAD_PARAM,
    WITH_PARAMS_ON_NVME,
    ZERO_STAGE,
    Knob,
    Site,
)
from optuna_dsat.config.ds_config import MICRO_BATCH, ZERO
from optuna_dsat.config.knob_values import normalise
from optuna_dsat.config.knobs import KNOBS, MODEL, PIN_MEMORY, ZENFLOW, ZENFLOW_SECTION
from optuna_dsat.errors import ConfigError

if TYPE_CHECKING:
    import optuna  # keeps imports fast for a node's agent and the runtime in a rank, which only name operators

_STAGE3_OFFLOAD_KEYS = ("ratio", "super_offload", "cpuadam_cores_perc")
"""Keys of ``offload_optimizer`` that DeepSpeed accepts with ZeRO 3 only."""


class Role(StrEnum):
    """Role of a knob in a search."""

    PARAMETER = "searched"
    FIXED = "fixed"
    """Fixed by ``fix``: merged over the user's config where it applies."""
    KEPT = "kept"
    """Left as in the user's config (``no_tune``)."""


@dataclass(frozen=True, kw_only=True)
class TunedKnob:
    """A knob of a space with the values that it may take."""

    knob: Knob
    choices: tuple[Any, ...]
    role: Role = Role.PARAMETER

    @property
    def name(self) -> str:
        """Name of the knob and of its parameter."""
        return self.knob.name


@dataclass(frozen=True, kw_only=True)
class KnobRow:
    """Row of :meth:`SearchSpace.describe`."""

    knob: str
    role: str
    """``searched``, ``fixed``, ``kept`` or ``without effect``."""
    where: str
    """Description of the condition."""
    choices: tuple[Any, ...]
    is_range: bool = False
    """Whether ``choices`` are the ends of a range."""


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """A search space; build it with :func:`build_space`."""

    knobs: tuple[TunedKnob, ...]
    """In the order of suggestion, without the micro-batch."""
    micro_batches: tuple[int, int]
    """Smallest and largest micro-batch."""
    micro_batch_values: tuple[int, ...] | None = None
    """Allowed micro-batches, ascending; None for all between the smallest and the largest."""
    site: Site
    device: str
    """``cuda`` or ``cpu``."""
    params: int | None = None
    """Parameters of the model, which limit sizes; None if unknown."""
    nvme_path: str | None = None
    swap_settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of an offload of the parameters to NVMe."""
    gradient_accumulation_steps: int = 1
    holds_accumulation: bool = False
    """True if the script accumulates by a number in its own code: every configuration then has these steps."""
    samples_per_rank: int | None = None
    """Samples per rank and global step, kept by the accumulation; None if the global batch follows the micro-batch."""
    max_samples_per_rank: int | None = None
    """Largest number of samples per rank and global step: larger micro-batches accumulate less; None if unbounded."""
    asked_samples_per_rank: int | None = None
    """Samples per rank and global step that the question asks for (``at_batch``); None in the search itself."""
    user_zero: Mapping[str, Any] = field(default_factory=dict)
    """The user's ``zero_optimization`` section in its current form, lists resolved, as ``knob_settings`` has it."""
    legacy_keys: tuple[str, ...] = ()
    """Deprecated spellings of knobs in the user's section, which overlays remove."""
    leaf_classes: tuple[str, ...] = ()
    """Classes of modules that ``leaf_module`` names."""
    allow_untested_optimizer: bool = False
    """Whether overlays with ZeRO set ``zero_allow_untested_optimizer``."""

    @property
    def stages(self) -> tuple[int, ...]:
        """ZeRO stages searched."""
        return self.knobs[0].choices

    def suggest(self, trial: optuna.trial.BaseTrial) -> dict[str, Any]:
        """Suggest a configuration, only the knobs that apply, the micro-batch last; return the params."""
        params: dict[str, Any] = {}

        def draw(tuned: TunedKnob) -> Any:
            params[tuned.name] = trial.suggest_categorical(tuned.name, tuned.choices)
            return params[tuned.name]

        for _ in self._settings(draw):
            pass
        low, high = self.micro_batches
        if self.micro_batch_values is None:
            params[MICRO_BATCH] = trial.suggest_int(MICRO_BATCH, low, high, log=True)
        else:
            params[MICRO_BATCH] = trial.suggest_categorical(MICRO_BATCH, self.micro_batch_values)
        return params

    def accumulation(self, micro_batch: int) -> int:
        """Return the gradient accumulation steps of a micro-batch."""
        if self.asked_samples_per_rank is not None:
            return self.asked_samples_per_rank // micro_batch
        return self.searched_accumulation(micro_batch)

    def searched_accumulation(self, micro_batch: int) -> int:
        """Return the gradient accumulation steps of trials that do not have them as a parameter.

        A micro-batch of another study may be larger than the kept samples; then it is 1.
        """
        if self.samples_per_rank is not None:
            return max(1, self.samples_per_rank // micro_batch)
        if self.max_samples_per_rank is not None and not self.holds_accumulation:
            return max(1, min(self.gradient_accumulation_steps, self.max_samples_per_rank // micro_batch))
        return self.gradient_accumulation_steps

    def at_batch(self, samples_per_rank: int) -> SearchSpace | None:
        """Return this space with the accumulation steps that keep a global batch.

        Its trials have the parameters of this space, and ``gradient_accumulation_steps`` where it differs. None if
        nothing can have this batch, or if every configuration of this space has it already.
        """
        values = tuple(size for size in self._sizes if samples_per_rank % size == 0)
        if self.holds_accumulation:
            values = tuple(size for size in values if size * self.gradient_accumulation_steps == samples_per_rank)
        if not values or self._batches == {samples_per_rank}:
            return None
        knobs = (replace(tuned, choices=(False,)) if tuned.name == ZENFLOW else tuned for tuned in self.knobs)
        return replace(
            self,
            knobs=tuple(knobs),  # ZenFlow replaces the accumulation
            asked_samples_per_rank=samples_per_rank,
            micro_batches=(values[0], values[-1]),
            micro_batch_values=values,
        )

    def has_batch_above(self, samples_per_rank: int | None) -> bool:
        """Whether a configuration has more samples per rank and global step."""
        return max(self._batches) > (samples_per_rank or 0)

    @property
    def _sizes(self) -> Sequence[int]:
        low, high = self.micro_batches
        return self.micro_batch_values or range(low, high + 1)

    @property
    def _batches(self) -> set[int]:
        """Samples per rank and global step of the search's configurations."""
        return {self.searched_accumulation(size) * size for size in self._sizes}

    def _settings(self, pick: Callable[[TunedKnob], Any]) -> Iterator[tuple[TunedKnob, Any]]:
        """Yield the knobs that apply with their values; ``pick`` chooses the values of searched knobs."""
        settings: dict[str, Any] = {}
        for tuned in self.knobs:
            if tuned.knob.applies(settings, self.site):
                value = pick(tuned) if tuned.role is Role.PARAMETER else tuned.choices[0]
                settings[tuned.name] = value
                yield tuned, value

    def overlay(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the overlay over the user's config that runs ``params``; a value of None removes a key.

        Sub-keys of the user's offload sections (``pin_memory``, ``buffer_count``...) are kept. Knobs that do not
        apply are removed, as they would be inherited otherwise: an ``offload_param`` is meaningless below ZeRO 3, and
        an ``offload_optimizer`` without ZeRO makes DeepSpeed build a CPU optimizer for parameters on the GPU.
        Parameters on NVMe get settings with which they run (``WITH_PARAMS_ON_NVME``), unless the user's config offloads
        them there.
        ``reduce_scatter`` is disabled at stages 2 and 3 if gradients are prescaled, because DeepSpeed refuses its
        default there. ``zero_allow_untested_optimizer`` is set only after a comparison of losses: ZeRO flattens and
        splits parameters, and an optimizer that reads their shapes then trains differently
        (``Profiled.zero_is_untested``).

        Raises:
            ConfigError: If a param that applies is missing.
        """

        def given(tuned: TunedKnob) -> Any:
            if tuned.name not in params:
                raise ConfigError(f"{tuned.name} is missing in the params {dict(params)}, but it applies there.")
            return params[tuned.name]

        settings = dict(self._settings(given))
        values = {tuned.name: value for tuned, value in settings.items()}
        zero: dict[str, Any] = dict.fromkeys(self.legacy_keys)
        others: dict[str, dict[str, Any]] = {}
        for tuned in self.knobs:
            section, key = tuned.knob.path[:2]
            if not tuned.knob.is_of_zero:
                value = values.get(tuned.name)
                value = value if section == MODEL else value or None  # 0 switches the script's own checkpointing off
                if value or key in self.user_zero:
                    others.setdefault(section, {})[key] = value
            elif tuned.knob.is_in_offload:
                if tuned.name in values and tuned.role is not Role.KEPT:
                    _write_in_offloads(tuned, values, zero)
            elif tuned.name not in values:
                zero.setdefault(key, None)
            elif tuned.role is not Role.KEPT and tuned.name != NVME:
                zero[key] = self._written(tuned, values)
        if values.get(OFFLOAD_PARAM) == "nvme":
            on_nvme = device_of(self.user_zero, OFFLOAD_PARAM) == "nvme"
            zero |= {key: self.user_zero.get(key) for key in WITH_PARAMS_ON_NVME} if on_nvme else WITH_PARAMS_ON_NVME
        if self.site.prescaled and values[ZERO_STAGE] >= 2:
            zero["reduce_scatter"] = False
        size = params[MICRO_BATCH]
        steps = params.get(configs.GRADIENT_ACCUMULATION, self.accumulation(size))
        result: dict[str, Any] = {ZERO: zero, **others, **configs.batch_overlay(size, steps)}
        if values.get(BF16_STATES):
            others[BF16][BF16_MASTER] = True
        if values.get(BF16):
            result["fp16"] = None
        if self.allow_untested_optimizer and values[ZERO_STAGE]:
            result["zero_allow_untested_optimizer"] = True
        return result

    def _written(self, tuned: TunedKnob, values: Mapping[str, Any]) -> Any:
        """Return a knob's value in the form of a DeepSpeed config."""
        value = values[tuned.name]
        if tuned.knob.kind == "modules":
            return {"classes": list(self.leaf_classes)} if value else None
        if tuned.knob.kind == "section":
            present = self.user_zero.get(tuned.name)
            return (present if isinstance(present, Mapping) else ZENFLOW_SECTION) if value else None
        if tuned.knob.kind != "device":
            return value
        if value == "none":
            return None
        device = "nvme" if tuned.name == OFFLOAD_OPTIMIZER and values.get(NVME) else value
        present = self.user_zero.get(tuned.name)
        present = present if isinstance(present, Mapping) else {}
        section: dict[str, Any] = {
            "device": device,
            "nvme_path": present.get("nvme_path") or self.nvme_path if device == "nvme" else None,
        }
        if "pin_memory" not in present and self.device == "cuda":
            section["pin_memory"] = True
        if tuned.name == OFFLOAD_PARAM and device == "nvme":
            section |= self.swap_settings
        if tuned.name == OFFLOAD_OPTIMIZER and values[ZERO_STAGE] < 3:
            section |= {key: None for key in _STAGE3_OFFLOAD_KEYS if key in present}
        return section

    def params_of(self, ds_config: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return a DeepSpeed config as params of this space, None if it is outside.

        The config must give its micro-batch as a number. Missing values are DeepSpeed's defaults; sizes beyond the
        number of parameters are mapped to the largest choice.
        """
        zero = configs.knob_settings(ds_config, zero=configs.effective({ZERO: {}, **ds_config})[ZERO])
        try:
            result = list(self._settings(lambda tuned: self._read(tuned, zero)))
            micro_batch = normalise(MICRO_BATCH, "count", ds_config.get(MICRO_BATCH))
        except ConfigError:
            return None
        low, high = self.micro_batches
        inside = all(
            (value if tuned.role is Role.PARAMETER else self._read(tuned, zero)) in tuned.choices
            for tuned, value in result
        )
        if not inside or not low <= micro_batch <= high:
            return None
        if self.micro_batch_values is not None and micro_batch not in self.micro_batch_values:
            return None
        given = ds_config.get(configs.GRADIENT_ACCUMULATION, self.accumulation(micro_batch))
        if given not in (configs.AUTO, self.accumulation(micro_batch)):
            return None
        params = {tuned.name: value for tuned, value in result if tuned.role is Role.PARAMETER}
        return {**params, MICRO_BATCH: micro_batch}

    def _read(self, tuned: TunedKnob, zero: Mapping[str, Any]) -> Any:
        if tuned.name == NVME:
            return device_of(zero, OFFLOAD_OPTIMIZER) == "nvme"
        value = present(tuned.knob, zero)
        if tuned.name == OFFLOAD_OPTIMIZER and value == "nvme" and tuned.role is not Role.KEPT:
            return "cpu"
        if tuned.knob.kind != "size" or tuned.role is not Role.PARAMETER or self.params is None:
            return value
        limit = configs.size_limit(tuned.name, self.params)
        return tuned.choices[-1] if value >= limit and tuned.choices[-1] >= limit else value

    def usual(self, name: str, params: Mapping[str, Any]) -> Any:
        """Return the value of a knob in the user's config, else DeepSpeed's default at the stage of ``params``."""
        tuned = next(tuned for tuned in self.knobs if tuned.name == name)
        return self._read(tuned, {**self.user_zero, "stage": params[ZERO_STAGE]})

    def completed(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Return the lineage with the wanted values where they apply and exist, else the user's or default values."""
        params: dict[str, Any] = {}

        def pick(tuned: TunedKnob) -> Any:
            value = wanted.get(tuned.name)
            if value not in tuned.choices:
                value = self._read(tuned, {**self.user_zero, "stage": params.get(ZERO_STAGE, wanted.get(ZERO_STAGE))})
            params[tuned.name] = value if value in tuned.choices else tuned.choices[0]
            return params[tuned.name]

        for _ in self._settings(pick):
            pass
        return params

    def describe(self) -> list[KnobRow]:
        """Return a row per knob: its role, choices, where it applies and where DeepSpeed uses it.

        Searched knobs that apply to no configuration of this space have no row, such as ZeRO 3's knobs without ZeRO 3.
        """
        applying = self._applying()
        ours = {tuned.name: tuned for tuned in self.knobs}
        rows = []
        for knob in KNOBS:
            tuned = ours.get(knob.name)
            if tuned is None and not knob.inert:
                continue
            if tuned is not None and tuned.role is Role.PARAMETER and tuned.name not in applying:
                continue
            rows.append(
                KnobRow(
                    knob=knob.name,
                    role="without effect" if tuned is None else tuned.role.value,
                    where=knob.where,
                    choices=() if tuned is None else tuned.choices,
                )
            )
        micro = KnobRow(
            knob=MICRO_BATCH, role=Role.PARAMETER.value, where="always",
            choices=self.micro_batch_values or self.micro_batches,
            is_range=not self.micro_batch_values,
        )  # fmt: skip
        return [*rows, micro]

    def _applying(self) -> frozenset[str]:
        """Return the knobs that apply to some configuration; conditions do not depend on numbers."""
        knobs = tuple(
            replace(tuned, choices=tuned.choices[:1]) if tuned.knob.kind in ("size", "ranks") else tuned
            for tuned in self.knobs
        )
        return frozenset(name for params in replace(self, knobs=knobs).lineages() for name in params)

    def without_idle(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a config without settings that have no effect.

        Removed are settings outside this space that DeepSpeed accepts but does not use, and DeepSpeed's defaults chosen
        by the search. Keys of the user's config stay.
        """
        zero = config.get(ZERO)
        if not isinstance(zero, Mapping):
            return dict(config)
        ours = {tuned.name for tuned in self.knobs}
        unused = {knob.path[1] for knob in KNOBS if knob.inert and knob.name not in ours}
        chosen = {tuned.knob.path[1] for tuned in self.knobs if tuned.role is Role.PARAMETER}
        defaults = {
            key for key in chosen & zero.keys() if zero[key] == configs.zero_default(key, stage=zero.get("stage"))
        }
        idle = (unused | defaults) - self.user_zero.keys() - {"stage"}
        return {**config, ZERO: {key: value for key, value in zero.items() if key not in idle}}

    def classes(self) -> int:
        """Return the number of lineages: combinations of all params except the micro-batch."""
        return len(self.lineages())

    def lineages(self) -> list[dict[str, Any]]:
        """Return the params of every lineage, without the micro-batch, in the order of the knobs' choices."""
        lineages: list[dict[str, Any]] = [{}]
        for tuned in self.knobs:
            choices = tuned.choices if tuned.role is Role.PARAMETER else tuned.choices[:1]
            so_far, lineages = lineages, []
            for settings in so_far:
                applies = tuned.knob.applies(settings, self.site)
                lineages += [{**settings, tuned.name: value} for value in choices] if applies else [settings]
        given = {tuned.name for tuned in self.knobs if tuned.role is not Role.PARAMETER}
        return [{name: value for name, value in params.items() if name not in given} for params in lineages]


def _write_in_offloads(tuned: TunedKnob, values: Mapping[str, Any], zero: dict[str, Any]) -> None:
    """Set a detail of an offload in the sections that have it; the sections of the devices come before it."""
    sections = (OFFLOAD_OPTIMIZER, OFFLOAD_PARAM) if tuned.name == PIN_MEMORY else (tuned.knob.path[1],)
    for section in sections:
        if values.get(section, "none") != "none":
            zero[section] = {**(zero.get(section) or {}), tuned.knob.path[2]: values[tuned.name]}


def device_of(zero: Mapping[str, Any], name: str) -> str:
    """Return the device of an offload section: ``none``, ``cpu`` or ``nvme``."""
    section = zero.get(name)
    value: str = normalise(
        name, "device", section.get("device") if isinstance(section, Mapping) else section, key=f"{ZERO}.{name}.device"
    )
    return value


def present(knob: Knob, zero: Mapping[str, Any]) -> Any:
    """Return a knob's value in a config, DeepSpeed's default if it is not given."""
    if knob.kind == "device":
        return device_of(zero, knob.name)
    value = knob.value_in(zero)
    if knob.is_in_offload or knob.kind in ("modules", "section") or not knob.is_of_zero:
        return knob.default if value in (None, configs.AUTO) else normalise(knob.name, knob.kind, value, key=knob.key)
    if value is None or value == configs.AUTO:
        value = configs.zero_default(knob.path[1], stage=zero.get("stage", 0))
    return normalise(knob.name, knob.kind, value, key=knob.key)


def capped(name: str, value: int, params: int | None) -> int:
    """Return ``value``, or if it is beyond ``size_limit``, that limit rounded up to two significant digits."""
    if params is None:
        return value
    limit = configs.size_limit(name, params)
    return value if value < limit else _round_up(limit)


def _round_up(count: int) -> int:
    """Return the next even number of two significant digits, such as 1400000 for 1313280."""
    unit = max(2, int(10 ** max(0, len(str(count)) - 2)))
    return max(2, -(-count // unit) * unit)
