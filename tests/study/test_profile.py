"""The stored form of a profile, and the micro-batch of its launch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from optuna_dsat.config.space_builder import SpaceRequest, build_space
from optuna_dsat.errors import ScriptFailedError
from optuna_dsat.launch.follow import follow
from optuna_dsat.launch.measurement import LaunchRecord
from optuna_dsat.launch.protocol import LaunchRequest
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.agent.preload import Preload
from optuna_dsat.runtime.events import ConfigDiffers, EngineReady, RankFailed, TrainerFound
from optuna_dsat.runtime.trial_config import PartitionedModelError
from optuna_dsat.script.arg_mapping import STAGE
from optuna_dsat.study.profile import profile
from optuna_dsat.study.profile.profile import profile_attempts
from optuna_dsat.study.profile.profiled import Profiled
from optuna_dsat.study.stored import read_stored, record_of
from optuna_dsat.study.trust import what_runs
from tests.harness.events import engine
from tests.harness.landscapes import Hill
from tests.harness.simulated import SimulatedLauncher, SimulatedResult
from tests.harness.studies import USER_CONFIG, StudyBench

SCRIPT = {"script": "/x/train.py", "cwd": "/x", "config_path": "/x/ds.json"}


def profiled_by(bench: StudyBench) -> Profiled:
    result = read_stored(bench.store, "s").profiled
    assert result is not None
    return result


def test_a_stored_profile_is_read(profiled: Profiled) -> None:
    assert Profiled.from_json(profiled.to_json()) == profiled


def test_a_script_that_accumulates_by_itself_is_told_what_follows(
    bench: StudyBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LaunchRecord, "passes_per_micro_batch", 4)
    bench.run(bench.spec(max_trials=1, confirm=0), Hill())
    (text,) = (text for text in bench.messages if "forward passes" in text)
    assert "makes 4 forward passes for each step" in text
    assert "set gradient_accumulation_steps to 4" in text


def test_samples_that_ranks_share_and_deepspeed_counts_for_each_are_announced(
    bench: StudyBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineReady, "counted_times", property(lambda _: 2, lambda *_: None), raising=False)
    bench.run(bench.spec(max_trials=1, confirm=0), Hill())
    assert sum("global batch counts these 2 times" in text for text in bench.messages) == 1


def test_a_script_that_accumulates_by_itself_as_its_config_says_has_as_many_steps_in_every_trial(
    bench: StudyBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LaunchRecord, "passes_per_micro_batch", 4)
    landscape = Hill()
    spec = bench.spec(max_trials=3, confirm=0, ds_config={**USER_CONFIG, "gradient_accumulation_steps": 4})
    bench.run(spec, landscape)
    assert [config["gradient_accumulation_steps"] for config in landscape.configs] == [1, *[4] * 3]
    assert profiled_by(bench).holds_accumulation
    (text,) = (text for text in bench.messages if "accumulat" in text)
    assert "every trial keeps your gradient_accumulation_steps" in text


@pytest.mark.parametrize(
    ("modules", "allowed", "expected"),
    [
        (("torch", "accelerate.accelerator"), [True, None], ("CPUAdamBuilder",)),
        (("torch", "transformers"), [True, None], ()),
        (("accelerate",), None, ()),  # imported, but the script calls DeepSpeed itself
    ],
)
def test_an_optimizer_that_accelerate_prepares_needs_deepspeeds_on_the_host(
    bench: StudyBench,
    profiled: Profiled,
    modules: tuple[str, ...],
    allowed: list[Any] | None,
    expected: tuple[str, ...],
) -> None:
    prepared = replace(
        profiled,
        profile=replace(profiled.profile, optimizer="AdamW"),
        preload=Preload(modules=modules),
        config_differences={} if allowed is None else {"zero_allow_untested_optimizer": allowed},
    )
    space = build_space(SpaceRequest(ds_config={"train_micro_batch_size_per_gpu": 1}, zero_stages=(1, 2)))
    assert prepared.operators(bench.spec(), space) == expected


@pytest.mark.parametrize(
    ("config", "differences", "modules", "stages"),
    [
        ({}, {}, (), (0,)),
        ({"zero_optimization": {"stage": 2}}, {}, (), (1, 2, 3)),  # it trains with ZeRO already
        ({"zero_allow_untested_optimizer": True}, {}, (), (1, 2, 3)),
        ({"zero_allow_untested_optimizer": False}, {}, (), (0,)),
        ({}, {"zero_allow_untested_optimizer": [True, None]}, (), (1, 2, 3)),  # in the script's own config
        ({}, {"zero_allow_untested_optimizer": [True, None]}, ("accelerate",), (0,)),  # accelerate's for any optimizer
        ({"zero_allow_untested_optimizer": True}, {}, ("accelerate",), (1, 2, 3)),
        ({}, {"zero_optimization.stage": [1, None]}, ("accelerate",), (1, 2, 3)),
    ],
)
def test_zero_is_searched_for_an_untested_optimizer_only_where_the_user_allows_it(
    bench: StudyBench, profiled: Profiled, config: dict[str, Any], differences: dict[str, list[Any]],
    modules: tuple[str, ...], stages: tuple[int, ...],
) -> None:  # fmt: skip
    spec = bench.spec().model_copy(update={"ds_config": {"train_micro_batch_size_per_gpu": 1, **config}})
    own_adam = replace(profiled, config_differences=differences, preload=Preload(modules=modules))
    row_norm = replace(own_adam, profile=replace(profiled.profile, optimizer="RowNorm", optimizer_tested=False))
    assert own_adam.followed_by(spec).zero_stages == (1, 2, 3)
    followed = row_norm.followed_by(spec)
    assert followed.zero_stages == stages
    assert row_norm.followed_by(followed) == followed


def test_a_study_of_an_untested_optimizer_says_why_only_zero_0_is_searched(bench: StudyBench) -> None:
    hill = Hill(optimizer="RowNorm", optimizer_tested=False)
    spec = bench.spec(max_trials=6, confirm=0)
    spec = spec.model_copy(update={"ds_config": {"train_micro_batch_size_per_gpu": 2}})
    result = bench.run(spec, hill)
    assert result.config.get("zero_optimization", {}).get("stage", 0) == 0
    assert all(config.get("zero_optimization", {}).get("stage", 0) == 0 for config in hill.configs)
    assert not any("zero_allow_untested_optimizer" in config for config in hill.configs)
    [text] = [text for text in bench.messages if "RowNorm" in text]
    assert '"zero_allow_untested_optimizer": true' in text


def _with_losses(zero: float) -> Hill:
    """Return a landscape of an untested optimizer whose losses are 1 without ZeRO, and ``zero`` with it."""

    def run(config: Mapping[str, Any]) -> SimulatedResult:
        uses_zero = config.get("zero_optimization", {}).get("stage", 0)
        return SimulatedResult(startup_s=1, forward_s=1 / (1 + uses_zero), loss=zero if uses_zero else 1.0)

    return Hill(optimizer="RowNorm", optimizer_tested=False, override=run)


@pytest.mark.parametrize(("loss", "is_searched"), [(1.0, True), (1.01, False)])
def test_losses_that_agree_have_zero_searched_for_an_untested_optimizer(
    bench: StudyBench, loss: float, is_searched: bool
) -> None:
    hill = _with_losses(loss)
    spec = bench.spec(max_trials=6, confirm=0)
    spec = spec.model_copy(update={"ds_config": {"train_micro_batch_size_per_gpu": 2}})
    launcher = SimulatedLauncher(hill, total_slots=2)
    result = bench.run_by(launcher, spec, check_loss=True)
    assert (result.config.get("zero_allow_untested_optimizer") is True) is is_searched
    assert ("RowNorm" in result.advice) is is_searched
    tried = {config.get("zero_optimization", {}).get("stage", 0) for config in hill.configs[5:]}
    assert (tried > {0}) is is_searched
    bench.session(spec.model_copy(update={"max_trials": 8}), launcher).run()  # it keeps its space
    compared = [row for row in bench.store.launches(record_of(bench.store, "s").uuid) if "zero" in row.report.launch_id]
    assert len(compared) == 3
    other = spec.model_copy(update={"name": "without"})
    assert "zero_allow_untested_optimizer" not in bench.run_by(launcher, other).config


def test_a_stored_profile_is_completed_by_the_comparison_of_losses(bench: StudyBench) -> None:
    launcher = SimulatedLauncher(_with_losses(1.0), total_slots=2)
    config = {"train_micro_batch_size_per_gpu": 2}
    spec = bench.spec(max_trials=1, confirm=0).model_copy(update={"ds_config": config})
    bench.session(spec, launcher).run()
    again = spec.model_copy(update={"name": "again", "max_trials": 6})
    result = bench.run_by(launcher, again, check_loss=True)
    assert result.config["zero_allow_untested_optimizer"] is True
    purposes = Counter(row.purpose for row in bench.store.launches(record_of(bench.store, "again").uuid))
    assert purposes["profile"] == 0


def test_of_the_thousands_of_modules_that_are_imported_the_packages_are_shown(
    bench: StudyBench, profiled: Profiled
) -> None:
    modules = ("torch", *(f"torch.part{number}" for number in range(3000)), "parts.network", "parts")
    profiled = replace(profiled, preload=Preload(modules=modules))
    (line,) = (line for line in what_runs(bench.spec(), profiled) if "imports" in line)
    assert line.split(maxsplit=1)[1] == "torch, parts (3,003 modules)"


@pytest.mark.parametrize(
    ("config", "changes", "smallest"),
    [
        ({}, {}, 1),
        ({}, {"fix": {"train_micro_batch_size_per_gpu": 16}}, 16),
        ({"train_micro_batch_size_per_gpu": [12, 6]}, {}, 6),
        ({"train_micro_batch_size_per_gpu": 4}, {"no_tune": ("train_micro_batch_size_per_gpu",)}, 4),
        ({"autotuning": {"min_train_micro_batch_size_per_gpu": 3}}, {}, 3),
        (
            {"train_micro_batch_size_per_gpu": [1, 8], "autotuning": {"min_train_micro_batch_size_per_gpu": 2}},
            {},
            8,
        ),
    ],
)
def test_the_profile_launch_uses_the_smallest_micro_batch_that_is_allowed(
    bench: StudyBench, config: dict[str, Any], changes: dict[str, Any], smallest: int
) -> None:
    spec = bench.spec(**changes, ds_config={**USER_CONFIG, **config})
    attempts = list(profile_attempts(spec))
    assert len(attempts) > 1
    assert {attempt.overlay()["train_micro_batch_size_per_gpu"] for attempt in attempts} == {smallest}


def test_profile_attempts_with_zenflow_offload_the_optimizer(bench: StudyBench) -> None:
    zero = {"stage": 1, "offload_optimizer": {"device": "cpu"}, "zenflow": {}}
    _, *attempts = profile_attempts(bench.spec(ds_config={**USER_CONFIG, "zero_optimization": zero}))
    assert [attempt.words for attempt in attempts] == ["ZeRO 2 + optimizer offload"]


def test_a_model_built_within_zero_init_climbs_to_zero_3(bench: StudyBench, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = []

    def refusing(launcher: Any, request: Any, *arguments: Any, **options: Any) -> Any:
        record, report = follow(launcher, request, *arguments, **options)
        stages.append((request.ds_config.get("zero_optimization") or {}).get("stage", 0))
        if stages[-1] == 3:
            return record, report
        failed = RankFailed(
            rank=0,
            time=0.0,
            outcome=Outcome.INVALID_CONFIG,
            phase="initialize",
            error_type=PartitionedModelError.__name__,
            message="within deepspeed.zero.Init",
            traceback="",
            missing_bytes=None,
            steps=0,
        )
        record.add(failed)
        return record, replace(report, outcome=Outcome.INVALID_CONFIG)

    monkeypatch.setattr(profile, "follow", refusing)
    spec = bench.spec(max_trials=3, confirm=0, enqueue_user_config=False)
    assert len(spec.stages) > 1
    bench.run(spec, Hill())
    assert len(stages) == 2, "no stage between is tried"
    assert stages[-1] == 3
    profiled = profiled_by(bench)
    assert Profiled.from_json(profiled.to_json()).only_zero_3
    assert {trial.params["zero_stage"] for trial in bench.study().trials} == {3}


def test_an_option_that_sets_the_stage_follows_it_and_limits_it_to_what_it_accepts(
    bench: StudyBench, profiled: Profiled
) -> None:
    stored = profiled
    profiled = replace(stored, stage_option="--stage", stage_choices={"--stage": [2, 3], "--level": [0]})
    assert Profiled.from_json(json.loads(json.dumps(profiled.to_json()))) == profiled
    followed = profiled.followed_by(bench.spec(zero_stages=(0, 2)))
    assert (followed.script.arg_mappings[STAGE], followed.zero_stages) == ("--stage", (2,))
    mapped = bench.spec(zero_stages=(0, 2), script={**SCRIPT, "arg_mappings": {STAGE: "--level"}})
    followed = profiled.followed_by(mapped)
    assert (followed.script.arg_mappings[STAGE], followed.zero_stages) == ("--level", (0,))
    assert profiled.followed_by(bench.spec(zero_stages=(0, 1))).zero_stages == (0, 1), "the user asks for these alone"
    assert stored.followed_by(bench.spec(zero_stages=(0, 2))).zero_stages == (0, 2)
    direct = replace(stored, profile=replace(stored.profile, needs_zero=True))
    assert direct.followed_by(bench.spec(zero_stages=(0, 2))).zero_stages == (2,)


def test_a_mapped_stage_is_the_scripts_own_in_the_first_profile_launch(
    bench: StudyBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    mappings = []

    def short_of_memory(launcher: Any, request: Any, *arguments: Any, **options: Any) -> Any:
        record, report = follow(launcher, request, *arguments, **options)
        mappings.append(dict(request.command.arg_mappings))
        return record, replace(report, outcome=Outcome.OUT_OF_MEMORY) if len(mappings) == 1 else report

    monkeypatch.setattr(profile, "follow", short_of_memory)
    both = {STAGE: "--stage", "gradient_accumulation_steps": "--steps"}
    bench.run(bench.spec(max_trials=1, confirm=0, script={**SCRIPT, "arg_mappings": both}), Hill())
    assert mappings == [{"gradient_accumulation_steps": "--steps"}, both]


def test_a_config_that_the_script_passes_for_a_changed_option_is_not_reported_as_its_own(
    bench: StudyBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[LaunchRequest] = []

    def measured(launcher: Any, request: LaunchRequest, *arguments: Any, **options: Any) -> Any:
        record, report = follow(launcher, request, *arguments, **options)
        if request.launch_id.startswith("profile-stage"):
            assert record.engine is not None
            record.engine = replace(record.engine, config_differences={STAGE: [3, 1]})
        requests.append(request)
        return record, report

    def prove(_spec: Any, launch: Any, _record: Any, **_: Any) -> str:
        launch(replace(requests[-1], launch_id="profile-stage-0-3"))
        return "--stage"

    monkeypatch.setattr(profile, "follow", measured)
    monkeypatch.setattr(profile, "find_stage_option", prove)
    bench.run(bench.spec(max_trials=1, confirm=0), Hill())
    assert not [text for text in bench.messages if "a DeepSpeed config of its own" in text]
    assert "The script takes its ZeRO stage from --stage; it follows each configuration." in bench.messages


def test_inputs_with_two_dimensions_of_the_micro_batch_are_profiled_at_twice_the_micro_batch_as_well(
    bench: StudyBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --fix of the length of time-first inputs, the script's own batch size was taken for the length."""
    before, landscape = LaunchRecord.add, Hill()

    def add(record: LaunchRecord, event: Any) -> Any:
        is_ambiguous = getattr(event, "observed_micro_batch", None) == 4
        return before(record, replace(event, is_ambiguous=True) if is_ambiguous else event)

    monkeypatch.setattr(LaunchRecord, "add", add)
    bench.run(bench.spec(max_trials=2, confirm=0, fix={"train_micro_batch_size_per_gpu": 4}), landscape)
    sizes = [config["train_micro_batch_size_per_gpu"] for config in landscape.configs]
    assert sizes[:2] == [4, 8]
    assert set(sizes[2:]) <= {2, 4}  # your config, and trials of the fixed size


def failing_below(least: int) -> Hill:
    """Return a landscape of a script that fails in training at less than ``least`` samples."""

    def fail(ds_config: Mapping[str, Any]) -> SimulatedResult | None:
        if ds_config["train_micro_batch_size_per_gpu"] >= least:
            return None
        return SimulatedResult(outcome=Outcome.SCRIPT_ERROR, startup_s=1.0, message="Expected more than 1 value")

    return Hill(fail)


@pytest.mark.parametrize("steps", [1, 2])
def test_a_model_that_trains_on_no_single_sample_is_profiled_and_searched_from_the_users_own_micro_batch(
    bench: StudyBench, steps: int
) -> None:
    landscape = failing_below(2)
    own = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": steps}
    bench.run(bench.spec(max_trials=4, confirm=0, ds_config={**USER_CONFIG, **own}), landscape)
    sizes = [config["train_micro_batch_size_per_gpu"] for config in landscape.configs]
    assert sizes[:2] == [1, 4]
    assert min(sizes[2:]) >= 4
    profiled = Profiled.from_json(profiled_by(bench).to_json())
    assert (profiled.least_micro_batch, profiled.holds_accumulation) == (4, False)
    assert all(trial.user_attrs["outcome"] != Outcome.SCRIPT_ERROR for trial in bench.study().trials)


def test_the_error_of_a_script_that_no_batch_size_mends_is_told_at_once(bench: StudyBench) -> None:
    own = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    spec = bench.spec(max_trials=4, confirm=0, ds_config={**USER_CONFIG, **own})
    failed, waited = Outcome.SCRIPT_ERROR, Outcome.TIMEOUT
    ends = (("NameError: name 'x' is not defined", failed, 1), ("ValueError: odd", failed, 2), ("longer", waited, 1))
    for error, outcome, launches in ends:
        landscape = Hill(
            lambda _, error=error, outcome=outcome: SimulatedResult(  # type: ignore[misc]
                outcome=outcome, startup_s=1.0, message=f"rank 0: {error}"
            )
        )
        with pytest.raises(ScriptFailedError, match=error):
            bench.run(spec.model_copy(update={"name": error[:4]}), landscape)
        assert [config["train_micro_batch_size_per_gpu"] for config in landscape.configs] == [1, 4][:launches]


@pytest.mark.parametrize("in_file", [True, False])
def test_a_script_that_insists_on_its_accumulation_steps_is_profiled_with_them_and_searched_at_every_micro_batch(
    bench: StudyBench, monkeypatch: pytest.MonkeyPatch, in_file: bool
) -> None:
    refused = SimulatedResult(outcome=Outcome.SCRIPT_ERROR, startup_s=1.0, message="assert accumulation == 2")

    def followed(*args: Any, **kwargs: Any) -> Any:
        record, report = follow(*args, **kwargs)
        if not in_file and report.outcome is Outcome.SCRIPT_ERROR:  # a launch with 2 steps shows no difference
            record.add(engine(config_differences={"gradient_accumulation_steps": [2, 1]}))
        return record, report

    monkeypatch.setattr(profile, "follow", followed)
    landscape = Hill(lambda config: None if config["gradient_accumulation_steps"] == 2 else refused)
    spec = bench.spec(max_trials=4, confirm=0)
    own = {"train_micro_batch_size_per_gpu": 4, **({"gradient_accumulation_steps": 2} if in_file else {})}
    bench.run(spec.model_copy(update={"ds_config": {**USER_CONFIG, **own}}), landscape)
    keys = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    sizes = [tuple(config[key] for key in keys) for config in landscape.configs]
    assert sizes[:4] == [(1, 1), (4, 2), (4, 1), (1, 2)]
    assert {steps for _, steps in sizes[3:]} == {2}
    profiled = Profiled.from_json(profiled_by(bench).to_json())
    assert (profiled.least_micro_batch, profiled.holds_accumulation) == (1, True)
    assert profiled.measured_with == "your own ZeRO settings and 2 accumulation steps"


def test_the_users_own_micro_batch_is_the_one_that_the_script_means(bench: StudyBench) -> None:
    engine = SimpleNamespace(config_differences={"train_batch_size": (24, None)}, data_parallel_size=4)
    record: Any = SimpleNamespace(engine=engine, trainer=None, batch_sources=None)
    spec = bench.spec()
    left = {key: value for key, value in spec.ds_config.items() if key != "train_micro_batch_size_per_gpu"}
    assert profile.own_batch(spec.model_copy(update={"ds_config": left}), record).micro_batch == 6
    failed: Any = SimpleNamespace(engine=None, trainer=None, batch_sources=None)
    assert [profile.own_batch(spec, failed, compares=does).micro_batch for does in (False, True)] == [1, 2]
    sizes = {"micro_batch": 3, "gradient_accumulation_steps": 2}
    failed.trainer = TrainerFound(rank=0, time=1.0, framework="transformers", options={}, **sizes)
    assert profile.own_batch(spec.model_copy(update={"ds_config": {}}), failed).micro_batch == 3


def test_the_seconds_of_the_profile_launch_outside_its_steps_are_kept(bench: StudyBench) -> None:
    bench.run(bench.spec(max_trials=1, confirm=0), Hill())
    assert profiled_by(bench).start_s == pytest.approx(10, rel=0.1), "a start of the simulated machine takes 10 s"


@pytest.mark.parametrize("outcome", [Outcome.OUT_OF_MEMORY, Outcome.SCRIPT_ERROR])
def test_what_only_a_failed_launch_told_of_the_scripts_config_is_kept(
    bench: StudyBench, monkeypatch: pytest.MonkeyPatch, outcome: Outcome
) -> None:
    """A launch shows no difference in what it sets to the script's own value."""
    words = {"zero_optimization.stage": [3, 2], "gradient_accumulation_steps": [2, 1]}
    landscape = Hill(
        lambda _: SimulatedResult(outcome=outcome, startup_s=1.0, message="short") if len(launched) == 1 else None
    )
    launched: list[str] = []

    def followed(launcher: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        launched.append(request.launch_id)
        record, report = follow(launcher, request, *args, **kwargs)
        if len(launched) == 1:
            record.add(ConfigDiffers(rank=0, time=1.0, differences=words))
        return record, report

    monkeypatch.setattr(profile, "follow", followed)
    spec = bench.spec(max_trials=1, confirm=0)
    bench.run(spec.model_copy(update={"ds_config": {**USER_CONFIG, "train_micro_batch_size_per_gpu": 4}}), landscape)
    assert len(launched) > 1
    profiled = profiled_by(bench)
    assert profiled.config_differences == words


@pytest.mark.parametrize(
    ("framework", "hint"),
    [
        ("transformers", 'fills in "auto" from TrainingArguments: if the value is one of scheduler.params.warmup'),
        ("lightning", "not by DeepSpeed: give scheduler.params.warmup a value"),
        (None, "not by DeepSpeed: give scheduler.params.warmup a value"),
    ],
)
def test_what_auto_stands_for_is_looked_for_where_it_is_filled_in(
    bench: StudyBench, monkeypatch: pytest.MonkeyPatch, framework: str | None, hint: str
) -> None:
    def followed(*args: Any, **kwargs: Any) -> Any:
        record, report = follow(*args, **kwargs)
        if framework is not None:
            record.trainer = TrainerFound(
                rank=0, time=1.0, framework=framework, micro_batch=2, gradient_accumulation_steps=1, options={}
            )
        return record, report

    monkeypatch.setattr(profile, "follow", followed)
    message = "TypeError: '>' not supported between instances of 'str' and 'int'"
    landscape = Hill(lambda _: SimulatedResult(outcome=Outcome.INVALID_CONFIG, startup_s=1.0, message=message))
    spec = bench.spec(max_trials=1)
    scheduler = {"scheduler": {"params": {"warmup": "auto"}}}
    with pytest.raises(ScriptFailedError, match=hint):
        bench.run(spec.model_copy(update={"ds_config": {**USER_CONFIG, **scheduler}}), landscape)


@pytest.mark.parametrize(
    ("steps", "mapped", "sizes", "own"),
    [
        (lambda micro: 16 // micro, True, [1, 4], 4),
        (lambda micro: 4 // micro, True, [1, 4], 1),
        (lambda _: 1, True, [1], 1),
        (lambda _: 4, False, [1], 4),
    ],
    ids=["of a global batch", "one step", "none but the launch's", "not mapped"],
)
def test_steps_computed_from_a_mapped_batch_size_are_read_at_the_scripts_own_size(
    bench: StudyBench, monkeypatch: pytest.MonkeyPatch, steps: Any, mapped: bool, sizes: list[int], own: int
) -> None:
    launched: list[int] = []

    def followed(launcher: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        record, report = follow(launcher, request, *args, **kwargs)
        micro = request.overlay["train_micro_batch_size_per_gpu"]
        launched.append(micro)
        assert record.engine is not None
        result = {} if steps(micro) == 1 else {"gradient_accumulation_steps": [steps(micro), None]}
        record.engine = replace(record.engine, config_differences=result)
        return record, report

    monkeypatch.setattr(profile, "follow", followed)
    mappings = {"train_micro_batch_size_per_gpu": "--bs"} if mapped else {}
    spec = bench.spec(max_trials=1, confirm=0, script={**SCRIPT, "arg_mappings": mappings})
    config = {**spec.ds_config, "train_micro_batch_size_per_gpu": 4}
    bench.run(spec.model_copy(update={"ds_config": config}), Hill())
    assert launched == sizes
    profiled = profiled_by(bench)
    assert profiled.config_differences.get("gradient_accumulation_steps", [1])[0] == own
