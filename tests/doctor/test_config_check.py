"""Findings on a DeepSpeed config, by the installed DeepSpeed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import pytest

from optuna_dsat.config.user_file import READ_KEYS, correction_of_type
from optuna_dsat.doctor import config_check
from optuna_dsat.doctor.config_check import check
from optuna_dsat.doctor.finding import Finding, Status
from optuna_dsat.doctor.libraries import run_probe

ADAM = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


@pytest.fixture(scope="module")
def examined() -> tuple[dict[str, Finding], dict[str, Any]]:
    """Return the findings on a config with an error of each kind, and what the probe of DeepSpeed returned."""
    config = {
        "train_micro_batch_size_per_gpu ": 4,
        "train_batch_size": 12,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": "1.0",
        "zero_allow_untested_optimizer": "false",
        "stage3_max_live_parameters": 10,
        "remark": "a key of nobody's",
        "elasticity": {"enabled": False},
        "fp16": {"enabled": True},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": "1e-3", "torch_adamm": True}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 5}},
        "zero_optimization": {
            "stage": 2,
            "stge": 3,
            "reduce_bucket_size": "2e8",
            "offload_param": {"device": "cpu"},
            "cpu_offload": True,
            "offload_optimizer": {"device": "cpu"},
        },
        "wandb": {"enabled": "hf_QkZrTnWvXyBcDfGhJkLmNpQrStVwXyZa"},
        "prescale_gradients": True,
    }
    probed: list[dict[str, Any]] = []

    def probe(*args: Any, **options: Any) -> dict[str, Any]:
        probed.append(run_probe(*args, **options))
        return probed[0]

    with patch.object(config_check, "run_probe", probe):
        return by_name(check(config, ranks=2)), probed[0]


@pytest.fixture
def wrong(examined: tuple[dict[str, Finding], dict[str, Any]]) -> dict[str, Finding]:
    return examined[0]


def test_what_deepspeed_reads_and_names_is_known(examined: tuple[object, dict[str, Any]]) -> None:
    _, probed = examined
    assert set(probed["asked"][""]) <= READ_KEYS
    assert correction_of_type("Adamw2", probed["choices"]["optimizer.type"]) == "Write AdamW"


@pytest.mark.parametrize(
    ("key", "status", "text", "remedy"),
    [
        (
            "train_micro_batch_size_per_gpu ",
            Status.PROBLEM,
            "does not read it",
            "Write train_micro_batch_size_per_gpu.",
        ),
        (
            "train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps",
            Status.FATAL,
            "= 16",
            "to 16",
        ),
        ("gradient_clipping", Status.FATAL, "'1.0', in quotes", "Write 1.0"),
        ("zero_allow_untested_optimizer", Status.PROBLEM, "'false', in quotes", "Write false"),
        ("stage3_max_live_parameters", Status.PROBLEM, "but in zero_optimization", "Move it into zero_optimization."),
        ("remark", Status.NOTE, "does not read it", ""),
        ("elasticity", Status.FATAL, "removed", "Remove elasticity."),
        ("fp16.enabled, bf16.enabled", Status.FATAL, "simultaneously", "Change one of fp16.enabled, bf16.enabled."),
        ("optimizer.params.torch_adamm", Status.FATAL, "no such parameter", "Remove optimizer.params.torch_adamm."),
        ("optimizer.params.lr", Status.FATAL, "'1e-3', in quotes", "Write 1e-3 for optimizer.params.lr"),
        ("scheduler.params.total_num_steps", Status.FATAL, "WarmupDecayLR needs", "Add scheduler.params.total_num_st"),
        ("zero_optimization.stge", Status.FATAL, "no such key", "or write zero_optimization.stage."),
        ("zero_optimization.reduce_bucket_size", Status.FATAL, "'2e8', in quotes", "Write 2e8"),
        ("zero_optimization.offload_param", Status.NOTE, "ZeRO 3 alone", ""),
        ("zero_optimization.cpu_offload, zero_optimization.offload_optimizer", Status.FATAL, "together", "Change one"),
        ("prescale_gradients", Status.FATAL, "reduce_scatter", "Set zero_optimization.reduce_scatter to false."),
    ],
)
def test_each_wrong_key_is_named_with_cause_and_remedy(
    wrong: Mapping[str, Finding], key: str, status: Status, text: str, remedy: str
) -> None:
    if key == "elasticity" and key not in wrong:
        pytest.skip("this DeepSpeed has elastic training")
    finding = wrong[key]
    assert finding.status is status
    assert text in finding.text
    assert remedy in finding.remedy if remedy else not finding.remedy


def test_a_secret_in_the_place_of_another_value_is_not_shown_and_fatal_findings_come_first(
    wrong: Mapping[str, Finding],
) -> None:
    assert "wandb.enabled" in wrong
    assert not any("hf_QkZr" in finding.text + finding.remedy for finding in wrong.values())
    order = [Status.FATAL, Status.PROBLEM, Status.NOTE]
    assert sorted(wrong.values(), key=lambda item: order.index(item.status)) == list(wrong.values())


@pytest.fixture
def no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the installed DeepSpeed refuse nothing, and not be loaded: that takes seconds."""
    nothing = {"version": "1", "refused": [], "asked": {}, "quoted": [], "models": {}, "choices": {}}
    monkeypatch.setattr(config_check, "run_probe", lambda *_args, **_options: nothing)


HUGGING_FACE: dict[str, Any] = {
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-4, "warmup_num_steps": "auto", "total_num_steps": "auto"},
    },
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "sub_group_size": 1e9, "overlap_comm": True},
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": "auto",
}


@pytest.mark.usefixtures("no_probe")
def test_auto_is_a_note_where_nothing_is_known_of_the_script_and_fatal_where_nobody_fills_it_in() -> None:
    (finding,) = check(HUGGING_FACE)
    assert finding.status is Status.NOTE
    assert "optimizer.params.lr" in finding.name
    assert "fp16.enabled" not in finding.name  # DeepSpeed takes its default there
    config = {"train_micro_batch_size_per_gpu": "auto", "optimizer": ADAM}
    (finding,) = check(config, fills_auto=False)
    assert (finding.name, finding.status) == ("train_micro_batch_size_per_gpu", Status.FATAL)


@pytest.mark.usefixtures("no_probe")
def test_arguments_of_the_trainer_that_disagree_with_the_config_are_named() -> None:
    arguments = {"learning_rate": 5e-5, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    result = by_name(check(HUGGING_FACE, ranks=2, fills_auto=True, trainer_arguments=arguments))
    assert set(result) == {"scheduler.params.warmup_max_lr", "train_batch_size"}
    assert "2 x 2 x 2 ranks" in result["train_batch_size"].text
    assert result["train_batch_size"].status is Status.FATAL


def test_a_value_that_deepspeed_refuses_is_named_with_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Users read "Input should be 0, 1, 2, 3 or 3", in the words of pydantic."""
    refusal = {"keys": ["zero_optimization.stage"], "text": "Input should be 0, 1, 2, 3 or 3", "model": "M"}
    nothing = {"version": "1", "asked": {}, "quoted": [], "models": {}, "choices": {}}
    monkeypatch.setattr(config_check, "run_probe", lambda *_args, **_options: {**nothing, "refused": [refusal]})
    (finding,) = check({"train_batch_size": 4, "optimizer": ADAM, "zero_optimization": {"stage": 7}})
    assert finding.text == "zero_optimization.stage is 7: it must be 0, 1, 2 or 3."


def test_what_zero_refuses_of_an_optimizer_is_named_with_the_stage_and_a_misspelt_schedule_with_the_name() -> None:
    config: dict[str, Any] = {"train_batch_size": 4, "optimizer": {"type": "SGD"}, "zero_optimization": {"stage": 1}}
    result = by_name(check({**config, "scheduler": {"type": "WarmupRL", "params": {}}}))
    assert result["scheduler.type"].remedy == "Write WarmupLR."
    finding = result["optimizer.type, zero_optimization.stage"]
    assert finding.data["keys"] == ["optimizer.type", "zero_optimization.stage"]
    assert "zero_allow_untested_optimizer" in finding.text


@pytest.mark.usefixtures("no_probe")
def test_batch_sizes_that_fit_some_number_of_ranks_are_not_wrong_where_it_is_unknown() -> None:
    sizes = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
    assert check({**sizes, "optimizer": ADAM}) == []
    (finding,) = check({**sizes, "train_batch_size": 25, "optimizer": ADAM})
    assert finding.status is Status.FATAL
    assert "rank" not in finding.text


@pytest.mark.usefixtures("no_probe")
def test_a_config_without_batch_sizes_is_a_note_as_a_trainer_may_add_them() -> None:
    sizes: tuple[dict[str, Any], ...] = ({}, {"train_batch_size": None})
    for given in sizes:
        (finding,) = check({**given, "optimizer": ADAM})
        assert finding.name == "train_micro_batch_size_per_gpu, train_batch_size"
        assert finding.status is Status.NOTE
