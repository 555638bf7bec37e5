"""The user's config in a study: with explicit batch sizes, consistent with the script's trainer, measured first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import optuna

from optuna_dsat.config import ds_config
from optuna_dsat.config.search_space import SearchSpace
from optuna_dsat.errors import UsageError
from optuna_dsat.script.arg_mapping import PASS_BATCH, RANK_BATCH, STAGE
from optuna_dsat.script.batch_rule import BatchRule
from optuna_dsat.script.trainer import ScriptTrainer
from optuna_dsat.store import Store
from optuna_dsat.study.spec import StudySpec
from optuna_dsat.trials import attributes


def own_train_batch_size(spec: StudySpec, *, ranks: int) -> int:
    """Return the global batch of the original user config, in samples, before ``--train-batch-size``."""
    return ds_config.batch_triangle(ds_config.effective(spec.ds_config), world_size=ranks).train_batch_size


def user_train_batch_size(spec: StudySpec, *, ranks: int) -> int:
    """Return the global batch of the user's config in the study, in samples: that of ``--train-batch-size``, if set."""
    config, _ = user_config(spec, data_parallel_size=ranks)
    return ds_config.batch_triangle(config, world_size=ranks).train_batch_size


def stated_batch(spec: StudySpec, *, ranks: int) -> ds_config.BatchTriangle | None:
    """Return the batch sizes of a config that gives its micro-batch or global batch; None if it gives neither."""
    config = ds_config.effective(spec.ds_config)
    if not any(isinstance(config.get(key), int) for key in (ds_config.TRAIN_BATCH, ds_config.MICRO_BATCH)):
        return None
    return ds_config.batch_triangle(config, world_size=ranks)


def user_config(spec: StudySpec, *, data_parallel_size: int | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the user's config with explicit batch sizes, and the overlay that makes them explicit.

    With ``--train-batch-size`` it has this global batch, for a fair comparison: at the user's micro-batch, or the next
    smaller one that divides the samples of a rank. ``data_parallel_size`` is None before it is known.
    """
    config = ds_config.effective(spec.ds_config)
    ranks = data_parallel_size or spec.data_parallel_ranks
    triangle = ds_config.batch_triangle(config, world_size=ranks)
    micro_batch, accumulation = triangle.micro_batch, triangle.gradient_accumulation_steps
    if spec.train_batch_size is not None:
        samples = max(1, spec.train_batch_size // ranks)
        micro_batch = next(size for size in range(min(micro_batch, samples), 0, -1) if samples % size == 0)
        accumulation = samples // micro_batch
    overlay = ds_config.batch_overlay(micro_batch, accumulation)
    return ds_config.merge(config, overlay), overlay


def enqueue_user_config(
    study: optuna.Study, *, store: Store, spec: StudySpec, space: SearchSpace, data_parallel_size: int
) -> None:
    """Enqueue the user's config as the first trial of a study, once per study, unless disabled in the spec."""
    if not spec.enqueue_user_config:
        return
    config, _ = user_config(spec, data_parallel_size=data_parallel_size)
    params = space.params_of(config) or {}

    def work() -> None:
        trials = study.get_trials(deepcopy=False)
        if not any(t.user_attrs.get(attributes.PURPOSE) == attributes.USER_CONFIG for t in trials):
            study.enqueue_trial(params, user_attrs={attributes.PURPOSE: attributes.USER_CONFIG})

    store.exclusively("enqueue the user's config", work)


def follow_trainer(
    spec: StudySpec, trainer: ScriptTrainer | None, defaults: Mapping[str, int] = MappingProxyType({})
) -> StudySpec:
    """Return the spec with open batch sizes filled in, and with options that set the trainer's batch sizes.

    Batch sizes in the user's config are unchanged. An open batch size is set to the value that the user passes as an
    option of ``--arg-mapping``, else the option's default, else the trainer's value. The user's mappings take
    precedence over the trainer's options.
    """
    config = dict(spec.ds_config)
    if _is_open(config.get(ds_config.TRAIN_BATCH)):  # otherwise open batch sizes follow from the global batch
        for key in (ds_config.MICRO_BATCH, ds_config.GRADIENT_ACCUMULATION):
            value = _mapped_value(spec, key, defaults) or (None if trainer is None else trainer.script_value(key))
            if value is not None and _is_open(config.get(key)):
                config[key] = value
        if _is_open(config.get(ds_config.GRADIENT_ACCUMULATION)):
            batch = _mapped_value(spec, ds_config.TRAIN_BATCH, defaults)
            config |= {} if batch is None else {ds_config.TRAIN_BATCH: batch}
        steps = config.get(ds_config.GRADIENT_ACCUMULATION)
        parts = {PASS_BATCH: spec.data_parallel_ranks, RANK_BATCH: steps if isinstance(steps, int) else 1}
        for key, part in parts.items():
            if _is_open(config.get(ds_config.MICRO_BATCH)) and (batch := _mapped_value(spec, key, defaults)):
                config[ds_config.MICRO_BATCH] = max(1, batch // part)
    result = {} if trainer is None else trainer.options
    options = {key: _as_given(option, spec.script.args) for key, option in result.items()}
    changes: dict[str, Any] = {"arg_mappings": {**options, **spec.script.arg_mappings}}
    if trainer is not None and trainer.source:
        changes["batch_source"] = _source_here(trainer.source, spec)
    return spec.with_script(**changes).model_copy(update={"ds_config": config})


def check_sizes(spec: StudySpec) -> None:
    """Check that a spec that follows its script has a batch size.

    Raises:
        UsageError: If it is that of an option which the user mapped, and which the command lacks.
    """
    mapped = {key: option for key, option in spec.script.arg_mappings.items() if key != STAGE}
    keys = (ds_config.TRAIN_BATCH, ds_config.MICRO_BATCH)
    if mapped and all(_is_open(spec.ds_config.get(key)) for key in keys):
        option = next(iter(mapped.values()))
        raise UsageError(f"The value of {option}, a batch size, is not known: give it in the command, too.")


def follow_script(
    spec: StudySpec,
    *,
    differences: Mapping[str, Sequence[Any]],
    trainer: ScriptTrainer | None,
    defaults: Mapping[str, int],
    batch: BatchRule | None,
    ranks: int,
    options: Mapping[str, str] = MappingProxyType({}),
    environment: Mapping[str, str] = MappingProxyType({}),
) -> StudySpec:
    """Return the spec completed with the script's settings that the profile launch detected; see ``Profiled``.

    ``defaults`` are its ``option_defaults`` and ``ranks`` its ``data_parallel_size``. The script's value of a differing
    key is the baseline; None removes the key. ``options`` are its options for keys, or empty.
    """
    given = {key: values[0] for key, values in differences.items()}
    if trainer is not None or spec.script.arg_mappings.keys() - {STAGE}:
        given.pop(ds_config.TRAIN_BATCH, None)  # it may be computed from the launch's other sizes
    sizes = {ds_config.MICRO_BATCH, ds_config.GRADIENT_ACCUMULATION}
    if given.keys() & sizes and not _is_open(spec.ds_config.get(ds_config.TRAIN_BATCH)):
        in_file = {} if given.keys() >= sizes else user_config(spec, data_parallel_size=ranks)[1]
        # Differences have the script's global batch as these.
        given = {ds_config.TRAIN_BATCH: None, **in_file, **given}
    config = ds_config.with_values(spec.ds_config, given) if given else spec.ds_config
    followed = spec.model_copy(update={"ds_config": config}).with_script(
        environment={**environment, **spec.script.environment},
        arg_mappings={**{key: option for key, option in options.items() if option}, **spec.script.arg_mappings},
        data_parallel_size=ranks,
    )
    followed = follow_batch(follow_trainer(followed, trainer, defaults), batch, ranks=ranks)
    if spec.batch == "keep" and spec.train_batch_size is None:
        return followed.model_copy(update={"train_batch_size": own_train_batch_size(followed, ranks=ranks)})
    return followed


def follow_batch(spec: StudySpec, rule: BatchRule | None, *, ranks: int) -> StudySpec:
    """Return the spec whose launches set the script's batch size, the baseline, by a rule; unchanged without one."""
    if rule is None:
        return spec
    triangle = ds_config.batch_triangle(ds_config.effective(spec.ds_config), world_size=ranks)
    batch = ds_config.batch_overlay(rule.own, triangle.gradient_accumulation_steps) if rule.kind != "config" else {}
    if batch and (given := spec.ds_config.get(ds_config.TRAIN_BATCH)):  # the script may read it from the file
        samples = rule.own * triangle.gradient_accumulation_steps * ranks
        batch[ds_config.TRAIN_BATCH] = ds_config.AUTO if given == ds_config.AUTO else samples
    config = {key: value for key, value in {**spec.ds_config, **batch}.items() if value is not None}
    in_file = spec.ds_config.get(ds_config.MICRO_BATCH)
    is_unused = rule.keeps_file and isinstance(in_file, int) and in_file != rule.own
    changes: dict[str, Any] = {"ds_config": config, "divisible_by": math.lcm(spec.divisible_by, rule.multiple)}
    if rule.kind == "held":
        changes["fix"] = {**(spec.fix or {}), ds_config.MICRO_BATCH: rule.own}
    return spec.model_copy(update=changes).with_script(
        unused_micro_batch=in_file if is_unused else spec.script.unused_micro_batch,
        arg_mappings={**rule.arg_mappings, **spec.script.arg_mappings},
        data_parallel_size=ranks,
        batch_source={**spec.script.batch_source, **_source_here(rule.source(ranks=ranks), spec)},
    )


def _source_here(source: Mapping[str, Any], spec: StudySpec) -> dict[str, Any]:
    """Return the batch size rule, with this machine's path of a settings file."""
    return {**source, "file": str(Path(spec.script.cwd) / source["file"])} if "file" in source else dict(source)


def _is_open(value: Any) -> bool:
    return value in (None, ds_config.AUTO)


def _mapped_value(spec: StudySpec, key: str, defaults: Mapping[str, int]) -> int | None:
    """Return the positive integer of the option mapped to a key, passed (the last counts) or by default; else None."""
    option, args = spec.script.arg_mappings.get(key), spec.script.args
    if option is None:
        return None
    value = defaults.get(option)
    for index, arg in enumerate(args):
        name, equals, joined = arg.partition("=")
        text = joined if equals else "".join(args[index + 1 : index + 2])
        if name.replace("_", "-") == option.replace("_", "-") and text.isdecimal():
            value = int(text)
    return value or None


def _as_given(option: str, args: Sequence[str]) -> str:
    """Return an option in the spelling of the user's arguments: ``HfArgumentParser`` accepts dashes, too."""
    dashed = option.replace("_", "-")
    return dashed if any(arg.partition("=")[0] == dashed for arg in args) else option


def hint_to_train(spec: StudySpec) -> str:
    """Return what to do about a script that ends without training, as the end of a message."""
    given = {word.partition("=")[0] for word in spec.script.args}
    missing = " or ".join(option for option in spec.source.options_to_train() if option not in given)
    return f". If it trains only with {missing or 'an option'}, add that"
