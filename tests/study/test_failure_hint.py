"""Remedies are given where the error supports them; structures at which no launch ran are stated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from optuna.distributions import CategoricalDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from optuna_dsat.errors import ScriptFailedError
from optuna_dsat.launch.classify import NO_ENGINE
from optuna_dsat.launch.follow import follow
from optuna_dsat.launch.measurement import LaunchRecord
from optuna_dsat.launch.protocol import LaunchRequest
from optuna_dsat.outcome import Outcome
from optuna_dsat.study.end_reason import describe_structure_failures
from optuna_dsat.study.profile import profile
from optuna_dsat.study.profile.failure_hint import failure_hint
from optuna_dsat.study.profile.profiled import Profiled
from optuna_dsat.study.stored import read_stored
from optuna_dsat.trials import attributes
from optuna_dsat.trials.lineage import MICRO_BATCH, ZERO_STAGE
from tests.harness.events import step_of
from tests.harness.landscapes import Hill
from tests.harness.studies import StudyBench, spec_of

AUTO = {"zero_optimization": {"reduce_bucket_size": "auto", "zenflow": {"select_interval": "auto"}}}
QUANTIZED = {"optimizer": {"type": "AdamW"}, "zero_optimization": {"zero_quantized_weights": True}}
OFFLOAD = {"optimizer": {"type": "AdamW"}, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}


@pytest.mark.parametrize(
    ("message", "config", "hint"),
    [
        ("ValueError: This op had not been implemented on CPU backend", AUTO, ""),
        (
            "ValueError: This op had not been implemented on CPU backend",
            QUANTIZED,
            ". Tune on GPUs, or remove from the config what needs them: zero_optimization.zero_quantized_weights",
        ),
        (
            "ValueError in initialize: Type fp16 is not supported on your device",
            {},
            ". Set fp16.enabled to false, or tune on devices that support it",
        ),
        (
            "Exception in step: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run",
            {},
            ". Losses or gradients are never finite: look at data, learning rate, initial values, or use bf16",
        ),
        ("RuntimeError: the mean is 0", AUTO, ""),
        (
            "EOFError: EOF when reading a line",
            AUTO,
            ". The script asks a question on its standard input, which is empty in trials: answer it by an option, or "
            "have it ask only if sys.stdin.isatty()",
        ),
        (
            "RuntimeError in initialize: self.dim() cannot be 0 to view Float as Byte (different element sizes)",
            {},
            ". DeepSpeed rejects the model: a parameter is a scalar. Give it a dimension, such as torch.ones(1)",
        ),
        (
            "DeepSpeedConfigError in initialize: NVIDIA Apex AMP integration has been removed. Use DeepSpeed 'fp16'",
            {"fp16": {"enabled": False}, "amp": {"enabled": False}},
            ". Remove amp from the config",
        ),
        (
            "DeepSpeedConfigError: MiCS ZeRO-3 sharding has been removed; 'zero_optimization.mics_shard_size' is no",
            {"zero_optimization": {"stage": 3, "mics_shard_size": 8}},
            ". Remove zero_optimization.mics_shard_size from the config",
        ),
        ("RuntimeError: the file has been removed", {}, ""),
        ("ValueError: correct values that mismatch TrainingArguments values: lr; set these to 'auto'", AUTO, ""),
        (
            "ValidationError: zero_optimization.reduce_bucket_size is 'auto': it must be a whole number",
            AUTO,
            '. "auto" is filled in by the Hugging Face Trainer and, in part, by accelerate and Lightning, not by '
            "DeepSpeed: give zero_optimization.reduce_bucket_size a value",
        ),
        (
            "TypeError: AdamW.__init__() got an unexpected keyword argument 'torch_adam'",
            {**AUTO, "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}},
            ". Remove optimizer.params.torch_adam from the config: what DeepSpeed builds for it does not take it",
        ),
        ("TypeError: forward() got an unexpected keyword argument 'labels'", AUTO, ""),
        (
            "TypeError: OneCycle.__init__() missing 2 required positional arguments: 'cycle_min_lr' and 'cycle_max_lr'",
            {"scheduler": {"type": "OneCycle"}},
            ". Add scheduler.params.cycle_min_lr, scheduler.params.cycle_max_lr to the config",
        ),
        ("TypeError: Head.__init__() missing 1 required positional argument: 'dim'", AUTO, ""),
        (
            "ValidationError: zero_optimization.reduce_bucket_size is '2e8': it must be a whole number",
            {},
            ". Write zero_optimization.reduce_bucket_size as a number or true or false, without quotes",
        ),
        (
            "ValidationError: zero_optimization.cpu_offload_params: DeepSpeed has no such key",
            {},
            ". Remove zero_optimization.cpu_offload_params, or write zero_optimization.cpu_offload_param",
        ),
        (
            "ValidationError: zero_optimization.elastic: DeepSpeed has no such key",
            {},
            ". Remove zero_optimization.elastic",
        ),
        (
            "RuntimeError: Error building extension 'cpu_adam': c++: not found",
            OFFLOAD,
            ". DeepSpeed builds this operator for optimizer.type, zero_optimization.offload_optimizer.device in the "
            "config. Install a C++ compiler and ninja, or set optimizer.params.torch_adam to true, which needs none",
        ),
        (
            "RuntimeError: Error building extension 'async_io': c++: not found",
            {},
            ". DeepSpeed builds this operator. Install a C++ compiler and ninja",
        ),
    ],
)
def test_a_remedy_is_given_where_the_error_supports_it(message: str, config: dict[str, Any], hint: str) -> None:
    spec = spec_of(Path("/x")).model_copy(update={"ds_config": config})
    report: Any = SimpleNamespace(outcome=Outcome.INVALID_CONFIG, message=message, error_excerpt="")
    assert failure_hint(spec, report, LaunchRecord(world_size=2, start_profile_step=1)) == hint


@pytest.mark.parametrize(
    ("text", "args", "hint"),
    [
        ("parser.add_argument('--do_train')", [], ". If it trains only with --do_train, add that"),
        ("if training_args.do_train: train()", ["--do_eval"], ". If it trains only with --do_train, add that"),
        ("if args.do_train: train()", ["--do_train=0"], ". If it trains only with an option, add that"),
        ("model.train(mode=True)", [], ". If it trains only with an option, add that"),
    ],
)
def test_a_script_that_does_not_train_is_reported_with_its_option_for_that(
    tmp_path: Path, text: str, args: list[str], hint: str
) -> None:
    (tmp_path / "train.py").write_text(text)
    spec = spec_of(tmp_path, script={"script": "train.py", "args": args, "cwd": str(tmp_path), "config_path": ""})
    report: Any = SimpleNamespace(outcome=Outcome.SCRIPT_ERROR, message=f"rank 0: {NO_ENGINE}", error_excerpt="")
    assert failure_hint(spec, report, LaunchRecord(world_size=2, start_profile_step=1)) == hint


def trial(
    stage: int, message: str = "", outcome: Outcome = Outcome.SCRIPT_ERROR, *, micro_batch: int = 4
) -> FrozenTrial:
    return create_trial(
        params={ZERO_STAGE: stage, MICRO_BATCH: micro_batch},
        distributions={ZERO_STAGE: CategoricalDistribution([0, 1, 2, 3]), MICRO_BATCH: IntDistribution(1, 64)},
        state=TrialState.FAIL if message else TrialState.COMPLETE,
        value=None if message else 1.0,
        user_attrs={attributes.OUTCOME: outcome.value if message else "measured", attributes.MESSAGE: message},
    )


def test_an_error_is_stated_once_with_the_structures_that_never_ran() -> None:
    trials = [trial(0), trial(1, "rank 1: TypeError: no"), trial(2, "rank 0: TypeError: no"), trial(0, "rank 0: lr")]
    trials.append(trial(3, "no rank has moved for 31 s", Outcome.STALLED))
    assert describe_structure_failures(trials) == (
        "No launch ran at ZeRO 1, ZeRO 2: TypeError: no. No launch ran at ZeRO 3: no rank has moved for 31 s. "
        "The search tried no more at ZeRO 1, ZeRO 2, ZeRO 3."
    )


def test_a_structure_that_was_tried_at_larger_micro_batches_only_is_not_blamed() -> None:
    trials = [trial(1), trial(0, "rank 0: AssertionError: (16, 64)", micro_batch=16)]
    assert describe_structure_failures(trials) == (
        "No launch ran at ZeRO 0, tried above micro-batch 4 only, the largest that ran: AssertionError: (16, 64)."
    )


def test_failures_by_chance_are_not_stated() -> None:
    assert describe_structure_failures([trial(1, "rank 0: lost", Outcome.COMMUNICATION_ERROR), trial(2)]) == ""


def test_what_the_search_avoids_is_stated_and_a_stage_that_runs_outside_it() -> None:
    own = create_trial(
        value=1.0,
        user_attrs={
            attributes.OUTCOME: "measured",
            attributes.CONFIG: {MICRO_BATCH: 4, "zero_optimization": {"stage": 0}},
        },
    )
    trials = [own, trial(1, "rank 1: TypeError: no"), trial(2, "rank 0: TypeError: no")]
    assert describe_structure_failures(trials) == (
        "No launch ran at ZeRO 1, ZeRO 2: TypeError: no. The search tried no more at ZeRO 1, ZeRO 2, ZeRO 3. "
        "--zero-stages 0 searches the ZeRO stage that ran."
    )


@pytest.mark.parametrize("skipped", [True, False])
def test_a_loop_is_suspected_unless_steps_were_skipped(skipped: bool) -> None:
    record = LaunchRecord(world_size=1, start_profile_step=1)
    record.add(step_of(step=1, skipped=skipped))
    report: Any = SimpleNamespace(outcome=Outcome.OUT_OF_DATA, message="", error_excerpt="")
    assert ("dsat_reporting_context" in failure_hint(spec_of(Path("/x")), report, record)) is not skipped


@pytest.mark.parametrize("variable", ["SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"])
def test_a_script_that_reads_its_rank_where_another_launcher_sets_it_is_told_what_there_is(variable: str) -> None:
    message = f"rank 1: KeyError: '{variable}'"
    report: Any = SimpleNamespace(outcome=Outcome.SCRIPT_ERROR, message=message, error_excerpt="")
    hint = failure_hint(spec_of(Path("/x")), report, LaunchRecord(world_size=2, start_profile_step=1))
    assert hint.startswith(f". {variable} is set by another launcher")
    assert "have RANK" in hint
    assert f"--env '{variable}=$RANK'" in hint
    spec = spec_of(Path("/x"))
    given = spec.model_copy(update={"script": spec.script.model_copy(update={"environment": {variable: "$RANK"}})})
    assert failure_hint(given, report, LaunchRecord(world_size=2, start_profile_step=1)) == "", "it has it already"


@pytest.mark.parametrize("train_launcher", [None, "torchrun"])
def test_a_script_gets_the_variables_of_another_launcher_that_it_lacks_unless_its_command_has_torchrun(
    bench: StudyBench, monkeypatch: pytest.MonkeyPatch, train_launcher: str | None
) -> None:
    seen: list[LaunchRequest] = []

    def lacking(launcher: Any, request: LaunchRequest, *arguments: Any, **options: Any) -> Any:
        record, report = follow(launcher, request, *arguments, **options)
        seen.append(request)
        if "SLURM_PROCID" in request.env:
            return record, report
        return record, replace(report, outcome=Outcome.SCRIPT_ERROR, message="rank 0: KeyError: 'SLURM_PROCID'")

    monkeypatch.setattr(profile, "follow", lacking)
    spec = bench.spec(max_trials=1, confirm=0, train_launcher=train_launcher)
    own = spec.script.model_copy(update={"environment": {"MINE": "$RANK"}})
    spec = spec.model_copy(update={"script": own})
    if train_launcher is not None:
        with pytest.raises(ScriptFailedError, match="SLURM_PROCID is set by another launcher"):
            bench.run(spec, Hill())
        return
    result = bench.run(spec, Hill())
    assert len(seen) == 2
    stored = read_stored(bench.store, "s").profiled
    assert stored is not None
    variables = Profiled.from_json(stored.to_json()).followed_by(spec).script.environment
    assert variables == seen[1].env
    assert variables.items() >= {"SLURM_PROCID": "$RANK", "SLURM_NTASKS": "$WORLD_SIZE"}.items()
    assert "OMPI_COMM_WORLD_RANK" not in variables
    assert "optuna-dsat train s" in result.command
    with pytest.raises(ValueError, match="SLURM_PROCID"):
        Profiled.from_json({**stored.to_json(), "environment": {"SLURM_PROCID": "/elsewhere"}})
