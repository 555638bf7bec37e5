from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from optuna_dsat.runtime.overlay import effective_config, merge, read_config, without_impossible_zero


class AdamW:
    pass


class DeepSpeedCPUAdam:
    pass


def test_merge_goes_deep_removes_by_none_and_mutates_nothing() -> None:
    base = {"a": {"b": 1, "c": 2}, "d": [1], "e": 3}
    overlay = {"a": {"c": None, "f": {"g": 4}}, "e": None, "h": {"i": None}}
    merged = merge(base, overlay)
    assert merged == {"a": {"b": 1, "f": {"g": 4}}, "d": [1], "h": {}}
    merged["d"].append(2)
    merged["a"]["f"]["g"] = 5
    assert base == {"a": {"b": 1, "c": 2}, "d": [1], "e": 3}
    assert overlay["a"] == {"c": None, "f": {"g": 4}}


def test_an_object_replaces_a_plain_value() -> None:
    assert merge({"zero": "auto"}, {"zero": {"stage": 1}}) == {"zero": {"stage": 1}}


T, G, M = "train_batch_size", "gradient_accumulation_steps", "train_micro_batch_size_per_gpu"


@pytest.mark.parametrize(
    ("base", "overlay", "expected"),
    [
        ({T: 64, G: 2, M: 4}, {M: 8, G: 1}, {G: 1, M: 8}),
        ({T: 64, G: 2}, {M: 8}, {G: 2, M: 8}),
        ({T: 64}, {M: 8}, {T: 64, M: 8}),
        ({G: 2, M: 4}, {T: 32, M: 8}, {T: 32, M: 8}),
        ({G: 2, M: 4}, {T: 32}, {T: 32, M: 4}),
        ({T: 64, M: 4}, {T: 32, G: 2}, {T: 32, G: 2}),
        ({T: 64, G: 2, M: 4}, {T: 16, G: 2, M: 8}, {T: 16, G: 2, M: 8}),
        ({T: 64, G: 2, M: 4}, {T: None, M: 8}, {G: 2, M: 8}),
        ({T: 64, G: 2, M: 4}, {}, {T: 64, G: 2, M: 4}),
    ],
)
def test_the_overlay_wins_in_the_triangle_of_batch_sizes(
    base: dict[str, Any], overlay: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert effective_config(base, overlay) == expected


def test_deprecated_offload_keys_give_way_to_the_overlay() -> None:
    base = {"zero_optimization": {"stage": 2, "cpu_offload": True, "cpu_offload_param": True}}
    overlay = {"zero_optimization": {"offload_optimizer": {"device": "none"}}}
    zero = effective_config(base, overlay)["zero_optimization"]
    assert zero == {"stage": 2, "offload_optimizer": {"device": "none"}, "cpu_offload_param": True}
    assert effective_config(base, {"zero_optimization": {"offload_optimizer": None}}) == {
        "zero_optimization": {"stage": 2, "cpu_offload_param": True}
    }


@pytest.mark.parametrize(
    ("optimizer", "device", "forced"),
    [
        (AdamW(), "cpu", False),
        (AdamW(), "nvme", False),
        (AdamW(), "none", None),
        (DeepSpeedCPUAdam(), "cpu", None),
        (None, "cpu", None),
    ],
)
def test_a_client_optimizer_is_let_through_under_offload(
    optimizer: object | None, device: str, forced: bool | None
) -> None:
    overlay = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": device}}}
    config = effective_config({}, overlay, client_optimizer=optimizer)
    assert config.get("zero_force_ds_cpu_optimizer") is forced


def test_the_users_own_word_on_client_optimizers_stands() -> None:
    overlay = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    config = effective_config({"zero_force_ds_cpu_optimizer": True}, overlay, client_optimizer=AdamW())
    assert config["zero_force_ds_cpu_optimizer"] is True


def test_the_autotuning_section_goes() -> None:
    assert effective_config({"autotuning": {"enabled": True}, "fp16": {"enabled": True}}, {}) == {
        "fp16": {"enabled": True}
    }


def test_configs_are_read_as_deepspeed_reads_them(tmp_path: Path) -> None:
    config = {"train_batch_size": 4, "long": "x" * 5000}
    plain = tmp_path / "plain.json"
    plain.write_text(json.dumps(config), encoding="utf-8")
    commented = tmp_path / "commented.json"
    commented.write_text("{\n  # four\n  train_batch_size: 4\n}", encoding="utf-8")
    encoded = base64.urlsafe_b64encode(json.dumps(config).encode()).decode()
    assert read_config(config) == config
    assert read_config(str(plain)) == read_config(plain) == read_config(encoded) == config
    assert read_config(str(commented)) == {"train_batch_size": 4}


@pytest.mark.parametrize("config", ["/nowhere/config.json", 7, ["a"], "cut.json"])
def test_what_is_no_config_is_refused_with_its_value(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cut.json").write_text('{"train_batch_size": ', encoding="utf-8")
    with pytest.raises(ValueError, match=r"takes a config as a dict.*got") as refused:
        read_config(config)
    assert ("which is no file in" in str(refused.value)) == (config == "/nowhere/config.json")


def test_a_list_is_no_config(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    path.write_text("[1]", encoding="utf-8")
    with pytest.raises(ValueError, match="is a JSON object"):
        read_config(path)


def test_auto_in_the_overlay_gives_way_to_what_was_filled_in() -> None:
    filled = {"optimizer": {"params": {"lr": 0.1}}, "gradient_clipping": 1.0}
    overlay = {"optimizer": {"params": {"lr": "auto", "eps": "auto"}}, "gradient_clipping": "auto"}
    assert merge(filled, overlay) == {"optimizer": {"params": {"lr": 0.1, "eps": "auto"}}, "gradient_clipping": 1.0}


def test_zero_that_splits_an_optimizer_is_not_laid_on_an_engine_without_one() -> None:
    own = {"zero_optimization": {"stage": 0}, "bf16": {"enabled": True}}
    for stage, left in ((0, 0), (1, 0), (2, 0), (3, 3)):
        laid = {**own, "zero_optimization": {"stage": stage}}
        assert without_impossible_zero(laid, own) == {**own, "zero_optimization": {"stage": left}}
    assert without_impossible_zero({"zero_optimization": {"stage": 2}}, {}) == {}
