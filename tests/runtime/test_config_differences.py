"""Differences between the script's config and the file, and configurations that a launch rejects."""

from __future__ import annotations

import builtins
import io
import json
import math
import os
import subprocess
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from optuna_dsat.runtime.adapt.config import reads_redirected
from optuna_dsat.runtime.overlay import LaidConfig, effective_config
from optuna_dsat.runtime.trial_config import TrialConfig, config_differences
from optuna_dsat.words import differences_in_words
from tests.harness.ranks import ROOT, other_python, plan_of

USER: dict[str, Any] = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
    "fp16": {"enabled": "auto"},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": [1000, 2000]},
    "steps_per_print": 10,
}
OVERLAY: dict[str, Any] = {
    "train_batch_size": None,
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 2000},
}
LAUNCH: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
    "fp16": {"enabled": "auto"},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 2000},
}


def differences(script: dict[str, Any]) -> dict[str, list[Any]]:
    return config_differences(script, user=USER, launch=LAUNCH, world_size=2)


@pytest.mark.parametrize("script", [USER, LAUNCH], ids=["the file", "the launch's file"])
def test_a_script_that_reads_the_file_has_no_differences(script: dict[str, Any]) -> None:
    assert differences({**script, "steps_per_print": 1, "wall_clock_breakdown": True}) == {}


def test_a_config_in_code_is_known_whole() -> None:
    """Its monitors and ``steps_per_print`` were missing in the best config, and xtuner reads ``fp16.enabled`` there."""
    script = {"steps_per_print": 10, "csv_monitor": {"enabled": True}, "autotuning": {"start_profile_step": 2}}
    script["fp16"] = {"enabled": False}
    found = config_differences(script, user={}, launch={}, world_size=2)
    assert found == {
        "steps_per_print": [10, None],
        "csv_monitor.enabled": [True, None],
        "autotuning.start_profile_step": [2, None],
        "fp16.enabled": [False, None],
    }
    assert config_differences({"steps_per_print": math.inf}, user={}, launch={}, world_size=2) == {}


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"optimizer": {"type": "Adam", "params": {"lr": 0.001}}}, {"optimizer.type": ["Adam", "AdamW"]}),
        ({"bf16": {"enabled": True}}, {"bf16.enabled": [True, None]}),
        ({"fp16": {"enabled": True}}, {}),
        ({"bf16": {"enabled": False}, "gradient_clipping": 0}, {}),  # DeepSpeed's defaults, as accelerate writes them
        ({"optimizer": {}}, {"optimizer.params.lr": [None, 0.001], "optimizer.type": [None, "AdamW"]}),
        ({"zero_optimization": {"stage": 1, "reduce_bucket_size": 1000}}, {}),
        (
            {"zero_optimization": {"stage": 3, "reduce_bucket_size": 7}},
            {"zero_optimization.reduce_bucket_size": [7, [1000, 2000]], "zero_optimization.stage": [3, 2]},
        ),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4}, {"gradient_accumulation_steps": [4, 2]}),
        ({"train_batch_size": 16, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1},
         {"gradient_accumulation_steps": [1, 2]}),
        ({"train_micro_batch_size_per_gpu": None, "gradient_accumulation_steps": 2}, {}),
        ({"tensorboard": {"enabled": True}}, {}),
    ],
    ids=lambda value: json.dumps(value),
)  # fmt: skip
def test_what_differs_from_both_is_told_with_both_values(changes: dict[str, Any], found: dict[str, Any]) -> None:
    assert differences({**USER, **changes}) == found


def test_accumulation_steps_that_a_script_sets_itself_are_reported_where_they_equal_the_files() -> None:
    """Its own command does not train with other steps in the file."""
    launch = {**LAUNCH, "gradient_accumulation_steps": 1}
    found = config_differences(USER, user=USER, launch=launch, world_size=2)
    assert found == {"gradient_accumulation_steps": [2, 2]}
    assert differences_in_words(found, file="ds.json") == ""
    assert config_differences(launch, user=USER, launch=launch, world_size=2) == {}


@pytest.mark.parametrize(("size", "found"), [(64, [16, 4]), (16, [4, 4]), (32, None)])
def test_a_global_batch_that_a_script_sets_in_the_launchs_file_is_its_own(size: int, found: list[int] | None) -> None:
    """The micro-batch there is the launch's; the script's own command fails with that of the best config."""
    assert differences({**LAUNCH, "train_batch_size": size}).get("train_micro_batch_size_per_gpu") == found


def test_a_global_batch_of_the_launchs_file_is_not_the_scripts_where_ranks_share_their_data() -> None:
    """A profile launch's file has that of all ranks, also for the stages of a pipeline."""
    user, launch = {"train_batch_size": 4}, {**OVERLAY, "train_batch_size": 32}
    assert config_differences(launch, user=user, launch=launch, world_size=1) == {}


def test_what_a_library_sets_by_itself_is_not_worth_a_word() -> None:
    assert differences_in_words({"zero_allow_untested_optimizer": [True, None]}, file="ds.json") == ""
    words = differences_in_words({"a": [1, None], "zero_allow_untested_optimizer": [True, None]}, file="ds.json")
    assert "differs from ds.json: a is 1 (not set in the file). " in words


@pytest.mark.parametrize("key", ["gradient_accumulation_steps", "train_micro_batch_size_per_gpu"])
@pytest.mark.parametrize(("size", "found"), [(4, [4, "auto"]), (2, None), ("auto", None)])
def test_batch_sizes_that_a_file_leaves_open_are_the_scripts(
    key: str, size: int | str, found: list[Any] | None
) -> None:
    """Two is the launch's value, contained in the file that a script reads."""
    user = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1, key: "auto"}
    launch = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1, key: 2}
    differences = config_differences({**launch, key: size}, user=user, launch=launch, world_size=2)
    assert differences == ({} if found is None else {key: found})


@pytest.mark.parametrize(
    ("given", "launched", "found"),
    [
        (3, "auto", [3, "auto"]),
        (3, 1, [3, "auto"]),
        (3, 3, None),  # as in a script that reads the launch's file
        (0, "auto", None),  # DeepSpeed's default
        ("auto", "auto", None),
    ],
)
def test_a_stage_that_a_file_leaves_open_is_what_the_script_fills_in(
    given: int | str, launched: int | str, found: list[Any] | None
) -> None:
    script, user, launch = ({"zero_optimization": {"stage": stage}} for stage in (given, "auto", launched))
    key = "zero_optimization.stage"
    assert config_differences(script, user=user, launch=launch, world_size=2).get(key) == found
    if given == launched == 3:
        assert config_differences(script, user=user, launch=launch, world_size=2, scripts={key})[key] == [3, "auto"]


def test_what_a_library_is_known_to_fill_in_by_itself_is_the_scripts_own_at_any_launch(tmp_path: Path) -> None:
    laid = LaidConfig(LAUNCH, LAUNCH)  # read from the file, which is the launch's
    laid.note_own("zero_optimization.stage", 1)
    config = trial_config(tmp_path)
    assert config.differences(laid)["zero_optimization.stage"] == [1, 2]
    assert config.differences(LaidConfig(deepcopy(laid), LAUNCH))["zero_optimization.stage"] == [1, 2]
    assert "zero_optimization.stage" not in config.differences(LAUNCH)


def trial_config(folder: Path, *, purpose: str = "trial") -> TrialConfig:
    for name, config in (("user.json", USER), ("launch.json", LAUNCH)):
        (folder / name).write_text(json.dumps(config), encoding="utf-8")
    paths = {"config_path": str(folder / "launch.json"), "user_config_path": str(folder / "user.json")}
    return TrialConfig(plan_of(purpose=purpose, overlay=OVERLAY, **paths), world_size=2)


def test_monitors_are_off_in_trials_and_on_in_a_full_run(tmp_path: Path) -> None:
    script = {**USER, "tensorboard": {"enabled": True}, "comet": {"enabled": True}, "csv_monitor": {"enabled": True}}
    trial = trial_config(tmp_path).apply_overlay({**script, "wandb": {"enabled": True}})
    assert trial["zero_optimization"]["stage"] == 1
    assert not {"tensorboard", "comet", "csv_monitor", "wandb"} & set(trial)
    assert trial_config(tmp_path, purpose="full").apply_overlay(script)["tensorboard"] == {"enabled": True}


def test_trials_start_at_the_end_of_a_curriculum(tmp_path: Path) -> None:
    """A trial that continued a launch was measured at longer sequences than one that was launched."""
    length = {"min_difficulty": 8, "max_difficulty": 64, "schedule_type": "fixed_linear"}
    section = {"data_sampling": {"curriculum_learning": {"enabled": True, "curriculum_metrics": {"seqlen": length}}}}
    script = {**USER, "data_efficiency": section}
    trial = trial_config(tmp_path).apply_overlay(script)
    metrics = trial["data_efficiency"]["data_sampling"]["curriculum_learning"]["curriculum_metrics"]
    assert metrics == {"seqlen": {**length, "min_difficulty": 64}}
    assert trial_config(tmp_path, purpose="full").apply_overlay(script)["data_efficiency"] == section


def test_without_the_files_nothing_is_said_to_differ(tmp_path: Path) -> None:
    config = trial_config(tmp_path)
    assert config.differences({"bf16": {"enabled": True}})["bf16.enabled"] == [True, None]
    assert (
        TrialConfig(plan_of(config_path="none", user_config_path="none"), world_size=2).differences(
            {"bf16": {"enabled": True}}
        )
        == {}
    )


@pytest.mark.parametrize("copied", [False, True])
def test_a_config_with_the_overlay_in_it_is_compared_as_the_script_gave_it(tmp_path: Path, copied: bool) -> None:
    script = {**USER, "train_batch_size": "auto", "gradient_accumulation_steps": 7, "zero_optimization": {"stage": 3}}
    laid = LaidConfig(script, effective_config(script, OVERLAY))
    if copied:  # a library copies its config, and the overlay is applied again
        copy = deepcopy(laid)
        laid = LaidConfig(copy, effective_config(copy, OVERLAY))
    laid["bf16"] = {"enabled": True}  # a library completes its config
    config = trial_config(tmp_path)
    assert laid["gradient_accumulation_steps"] == 2
    assert config.differences(laid) == config.differences({**script, "bf16": {"enabled": True}})
    assert config.differences(laid)["zero_optimization.stage"] == [3, 2]
    laid.note_own("gradient_accumulation_steps", 5)
    laid.note_own("gradient_accumulation_steps", 6)  # later a library has the launch's
    assert config.differences(laid)["gradient_accumulation_steps"] == [5, 2]


def test_a_stage_given_in_code_alone_is_told_also_where_the_launch_has_the_same(tmp_path: Path) -> None:
    (tmp_path / "launch.json").write_text(json.dumps(LAUNCH), encoding="utf-8")
    plan = plan_of(config_path=str(tmp_path / "launch.json"), user_config_path="", overlay=OVERLAY)
    result = TrialConfig(plan, world_size=2).differences(LAUNCH)
    assert result["zero_optimization.stage"] == [1, None]
    assert "train_micro_batch_size_per_gpu" not in result  # may come from an option that is set by the launch


def test_the_global_batch_of_a_config_in_code_is_known_with_the_ranks_that_share_it(tmp_path: Path) -> None:
    """The best config lost it, and a contradiction that DeepSpeed refuses gave a baseline that nobody asked for."""
    (tmp_path / "launch.json").write_text("{}", encoding="utf-8")
    plan = plan_of(config_path=str(tmp_path / "launch.json"), user_config_path="")
    script = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2}
    config = TrialConfig(plan, world_size=2)
    assert {key: own for key, (own, _) in config.differences(script, ranks=2).items()} == script
    assert "train_batch_size" not in config.differences(script)
    assert "train_batch_size" not in config.differences(LaidConfig(script, script), ranks=2), "a library computes it"


class PipelineModule:
    def parameters(self) -> list[Any]:
        return []


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_pipeline_is_refused_at_zero_2_and_3(tmp_path: Path, stage: int) -> None:
    config = trial_config(tmp_path)
    if stage < 2:
        config.check_model(PipelineModule(), {"zero_optimization": {"stage": stage}})
        return
    with pytest.raises(ValueError, match=rf"ZeRO 0 or 1 only; the config says ZeRO {stage}\. .*user\.json"):
        config.check_model(PipelineModule(), {"zero_optimization": {"stage": stage}})


def test_a_model_partitioned_by_zero_init_is_refused_below_zero_3(tmp_path: Path) -> None:
    model = SimpleNamespace(parameters=lambda: [SimpleNamespace(ds_id=0)])
    config = trial_config(tmp_path)
    config.check_model(model, {"zero_optimization": {"stage": 3}})
    for other in ({"zero_optimization": {"stage": 2}}, {}):
        with pytest.raises(ValueError, match=r"zero\.Init, which is for ZeRO 3.*--zero-stages 3"):
            config.check_model(model, other)


def engine(stage: int = 1, micro_batch: int = 8, accumulation: int = 2) -> SimpleNamespace:
    return SimpleNamespace(
        zero_optimization_stage=lambda: stage,
        train_micro_batch_size_per_gpu=lambda: micro_batch,
        gradient_accumulation_steps=lambda: accumulation,
    )


def test_an_engine_that_the_script_built_must_run_the_trials_config(tmp_path: Path) -> None:
    config = trial_config(tmp_path)
    config.check_engine(engine())
    with pytest.raises(ValueError, match=r"stage is 2, not 1, train_micro_batch_size_per_gpu is 4, not 8\. "):
        config.check_engine(engine(stage=2, micro_batch=4))
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps is 1, not 2.*get_ds_config_from_hparams"):
        config.check_engine(engine(accumulation=1))


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "ds.json").write_text("user")
    (tmp_path / "trial.json").write_text("trial")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "ds.json").write_text("other")
    (tmp_path / "link.ds.json").symlink_to("ds.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_way_of_reading_the_users_config_gives_the_launchs(files: Path) -> None:
    with reads_redirected(user_config=str(files / "ds.json"), config=str(files / "trial.json")):
        with open("ds.json") as stream:  # noqa: PTH123 - tests the builtin
            assert stream.read() == "trial"
        assert Path("ds.json").read_text() == "trial"
        assert (files / "ds.json").read_bytes() == b"trial"
        assert Path("link.ds.json").read_text() == "trial"
        with io.open(files / "other" / ".." / "ds.json", encoding="utf-8") as stream:  # noqa: UP020 - likewise
            assert stream.read() == "trial"


READ = """
from pathlib import Path
from optuna_dsat.runtime.adapt.config import reads_redirected
with reads_redirected(user_config=str(Path("ds.json").resolve()), config=str(Path("trial.json").resolve())):
    assert Path("ds.json").read_text() == Path("ds.json").open().read() == "trial"
assert Path("ds.json").read_text() == "user"
"""


@pytest.mark.parametrize("version", ["3.9", "3.10"])
def test_older_pythons_read_the_launchs_config_by_pathlib_too(files: Path, version: str) -> None:
    environment = {"PYTHONPATH": str(ROOT / "optuna_dsat" / "on_path")}
    subprocess.run([other_python(version), "-c", READ], env=environment, cwd=files, check=True)


def test_a_config_that_is_gone_is_the_launchs(files: Path) -> None:
    (files / "ds.json").unlink()
    with reads_redirected(user_config=str(files / "ds.json"), config=str(files / "trial.json")):
        assert Path("ds.json").read_text() == "trial"
        assert Path("other/ds.json").read_text() == "other"
        with pytest.raises(FileNotFoundError):
            Path("other/gone/ds.json").read_text()


def test_a_copy_in_the_folder_of_an_earlier_run_is_the_launchs_config_too(files: Path) -> None:
    (files / "ds.json").write_text('{"train_batch_size": 8}')
    (files / "other" / "kept.json").write_text('{\n  "train_batch_size": 8\n}\n')
    with reads_redirected(user_config=str(files / "ds.json"), config=str(files / "trial.json")):
        assert Path("other/kept.json").read_text() == "trial"
        Path("other/kept.json").write_text("changed")
        assert Path("other/kept.json").read_text() == "changed"


def test_a_further_trial_has_its_own_config_though_that_equals_the_users(tmp_path: Path) -> None:
    """The baseline had the profile launch's, and was measured at its accumulation where the script sets that."""
    user, *launches = (str(tmp_path / name) for name in ("ds.json", "profile/ds_config.json", "trial-0/ds_config.json"))
    for path, size in ((user, 4), (launches[0], 1), (launches[1], 4)):
        Path(path).parent.mkdir(exist_ok=True)
        content = {"train_micro_batch_size_per_gpu": size, "gradient_accumulation_steps": size}
        Path(path).write_text(json.dumps(content))
    profile, trial = (plan_of(config_path=path, user_config_path=user) for path in launches)
    config = TrialConfig(profile, world_size=2)
    with reads_redirected(user_config=user, config=profile.config_path):
        config.take_on(trial)
    assert (config.micro_batch, config.accumulation, config.micro_batches) == (4, 4, frozenset({1, 4}))


def test_batch_sizes_that_the_launchs_file_leaves_open_are_those_that_deepspeed_gets(tmp_path: Path) -> None:
    path, sizes = tmp_path / "ds_config.json", ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    path.write_text(json.dumps(dict.fromkeys(sizes, "auto")))
    plan = plan_of(config_path=str(path), user_config_path=str(path), overlay={sizes[0]: 3, sizes[1]: 5})
    config = TrialConfig(plan, world_size=2)
    assert (config.micro_batch, config.accumulation) == (3, 5)


@pytest.mark.parametrize(("purpose", "expected"), [("profile", {2, 8}), ("trial", {2})])
def test_the_users_micro_batch_is_none_of_a_trial_with_another(
    tmp_path: Path, purpose: str, expected: set[int]
) -> None:
    """40 texts as long as it, of a script without a loader, were counted as so many samples, and 40 was not tried."""
    user, launch = (tmp_path / name for name in ("ds.json", "ds_config.json"))
    for path, size in ((user, 8), (launch, 2)):
        path.write_text(json.dumps({"train_micro_batch_size_per_gpu": size}))
    plan = plan_of(config_path=str(launch), user_config_path=str(user), purpose=purpose)
    assert TrialConfig(plan, world_size=2).micro_batches == expected


@pytest.mark.parametrize(
    ("script", "size"),
    [
        ({"train_batch_size": 32}, 16),
        ({"train_batch_size": 32, "gradient_accumulation_steps": 4}, 4),
        ({"train_batch_size": 32, "gradient_accumulation_steps": 0}, 32),  # DeepSpeed refuses it by its own message
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 0}, 0),
    ],
)
def test_the_micro_batch_of_the_scripts_global_batch_is_known(
    tmp_path: Path, script: dict[str, int], size: int
) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text('{"train_micro_batch_size_per_gpu": 1}')
    config = TrialConfig(plan_of(config_path=str(path), user_config_path=""), world_size=2)
    config.apply_overlay(script)
    assert config.micro_batches == {1, size}


def test_other_files_descriptors_and_writing_are_left_alone(files: Path) -> None:
    with reads_redirected(user_config=str(files / "ds.json"), config=str(files / "trial.json")):
        assert Path("other/ds.json").read_text() == "other"
        with open(os.open("ds.json", os.O_RDONLY)) as stream:  # noqa: PTH123 - likewise
            assert stream.read() == "user"
        with pytest.raises(FileNotFoundError):
            Path("missing/ds.json").read_text()
        Path("ds.json").write_text("changed")
    assert Path("ds.json").read_text() == "changed"
    assert Path("trial.json").read_text() == "trial"


@pytest.mark.usefixtures("files")
def test_open_is_itself_again_afterwards() -> None:
    before = builtins.open
    with pytest.raises(ZeroDivisionError), reads_redirected(user_config="ds.json", config="trial.json"):
        raise ZeroDivisionError
    assert builtins.open is before
    assert io.open is before


def test_who_names_the_file_that_is_read_is_told(files: Path) -> None:
    words: list[bool] = []
    with reads_redirected(user_config=str(files / "ds.json"), config=str(files / "trial.json"), on_read=words.append):
        Path("ds.json").read_text()
        Path("trial.json").read_text()
        (files / "other" / "ds.json").read_text()
    assert words == [False, True]
