"""Differences between the exported config and the user's config, key by key."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optuna_dsat.config import ds_config
from optuna_dsat.config.structures import Structure
from optuna_dsat.runtime.adapt.parsers import means_accumulation
from optuna_dsat.runtime.overlay import BIND_CORES, binds_cores, checkpoint_every, is_compiled, without_model
from optuna_dsat.trials import attributes
from optuna_dsat.words import setting_in_words

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

    from optuna_dsat.config.search_space import SearchSpace
    from optuna_dsat.script.trainer import ScriptTrainer


@dataclass(frozen=True, kw_only=True)
class Change:
    """A setting that differs between the best config and the user's config."""

    key: str
    """Dotted key of the config."""
    own: str
    """The user's value as JSON; empty if it is not set."""
    best: str
    """The best config's value as JSON; empty if it is not set."""


_STAGE = f"{ds_config.ZERO}.stage"


def config_changes(user: Mapping[str, Any], best: Mapping[str, Any]) -> tuple[Change, ...]:
    """Return every key whose value differs, sorted: changed, added and dropped keys. No ZeRO stage is stage 0."""
    before, after = shown_settings(user), shown_settings(best)
    if after.get(_STAGE) == "0":
        before.setdefault(_STAGE, "0")
    return tuple(
        Change(key=key, own=before.get(key, ""), best=after.get(key, ""))
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    )


def changes_in_words(changes: Iterable[Change]) -> str:
    """Return sentences with the changed, added and dropped keys; empty without any.

    A dropped offload device ``none`` is left out: dropping it changes nothing.
    """
    kinds: dict[str, list[str]] = {"Changed from your config": [], "Added": [], "Dropped": []}
    for change in changes:
        if change.own and change.best:
            kinds["Changed from your config"].append(f"{change.key} {change.own} -> {change.best}")
        elif change.best:
            kinds["Added"].append(f"{change.key} {change.best}")
        elif not (change.key.endswith(".device") and change.own == '"none"'):
            kinds["Dropped"].append(f"{change.key} {change.own}")
    return " ".join(f"{kind}: {', '.join(keys)}." for kind, keys in kinds.items() if keys)


def shown_settings(config: Mapping[str, Any]) -> dict[str, str]:
    """Return dotted key -> value of a config as its user writes it, without nulls; text is in quotes."""
    return {
        key: json.dumps(value, ensure_ascii=False) if isinstance(value, str) else setting_in_words(value)
        for key, value in ds_config.flatten(config).items()
        if value is not None
    }


def changes_model(config: Mapping[str, Any], user: Mapping[str, Any]) -> bool:
    """Return whether a complete config changes the model that the script builds with the ``user``'s."""
    return checkpoint_every(config) != checkpoint_every(user) or is_compiled(config)


def model_change_in_words(config: Mapping[str, Any], user: Mapping[str, Any]) -> str:
    """Return where to write what no DeepSpeed config sets: activation checkpointing and compilation; empty for none.

    ``config`` is complete, ``user`` the user's config as the script means it.
    """
    changes = []
    every, before = checkpoint_every(config), checkpoint_every(user)
    if before and not every:
        changes.append(
            "The activation checkpointing of your script is off, which no DeepSpeed config can do. optuna-dsat train "
            "does it; for your own command, switch it off in the script (with the Hugging Face Trainer: "
            "gradient_checkpointing=False in its arguments; instead of torch.utils.checkpoint.checkpoint(f, x), call "
            "f(x))."
        )
    elif every != before:
        blocks = "every block" if every == 1 else f"one of {every} blocks"
        changes.append(
            f"The activations of {blocks} are checkpointed, which no DeepSpeed config can. optuna-dsat train does it; "
            f"for your own command, write optuna_dsat.checkpoint_blocks(model, every={every}) before "
            "deepspeed.initialize (with the Hugging Face Trainer, for every block: gradient_checkpointing=True in its "
            "arguments)."
        )
    if is_compiled(config):
        changes.append(
            "The model is compiled, which no DeepSpeed config can. optuna-dsat train does it; for your own command, "
            "write engine.compile() after deepspeed.initialize (with the Hugging Face Trainer: torch_compile=True in "
            "its arguments)."
        )
    if binds_cores(config) and not binds_cores(user):
        changes.append(
            "Each rank runs on its own cores, which no DeepSpeed config can. optuna-dsat train does it; so does "
            f"deepspeed {BIND_CORES_OPTION}, which needs numactl."
        )
    return " ".join(changes)


BIND_CORES_OPTION = "--bind_cores_to_rank"
"""Option of the ``deepspeed`` launcher that has each rank run on its own cores."""


def core_binding_in_words(config: Mapping[str, Any], *, ranks: int) -> str:
    """Return a knob that may speed up an optimizer on the host; empty for other complete configs."""
    if ranks == 1 or Structure.of(config).offload_optimizer != "cpu" or binds_cores(config):
        return ""
    return (
        "The optimizer runs on the host: ranks that have their own cores may be faster (by 1.3x in DeepSpeed's pull "
        f"request 7474). --only {BIND_CORES} measures it."
    )


def trainable_config(config: Mapping[str, Any], *, world_size: int) -> dict[str, Any]:
    """Return ``config`` without any tuning key and with a consistent batch triangle, ready to train with."""
    clean = ds_config.effective(config)
    triangle = ds_config.batch_triangle(clean, world_size=world_size)
    return {
        **clean,
        ds_config.TRAIN_BATCH: triangle.train_batch_size,
        ds_config.MICRO_BATCH: triangle.micro_batch,
        ds_config.GRADIENT_ACCUMULATION: triangle.gradient_accumulation_steps,
    }


def complete_config(trial: FrozenTrial, *, slots: int, space: SearchSpace) -> dict[str, Any]:
    """Return a trial's DeepSpeed config without any tuning key and with all batch sizes.

    Settings that change nothing are left out (``SearchSpace.without_idle``), unless it is the user's own config. What
    launches allow for the script's own optimizer under offload is allowed by the config, too.
    """
    ranks = attributes.data_parallel_size(trial, slots=slots)
    config = trainable_config(trial.user_attrs[attributes.CONFIG], world_size=ranks)
    if trial.user_attrs.get(attributes.PURPOSE) == attributes.USER_CONFIG:
        return config
    complete = space.without_idle(config)
    offload = ds_config.zero_section(complete).get("offload_optimizer") or {}
    own_optimizer = "type" not in (complete.get("optimizer") or {})
    if own_optimizer and offload.get("device", "none") != "none":
        complete = {"zero_force_ds_cpu_optimizer": False, **complete}
    return complete


def ready_config(
    complete: Mapping[str, Any], *, user: Mapping[str, Any], trainer: ScriptTrainer | None
) -> dict[str, Any]:
    """Return a config as the script trains with it: as its trainer takes it, and with two of the three batch sizes.

    The third is left out unless the user's config has it. DeepSpeed compares all three with the ranks, and counts one
    rank where a model is built within ``zero.Init`` before the ranks are joined.
    """
    keys = (ds_config.TRAIN_BATCH, ds_config.GRADIENT_ACCUMULATION)
    implied = next((key for key in keys if key not in user), None)
    config = without_model(complete if trainer is None else trainer.trainable(complete))
    return {key: value for key, value in config.items() if key != implied}


_COUNTED_IN_STEPS = frozenset(
    {"warmup_num_steps", "total_num_steps", "cycle_first_step_size", "cycle_second_step_size", "decay_step_size"}
    | {"lr_range_test_step_size", "total_curriculum_step", "require_steps", "schedule_offset", "schedule_offset_end"}
    | {"quantization_period", "freeze_step", "var_freeze_step"}
)
"""Keys of a DeepSpeed config with numbers of optimizer steps: of its schedulers, curricula, compression and 1-bit
optimizers (``lr_schedules``, ``data_pipeline``, ``compression`` and ``fp16.onebit`` of 0.19.8)."""
_DEFAULT_STEPS = {"OneCycle": ("cycle_first_step_size", 2000), "LRRangeTest": ("lr_range_test_step_size", 2000)}
"""Scheduler -> its key with a number of steps, and the default; the others warm up (``lr_schedules`` of 0.19.8)."""


_OPTION_OF_STEPS = re.compile(
    r"(?!.*(eval|valid|test|save|log|decode|infer))-.*(max|num|total|train|warm-?_?up|decay)"
    r".*[-_](steps?|iters?|iterations|updates)"
)
"""Matches options with a number of optimizer steps of a schedule, such as ``--max_train_steps``."""


def scaled_steps(config: Mapping[str, Any], ratio: float, *, args: Sequence[str] = ()) -> str:
    """Return the numbers of steps that cover as many samples at a batch ``ratio`` times as large.

    They are in the config, and in the script's options ``args``.
    """
    flat = ds_config.flatten(config)
    if kind := flat.get("scheduler.type"):
        name, default = _DEFAULT_STEPS.get(kind, ("warmup_num_steps", 1000))
        flat.setdefault(f"scheduler.params.{name}", default)
    counted = {key: value for key, value in flat.items() if key.rpartition(".")[2] in _COUNTED_IN_STEPS}
    changed = [
        f"{key} from {value:,.0f} to {max(1, round(value / ratio)):,}"
        for key, value in [*counted.items(), *_options_of_steps(args)]
        if type(value) in (int, float) and value > 0
    ]
    unnamed = f" A learning-rate schedule that the script counts in steps covers {ratio:.3g} times as many samples."
    return f" These are counted in steps; for as many samples change {', '.join(changed)}." if changed else unnamed


def _options_of_steps(args: Sequence[str]) -> Iterator[tuple[str, int]]:
    for word, following in zip(args, [*args[1:], ""], strict=False):
        name, is_joined, value = word.partition("=")
        value = value if is_joined else following
        if value.isdecimal() and _OPTION_OF_STEPS.fullmatch(name) and not means_accumulation(name):
            yield name, int(value)
