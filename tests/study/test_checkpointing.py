"""Activation checkpointing as a knob: where it is searched, its prediction, and the training with such a result."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from optuna_dsat.config import ds_config
from optuna_dsat.config.differences import live_changes
from optuna_dsat.cost.memory import Hardware, estimate, largest_micro_batch, zero_settings
from optuna_dsat.cost.step_time import COEFFICIENTS, Columns, StepTimeModel
from optuna_dsat.errors import ConfigError
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.overlay import CHECKPOINT_EVERY, MODEL, effective_config
from optuna_dsat.study.profile.profiled import Profiled
from optuna_dsat.study.space import is_memory_bound, micro_batch_cap, searches_checkpointing, space_of
from optuna_dsat.study.spec import StudySpec
from optuna_dsat.trials import attributes
from tests.harness.landscapes import Hill
from tests.harness.simulated import SimulatedProfile, SimulatedResult
from tests.harness.small_model import CONFIG, GIB, PROFILE, profiled_of
from tests.harness.studies import StudyBench

BLOCKS = 8
HARDWARE = Hardware(world_size=2, ranks_per_node=2, device_memory_bytes=1, host_memory_bytes=PROFILE.host_memory_bytes)
OF_BLOCKS = {
    "blocks": BLOCKS,
    "block_bytes_per_sample": GIB * 9 // 10,
    "block_input_bytes_per_sample": GIB * 1 // 10,
    "block_share": 0.9,
}


@dataclass
class Short(Hill):
    """A hill in which few samples fit without checkpointing, and a forward pass costs much whatever its samples."""

    against: str = ""
    memory_gib: float = 24.0

    def profile(self, slots: int) -> SimulatedProfile:
        facts: dict[str, Any] = {"no_checkpointing": self.against} if self.against else OF_BLOCKS
        return replace(super().profile(slots), device_memory_bytes=int(self.memory_gib * GIB), **facts)

    def run(self, ds_config: Mapping[str, Any], slots: int) -> SimulatedResult:  # noqa: ARG002 - the protocol's
        self.configs.append(dict(ds_config))
        size = ds_config["train_micro_batch_size_per_gpu"]
        every = (ds_config.get(MODEL) or {}).get(CHECKPOINT_EVERY, 0)
        share = {0: 1.0, 1: 0.3, 2: 0.65}[every]
        if 18 + share * size > self.memory_gib:
            return SimulatedResult(outcome=Outcome.OUT_OF_MEMORY, startup_s=10, missing_bytes=GIB)
        forward_s = 0.02 * (size + 8)
        return SimulatedResult(
            startup_s=10,
            forward_s=forward_s,
            backward_s=(2 + 0.9 * {0: 0, 1: 1, 2: 0.5}[every]) * forward_s,
            step_s=0.02,
            peak_bytes=int((18 + share * size) * GIB),
        )


@dataclass
class OwnCheckpointing(Short):
    """A script that checkpoints its blocks itself, unless a launch switches that off."""

    def run(self, ds_config: Mapping[str, Any], slots: int) -> SimulatedResult:
        asked = ds_config.get(MODEL) or {}
        result = super().run({**ds_config, MODEL: {CHECKPOINT_EVERY: 1, **asked}}, slots)
        return replace(result, checkpoints=CHECKPOINT_EVERY in asked)


def short(**facts: Any) -> Profiled:
    """Return a profile whose device holds a few samples beyond the states."""
    profile = replace(PROFILE, **{**OF_BLOCKS, "activation_bytes_per_sample": GIB, **facts})
    config = {**CONFIG, "zero_optimization": {"stage": 0}}
    states = estimate(profile, config, micro_batch=0, hardware=HARDWARE).device_bytes
    return profiled_of(profile=replace(profile, device_memory_bytes=states + 6 * GIB))


def spec(bench: StudyBench, **changes: Any) -> StudySpec:
    return bench.spec(**{"method": "guided", "max_trials": 16, **changes})


def test_inputs_of_blocks_and_one_whole_block_stay() -> None:
    profile = short().profile
    whole, blocks, inputs = (
        profile.activation_bytes_per_sample,
        profile.block_bytes_per_sample,
        profile.block_input_bytes_per_sample,
    )
    again = (blocks - inputs) / BLOCKS
    assert profile.activation_bytes(0) == whole
    assert profile.activation_bytes(1) == pytest.approx(whole - blocks + inputs + again, abs=1)
    assert profile.activation_bytes(2) == pytest.approx(whole - (blocks - inputs) / 2 + again, abs=1)
    assert profile.checkpointed_share(3) == 3 / 8
    assert replace(profile, blocks=0).activation_bytes(1) == whole


def test_more_samples_fit_and_the_backward_pass_repeats_the_forward_pass() -> None:
    profile = short().profile
    hardware = replace(HARDWARE, device_memory_bytes=profile.device_memory_bytes)
    configs = [{**CONFIG, MODEL: {CHECKPOINT_EVERY: every}} for every in (0, 2, 1)]
    none, second, every = (largest_micro_batch(profile, config, hardware=hardware) for config in configs)
    assert none < second < every
    assert every >= 3 * none
    columns = Columns.of([zero_settings(profile, config, hardware) for config in configs])
    model = StepTimeModel.of(profile, hardware, machine={})
    logs = model.prior_coefficients().mean
    forward, backward, *_ = model.phases(logs, columns, *(np.full(3, value) for value in (4.0, 1.0, 0.5)))
    assert forward[0] == forward[1] == forward[2]
    assert backward - backward[0] == pytest.approx(columns.recomputed * forward)
    assert list(columns.recomputed) == pytest.approx([0, 0.45, 0.9])
    assert len(logs) == len(COEFFICIENTS)


def test_it_is_searched_where_memory_ends_the_micro_batches(bench: StudyBench) -> None:
    roomy = replace(short(), profile=replace(short().profile, activation_bytes_per_sample=GIB // 100))
    for known, expected in ((short(), True), (roomy, False)):
        assert is_memory_bound(spec(bench), known) is expected
        names = [tuned.name for tuned in space_of(spec(bench), known).knobs]
        assert (CHECKPOINT_EVERY in names) is expected
    assert not searches_checkpointing(spec(bench), None)
    assert not searches_checkpointing(spec(bench), short(blocks=0, no_checkpointing="it is a pipeline"))
    assert not searches_checkpointing(spec(bench, no_tune=(CHECKPOINT_EVERY,)), short())
    assert not searches_checkpointing(spec(bench, only=("batch",)), short())
    assert searches_checkpointing(spec(bench, only=(CHECKPOINT_EVERY,)), roomy)
    assert micro_batch_cap(spec(bench), short()) > micro_batch_cap(spec(bench, no_tune=(CHECKPOINT_EVERY,)), short())


@pytest.mark.parametrize("changes", [{"only": (CHECKPOINT_EVERY,)}, {"fix": {CHECKPOINT_EVERY: 1}}])
def test_a_model_that_cannot_be_checkpointed_refuses_the_option(bench: StudyBench, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="cannot be checkpointed: it is a pipeline"):
        space_of(spec(bench, **changes), short(blocks=0, no_checkpointing="it is a pipeline"))


def test_its_value_is_beside_the_config_and_deepspeed_never_gets_it(bench: StudyBench) -> None:
    space = space_of(spec(bench), short())
    lineages = {lineage[CHECKPOINT_EVERY]: lineage for lineage in space.lineages() if lineage["zero_stage"] == 0}
    assert sorted(lineages) == [0, 1, 2]
    overlays = {
        every: space.overlay({**lineage, "train_micro_batch_size_per_gpu": 2}) for every, lineage in lineages.items()
    }
    base = ds_config.effective(spec(bench).ds_config)
    configs = {every: ds_config.merge(base, overlay) for every, overlay in overlays.items()}
    assert {every: config.get(MODEL) for every, config in configs.items()} == {
        0: None, 1: {CHECKPOINT_EVERY: 1}, 2: {CHECKPOINT_EVERY: 2},
    }  # fmt: skip
    assert [space.params_of(config)[CHECKPOINT_EVERY] for config in configs.values()] == [0, 1, 2]  # type: ignore[index]
    assert len({ds_config.canonical_key(config) for config in configs.values()}) == 3
    assert live_changes(configs[0], configs[1]) is None
    assert MODEL not in effective_config(base, overlays[1])
    fixed = space_of(spec(bench, fix={CHECKPOINT_EVERY: 2}), short())
    assert CHECKPOINT_EVERY not in fixed.lineages()[0]
    assert fixed.overlay({"zero_stage": 0, "train_micro_batch_size_per_gpu": 2})[MODEL] == {CHECKPOINT_EVERY: 2}


@pytest.mark.parametrize("method", ["guided", "random"])
def test_a_search_reaches_a_larger_micro_batch_and_says_how_to_train_with_it(bench: StudyBench, method: str) -> None:
    hill = Short()
    result = bench.run(spec(bench, method=method), hill)
    trial = bench.study().trials[result.trial]
    assert trial.params[CHECKPOINT_EVERY] == result.checkpoint_every > 0
    assert trial.params["train_micro_batch_size_per_gpu"] > 6  # the most that fit without
    assert MODEL not in result.config
    assert not any(change.key.startswith(MODEL) for change in result.changes)  # no key of a DeepSpeed config
    assert f"checkpoint_blocks(model, every={result.checkpoint_every})" in result.model_change
    assert "optuna-dsat train s --storage" in result.command
    assert trial.user_attrs[attributes.OVERLAY][MODEL] == {CHECKPOINT_EVERY: result.checkpoint_every}
    folder = bench.folder / "out" / "s"
    assert json.loads((folder / "best_ds_metrics.json").read_text())[CHECKPOINT_EVERY] == result.checkpoint_every
    assert MODEL not in json.loads((folder / "best_ds_config.json").read_text())
    assert any("8 repeated blocks is searched, as memory is short" in str(event) for event in bench.news)


def test_a_reason_against_it_is_given_once_where_memory_is_short(bench: StudyBench) -> None:
    result = bench.run(spec(bench, max_trials=4, confirm=0), Short(against="its blocks contain BatchNorm1d"))
    assert (result.checkpoint_every, result.model_change) == (0, "")
    texts = [str(event) for event in bench.news]
    assert (
        sum("activation checkpointing is not searched: its blocks contain BatchNorm1d." in text for text in texts) == 1
    )


def test_a_script_that_checkpoints_itself_is_searched_without(bench: StudyBench) -> None:
    result = bench.run(spec(bench, max_trials=8, confirm=1), OwnCheckpointing(memory_gib=80.0))
    baseline, best = (bench.study().trials[number] for number in (0, result.trial))
    assert baseline.params[CHECKPOINT_EVERY] == 1
    assert best.params[CHECKPOINT_EVERY] == result.checkpoint_every == 0
    assert best.user_attrs[attributes.OVERLAY][MODEL] == {CHECKPOINT_EVERY: 0}
    assert "gradient_checkpointing=False" in result.model_change
    assert "optuna-dsat train s --storage" in result.command
    assert any("Your script checkpoints activations." in str(event) for event in bench.news)
    kept = bench.run(spec(bench, name="kept", max_trials=2, confirm=0, no_tune=(CHECKPOINT_EVERY,)), OwnCheckpointing())
    assert (kept.checkpoint_every, kept.model_change) == (1, "")
    assert "optuna-dsat train" not in kept.command


def test_a_script_that_fits_only_with_its_own_checkpointing_keeps_it(bench: StudyBench) -> None:
    hill = OwnCheckpointing(memory_gib=18.8)
    bench.run(spec(bench, max_trials=2, confirm=0), hill)
    assert [config[MODEL][CHECKPOINT_EVERY] for config in hill.configs[:3]] == [0, 1, 1]
    assert {config[MODEL][CHECKPOINT_EVERY] for config in hill.configs[1:]} == {1}
