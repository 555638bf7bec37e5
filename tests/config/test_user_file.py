"""Reading and checking a user's DeepSpeed config; misspelt keys of it."""

from __future__ import annotations

import importlib
import json
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from optuna_dsat.config import ds_config, user_file
from optuna_dsat.config.documents import checked
from optuna_dsat.config.user_file import correction, misspelt_in_words, misspelt_keys, misspelt_types
from optuna_dsat.errors import ConfigError, UsageError


def read(tmp_path: Path, text: str | bytes) -> user_file.UserConfig:
    path = tmp_path / "ds_config.json"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return user_file.load(path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "is empty"),
        ("{", "line 1, column 2"),
        ('{\n "a": 1,\n', "line 3, column 1"),
        ('{"a": 1, "a": 2}', "'a' is given twice"),
        ('{"zero_optimization": {"stage": 1, "stage": 2}}', "'stage' is given twice"),
        ('{"zero_optimization": {stage: 1, "stage": 2}}  # HJSON', "'stage' is given twice"),
        ("[1]", "this is a list"),
        ("null", "this is null"),
        ('{"a": {"b": [1, NaN]}}', ": a.b holds a number that is not finite"),
        (b'{"a": "\xff"}', "line 1: not UTF-8"),
        ("[" * 100_000, "nested too deeply"),
        ('{"zero_optimization": 3}', 'zero_optimization is a number; it must be an object, such as {"stage": 1}.'),
        ('{"zero_optimization": {"offload_param": "cpu"}}', "offload_param is a string; it must be an object, such as"),
        ('{"optimizer": "adam"}', "optimizer is a string"),
        ('{"optimizer": {"type": 5}}', "optimizer.type is a number; it must be a string"),
        ('{"zero_optimization": {"offload_param": false}}', "offload_param is a truth value; it must be an object"),
        ('{"zero_optimization": {"offload_param": {"device": null}}}', "device is null; it must be none, cpu or nvme"),
        ('{"optimizer": {"type": "SGD", "params": [0.1]}}', "optimizer.params is a list; it must be an object"),
        (
            '{"optimizer": {"type": "Adam", "params": {"betas": 3}}}',
            "optimizer.params.betas is 3; it must be a list of two numbers, such as [0.9, 0.999]",
        ),
        (
            '{"optimizer": {"type": "Adam", "params": {"lr": [0.1]}}}',
            "optimizer.params.lr is [0.1]; it must be a number",
        ),
        ('{"bfloat16": true}', 'bfloat16 is a truth value; it must be an object, such as {"enabled": true}.'),
        ('{"train_batch_size": [8, 16]}', "is not searched"),
        ('{"gradient_accumulation_steps": "all"}', "gradient_accumulation_steps is 'all', but is not searched"),
        ('{"train_micro_batch_size_per_gpu": 2.5}', "whole number"),
        ('{"train_micro_batch_size_per_gpu": [1, 0]}', "at least 1"),
        ('{"zero_optimization": {"reduce_bucket_size": []}}', "empty list"),
        ('{"autotuning": {"tuner_num_trials": "many"}}', "tuner_num_trials"),
        (
            '{"autotuning": {"min_train_micro_batch_size_per_gpu": 8, "max_train_micro_batch_size_per_gpu": 4}}',
            "is 8, above the maximum 4",
        ),
    ],
)
def test_a_bad_config_gets_one_line_that_names_the_file(tmp_path: Path, text: str | bytes, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    message = str(caught.value)
    assert expected in message
    assert "ds_config.json" in message
    assert "\n" not in message


def test_yaml_which_hjson_would_misread_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.yml"
    path.write_text("train_batch_size: 16\nzero_optimization:\n    stage: 1\n")
    with pytest.raises(ConfigError, match=r"ds_config\.yml is YAML, which DeepSpeed does not read\. Leave it out"):
        user_file.load(path)
    path.write_text("{\n  # as DeepSpeed reads it\n  train_batch_size: 16,  // a comment\n}\n")
    assert user_file.load(path).raw == {"train_batch_size": 16}


def test_a_missing_file_and_a_directory_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such DeepSpeed config"):
        user_file.load(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="is a directory"):
        user_file.load(tmp_path)
    assert user_file.load(None).raw == {}, "of no file"


def test_lists_are_read_as_narrowing_and_resolved_to_their_first(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        """{"train_micro_batch_size_per_gpu": [2, 4],
            "optimizer": {"type": "AdamW", "params": {"betas": [0.8, 0.9]}},
            "zero_optimization": {"stage": "all", "reduce_bucket_size": [5e7, 5e8],
                                  "offload_optimizer": {"device": ["cpu", "none"], "pin_memory": false},
                                  "offload_param": ["none", "cpu"]},
            "autotuning": {"enabled": true}}""",
    )
    assert user_file.knob_lists(config.raw) == {
        "train_micro_batch_size_per_gpu": (2, 4),
        "zero_optimization.stage": ("all",),
        "zero_optimization.reduce_bucket_size": (5e7, 5e8),
        "zero_optimization.offload_optimizer.device": ("cpu", "none"),
        "zero_optimization.offload_param.device": ("none", "cpu"),
    }
    assert ds_config.effective(config.raw) == {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"betas": [0.8, 0.9]}},
        "zero_optimization": {
            "reduce_bucket_size": 5e7,
            "offload_optimizer": {"device": "cpu", "pin_memory": False},
            "offload_param": {"device": "none"},
        },
    }


def test_a_document_that_contains_itself_is_refused_without_naming_each_of_its_values() -> None:
    document: dict[str, Any] = {}
    document["zero_optimization"] = document
    tracemalloc.start()
    with pytest.raises(UsageError, match=r"^it is nested in itself"):
        checked(document, "it")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**26


def test_reading_leaves_the_raw_config_alone() -> None:
    raw = {"zero_optimization": {"stage": [1, 2], "cpu_offload": True}, "autotuning": {"enabled": False}}
    before = json.dumps(raw)
    ds_config.effective(raw)
    ds_config.merge(raw, {"zero_optimization": {"stage": 3}})
    ds_config.canonical_key(raw)
    assert json.dumps(raw) == before


def test_the_autotuning_section_is_parsed_and_unknown_keys_are_named(tmp_path: Path) -> None:
    section = read(
        tmp_path,
        """{"autotuning": {"enabled": true, "start_step": 5, "end_step": 10, "metric": "latency", "num_gpus": [2, 4],
            "num_nodes": 1, "tuner_num_trials": 9, "max_train_micro_batch_size_per_gpu": 3e1, "speed": 3,
            "arg_mappings": {"train_micro_batch_size_per_gpu": "per_device_train_batch_size"}}}""",
    ).autotuning
    assert (section.enabled, section.start_profile_step, section.end_profile_step) == (True, 5, 10)
    assert (section.metric, section.num_gpus, section.tuner_num_trials) == ("latency", 4, 9)
    assert section.max_train_micro_batch_size_per_gpu == 30
    assert section.arg_mappings == {"train_micro_batch_size_per_gpu": "per_device_train_batch_size"}
    assert (section.ignored, section.unknown, section.num_nodes) == ((), ("speed",), 1)


def test_misspelt_keys_are_found_with_the_key_that_they_resemble() -> None:
    keys = ["train_micro_batch_size_per_gpu ", "zero_optimisation.stage", "gradient_acumulation_steps", "BF16.enabled"]
    keys += ["optimizer.typ", "scheduler.parms.warmup_num_steps", "gradient_clip", "zero_optimization.overlap_com"]
    keys += ["zero_optimization.offload_optimiser.device", "zero_optimization.offload_param.pin_memry", "fp16.enable"]
    assert misspelt_keys(keys) == {
        "train_micro_batch_size_per_gpu ": "train_micro_batch_size_per_gpu",
        "zero_optimisation": "zero_optimization",
        "gradient_acumulation_steps": "gradient_accumulation_steps",
        "BF16": "bf16",
        "optimizer.typ": "optimizer.type",
        "scheduler.parms": "scheduler.params",
        "gradient_clip": "gradient_clipping",
        "zero_optimization.overlap_com": "zero_optimization.overlap_comm",
        "zero_optimization.offload_optimiser": "zero_optimization.offload_optimizer",
        "zero_optimization.offload_param.pin_memry": "zero_optimization.offload_param.pin_memory",
        "fp16.enable": "fp16.enabled",
    }
    right = ["zero_optimization.stage", "fp16", "tensorboard", "autotuning.enabled", "optimizer.type"]
    assert misspelt_keys(right) == {}


def test_misspelt_keys_in_words_name_the_key_as_it_is_written() -> None:
    (text,) = misspelt_in_words(["bf16", "zero_optimisation"])
    assert text == "DeepSpeed has no key 'zero_optimisation'; 'zero_optimization' is probably meant."
    (text,) = misspelt_in_words(["mixed_precision", "fsdp_config.fsdp_offload_params", "fsdp_config.x", "_comment"])
    assert text.startswith("DeepSpeed ignores mixed_precision, fsdp_config in the config: without effect unless")


@pytest.mark.parametrize(
    ("config", "lines"),
    [
        ({"optimizer": {"type": "AdamWW"}}, ["DeepSpeed has no optimizer 'AdamWW'; 'AdamW' is probably meant."]),
        (
            {"scheduler": {"type": "WarmupCosLR"}},
            ["DeepSpeed has no scheduler 'WarmupCosLR'; 'WarmupCosineLR' is probably meant."],
        ),
        (
            {"scheduler": {"type": "WarmupDecayLr"}},
            ["DeepSpeed has no scheduler 'WarmupDecayLr'; 'WarmupDecayLR' is probably meant."],
        ),
        ({"optimizer": {"type": "adamW"}, "scheduler": {"type": "OneCycleLR"}}, []),
        ({"optimizer": {"type": "AdEMAMix"}, "scheduler": {"type": "auto"}}, []),
        ({"optimizer": None, "scheduler": {}}, []),
    ],
)
def test_a_type_that_resembles_one_of_deepspeed_or_torch_is_named(config: dict[str, Any], lines: list[str]) -> None:
    assert misspelt_types(config) == lines


def test_a_wrong_key_is_corrected_by_a_known_name_that_it_resembles() -> None:
    assert correction("zero_optimization.stge") == "Remove zero_optimization.stge, or write zero_optimization.stage"
    assert correction("zero_optimization.unlike") == "Remove zero_optimization.unlike"
    assert correction("stag") == "Remove stag, or write stage"
    assert correction("fp16.enable") == "Remove fp16.enable, or write fp16.enabled"


class AskedConfig(dict[str, Any]):
    """A config that records the keys that DeepSpeed asks for."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def keys(self) -> Any:
        return self


def test_the_known_keys_and_types_are_those_of_the_installed_deepspeed() -> None:
    """DeepSpeed's config asks for its keys by name: a version that renames one fails here."""
    config = pytest.importorskip("deepspeed.runtime.config")
    schedules = importlib.import_module("deepspeed.runtime.lr_schedules").VALID_LR_SCHEDULES
    asked: set[str] = set()
    for zero in (True, {"stage": 2}):  # true reads the bucket's size from the top level
        given = AskedConfig({"train_batch_size": 1, "optimizer": {"type": "Adam"}, "zero_optimization": zero})
        config.DeepSpeedConfig(given)
        asked |= given.asked
    elsewhere = {"data_parallel_size", "sequence_parallel_size"}  # in ``deepspeed.initialize``
    gone = {"fp32_allreduce"}  # of earlier versions
    assert asked | elsewhere | gone == user_file.READ_KEYS
    assert set(config.DEEPSPEED_OPTIMIZERS) <= {name.lower() for name in user_file._TYPES["optimizer"]}
    assert set(schedules) <= set(user_file._TYPES["scheduler"])


@pytest.mark.parametrize(
    ("section", "module", "model"),
    [
        ("fp16", "precision_config", "DeepSpeedFP16Config"),
        ("bf16", "precision_config", "DeepSpeedBF16Config"),
        ("zero_optimization", "zero.config", "DeepSpeedZeroConfig"),
        ("zero_optimization.offload_optimizer", "zero.offload_config", "DeepSpeedZeroOffloadOptimizerConfig"),
        ("zero_optimization.offload_param", "zero.offload_config", "DeepSpeedZeroOffloadParamConfig"),
    ],
)
def test_the_keys_of_sections_are_the_fields_of_the_installed_deepspeeds(section: str, module: str, model: str) -> None:
    fields = getattr(pytest.importorskip(f"deepspeed.runtime.{module}"), model).model_fields
    names = {*fields, *(field.alias for field in fields.values() if field.alias)}
    assert set(user_file._OF_SECTIONS[section]) == names
