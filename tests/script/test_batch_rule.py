from __future__ import annotations

from typing import Any

import pytest

from optuna_dsat.config.ds_config import MICRO_BATCH, TRAIN_BATCH
from optuna_dsat.runtime.events import BatchSourcesFound
from optuna_dsat.script.arg_mapping import map_arguments
from optuna_dsat.script.batch_rule import BatchRule, guesses, held, samples_per_rank


def found(**values: Any) -> BatchSourcesFound:
    return BatchSourcesFound(**{"rank": 0, "time": 0.0, "options": {}, **values})


def loader(batch_size: int = 4, *, trains: bool = True, samples: int | None = 100) -> dict[str, Any]:
    return {"batch_size": batch_size, "file": "/a/train.py", "line": 7, "samples": samples, "trains": trains}


def test_an_option_of_that_value_and_name_comes_first() -> None:
    noted = found(options={"--epochs": 4, "--eval-batch-size": 4, "--batch-size": 4}, loaders=[loader()])
    assert [rule.option or rule.kind for rule in guesses(noted, own=4, ranks=2)] == [
        "--batch-size", "--eval-batch-size", "loader", "--epochs"
    ]  # fmt: skip


def test_an_option_may_count_the_samples_of_all_ranks() -> None:
    (rule,) = guesses(found(options={"--global-batch": 8}), own=4, ranks=2)
    assert rule.arg_mappings == {TRAIN_BATCH: "--global-batch"}
    assert guesses(found(options={"--batch": 8}), own=4, ranks=1) == []


@pytest.mark.parametrize("name", ["--bptt", "--seq-len", "--max_length", "model.block_size=", "--context"])
def test_a_length_is_no_batch_size(name: str) -> None:
    assert guesses(found(options={name: 4}), own=4, ranks=1) == []
    assert guesses(found(settings=[{"file": "/a/run.yaml", "key": name, "value": 4}]), own=4, ranks=1) == []


def test_a_held_batch_is_not_compared_with_the_config() -> None:
    assert held(4).source(ranks=2) == {"kind": "held"}
    assert BatchRule(kind="option", own=4, option="--b").source(ranks=2) == {}


@pytest.mark.parametrize("name", ["--batch-size", "--bs", "-b", "--mbs", "train.batch=", "--per_device_bsz"])
def test_names_that_mean_a_batch_size(name: str) -> None:
    rules = guesses(found(options={name: 4}, loaders=[loader()]), own=4, ranks=1)
    assert [rule.kind for rule in rules] == ["option", "loader"]


def test_a_setting_of_a_file_and_a_loader_are_told_to_the_ranks() -> None:
    noted = found(settings=[{"file": "/a/run.yaml", "key": "train.batch", "value": 8}], loaders=[loader()])
    setting, of_loader = guesses(noted, own=4, ranks=2)
    assert setting.source(ranks=2) == {
        "kind": "setting", "file": "/a/run.yaml", "key": "train.batch", "own": 4, "scale": 2
    }  # fmt: skip
    assert of_loader.source(ranks=2) == {"kind": "loader", "own": 4}
    config = {MICRO_BATCH: 16, TRAIN_BATCH: 32}
    assert setting.advice(config).startswith("Set train.batch in /a/run.yaml to 32")
    assert of_loader.advice(config).startswith("Set the batch size at /a/train.py:7 to 16")
    assert of_loader.advice({MICRO_BATCH: 4}) == ""


def test_a_rule_is_stored_whole() -> None:
    rule = BatchRule(kind="option", own=4, option="--batch-size")
    assert BatchRule.from_json(rule.to_json()) == rule
    assert "--batch-size (now 4)" in rule.announcement()
    assert "the micro-batch stays 4" in held(4).announcement()


def test_only_a_loader_that_feeds_the_engine_tells_how_much_data_there_is() -> None:
    noted = found(loaders=[loader(trains=False, samples=10), loader(samples=None), loader(samples=70)])
    assert samples_per_rank(noted) == 70
    assert samples_per_rank(found()) is None


def test_of_several_loaders_that_of_the_engines_batch_tells_how_much_data_there_is() -> None:
    noted = found(loaders=[loader(2, samples=10), loader(4, samples=70)])
    assert samples_per_rank(noted, own=4) == 70
    assert samples_per_rank(noted, own=3) == 10


def test_an_override_of_hydras_is_replaced() -> None:
    mapped = map_arguments(["a=1", "train.batch=4"], {MICRO_BATCH: "train.batch="}, {MICRO_BATCH: 9}, world_size=1)
    assert mapped == ("a=1", "train.batch=9")


def constant(line: int, name: str = "", *, value: int = 8) -> dict[str, Any]:
    return {"file": "/a/train.py", "line": line, "value": value, "name": name}


FED_AT = [{"file": "/a/train.py", "line": 30}, {"file": "/a/train.py", "line": 40}]


@pytest.mark.parametrize(
    ("constants", "line"),
    [
        ([constant(3, "BATCH"), constant(30), constant(9, "hidden")], 3),
        ([constant(3, "eval_batch"), constant(30), constant(9, "hidden")], 30),
        ([constant(9, "hidden")], 9),
        ([constant(5, "batch_size", value=16)], 5),
    ],
    ids=["by its name", "on the way to the engine", "the only one", "of all ranks"],
)
def test_a_constant_is_named_where_one_is_the_likeliest(constants: list[dict[str, Any]], line: int) -> None:
    rule = held(8, found=found(constants=constants, fed_at=FED_AT), ranks=2)
    assert (rule.line, rule.constant) == (line, True)
    assert f"seems to be a constant (train.py, line {line}" in rule.announcement()
    assert rule.advice({MICRO_BATCH: 8}) == ""
    assert f"/a/train.py:{line}" in rule.advice_on_held()
    assert BatchRule.from_json(rule.to_json()) == rule


@pytest.mark.parametrize(
    "constants", [[], [constant(3, "BATCH"), constant(4, "batch_size")], [constant(1), constant(2)]]
)
def test_no_constant_is_named_where_none_is_the_likeliest(constants: list[dict[str, Any]]) -> None:
    rule = held(8, found=found(constants=constants, fed_at=FED_AT), ranks=2)
    assert not rule.constant
    assert "(8) was not found; the batches go to the model at train.py, line 30" in rule.announcement()
    assert (rule.advice({MICRO_BATCH: 8}), rule.advice_on_held()) == ("", "")


def test_an_attribute_of_a_data_set_is_told_to_the_ranks() -> None:
    stream = {**loader(), "attribute": "Stream.batch_size"}
    epochs = {**loader(), "attribute": "Stream.epoch"}
    rules = guesses(found(loaders=[epochs, stream]), own=4, ranks=1)
    assert [rule.key for rule in rules] == ["Stream.batch_size", "Stream.epoch"]
    assert rules[0].source(ranks=1) == {"kind": "attribute", "key": "Stream.batch_size", "own": 4}
    assert "Stream.batch_size of its data set (train.py, line 7, now 4)" in rules[0].announcement()
    assert rules[0].advice({MICRO_BATCH: 9}).startswith("Set Stream.batch_size, used at /a/train.py:7, to 9")
