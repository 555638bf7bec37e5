from __future__ import annotations

from pathlib import Path

import pytest

from optuna_dsat.script.settings_file import find_config, find_config_key, looks_like_config

CONFIG = '{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "ds.json").write_text(CONFIG)
    (tmp_path / "data.json").write_text('{"rows": [1, 2]}')
    return tmp_path


@pytest.mark.parametrize(
    "args",
    [
        "--deepspeed_config ds.json --lr 1",
        "--deepspeed --deepspeed_config=ds.json",
        "--deepspeed ds.json",
        "--data data.json --my-own-option ds.json",
        "train data.json ds.json",
    ],
)
def test_an_argument_names_the_config(folder: Path, args: str) -> None:
    assert find_config(args.split(), cwd=folder) == folder / "ds.json"


def test_the_option_comes_before_other_files_that_look_alike(folder: Path) -> None:
    (folder / "a.json").write_text(CONFIG)
    assert find_config(["a.json", "--deepspeed_config", "ds.json"], cwd=folder) == folder / "ds.json"


@pytest.mark.parametrize("named", ["ds.json", "../ds.json"])
def test_a_settings_file_names_the_config(folder: Path, named: str) -> None:
    inner = folder / "settings"
    inner.mkdir()
    (inner / "run.yaml").write_text(f"model: x\ntraining:\n  deepspeed: {named}\n")
    assert find_config(["settings/run.yaml"], cwd=folder) == (
        folder / "ds.json" if named == "ds.json" else inner / named
    )


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("model: x\ndeepspeed: ds.json\n", "deepspeed"),
        ("train:\n  engine: {deepspeed_config: ds.json}\n", "train.engine.deepspeed_config"),
        ("deepspeed: other.json\ntrain: {deepspeed: ds.json}\n", "train.deepspeed"),
        ("note: ds.json\n", None),
    ],
)
def test_the_key_that_names_the_config_is_found(folder: Path, text: str, key: str | None) -> None:
    (folder / "other.json").write_text(CONFIG)
    (folder / "run.yaml").write_text(text)
    args = ["data.json", "run.yaml", "lr=1"]
    assert find_config_key(args, cwd=folder, config=folder / "ds.json") == key


def test_where_nothing_names_a_config_none_is_found(folder: Path) -> None:
    (folder / "run.yaml").write_text("deepspeed: missing.json\n")
    assert find_config(["--data", "data.json", "run.yaml", "--lr", "0.1"], cwd=folder) is None


def test_comments_and_trailing_commas_are_read(folder: Path) -> None:
    (folder / "h.json").write_text('{ // ours\n  fp16: {enabled: true},\n  optimizer: {type: "Adam"},\n}')
    assert looks_like_config(folder / "h.json")
    assert not looks_like_config(folder / "data.json")
    assert not looks_like_config(folder)
