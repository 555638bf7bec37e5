"""``--allow``: what is refused before anything is launched, and what a search with it returns."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from optuna_dsat.config.conditions import BF16
from optuna_dsat.config.ds_config import MICRO_BATCH
from optuna_dsat.config.knobs import COMPILE, DEEPCOMPILE, KNOBS, QUANTIZED_FROZEN, ZENFLOW
from optuna_dsat.errors import ConfigError
from optuna_dsat.report.view import read_view
from optuna_dsat.runtime.overlay import MODEL
from optuna_dsat.script.trainer import ScriptTrainer
from optuna_dsat.study.profile import permission
from optuna_dsat.study.profile.permission import permitted_knobs, refused_in_words, refused_knobs
from optuna_dsat.study.requests import launch_request
from optuna_dsat.study.space import space_of
from optuna_dsat.study.spec import StudySpec
from optuna_dsat.trials import attributes
from tests.harness.landscapes import Hill
from tests.harness.simulated import SimulatedResult
from tests.harness.small_model import PROFILE, profiled_of
from tests.harness.studies import StudyBench, spec_of
from tests.study.conftest import ZERO_3_KNOBS


def spec_with(**changes: Any) -> StudySpec:
    return spec_of(Path("/x"), **{"no_tune": ZERO_3_KNOBS, **changes})


@pytest.fixture(autouse=True)
def compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permission, "package_folders", lambda name, python: ("triton",))  # noqa: ARG005
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")


def test_only_what_is_allowed_is_permitted() -> None:
    assert permitted_knobs(spec_with(), None) == frozenset()
    assert refused_knobs(spec_with(), None) == {}
    assert permitted_knobs(spec_with(allow=("compile",)), None) == {COMPILE, DEEPCOMPILE}
    assert permitted_knobs(spec_with(allow=("compile",), only=("stage", COMPILE)), None) == {COMPILE}
    assert spec_with(allow=("compile",)).identity() != spec_with().identity()
    with pytest.raises(ConfigError, match="--allow is 'fast'; it takes"):
        spec_with(allow=("fast",))


def test_what_compilation_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = {"allow": ("compile",)}
    on_cpu = spec_with(device="cpu", **allowed)
    assert refused_knobs(on_cpu, None) == {DEEPCOMPILE: "CUDA is needed"}
    profiled = profiled_of(profile=replace(PROFILE, no_compiling="the script compiles its model itself"))
    assert refused_in_words(refused_knobs(spec_with(**allowed), profiled)) == (
        "Allowed, and not searched: compile, deepcompile (the script compiles its model itself)."
    )
    assert COMPILE not in {tuned.name for tuned in space_of(spec_with(**allowed), profiled).knobs}
    monkeypatch.setattr(permission, "package_folders", lambda name, python: ())  # noqa: ARG005
    assert "Triton" in refused_knobs(spec_with(**allowed), None)[COMPILE]
    assert permitted_knobs(on_cpu, None) == {COMPILE}
    monkeypatch.setattr(shutil, "which", lambda name: None)  # noqa: ARG005
    assert "a C++ compiler" in refused_knobs(on_cpu, None)[COMPILE]
    monkeypatch.setattr(permission, "script_versions", lambda python, on: {"deepspeed": "0.15.1+cu"})  # noqa: ARG005
    assert refused_knobs(spec_with(**allowed), None)[DEEPCOMPILE] == (
        "it came with DeepSpeed 0.16.6, and the script's is 0.15.1+cu"
    )


LOSSY = {knob.name for knob in KNOBS if not knob.is_exact}


def test_what_cannot_change_numbers_here_is_named() -> None:
    allowed = {"allow": ("lossy",)}
    assert refused_knobs(spec_with(**allowed), None) == {
        BF16: "the config trains in bf16 already",
        QUANTIZED_FROZEN: "it is for frozen parameters in fp16",
    }
    assert permitted_knobs(spec_with(**allowed), None) == LOSSY - {BF16, QUANTIZED_FROZEN}
    on_cpu = refused_knobs(spec_with(device="cpu", **allowed), None)
    assert "zero_quantized_weights, zero_quantized_gradients, zero_quantized_nontrainable_weights, zenflow (CUDA" in (
        refused_in_words(on_cpu)
    )
    config = {key: value for key, value in spec_with().ds_config.items() if key != "bf16"}
    old = profiled_of(profile=replace(PROFILE, device_name="Tesla V100-SXM2-32GB", param_bytes=4))
    new = replace(old, profile=replace(old.profile, device_name="NVIDIA H100 80GB HBM3"))
    in_fp32 = spec_with(ds_config=config, **allowed)
    assert refused_knobs(in_fp32, old)[BF16] == "this GPU has no bf16"
    assert {BF16, ZENFLOW} <= permitted_knobs(in_fp32, new)
    accumulates = {**config, "gradient_accumulation_steps": 2}
    assert ZENFLOW in refused_knobs(spec_with(ds_config=accumulates, **allowed), new)
    for changes in (
        {"data_types": {"grad_accum_dtype": "fp32"}},
        {"fp16": {"enabled": "auto"}},
        {"torch_autocast": {"enabled": True}},
    ):
        assert BF16 in refused_knobs(spec_with(ds_config={**config, **changes}, **allowed), new)
    left_open = spec_with(ds_config={**config, "fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}, **allowed)
    trainer = ScriptTrainer(framework="transformers", micro_batch=1, gradient_accumulation_steps=1, options={})
    for framework, precision, why in (
        ("transformers", "fp16", None),
        ("transformers", "bf16", "the config trains in bf16 already"),
        ("transformers", "", "the script sets the precision"),
        ("", "fp16", "the script sets the precision"),
    ):
        known = replace(new, trainer=trainer if framework else None, precision=precision)
        assert refused_knobs(left_open, known).get(BF16) == why
        space = space_of(left_open, known)
        overlays = [space.overlay({**params, MICRO_BATCH: 1}) for params in space.lineages()]
        values = {str(overlay.get("bf16", {}).get("enabled", "as it is")) for overlay in overlays}
        assert values == ({"True", "as it is"} if why is None else {"as it is"})
    frozen = replace(new.profile, trainable_params=1)
    in_fp16 = spec_with(ds_config={**config, "fp16": {"enabled": True}}, **allowed)
    assert QUANTIZED_FROZEN in permitted_knobs(in_fp16, replace(new, profile=frozen))


def test_a_compiled_engine_is_not_continued_and_counts_later_steps() -> None:
    spec = spec_with(start_profile_step=1, end_profile_step=4)
    overlay = {MODEL: {COMPILE: True}}
    plain, compiled = (launch_request(spec, launch_id="l", purpose="trial", overlay=item) for item in ({}, overlay))
    assert (plain.continues, plain.start_profile_step, plain.end_profile_step) == (True, 1, 4)
    assert (compiled.continues, compiled.start_profile_step, compiled.end_profile_step) == (False, 3, 6)


@dataclass
class Compiling(Hill):
    """A hill on which a compiled model is twice as fast."""

    def run(self, ds_config: Mapping[str, Any], slots: int) -> SimulatedResult:
        result = super().run(ds_config, slots)
        if not (ds_config.get(MODEL) or {}).get(COMPILE):
            return result
        return replace(result, forward_s=result.forward_s / 2, backward_s=result.backward_s / 2)


def test_a_compiled_result_says_where_to_write_it(bench: StudyBench) -> None:
    early = {"start_profile_step": 1, "end_profile_step": 2}  # compiled launches count later steps
    result = bench.run(bench.spec(method="guided", max_trials=10, confirm=1, allow=("compile",), **early), Compiling())
    assert result.compiled
    assert "write engine.compile() after deepspeed.initialize" in result.model_change
    view = read_view(bench.store, "s")
    assert view.best is not None
    launches = [row.report.launch_id for row in view.reports[view.best.trial.number] if row.purpose == "trial"]
    assert [len(view.step_times[launch]) for launch in launches] == [2], "those that count"
    assert "optuna-dsat train s --storage" in result.command
    assert MODEL not in result.config
    assert json.loads((bench.folder / "out" / "s" / "best_ds_metrics.json").read_text())["compiled"] is True
    continued = [t for t in bench.study().trials if attributes.ROOT_LAUNCH in t.user_attrs]
    assert not any(trial.params.get(COMPILE) for trial in continued)
