"""A config found in a command; a copy of a settings file is made only where it means what the original means."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from optuna_dsat.config.ds_config import GRADIENT_ACCUMULATION, MICRO_BATCH, TRAIN_BATCH
from optuna_dsat.config.user_file import load
from optuna_dsat.errors import ConfigError
from optuna_dsat.script.settings_file import (
    SettingsCopy,
    find_config,
    find_config_key,
    looks_like_config,
    missing_config,
    settings_copy,
)

KEY = "data.0.batch"


def copy_of(
    folder: Path, source: dict[str, Any], tuned: dict[str, Any], *args: str, own: dict[str, Any] | None = None,
    **options: Any,
) -> SettingsCopy | None:  # fmt: skip
    return settings_copy(source, tuned, user=own or {}, args=args, cwd=str(folder), folder=folder / "out", **options)


def copied(
    folder: Path, text: str, *, name: str = "run.yaml", micro_batch: int = 6, **source: Any
) -> SettingsCopy | None:
    file = folder / "conf" / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    setting = {"kind": "setting", "file": str(file), "key": KEY, "own": 3, "scale": 1, **source}
    return copy_of(folder, setting, {MICRO_BATCH: micro_batch}, "train", f"--settings=conf/{name}")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.yaml", "# mine\nlr: 1e-4  # a string to some\ndata:\n  - {batch: 3, é: '3'}\n  - {batch: 3}\n"),
        ("run.json", '{\n\t"lr": 1e-4,\n\t"data": [{"batch": 3, "name": "a"}]\n}\n'),
    ],
)
def test_a_copy_differs_in_the_number_alone_and_stands_in_the_command(tmp_path: Path, name: str, text: str) -> None:
    copy = copied(tmp_path, text, name=name)
    assert copy is not None
    expected = text.replace("batch: 3", "batch: 6", 1).replace('"batch": 3', '"batch": 6')
    load = json.loads if name == "run.json" else yaml.safe_load
    assert load(copy.text) == load(expected)
    assert copy.pointed(("train", f"--settings=conf/{name}", "a=b"), cwd=str(tmp_path)) == [
        "train",
        f"--settings={tmp_path}/out/best_{name}",
        "a=b",
    ]


@pytest.mark.parametrize(
    ("name", "text", "changed"),
    [
        (
            "run.yaml",
            "deepspeed: conf/ds.json  # mine\ndata: [{batch: 3}]\n",
            'deepspeed: "/best/ds.json"  # mine\ndata: [{batch: 6}]\n',
        ),
        (
            "run.json",
            '{"data": [{"batch": 3}], "train": {"deepspeed": "ds.json"}}',
            '{"data": [{"batch": 6}], "train": {"deepspeed": "/best/ds.json"}}',
        ),
    ],
    ids=["from the working directory", "from its own folder"],
)
def test_a_copy_names_the_best_config_where_its_file_names_the_users(
    tmp_path: Path, name: str, text: str, changed: str
) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "ds.json").write_text("{}")
    (tmp_path / "conf" / name).write_text(text)
    own = {"kind": "setting", "file": str(tmp_path / "conf" / name), "key": KEY, "own": 3}

    def copy(source: dict[str, Any], *, micro_batch: int, user_config: str = "conf/ds.json") -> SettingsCopy | None:
        args = ("data.csv", "--deepspeed=conf/ds.json", f"conf/{name}")
        user = str(tmp_path / user_config)
        return copy_of(
            tmp_path, source, {MICRO_BATCH: micro_batch}, *args, user_config=user, best_config="/best/ds.json"
        )

    both = copy(own, micro_batch=6)
    assert both is not None
    assert (yaml.safe_load(both.text), both.sets_batch, both.names_config) == (yaml.safe_load(changed), True, True)
    for source, micro_batch in ((own, 3), ({"kind": "loader"}, 6), ({}, 6)):
        path_alone = copy(source, micro_batch=micro_batch)
        assert path_alone is not None
        assert yaml.safe_load(path_alone.text) == yaml.safe_load(changed.replace("6", "3"))
        assert not path_alone.sets_batch
    assert copy({}, micro_batch=6, user_config="conf/other.json") is None
    (tmp_path / "conf" / name).write_text("one: &config conf/ds.json\ntwo: *config\n")
    if name == "run.yaml":
        by_alias = copy({}, micro_batch=6)
        assert by_alias is not None
        assert yaml.safe_load(by_alias.text) == dict.fromkeys(("one", "two"), "/best/ds.json")


def test_a_folder_that_an_earlier_run_wrote_is_no_file_to_read(tmp_path: Path) -> None:
    assert copied(tmp_path, "data: [{batch: 3}]\noutput_dir: ../conf\n") is not None
    assert copied(tmp_path, "data: [{batch: 3}]\ndataset: ../conf\n") is None
    assert copied(tmp_path, "data: [{batch: 3}]\ndefaults: [_self_]\n") is not None


def test_a_number_that_counts_the_samples_of_all_ranks_stays_one(tmp_path: Path) -> None:
    copy = copied(tmp_path, "data: [{batch: 12}]\n", scale=4)
    assert copy is not None
    assert yaml.safe_load(copy.text) == {"data": [{"batch": 24}]}


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("data: [{batch: 3}]\n", {"micro_batch": 3}),
        ("data: [{batch: 3}]\n", {"kind": "loader"}),
        ("data: [{batch: 3}]\n", {"file": "/elsewhere/run.yaml"}),
        ("data: [{batch: 3}]\n", {"name": "run.toml"}),
        ("data: [&one {batch: 3}, *one]\n", {}),
        ("data: [{batch: 3}]\nbase: run.yaml\n", {}),
        ("data: [{batch: 3}]\nbase: ../conf/run.yaml\n", {}),
        ("data: [{batch: 3}]\nbase: !include other.yaml\n", {}),
        ("data: [{batch: 3}]\ndefaults: [_self_, {model: small}]\n", {}),
        ("data: [{size: 3}]\n", {}),
        ("", {}),
        ("data: [\n", {}),
    ],
    ids=["as it is", "no setting", "not named", "format", "alias", "beside", "above", "tag", "hydra", "gone",
         "empty", "broken"],
)  # fmt: skip
def test_nothing_is_copied_where_that_may_mean_something_else(
    tmp_path: Path, text: str, changes: dict[str, Any]
) -> None:
    assert copied(tmp_path, text, **changes) is None


OWN: dict[str, Any] = {
    "block_size": 32, TRAIN_BATCH: 64, MICRO_BATCH: 8, "optimizer": {"params": {"lr": 1e-05}},
    "zero_optimization": {"stage": 1},
}  # fmt: skip
BEST = {**OWN, TRAIN_BATCH: 8, MICRO_BATCH: 2, GRADIENT_ACCUMULATION: 4, "zero_optimization": {"stage": 0}}


def whole(folder: Path, *, own: dict[str, Any] = OWN, name: str = "ds.yml", **source: Any) -> SettingsCopy | None:
    file = folder / name
    file.write_text("# mine\n" + yaml.safe_dump(OWN))
    setting = {"kind": "setting", "file": str(file), "key": MICRO_BATCH, "own": 8, **source}
    return copy_of(folder, setting, BEST, "--deepspeed_config", "ds.yml", own=own)


def test_it_holds_the_best_config_with_every_batch_size_and_numbers_that_yaml_reads_as_numbers(tmp_path: Path) -> None:
    copy = whole(tmp_path)
    assert copy is not None
    assert yaml.safe_load(copy.text) == BEST
    assert copy.pointed(("--deepspeed_config", "ds.yml"), cwd=str(tmp_path))[1] == f"{tmp_path}/out/best_ds.yml"


def test_a_config_that_the_batch_size_follows_is_found_among_the_arguments(tmp_path: Path) -> None:
    for name, text in (("other.yaml", "lr: 3\n"), ("ds.yml", yaml.safe_dump(OWN))):
        (tmp_path / name).write_text(text)
    args = ("--model=other.yaml", "--config=ds.yml", "\0", "none.yml")
    copy = copy_of(tmp_path, {}, BEST, *args, own=OWN)
    assert copy is not None
    assert yaml.safe_load(copy.text) == BEST
    assert copy.pointed(args, cwd=str(tmp_path))[1] == f"--config={tmp_path}/out/best_ds.yml"
    assert copy_of(tmp_path, {}, BEST, *args[:1], own=OWN) is None


def test_what_the_script_adds_to_its_file_is_left_to_it(tmp_path: Path) -> None:
    added = {"steps_per_print": 7, "optimizer": {"params": {"lr": 1e-05, "betas": [0.9, 0.95]}}}
    tuned = {**BEST, **added, "zero_optimization": {"stage": 0, "overlap_comm": True}}
    (tmp_path / "ds.yml").write_text(yaml.safe_dump(OWN))
    copy = copy_of(tmp_path, {}, tuned, "ds.yml", own={**OWN, **added})
    assert copy is not None
    assert yaml.safe_load(copy.text) == {**BEST, "zero_optimization": {"stage": 0, "overlap_comm": True}}


def test_what_is_not_told_of_a_config_stays_in_the_file(tmp_path: Path) -> None:
    unsaid = {"steps_per_print": 20, "fp16": {"enabled": False}, "autotuning": {"enabled": True}}
    own, best = {**OWN, "fp16": {"loss_scale": 0}}, {**BEST, "fp16": {"loss_scale": 0}}
    (tmp_path / "ds.yml").write_text(yaml.safe_dump({**own, **unsaid, "fp16": {"loss_scale": 0, "enabled": False}}))
    copy = copy_of(tmp_path, {}, best, "ds.yml", own=own)
    assert copy is not None
    assert yaml.safe_load(copy.text) == {
        **best, "steps_per_print": 20, "fp16": {"loss_scale": 0, "enabled": False},
    }  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [{"key": f"deepspeed.{MICRO_BATCH}"}, {"kind": "loader"}, {"name": "other.yml"}, {"name": "ds.json"}],
    ids=["a part of the file", "nothing of a file", "no argument names it", "no YAML"],
)
def test_there_is_none_where_the_script_passes_something_else(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert whole(tmp_path, **changes) is None


def test_a_config_that_the_script_changes_keeps_all_but_the_micro_batch(tmp_path: Path) -> None:
    copy = whole(tmp_path, own={**OWN, "zero_optimization": {"stage": 2}})
    assert copy is not None
    assert (yaml.safe_load(copy.text), copy.names_config) == ({**OWN, MICRO_BATCH: 2}, False)


SECTION: dict[str, Any] = {
    MICRO_BATCH: 4,
    "optimizer": {"params": {"lr": 0.001, "eps": 1e-08}},
    "zero_optimization": {"stage": 1},
}
BEST_SECTION = {**SECTION, TRAIN_BATCH: 16, MICRO_BATCH: 8, GRADIENT_ACCUMULATION: 2, "zero_optimization": {"stage": 2}}
LINES = """\
# mine
seed: 1
training:
  steps: 60   # as many as needed
  deepspeed:
    train_micro_batch_size_per_gpu: 4
    optimizer: {params: {lr: 0.001, eps: 1.0e-08}}
    zero_optimization:
      stage: 1  # to be tuned

  # what follows
  batch_size: 4
"""
EXPECTED = {"seed": 1, "training": {"steps": 60, "deepspeed": BEST_SECTION, "batch_size": 4}}


def with_section(
    folder: Path, text: str, *, name: str = "run.yaml", source: dict[str, Any] | None = None
) -> SettingsCopy | None:
    (folder / name).write_text(text)
    args = ("--config", name, "--seed", "2")
    return copy_of(folder, source or {}, BEST_SECTION, *args, own=SECTION, sections=True)


def test_the_section_changes_and_nothing_else_does(tmp_path: Path) -> None:
    copy = with_section(tmp_path, LINES)
    assert copy is not None
    assert yaml.safe_load(copy.text) == EXPECTED
    assert copy.names_config
    assert copy.pointed(("--config=run.yaml",), cwd=str(tmp_path)) == [f"--config={tmp_path}/out/best_run.yaml"]


def test_json_stays_json_and_a_section_may_stand_in_one_line_of_yaml(tmp_path: Path) -> None:
    settings = {"seed": 1, "training": {"steps": 60, "deepspeed": SECTION, "batch_size": 4}}
    for indent in (None, 4):
        copy = with_section(tmp_path, json.dumps(settings, indent=indent), name="run.json")
        assert copy is not None
        assert json.loads(copy.text) == EXPECTED
    own = json.dumps(SECTION).replace("1e-08", "1.0e-08")
    copy = with_section(tmp_path, f"seed: 1\ndeepspeed: {own}  # mine\nsteps: 3\n")
    assert copy is not None
    assert yaml.safe_load(copy.text) == {"seed": 1, "deepspeed": BEST_SECTION, "steps": 3}


@pytest.mark.parametrize(
    ("key", "batch_size"), [("training.batch_size", 8), ("training.deepspeed.train_micro_batch_size_per_gpu", 4)]
)
def test_the_batch_size_changes_where_the_script_reads_it(tmp_path: Path, key: str, batch_size: int) -> None:
    source = {"kind": "setting", "file": str(tmp_path / "run.yaml"), "key": key, "own": 4}
    copy = with_section(tmp_path, LINES, source=source)
    assert copy is not None
    result = yaml.safe_load(copy.text)["training"]
    assert (result["batch_size"], result["deepspeed"]) == (batch_size, BEST_SECTION)


@pytest.mark.parametrize(
    "text",
    [
        LINES.replace("lr: 0.001", "lr: 0.002"),
        LINES + "other:\n  zero_optimization: {stage: 1}\n  train_micro_batch_size_per_gpu: 4\n",
        LINES.replace("deepspeed:", "deepspeed: &all") + "again: *all\n",
        "training: [",
    ],
    ids=["another config", "two of them", "used elsewhere", "no yaml"],
)
def test_what_cannot_be_told_or_replaced_is_left_to_the_user(tmp_path: Path, text: str) -> None:
    assert with_section(tmp_path, text) is None
    assert with_section(tmp_path, LINES, source={"kind": "loader", "own": 4}) is None, "the batch size follows it"


CONFIG = '{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "ds.json").write_text(CONFIG)
    (tmp_path / "data.json").write_text('{"rows": [1, 2]}')
    return tmp_path


@pytest.mark.parametrize(
    "args",
    [
        "a.json --deepspeed_config ds.json --lr 1",
        "--deepspeed --deepspeed_config=ds.json",
        "--deepspeed ds.json",
        "--data data.json --my-own-option ds.json",
        "train data.json ds.json",
        "--train_args_file trainer.json",
    ],
)
def test_an_argument_names_the_config_and_an_option_of_it_comes_first(folder: Path, args: str) -> None:
    (folder / "a.json").write_text(CONFIG)
    (folder / "trainer.json").write_text('{"fp16": true, "gradient_accumulation_steps": 16, "deepspeed": "ds.json"}')
    assert find_config(args.split(), cwd=folder) == folder / "ds.json"


def test_a_config_that_cannot_be_read_is_found_by_its_option_and_refused(folder: Path) -> None:
    (folder / "broken.json").write_text('{"zero_optimization": ')
    found = find_config(["--deepspeed_config", "broken.json", "other.json"], cwd=folder)
    with pytest.raises(ConfigError, match=r"broken\.json"):
        load(found)
    assert find_config(["--deepspeed", "broken.json"], cwd=folder) is None


def test_an_option_that_names_a_missing_config_is_found(folder: Path) -> None:
    for args, missing in (
        ("--lr 1 --deepspeed_config=no.json", "--deepspeed_config no.json"),
        ("--deepspeed no.json", "--deepspeed no.json"),
        ("--deepspeed_config ds.json --data no.json", ""),
        ("--deepspeed train", ""),
    ):
        assert missing_config(args.split(), cwd=folder) == missing


def test_a_settings_file_names_the_config_from_where_the_script_runs_or_from_its_own_folder(folder: Path) -> None:
    inner = folder / "settings"
    inner.mkdir()
    for named, found in (("ds.json", folder / "ds.json"), ("../ds.json", inner / "../ds.json"), ("no.json", None)):
        (inner / "run.yaml").write_text(f"model: x\ntraining:\n  deepspeed: {named}\n")
        assert find_config(["--data", "data.json", "settings/run.yaml", "--lr", "0.1"], cwd=folder) == found


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


def test_comments_and_trailing_commas_are_read(folder: Path) -> None:
    (folder / "h.json").write_text('{ // ours\n  fp16: {enabled: true},\n  optimizer: {type: "Adam"},\n}')
    assert looks_like_config(folder / "h.json")
    assert not looks_like_config(folder / "data.json")
    assert not looks_like_config(folder)
