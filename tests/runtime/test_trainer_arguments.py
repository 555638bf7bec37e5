"""Arguments of trainers: batch sizes of ``TrainingArguments``, also if built repeatedly, and Lightning's devices."""

from __future__ import annotations

import dataclasses
import sys
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from optuna_dsat.runtime.adapt.trainers import HuggingFaceHook, LightningHook
from optuna_dsat.runtime.events import TrainerFound
from optuna_dsat.runtime.rank import LaunchPlan
from optuna_dsat.runtime.trial_config import TrialConfig
from tests.harness.ranks import plan_of, rank_of

OWN = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8}


def test_a_config_without_zero_gets_the_section_that_accelerate_insists_on() -> None:
    config_class = hooked_config()
    laid = config_class({"gradient_clipping": 1.0}).config
    assert laid["zero_optimization"] == {"stage": 0}
    assert "zero_optimization" not in laid.scripts_own()
    assert config_class({"zero_optimization": {"stage": 2}}).config["zero_optimization"] == {"stage": 2}


def hooked_config() -> Any:
    """Return the class of a library's config, patched as in a measured launch."""

    class HfDeepSpeedConfig:
        def __init__(self, config: dict[str, Any]) -> None:
            self.config = config

        def set_stage_and_offload(self) -> None:
            pass

        def trainer_config_finalize(self) -> None:
            pass

    hook = HuggingFaceHook(plan=plan_of(), rank=rank_of(), write=print)
    hook._config_imported(SimpleNamespace(HfDeepSpeedConfig=HfDeepSpeedConfig))
    return HfDeepSpeedConfig


def test_lengths_that_the_trainer_computes_for_a_launch_are_no_values_of_the_script(tmp_path: Path) -> None:
    """The best config had 100000 steps, which the Trainer refuses, where the script's config has "auto"."""
    config_class, config = hooked_config(), TrialConfig(config_in_code(tmp_path), world_size=2)
    params = {"total_num_steps": "auto", "warmup_num_steps": 3, "warmup_min_lr": 0}
    laid = config_class(deepcopy(config_class({"scheduler": {"params": params}}).config)).config  # by accelerate, too
    assert laid["scheduler"]["params"] == {**params, "warmup_num_steps": "auto"}
    laid["scheduler"]["params"].update(total_num_steps=100_000, warmup_num_steps=5_000)
    differences = {key.rpartition(".")[2]: own for key, (own, _) in config.differences(laid).items()}
    assert differences == params


def config_in_code(folder: Path) -> LaunchPlan:
    (folder / "launch.json").write_text("{}", encoding="utf-8")
    return plan_of(config_path=str(folder / "launch.json"), user_config_path="")


def hooked(if_failed: Any = print, **overlay: Any) -> Any:
    """Return a class of arguments, patched as in a measured launch."""

    @dataclass
    class Arguments:
        per_device_train_batch_size: int = 8
        gradient_accumulation_steps: int = 1
        lr_scheduler_type: str = "linear"
        max_steps: int = -1
        num_train_epochs: float = 3.0
        deepspeed: str = "ds.json"
        fp16: bool = False
        bf16: bool = False

        def __post_init__(self) -> None:
            pass

    hook = HuggingFaceHook(plan=plan_of(overlay=overlay), rank=rank_of(), write=print, if_failed=if_failed)
    hook._arguments_imported(SimpleNamespace(TrainingArguments=Arguments))
    return Arguments


def test_the_arguments_of_a_running_trainer_follow_the_accumulation_of_another_trial(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Trainer:
        def __init__(self, args: Any) -> None:
            self.args = args

        def train(self, *_: Any) -> None:
            pass

    callbacks = SimpleNamespace(EarlyStoppingCallback=object)
    monkeypatch.setitem(sys.modules, "transformers.trainer_callback", callbacks)
    hook = HuggingFaceHook(plan=plan_of(purpose="full"), rank=rank_of(), write=Mock())
    hook._trainer_imported(SimpleNamespace(Trainer=Trainer, TrainerCallback=object))
    arguments = SimpleNamespace(per_device_train_batch_size=8, gradient_accumulation_steps=4)
    Trainer(args=arguments).train()
    assert not hook.take_on(plan_of(changes={"zero_optimization.overlap_comm": True}))
    assert arguments.gradient_accumulation_steps == 4
    assert hook.take_on(plan_of(changes={"gradient_accumulation_steps": 2}))
    assert arguments.gradient_accumulation_steps == 2


def copied(arguments: Any) -> Any:
    """Return arguments built from others, as by trl's trainers and parsers that merge a file with options."""
    fields = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(arguments)}
    return type(arguments)(**fields)


@pytest.mark.parametrize(
    "overlay",
    [
        {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1},
        {"train_micro_batch_size_per_gpu": 1},
        {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8},
        {},
    ],
)
def test_a_copy_has_the_scripts_own_batch_sizes(overlay: dict[str, Any]) -> None:
    first = hooked(**overlay)(**OWN)
    second = copied(copied(first))
    for arguments in (first, second):
        assert arguments._dsat_script_values == (4, 8, False)
        assert arguments.per_device_train_batch_size == overlay.get("train_micro_batch_size_per_gpu", 4)
        assert arguments.gradient_accumulation_steps == overlay.get("gradient_accumulation_steps", 8)


def test_a_launch_reports_the_scripts_batch_size_only_where_it_differs(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = hooked(train_micro_batch_size_per_gpu=1)(**OWN)
    HuggingFaceHook(plan=plan_of(), rank=rank_of(), write=lambda _: None)._report_arguments(arguments)
    assert "per_device_train_batch_size 1 (the script has 4), gradient_accumulation_steps 8;" in capsys.readouterr().err


def test_a_launch_that_ends_at_its_arguments_has_the_scripts_batch_sizes() -> None:
    """As GRPO does, whose batch is a multiple of its generations: the profile's micro-batch of 1 was refused."""
    found: list[TrainerFound] = []
    hooked(found.append, train_micro_batch_size_per_gpu=1)(**OWN)
    assert [(event.micro_batch, event.gradient_accumulation_steps) for event in found] == [(4, 8)]


def test_arguments_agree_with_a_launch_in_bf16_and_else_keep_their_precision() -> None:
    in_bf16 = hooked(bf16={"enabled": True}, fp16=None)(**OWN, fp16=True)
    assert (in_bf16.bf16, in_bf16.fp16) == (True, False)
    for overlay in ({}, {"bf16": {"enabled": None}}, {"bf16": {"enabled": "auto"}}):
        arguments = hooked(**overlay)(**OWN, fp16=True)
        assert (arguments.bf16, arguments.fp16) == (False, True)


@pytest.mark.parametrize("bf16", [True, False])
def test_accelerate_fabric_and_lightning_1_agree_with_a_launch_in_bf16(bf16: bool) -> None:
    class DeepSpeedPlugin:
        def __post_init__(self) -> None:
            pass

        def set_mixed_precision(self, precision: str) -> None:
            self.precision = precision

    class DeepSpeedPrecision:
        def __init__(self, precision: str | int) -> None:
            self.precision = precision

    class DeepSpeedPrecisionPlugin(DeepSpeedPrecision):
        def __init__(self, precision: str | int, amp_type: str | None = None) -> None:
            super().__init__(precision)
            self.amp_type = amp_type

    facts: dict[str, Any] = {}
    plan = plan_of(overlay={"bf16": {"enabled": True}} if bf16 else {})
    accelerate, lightning = (
        kind(plan=plan, rank=rank_of(), write=print, note_fact=facts.update)
        for kind in (HuggingFaceHook, LightningHook)
    )
    accelerate.callbacks()["accelerate.utils.dataclasses"](SimpleNamespace(DeepSpeedPlugin=DeepSpeedPlugin))
    fabric = lightning.callbacks()["lightning.fabric.plugins.precision.deepspeed"]
    fabric(SimpleNamespace(DeepSpeedPrecision=DeepSpeedPrecision))
    plugin = DeepSpeedPlugin()
    plugin.set_mixed_precision("no")
    assert (plugin.precision, facts) == ("no", {})
    plugin.set_mixed_precision("fp16")
    assert (plugin.precision, "Accelerator" in facts["bf16_argument"]) == ("bf16" if bf16 else "fp16", True)
    assert DeepSpeedPrecision("32-true").precision == ("bf16-mixed" if bf16 else "32-true")
    assert "Fabric" in facts["bf16_argument"]
    lightning_1 = lightning.callbacks()["pytorch_lightning.plugins.precision.deepspeed"]
    lightning_1(SimpleNamespace(DeepSpeedPrecisionPlugin=DeepSpeedPrecisionPlugin))
    old = DeepSpeedPrecisionPlugin(precision=16, amp_type="native")
    assert (old.precision, old.amp_type) == ("bf16" if bf16 else 16, "native")


def test_other_arguments_have_their_own() -> None:
    cls = hooked(train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=1)
    assert cls(**OWN)._dsat_script_values == (4, 8, False)
    assert cls(per_device_train_batch_size=16, gradient_accumulation_steps=2)._dsat_script_values == (16, 2, False)


@pytest.fixture
def trainer() -> Any:
    """Return a class with the arguments of Lightning's Trainer, patched as in a launch of two ranks."""

    class Trainer:
        def __init__(self, *, devices: Any = "auto", num_nodes: int = 1) -> None:
            self.asked = (devices, num_nodes)

        def fit(self) -> None:
            """Train."""

    hook = LightningHook(plan=plan_of(), rank=rank_of(2), write=print)
    hook.callbacks()["lightning.pytorch.trainer.trainer"](SimpleNamespace(Trainer=Trainer))
    return Trainer


@pytest.mark.parametrize("devices", ["auto", -1, 2, [0, 1], "2", "0,1", "-1"])
def test_devices_that_fit_the_launch_are_left_alone(trainer: Any, devices: Any) -> None:
    assert trainer(devices=devices).asked == (devices, 1)
    assert trainer().asked == ("auto", 1)


@pytest.mark.parametrize(("devices", "nodes", "ranks"), [(1, 1, 1), ([3], 1, 1), ("1", 1, 1), ("3,", 1, 1), (2, 2, 4)])
def test_others_are_refused_with_the_option_that_gives_them_their_number(
    trainer: Any, devices: Any, nodes: int, ranks: int
) -> None:
    with pytest.raises(ValueError, match=rf"this launch has 2 ranks: tune with --gpus-per-trial {ranks} "):
        trainer(devices=devices, num_nodes=nodes)
