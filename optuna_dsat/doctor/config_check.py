"""Check a DeepSpeed config without a launch for keys that the installed DeepSpeed rejects, ignores or does not use."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from optuna_dsat.config import ds_config
from optuna_dsat.config.autotuning_section import parse_autotuning
from optuna_dsat.config.documents import as_written
from optuna_dsat.config.ds_config import AUTO, BATCH_KEYS, GRADIENT_ACCUMULATION, MICRO_BATCH, TRAIN_BATCH, ZERO
from optuna_dsat.config.knobs import KNOBS, NVME, ZERO_STAGE, ZERO_STAGES, Site
from optuna_dsat.config.space_builder import site_of
from optuna_dsat.config.user_file import (
    QUOTED_NUMBER,
    correction,
    correction_of_type,
    knob_lists,
    near_key,
    shape_errors,
)
from optuna_dsat.doctor.config_probe import UNKNOWN
from optuna_dsat.doctor.finding import Finding, Status, finding_of
from optuna_dsat.doctor.libraries import run_probe
from optuna_dsat.errors import ConfigError
from optuna_dsat.runtime.failure import rule_in_words
from optuna_dsat.secrecy.names import is_secret
from optuna_dsat.secrecy.references import hidden_text
from optuna_dsat.words import things_in_words

_BUILT = ("optimizer.params.", "scheduler.params.")
"""Sections with the parameters of a class."""
_MISSING = re.compile(r"(\w+)\.__init__\(\) missing \d+ required positional arguments?: (.+)")
_UNEXPECTED = re.compile(r"(\w+)\.__init__\(\) got an unexpected keyword argument '\w+'")
_OF_STAGE_3 = ("stage3_", "zero_quantized_", "offload_param", "sub_group_size", "zero_hpz_partition_size")
"""Prefixes of the keys of ``zero_optimization`` that only ZeRO 3 reads."""
_TRAINER = {
    MICRO_BATCH: "per_device_train_batch_size",
    GRADIENT_ACCUMULATION: "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "fp16.enabled": "fp16",
    "bf16.enabled": "bf16",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
}
"""Key -> argument of the Hugging Face Trainer that must agree with it (``transformers.integrations.deepspeed``)."""
_SEVERITY = (Status.FATAL, Status.PROBLEM, Status.NOTE)


def check(
    config: Mapping[str, Any],
    *,
    python: str = sys.executable,
    ranks: int | None = None,
    fills_auto: bool | None = None,
    trainer_arguments: Mapping[str, Any] | None = None,
) -> list[Finding]:
    """Return all findings on a config, fatal findings first, from ``run_probe`` and from knowledge of DeepSpeed.

    ``python`` has DeepSpeed. ``ranks`` are data-parallel; ``fills_auto`` tells whether the script's trainer fills in
    "auto" and batch sizes; None if unknown. ``trainer_arguments`` are the Hugging Face Trainer's in the command, by
    name.
    """
    findings = list(_of_shape(config))
    sound = ds_config.with_values(config, dict.fromkeys(["autotuning", *(item.name for item in findings)]))
    lists = knob_lists(sound).items()
    sound = ds_config.with_values(sound, {key: None if item == (ds_config.ALL,) else item[0] for key, item in lists})
    batches = list(_of_batches(sound, ranks))
    given = {"config": _filled(sound, bool(batches)), "ranks": ranks or _implied_ranks(sound)}
    environ = {**os.environ, "DS_ACCELERATOR": "cpu"}
    probed = run_probe("optuna_dsat.doctor.config_probe", python=python, environ=environ, given=given)
    if "error" in probed:
        text = f"DeepSpeed cannot be imported, and the config is checked in part alone: {probed['error']}"
        findings.append(_finding(["deepspeed"], Status.FATAL, text, "optuna-dsat doctor says more"))
        probed = {"version": "", "refused": [], "asked": {}, "quoted": list(sound), "models": {}, "choices": {}}
    autos = [key for key, value in ds_config.flatten(sound).items() if value == AUTO and _is_plain(key)]
    findings += [*batches, *_of_types(sound, probed["asked"]), *_of_refusals(sound, probed, autos)]
    findings += [*_of_trainer(sound, trainer_arguments or {}, ranks), *_of_ignored(sound, probed)]
    findings += [*_of_conflicts(sound), *_of_unused(sound)]
    if fills_auto is not True:
        findings += _of_auto(sound, autos, Status.NOTE if fills_auto is None else Status.FATAL)
    by_name: dict[str, Finding] = {}
    for finding in findings:
        by_name.setdefault(finding.name, finding)
    return sorted(by_name.values(), key=lambda finding: _SEVERITY.index(finding.status))


def _finding(keys: Sequence[str], status: Status, text: str, remedy: str = "") -> Finding:
    """Return a finding whose text contains its keys."""
    named = ", ".join(f"{key!r}" if key != key.strip() else key for key in keys)
    text = text if not keys or text.startswith(tuple(keys)) else f"{named}: {text}"
    text, remedy = (name.strip().rstrip(".") for name in (hidden_text(text), remedy))
    remedy = f"{remedy}." if remedy else ""
    return finding_of("config", ", ".join(keys) or text, f"{text}.", remedy, status=status, data={"keys": list(keys)})


def _is_plain(key: str) -> bool:
    """Return whether a key's value is used unchanged: "auto" in other sections means DeepSpeed's default."""
    return "." not in key or key.startswith(_BUILT)


def _of_shape(config: Mapping[str, Any]) -> Iterator[Finding]:
    for key, text in shape_errors(config):
        yield _finding([key], Status.FATAL, text)
    try:
        if isinstance(config.get("autotuning", {}), dict):
            parse_autotuning(config)
    except ConfigError as error:
        yield _finding(["autotuning"], Status.FATAL, str(error).removeprefix("<config>: "))


def _sizes(config: Mapping[str, Any]) -> dict[str, int]:
    return {key: int(config[key]) for key in BATCH_KEYS if config.get(key) not in (None, AUTO, ds_config.ALL)}


def _implied_ranks(config: Mapping[str, Any]) -> int:
    """Return the number of ranks for which three given batch sizes are consistent; 1 if fewer are given."""
    sizes = _sizes(config)
    return sizes[TRAIN_BATCH] // (sizes[MICRO_BATCH] * sizes[GRADIENT_ACCUMULATION]) or 1 if len(sizes) == 3 else 1


def _of_batches(config: Mapping[str, Any], ranks: int | None) -> Iterator[Finding]:
    """Yield a finding if the batch sizes contradict each other, at the given or at any number of ranks."""
    sizes = _sizes(config)
    try:
        ds_config.batch_triangle(sizes, world_size=ranks or _implied_ranks(config))
    except ConfigError as error:
        text, _, remedy = str(error).partition(": ")
        text = text if ranks else re.sub(r"( x)? (1 rank|\d+ ranks)\b", "", text)
        yield _finding(list(sizes), Status.FATAL, text, remedy[:1].upper() + remedy[1:])


def _filled(config: Mapping[str, Any], contradicts: bool) -> dict[str, Any]:
    """Return a config with batch sizes and with placeholders for "auto" values that a trainer fills in."""
    flat = ds_config.flatten(config)
    values: dict[str, Any] = {
        key: 1 if key.startswith("scheduler.") else None
        for key, value in flat.items()
        if value == AUTO and _is_plain(key)
    }
    if contradicts:
        values[TRAIN_BATCH] = None
    filled = ds_config.with_values(config, values)
    return filled if filled.get(TRAIN_BATCH) or filled.get(MICRO_BATCH) else {**filled, MICRO_BATCH: 1}


def _of_auto(config: Mapping[str, Any], autos: Sequence[str], status: Status) -> Iterator[Finding]:
    if autos:
        yield _finding(autos, status, ds_config.AUTO_IN_WORDS, "With a loop of your own, give each a value")
    if config.get(TRAIN_BATCH) is None and config.get(MICRO_BATCH) is None:
        text = "DeepSpeed needs one of them, unless the script or its trainer adds it"
        yield _finding([MICRO_BATCH, TRAIN_BATCH], status, text, f"Add {MICRO_BATCH}")


def _of_types(config: Mapping[str, Any], asked: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """Yield values whose type differs from DeepSpeed's default and is not checked by DeepSpeed."""
    for key, value in ds_config.flatten(config).items():
        section, _, name = key.rpartition(".")
        if value == AUTO or not (name in asked.get(section, {}) or key.startswith(_BUILT)):
            continue
        default = asked.get(section, {}).get(name)
        is_number = isinstance(default, int | float) and not isinstance(default, bool)
        if isinstance(value, str) and (QUOTED_NUMBER.fullmatch(value) or value.lower() in ("true", "false")):
            status = Status.PROBLEM if isinstance(default, bool) else Status.FATAL
            yield _finding([key], status, f"{key} is {_shown(key, value)}, in quotes", _unquoted(key, value))
        elif isinstance(default, bool) and not isinstance(value, bool | int | None):
            yield _finding([key], Status.PROBLEM, f"{key} is {_shown(key, value)}", "Write true or false")
        elif is_number and not isinstance(value, int | float | None):
            yield _finding([key], Status.FATAL, f"{key} is {_shown(key, value)}", "Write a number")


def _unquoted(key: str, value: str) -> str:
    return f"Write {value.lower()} for {key}, without quotes"


def _shown(key: str, value: Any) -> str:
    return "not shown" if isinstance(value, str) and is_secret(key, value) else as_written(value)


def _of_refusals(config: Mapping[str, Any], probed: Mapping[str, Any], autos: list[str]) -> Iterator[Finding]:
    """Yield findings on values rejected by DeepSpeed; keys with "auto" are added to ``autos`` instead."""
    flat = ds_config.flatten(config)
    for refusal in probed["refused"]:
        keys, text = refusal["keys"], rule_in_words(refusal["text"])
        keys = [key for key in keys if key.startswith(_BUILT)] or keys
        key = keys[0] if len(keys) == 1 else ""
        value = flat.get(key)
        if value == AUTO:
            autos.append(key)
        elif text == UNKNOWN and key:
            names = probed["models"].get(refusal["model"], [])
            yield _finding(
                [key], Status.FATAL, f"DeepSpeed {probed['version']} has no such key", correction(key, names)
            )
        elif missing := _MISSING.search(text):
            section = keys[0].partition(".")[0]
            names = [f"{section}.params.{name}" for name in re.findall(r"'(\w+)'", missing[2])]
            yield _finding(names, Status.FATAL, f"{missing[1]} needs a value", f"Add {' and '.join(names)}")
        elif unexpected := _UNEXPECTED.search(text):
            yield _finding(keys, Status.FATAL, f"{unexpected[1]} takes no such parameter", f"Remove {', '.join(keys)}")
        elif key in probed["choices"]:
            remedy = correction_of_type(str(value), probed["choices"][key])
            yield _finding([key], Status.FATAL, f"DeepSpeed {probed['version']} has no {as_written(value)}", remedy)
        elif isinstance(value, str) and QUOTED_NUMBER.fullmatch(value):
            yield _finding([key], Status.FATAL, f"{key} is {_shown(key, value)}, in quotes", _unquoted(key, value))
        elif key:
            shown = f" is {_shown(key, value)}" if value is not None else ""
            remedy = f"Remove {key}" if "removed" in text else f"Change or remove {key}"
            yield _finding([key], Status.FATAL, f"{key}{shown}: {text}", remedy)
        else:
            yield _finding(keys, Status.FATAL, text, f"Change one of {', '.join(keys)}" if keys else "")


def _of_ignored(config: Mapping[str, Any], probed: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield keys that DeepSpeed reads under another name, in another section, or not at all."""
    for section, names in probed["asked"].items():
        prefix = f"{section}." if section else ""
        result: Any = config
        for part in filter(None, section.split(".")):
            result = result.get(part, {}) if isinstance(result, Mapping) else {}
        for key in result if isinstance(result, Mapping) and f"{section}." not in _BUILT else ():
            text = f"DeepSpeed {probed['version']} does not read it"
            if key in names:
                continue
            if near := near_key(key, names):
                yield _finding([prefix + key], Status.PROBLEM, text, f"Write {prefix}{near}")
            elif not section and key in probed["models"].get("DeepSpeedZeroConfig", ()):
                yield _finding([key], Status.PROBLEM, f"{text} here, but in {ZERO}", f"Move it into {ZERO}")
            elif not section and key not in probed["quoted"]:
                yield _finding([key], Status.NOTE, text)


def _site(config: Mapping[str, Any]) -> Site:
    """Return the properties of a config on which conflicts and the use of knobs depend."""
    plain = {**config, ZERO: ds_config.zero_section(config)}
    return site_of(plain, pipeline=False, nvme_only=False, one_rank=False)


def _of_conflicts(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield findings on settings that ZeRO rejects once it has a model."""
    zero = ds_config.zero_section(config)
    stage = zero.get("stage", 0)
    if _site(config).prescaled and stage in (2, 3) and zero.get("reduce_scatter", True) is True:
        keys = [key for key in ("prescale_gradients", "gradient_predivide_factor") if key in config]
        text = f"ZeRO {stage} refuses that with reduce_scatter, which is on unless it is switched off"
        yield _finding(keys, Status.FATAL, text, f"Set {ZERO}.reduce_scatter to false")
    for key in ("offload_optimizer", "offload_param"):
        section = zero.get(key)
        offload = section if isinstance(section, Mapping) else {}
        if stage == 3 and offload.get("device") == "nvme" and not offload.get("nvme_path"):
            text = "the device nvme needs the path of a folder on the drive"
            yield _finding([f"{ZERO}.{key}.nvme_path"], Status.FATAL, text, f"Add {ZERO}.{key}.nvme_path")


def _of_unused(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield keys that DeepSpeed accepts but does not use at the config's ZeRO stage."""
    zero, plain = ds_config.zero_section(config), config.get(ZERO)
    stage = zero.get("stage", 0)
    if not isinstance(plain, Mapping) or stage not in ZERO_STAGES:
        return
    off = (None, False, AUTO, "none", {"device": "none"}, {"device": AUTO})
    if stage < 3:
        keys = [f"{ZERO}.{key}" for key, value in plain.items() if key.startswith(_OF_STAGE_3) and value not in off]
        if keys:
            yield _finding(keys, Status.NOTE, f"not used at ZeRO {stage}, but at ZeRO 3 alone")
    effective, params = ds_config.effective(config), {ZERO_STAGE: stage}
    for knob in KNOBS:
        value: Any = effective
        for part in knob.path:
            value = value.get(part) if isinstance(value, Mapping) else None
        if value not in (None, AUTO) and knob.name not in (ZERO_STAGE, NVME):
            params[knob.name] = value
    site = _site(config)
    given = [
        knob
        for knob in KNOBS
        if knob.is_of_zero and params.get(knob.name) not in off and not knob.path[1].startswith(_OF_STAGE_3)
    ]
    unused = [".".join(knob.path) for knob in given if knob.inert or not knob.applies(params, site)]
    if unused:
        yield _finding(unused, Status.NOTE, f"not used at ZeRO {stage} with these settings")


def _of_trainer(config: Mapping[str, Any], arguments: Mapping[str, Any], ranks: int | None) -> Iterator[Finding]:
    """Yield values that contradict arguments of the Hugging Face Trainer, which rejects such a combination."""
    flat = ds_config.flatten(config)
    expected = {
        key: (f"--{name} {arguments[name]}", arguments[name]) for key, name in _TRAINER.items() if name in arguments
    }
    micro, accumulation = (arguments.get(_TRAINER[key]) for key in (MICRO_BATCH, GRADIENT_ACCUMULATION))
    if ranks and isinstance(micro, int) and isinstance(accumulation, int):
        words = f"{micro} x {accumulation} x {things_in_words(ranks, 'rank')}"
        expected[TRAIN_BATCH] = (words, micro * accumulation * ranks)
    for key, (words, value) in expected.items():
        if flat.get(key) not in (None, AUTO, value):
            text = f"{key} is {as_written(flat[key])}, but the command gives {words}: the Trainer refuses that"
            yield _finding([key], Status.FATAL, text, f'Write "auto" for {key}, or the value of the command')
