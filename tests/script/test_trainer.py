"""What is known of a script's trainer, and the config that it accepts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from optuna_dsat.config import ds_config
from optuna_dsat.errors import ConfigError, UsageError
from optuna_dsat.runtime.events import TrainerFound, decode_event, encode_event
from optuna_dsat.script.arg_mapping import map_arguments
from optuna_dsat.script.trainer import ScriptTrainer
from optuna_dsat.study.profile.script import check_sizes, follow_script, follow_trainer, user_config
from optuna_dsat.study.requests import script_command
from optuna_dsat.study.spec import ScriptSpec, StudySpec, make_spec

OPTIONS = {
    "train_micro_batch_size_per_gpu": "--per_device_train_batch_size",
    "gradient_accumulation_steps": "--gradient_accumulation_steps",
}
AUTO = dict.fromkeys(("train_batch_size", *OPTIONS), "auto")


def trainer_of(**changes: Any) -> ScriptTrainer:
    result: dict[str, Any] = {"framework": "transformers", "micro_batch": 8, "gradient_accumulation_steps": 4}
    event = TrainerFound(rank=0, time=1.0, **{**result, "options": OPTIONS, **changes})
    decoded = decode_event(encode_event(event))
    assert decoded == event
    assert isinstance(decoded, TrainerFound)
    return ScriptTrainer.from_event(decoded)


def spec_of(config: dict[str, Any], **script: Any) -> StudySpec:
    paths = {"script": "/x/train.py", "cwd": "/x", "config_path": "/x/ds.json"}
    return make_spec(
        name="s",
        method="random",
        script=ScriptSpec(**{**paths, **script}),
        ds_config=config,
        device="cuda",
        slots_per_trial=2,
        output_dir="/x/out",
    )


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (AUTO, (8, 4)),
        ({}, (8, 4)),
        ({**AUTO, "gradient_accumulation_steps": 2}, (8, 2)),
        ({**AUTO, "train_micro_batch_size_per_gpu": [2, 6]}, (2, 4)),
        ({**AUTO, "train_batch_size": 32}, (16, 1)),
    ],
)
def test_what_the_config_leaves_open_is_what_the_script_says(config: dict[str, Any], expected: tuple[int, int]) -> None:
    present, _ = user_config(follow_trainer(spec_of(config), trainer_of()))
    triangle = ds_config.batch_triangle(present, world_size=2)
    assert (triangle.micro_batch, triangle.gradient_accumulation_steps) == expected


def test_options_keep_the_users_spelling_and_give_way_to_the_users_mapping() -> None:
    spec = spec_of(
        AUTO, args=("--gradient-accumulation-steps=2",), arg_mappings={"train_micro_batch_size_per_gpu": "--bs"}
    )
    assert follow_trainer(spec, None) == spec
    assert follow_trainer(spec, trainer_of()).script.arg_mappings == {
        "train_micro_batch_size_per_gpu": "--bs",
        "gradient_accumulation_steps": "--gradient-accumulation-steps",
    }


@pytest.mark.parametrize(
    ("args", "expected"),
    [("--bs 6", 6), ("--x --bs=5", 5), ("--bs many", 1), ("--bs", 1), ("--bsx 6", 1), ("--bs=6 --bs 4", 4)],
)
def test_the_option_of_a_mapping_says_what_the_config_leaves_open(args: str, expected: int) -> None:
    script = {"args": tuple(args.split()), "arg_mappings": {"train_micro_batch_size_per_gpu": "--bs"}}
    for config, size in ((AUTO, expected), ({"train_micro_batch_size_per_gpu": 3}, 3)):
        present, _ = user_config(follow_trainer(spec_of(config, **script), None))
        assert present["train_micro_batch_size_per_gpu"] == size


def test_the_option_of_the_global_batch_says_it_passed_or_by_default() -> None:
    mapped = {"arg_mappings": {"train_batch_size": "--batch"}}
    for config, args, expected in (({}, (), 8), ({}, ("--batch", "6"), 3), ({"train_batch_size": 2}, (), 1)):
        spec = follow_trainer(spec_of(config, args=args, **mapped), None, {"--batch": 16})
        assert user_config(spec)[0]["train_micro_batch_size_per_gpu"] == expected


@pytest.mark.parametrize(("key", "size"), [("train_micro_batch_size", 6), ("train_batch_size_per_gpu", 4)])
def test_options_for_the_samples_of_all_ranks_or_steps_say_the_micro_batch(key: str, size: int) -> None:
    script = {"args": ("--batch", "12"), "arg_mappings": {key: "--batch"}}
    spec = follow_trainer(spec_of({"gradient_accumulation_steps": 3}, **script), None)
    assert spec.ds_config["train_micro_batch_size_per_gpu"] == size
    check_sizes(spec)
    with pytest.raises(UsageError, match="The value of --batch, a batch size, is not known"):
        check_sizes(follow_trainer(spec_of({}, arg_mappings={key: "--batch"}), None))


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({"train_micro_batch_size_per_gpu": [2, 4], "gradient_accumulation_steps": [4, 4]}, (2, 4)),
        ({"train_micro_batch_size_per_gpu": [2, 4]}, (2, 4)),
        ({"gradient_accumulation_steps": [1, 4]}, (4, 1)),
        ({"gradient_clipping": [1.0, None]}, (4, 4)),
    ],
)
def test_a_global_batch_of_the_file_gives_way_to_batch_sizes_of_the_script(
    own: dict[str, list[Any]], expected: tuple[int, int]
) -> None:
    spec = spec_of({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4})
    followed = follow_script(spec, differences=own, trainer=None, defaults={}, batch=None, ranks=2)
    config, _ = user_config(followed)
    assert (config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]) == expected


def test_batch_sizes_in_code_are_kept_unless_they_contradict_each_other() -> None:
    sizes = {"train_batch_size": [32, None], "train_micro_batch_size_per_gpu": [8, None]}
    sizes["gradient_accumulation_steps"] = [2, None]
    known: dict[str, Any] = {"trainer": None, "defaults": {}, "batch": None, "ranks": 2}
    assert follow_script(spec_of({}), differences=sizes, **known).ds_config["train_batch_size"] == 32
    sizes["train_batch_size"] = [64, None]
    with pytest.raises(ConfigError, match="set train_batch_size to 32"):
        user_config(follow_script(spec_of({}), differences=sizes, **known))
    option = {"train_micro_batch_size_per_gpu": "--batch"}  # the launch's: the script may compute the others from it
    assert (
        "train_batch_size" not in follow_script(spec_of({}, arg_mappings=option), differences=sizes, **known).ds_config
    )


def test_an_option_for_the_global_batch_counts_the_ranks_with_different_samples() -> None:
    """Stages of a pipeline share theirs."""
    spec = spec_of({"train_micro_batch_size_per_gpu": 4})
    assert spec.slots_per_trial == 2
    followed = follow_script(spec, differences={}, trainer=None, defaults={}, batch=None, ranks=1)
    assert (script_command(spec).data_parallel_size, script_command(followed).data_parallel_size) == (2, 1)


def test_what_the_code_sets_is_left_to_the_user_in_plain_words() -> None:
    config = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2, "train_batch_size": 12}
    assert trainer_of().advice(config) == ""
    assert trainer_of(options={}).advice(config) == (
        "Set per_device_train_batch_size=3 and gradient_accumulation_steps=2 in the script's TrainingArguments: it has "
        "to agree with the config."
    )
    assert (
        trainer_of(options={})
        .advice({**config, "gradient_accumulation_steps": 4})
        .startswith("Set per_device_train_batch_size=3 in the script's")
    )
    assert trainer_of(options={}).advice({"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 4}) == ""
    lightning = trainer_of(framework="lightning", micro_batch=None, options={})
    assert lightning.advice(config) == (
        "Set accumulate_grad_batches=2 in the script's Trainer: it has to agree with the config."
    )
    assert lightning.trainable(config) == {"train_micro_batch_size_per_gpu": 3, "train_batch_size": 12}
    assert trainer_of().trainable(config) == config


IN_BF16 = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 4, "bf16": {"enabled": True}}


def test_bf16_is_set_where_the_script_takes_its_precision() -> None:
    words = "Set bf16=True and fp16=False in the script's TrainingArguments: it has to agree with the config."
    assert trainer_of(options={}).advice(IN_BF16, precision="fp16") == words
    assert trainer_of(options={}).advice(IN_BF16, precision="bf16") == ""
    lightning = trainer_of(framework="lightning", micro_batch=None, options={})
    assert lightning.advice(IN_BF16, precision="fp32").startswith(
        'Set precision="bf16-mixed" in the script\'s Trainer:'
    )
    options = {**OPTIONS, "bf16.enabled": "--bf16"}
    assert trainer_of(options=options).advice(IN_BF16, precision="fp32") == ""
    spec = follow_trainer(spec_of(AUTO, args=("--fp16", "--do_train")), trainer_of(options=options))
    mappings, given = spec.script.arg_mappings, spec.script.args
    args = map_arguments(given, mappings, IN_BF16, world_size=2)
    assert args[:2] == ("--fp16", "--do_train")
    assert args[-4:] == ("--bf16", "True", "--fp16", "False"), "the last of several options counts"
    left_open = {**IN_BF16, "bf16": {"enabled": "auto"}}
    assert "--bf16" not in map_arguments(given, mappings, left_open, world_size=2)


IN_FILE = {"kind": "setting", "file": "/a/run.yaml", "key": "train.batch", "own": 8, "scale": 1}


def test_a_size_in_a_settings_file_is_named_there_unless_a_copy_says_it() -> None:
    trainer = replace(trainer_of(options={}), source=IN_FILE)
    assert "train.batch in run.yaml (now 8) and gradient_accumulation_steps (now 4) follow" in trainer.announcement()
    kept = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 4}
    assert trainer.advice(kept) == "Set train.batch in /a/run.yaml to 3: it has to agree with the config."
    assert trainer.advice(kept, settings_written=True) == ""
    both = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}
    in_code = "gradient_accumulation_steps=2 in the script's TrainingArguments: it has to agree with the config."
    assert trainer.advice(both) == f"Set train.batch in /a/run.yaml to 3 and {in_code}"
    assert trainer.advice(both, settings_written=True) == f"Set {in_code}"
    assert follow_trainer(spec_of(AUTO), trainer).script.batch_source == IN_FILE


def test_a_profile_keeps_it() -> None:
    for trainer in (trainer_of(), replace(trainer_of(), source=IN_FILE)):
        assert ScriptTrainer.from_json(trainer.to_json()) == trainer
    assert ScriptTrainer.from_json({k: v for k, v in trainer_of().to_json().items() if k != "source"}) == trainer_of()


PARAMS = {"warmup_min_lr": 0, "warmup_num_steps": 5, "total_num_steps": 1536}


@pytest.mark.parametrize(
    ("micro_batch", "params"),
    [(4, PARAMS), (8, {"warmup_min_lr": 0, "warmup_num_steps": "auto", "total_num_steps": "auto"})],
)
def test_the_hugging_face_trainer_computes_the_schedule_of_another_batch(
    micro_batch: int, params: dict[str, Any]
) -> None:
    trainer = ScriptTrainer(framework="transformers", micro_batch=4, gradient_accumulation_steps=1, options={})
    config = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": 1,
        "scheduler": {"type": "WarmupDecayLR", "params": PARAMS},
    }
    assert trainer.trainable(config) == {**config, "scheduler": {"type": "WarmupDecayLR", "params": params}}
