from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from optuna_dsat.launch.classify import classify, observed_micro_batch
from optuna_dsat.launch.launch import lone_save
from optuna_dsat.launch.protocol import LaunchFacts, Verdict
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.events import (
    BatchSourcesFound,
    ConfigDiffers,
    EngineReady,
    Event,
    RankFailed,
    RankFinished,
    RankStarted,
    StepMeasured,
)
from optuna_dsat.runtime.failure import diagnose
from tests.harness.events import engine, step_of

PRUNE = Verdict(outcome=Outcome.PRUNED, message="cannot win")
ENOUGH = Verdict(outcome=Outcome.MEASURED, message="measured to step 4: the step time is known")


def started(rank: int) -> RankStarted:
    return RankStarted(rank=rank, time=1.0, local_rank=rank, world_size=2, pid=100 + rank)


def ready(rank: int) -> EngineReady:
    return engine(rank=rank, time=2.0, train_micro_batch_size_per_gpu=4)


def step(rank: int, number: int, batch: int | None = 4) -> StepMeasured:
    return step_of(rank, number, 1.0, batch or 0, time=2.0 + number, observed_micro_batch=batch)


def failed(rank: int, outcome: str, *, time: float = 9.0, **fields: Any) -> RankFailed:
    values: dict[str, Any] = {
        "phase": "forward",
        "error_type": "RuntimeError",
        "message": f"{outcome} happened",
        "traceback": f"Traceback: {outcome} in rank {rank}",
        "missing_bytes": None,
        "steps": 0,
    }
    return RankFailed(rank=rank, time=time, outcome=Outcome(outcome), **{**values, **fields})


def finished(rank: int, reason: str = "profile_done", steps: int = 5) -> RankFinished:
    return RankFinished(rank=rank, time=9.0, reason=reason, steps=steps)


def facts(*ends: Event | None, events: Mapping[int, Sequence[Event]] | None = None, **fields: Any) -> LaunchFacts:
    """Two ranks that did five steps and ended with the given events."""
    begun = {
        rank: [started(rank), ready(rank), *(step(rank, n) for n in range(1, 6)), *([end] if end else [])]
        for rank, end in enumerate(ends)
    }
    return LaunchFacts(
        **{
            "slots": 2,
            "start_profile_step": 3,
            "end_profile_step": 5,
            "micro_batch": 4,
            "events": begun if events is None else events,
            "agent_exit_code": 1,
            "oom_kills": 0,
            **fields,
        }
    )


OOM, HOST, COMM = "out_of_memory", "host_out_of_memory", "communication_error"
INVALID, SCRIPT = "invalid_config", "script_error"
WORKER_KILLED = "DataLoader worker (pid 7) is killed by signal: Killed. "


@pytest.mark.parametrize(
    ("what", "outcome"),
    [
        (facts(finished(0), finished(1)), Outcome.MEASURED),
        (facts(finished(0), finished(1), agent_exit_code=None), Outcome.MEASURED),
        (facts(failed(0, OOM), failed(1, COMM)), Outcome.OUT_OF_MEMORY),
        (facts(failed(0, COMM, time=1.0), failed(1, OOM, time=2.0)), Outcome.OUT_OF_MEMORY),
        (facts(failed(0, SCRIPT, time=1.0), failed(1, OOM, time=2.0)), Outcome.OUT_OF_MEMORY),
        (facts(failed(0, OOM), None, exit_codes={1: -9}), Outcome.OUT_OF_MEMORY),
        (facts(failed(0, OOM), finished(1)), Outcome.OUT_OF_MEMORY),
        (facts(failed(0, OOM), None, stop=PRUNE), Outcome.OUT_OF_MEMORY),
        (facts(failed(0, HOST), failed(1, COMM)), Outcome.HOST_OUT_OF_MEMORY),
        (facts(failed(0, HOST), failed(1, OOM)), Outcome.OUT_OF_MEMORY),
        (facts(failed(0, INVALID), failed(1, SCRIPT)), Outcome.INVALID_CONFIG),
        (facts(failed(0, INVALID), failed(1, INVALID)), Outcome.INVALID_CONFIG),
        (facts(failed(0, SCRIPT), failed(1, COMM)), Outcome.SCRIPT_ERROR),
        (facts(failed(0, COMM), failed(1, COMM)), Outcome.COMMUNICATION_ERROR),
        (facts(None, None, stop=PRUNE), Outcome.PRUNED),
        (facts(None, None, stop=ENOUGH), Outcome.MEASURED),
        (facts(failed(0, OOM), None, stop=ENOUGH), Outcome.OUT_OF_MEMORY),
        (facts(finished(0), finished(1), stop=PRUNE), Outcome.PRUNED),
        (facts(None, failed(1, COMM), stop=PRUNE), Outcome.PRUNED),
        (facts(None, None, stop=Verdict(outcome=Outcome.TIMEOUT, message="slow")), Outcome.TIMEOUT),
        (facts(None, None, stop=Verdict(outcome=Outcome.STALLED, message="still")), Outcome.STALLED),
        (facts(None, failed(1, COMM), exit_codes={0: -9}, oom_kills=1), Outcome.HOST_OUT_OF_MEMORY),
        (facts(None, None, exit_codes={0: -9}, oom_kills=None), Outcome.HOST_OUT_OF_MEMORY),
        (facts(failed(0, SCRIPT, message=WORKER_KILLED), None, oom_kills=1), Outcome.HOST_OUT_OF_MEMORY),
        (facts(failed(0, SCRIPT, message=WORKER_KILLED), None), Outcome.SCRIPT_ERROR),
        (facts(None, None, exit_codes={0: -9}, oom_kills=0), Outcome.KILLED),
        (facts(None, failed(1, COMM), exit_codes={0: -9}, oom_kills=0), Outcome.KILLED),
        (facts(None, None, exit_codes={0: -9, 1: -signal.SIGABRT}), Outcome.KILLED),
        (facts(None, None, exit_codes={0: -9, 1: -signal.SIGTERM}), Outcome.KILLED),
        (facts(None, None, exit_codes={0: -9, 1: -signal.SIGSEGV}), Outcome.SCRIPT_ERROR),
        (facts(None, failed(1, SCRIPT), exit_codes={0: -9}), Outcome.SCRIPT_ERROR),
        (facts(None, None, exit_codes={0: -signal.SIGTERM, 1: -signal.SIGTERM}), Outcome.KILLED),
        (facts(None, None, exit_codes={0: -signal.SIGHUP}), Outcome.KILLED),
        (facts(None, None, exit_codes={0: -signal.SIGUSR1}), Outcome.KILLED),
        (facts(None, None, exit_codes={0: -signal.SIGXCPU}), Outcome.SCRIPT_ERROR),
        (facts(None, None, agent_exit_code=-9), Outcome.KILLED),
        (facts(None, None, agent_exit_code=-9, oom_kills=None), Outcome.KILLED),
        (facts(finished(0), None, agent_exit_code=-9), Outcome.KILLED),
        (facts(finished(0), finished(1), agent_exit_code=-9), Outcome.MEASURED),
        (facts(failed(0, SCRIPT), None, agent_exit_code=-9), Outcome.SCRIPT_ERROR),
        (facts(events={}, agent_exit_code=-9), Outcome.KILLED),
        (facts(None, None, agent_exit_code=128 + signal.SIGTERM), Outcome.KILLED),
        (facts(None, None, agent_exit_code=-9, oom_kills=2), Outcome.HOST_OUT_OF_MEMORY),
        (facts(finished(0), finished(1), exit_codes={1: -9}, oom_kills=1), Outcome.MEASURED),
        (facts(None, failed(1, COMM), exit_codes={0: -signal.SIGSEGV}), Outcome.SCRIPT_ERROR),
        (facts(None, failed(1, COMM), exit_codes={0: -signal.SIGABRT}), Outcome.COMMUNICATION_ERROR),
        (facts(None, None, exit_codes={0: -signal.SIGABRT}), Outcome.SCRIPT_ERROR),
        (facts(None, failed(1, COMM), exit_codes={0: -signal.SIGTERM}), Outcome.COMMUNICATION_ERROR),
        (facts(None, failed(1, COMM), exit_codes={0: 3}), Outcome.SCRIPT_ERROR),
        (facts(finished(0, "exit_code_3"), failed(1, COMM)), Outcome.SCRIPT_ERROR),
        (facts(finished(0, "exit_code_0", 2), finished(1, "exit_code_0", 2)), Outcome.OUT_OF_DATA),
        (facts(finished(0, "script_end", 4), finished(1, "script_end", 4)), Outcome.OUT_OF_DATA),
        (facts(finished(0, "script_end", 5), finished(1, "script_end", 5)), Outcome.MEASURED),
        (facts(finished(0), None), Outcome.SCRIPT_ERROR),
        (facts(None, None, agent_exit_code=0), Outcome.SCRIPT_ERROR),
        (facts(events={rank: [started(rank), ready(rank), finished(rank)] for rank in (0, 1)}), Outcome.SCRIPT_ERROR),
        (facts(events={}), Outcome.COMMUNICATION_ERROR),
        (facts(events={0: [started(0)]}), Outcome.COMMUNICATION_ERROR),
        (facts(events={}, exit_codes={0: 2, 1: 2}), Outcome.COMMUNICATION_ERROR),
    ],
)
def test_outcome(what: LaunchFacts, outcome: Outcome) -> None:
    assert classify(what).outcome is outcome


@pytest.mark.parametrize(
    ("said", "outcome", "words"),
    [
        ("Failed to CUDA calloc 6291456 bytes", Outcome.OUT_OF_MEMORY, "out of memory, 6 MiB"),
        ("Cuda failure 2 'out of memory'", Outcome.OUT_OF_MEMORY, "out of memory in forward"),
        ("Failed to CUDA host alloc 4194304 bytes", Outcome.HOST_OUT_OF_MEMORY, "out of host memory, 4 MiB"),
        ("socketProgress: Connection closed by remote peer", Outcome.COMMUNICATION_ERROR, "communication failed"),
    ],
)
def test_memory_that_nccl_lacked_explains_what_the_other_ranks_lost(said: str, outcome: Outcome, words: str) -> None:
    def record(rank: int, last_error: str) -> RankFailed:
        error = RuntimeError(f"NCCL error in: NCCLUtils.cpp:94, NCCL version 2.29.7\nLast error:\n{last_error}")
        result = diagnose(error, phase="forward", device="cuda", limited=False)
        return failed(
            rank, result.outcome.value, message=str(error), missing_bytes=result.missing_bytes, time=9.0 + rank
        )

    verdict = classify(facts(record(0, "remote process exited or there was a network error"), record(1, said)))
    assert verdict.outcome is outcome
    assert words in verdict.message


def test_memory_that_a_script_lacked_is_a_sentence_without_a_phase() -> None:
    verdict = classify(facts(failed(0, "out_of_memory", missing_bytes=2**30, phase="script")))
    assert verdict.message == "rank 0: out of memory, 1.00 GiB could not be allocated"


def test_a_rank_that_aborted_explains_those_that_torchrun_ended() -> None:
    verdict = classify(facts(None, None, exit_codes={0: -signal.SIGTERM, 1: -signal.SIGABRT}))
    assert (verdict.rank, verdict.message) == (1, "rank 1: killed by SIGABRT")


@pytest.mark.parametrize(("free", "told"), [(2**20, True), (2**26, False), (None, False)])
def test_a_crash_with_a_full_dev_shm_names_it(free: int | None, told: bool) -> None:
    verdict = classify(facts(None, None, exit_codes={0: -signal.SIGSEGV}, shared_memory_free=free))
    assert verdict.message.startswith("rank 0: killed by SIGSEGV")
    assert ("a full /dev/shm is the usual cause" in verdict.message) is told


@pytest.mark.parametrize(("place", "told"), [("multiprocessing/synchronize.py", True), ("train.py", False)])
def test_a_process_that_gets_no_room_in_dev_shm_names_it(place: str, told: bool) -> None:
    traceback = f'Traceback (most recent call last):\n  File "/lib/{place}", line 57, in __init__\nOSError'
    fields: dict[str, Any] = {
        "error_type": "OSError",
        "message": "[Errno 28] No space left on device",
        "traceback": traceback,
    }
    verdict = classify(facts(failed(0, "script_error", **fields)))
    assert ("a full /dev/shm is the usual cause" in verdict.message) is told


def test_out_of_memory_tells_rank_place_and_size() -> None:
    lines = ['  File "train.py"' if number == 85 else str(number) for number in range(100)]
    record = failed(1, OOM, missing_bytes=3 * 2**30, steps=2, traceback="\n".join(lines))
    verdict = classify(facts(failed(0, OOM, time=1.0), record))
    assert (verdict.rank, verdict.missing_bytes) == (1, 3 * 2**30)
    assert "rank 1" in verdict.message
    assert "3.00 GiB" in verdict.message
    assert "in forward" in verdict.message
    assert "after 2 steps" in verdict.message
    assert verdict.error_excerpt.splitlines() == lines[85:], "whole frames, of twenty lines"


def test_the_rank_that_failed_first_is_quoted() -> None:
    verdict = classify(facts(failed(0, SCRIPT, time=5.0), failed(1, SCRIPT, time=4.0)))
    assert verdict.rank == 1
    assert verdict.error_excerpt == "Traceback: script_error in rank 1"


def test_what_was_killed_from_outside_is_named_and_not_the_script() -> None:
    verdict = classify(facts(None, failed(1, COMM), exit_codes={0: -9, 1: -signal.SIGTERM}))
    assert (verdict.rank, verdict.message.partition(":")[0]) == (0, "rank 0")
    assert "killed by SIGKILL from outside" in verdict.message
    verdict = classify(facts(None, None, agent_exit_code=-9))
    assert verdict.message.startswith("torchrun, or the process that it was forked from, was killed by SIGKILL")


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE])
def test_a_signal_is_called_by_its_name(number: signal.Signals) -> None:
    assert number.name in classify(facts(None, None, exit_codes={0: -number})).message


def test_an_unknown_signal_is_called_by_its_number() -> None:
    assert "signal 100" in classify(facts(None, None, exit_codes={0: -100})).message


def test_a_script_that_ends_early_is_told_when() -> None:
    message = classify(facts(finished(0, "script_end", 4), finished(1, "script_end", 4))).message
    assert "after 4 global steps" in message
    assert "before step 5" in message


@pytest.mark.parametrize(("precision", "who"), [("bf16", "DeepSpeed, in bf16,"), ("fp16", "the loss scaler")])
def test_a_script_that_ends_after_skipped_steps_alone_is_told_why(precision: str, who: str) -> None:
    events = {
        rank: [started(rank), replace(ready(rank), precision=precision),
               RankFinished(rank=rank, time=9.0, reason="script_end", steps=0, skipped=26)]
        for rank in (0, 1)
    }  # fmt: skip
    verdict = classify(facts(events=events))
    assert verdict.outcome is Outcome.OUT_OF_DATA
    assert f"before step 5: {who} skipped 26 of 26 steps, since gradients were not finite. " in verdict.message


def test_a_rank_that_the_launcher_ended_after_another_had_ended_early_is_no_cause() -> None:
    verdict = classify(facts(None, finished(1, "script_end", 0), agent_exit_code=None))
    assert verdict.outcome is Outcome.OUT_OF_DATA
    assert verdict.message.startswith("the script ended by itself after 0 global steps")
    assert "a finished run that it may resume" in verdict.message


def test_a_script_without_an_engine_is_told_so() -> None:
    events = {rank: [started(rank), finished(rank, "script_end", 0)] for rank in (0, 1)}
    assert "never called deepspeed.initialize" in classify(facts(events=events)).message


def test_ranks_that_never_started_are_named_with_the_exit_code_of_torchrun() -> None:
    message = classify(facts(events={0: [started(0)]}, agent_exit_code=3)).message
    assert "ranks 1 never started" in message
    assert "exit code 3" in message


def with_batches(*batches: int | None, configured: int | None = 4) -> LaunchFacts:
    events = {
        rank: [started(rank), ready(rank), *(step(rank, n, b) for n, b in enumerate(batches, 1)), finished(rank)]
        for rank in (0, 1)
    }
    return facts(events=events, micro_batch=configured)


@pytest.mark.parametrize(
    ("what", "observed", "outcome"),
    [
        (with_batches(4, 4, 4, 4, 4), 4, Outcome.MEASURED),
        (with_batches(4, 4, 4, 4, 1), 4, Outcome.MEASURED),
        (with_batches(4, 4, 2, 4, 4), 4, Outcome.MEASURED),
        (with_batches(9, 9, 4, 4, 4), 4, Outcome.MEASURED),
        (with_batches(None, None, None, None, None), None, Outcome.MEASURED),
        (with_batches(8, 8, 8, 8, 8, configured=None), 8, Outcome.MEASURED),
        (with_batches(4, 4), 4, Outcome.SCRIPT_ERROR),
        (with_batches(8, 8, 8, 8, 8), 8, Outcome.INVALID_CONFIG),
        (with_batches(2, 2, 2, 2, 2), 2, Outcome.OUT_OF_DATA),
        (with_batches(8, 8), 8, Outcome.INVALID_CONFIG),
    ],
)
def test_the_observed_batch_must_be_the_configured_one(
    what: LaunchFacts, observed: int | None, outcome: Outcome
) -> None:
    assert observed_micro_batch(what) == observed
    assert classify(what).outcome is outcome


def test_a_differing_batch_is_told_with_both_numbers_and_the_remedy() -> None:
    message = classify(with_batches(8, 8, 8, 8, 8)).message
    assert "train_micro_batch_size_per_gpu 4" in message
    assert "batches of 8" in message
    assert "--arg-mapping" in message
    growing = classify(with_batches(4, 4, 4, 8, 8)).message
    assert "batches of 8, too: it changes its batch size during training" in growing
    assert "--arg-mapping" not in growing


@pytest.mark.parametrize("batch", [8, 2])
def test_a_differing_batch_is_told_without_a_file_where_the_script_has_none(batch: int) -> None:
    what = replace(with_batches(batch, batch, batch, batch, batch), config_path="")
    assert "somewhere else than " in (message := classify(what).message)
    assert "the config that it passes to deepspeed.initialize" in message


def test_a_smaller_batch_is_a_bound_whether_or_not_it_is_the_end_of_the_data() -> None:
    verdict = classify(with_batches(2, 2, 2, 2, 2))
    message = verdict.message
    assert verdict.outcome is Outcome.OUT_OF_DATA
    assert "train_micro_batch_size_per_gpu 4, but the script fed batches of at most 2" in message
    assert "set autotuning.max_train_micro_batch_size_per_gpu to 2" in message
    assert "--arg-mapping" in message


@pytest.mark.parametrize("reason", ["script_end", "out_of_memory"])
def test_caught_errors_of_the_allocator_are_out_of_memory(reason: str) -> None:
    caught = replace(finished(1, reason, 0), allocation_failures=40)
    verdict = classify(facts(finished(0, "script_end", 0), caught))
    assert (verdict.outcome, verdict.rank) == (Outcome.OUT_OF_MEMORY, 1)
    assert "out of memory 40 times: the script caught the error" in verdict.message
    on_host = classify(
        facts(finished(0, "script_end", 0), replace(caught, allocation_failures=0, host_allocation_failures=2))
    )
    assert on_host.outcome is Outcome.HOST_OUT_OF_MEMORY
    assert "host out of memory 2 times: the script caught the error" in on_host.message
    stalled = Verdict(outcome=Outcome.STALLED, message="still")
    for skipped in (facts(failed(0, COMM), caught), facts(None, caught, stop=stalled)):  # by one rank, alone
        verdict = classify(skipped)
        assert (verdict.outcome, verdict.rank) == (Outcome.OUT_OF_MEMORY, 1)
        assert "went on without the other ranks" in verdict.message
    left = replace(finished(1, "exit_code_1", 0), allocation_failures=1)
    verdict = classify(facts(left, None))
    assert (verdict.outcome, verdict.message) == (
        Outcome.OUT_OF_MEMORY,
        "rank 1: out of memory 1 time: the script caught the error, and left with exit code 1",
    )


def test_a_script_that_reduces_its_batch_when_memory_runs_out_is_out_of_memory() -> None:
    """accelerate's ``find_executable_batch_size`` does; it was said to lack data, or an option."""
    smaller = with_batches(2, 2, 2, 2, 2)
    ends = {rank: (replace(finished(rank), allocation_failures=1),) for rank in smaller.events}
    events = {
        rank: (*(e for e in events if not isinstance(e, RankFinished)), *ends[rank])
        for rank, events in smaller.events.items()
    }
    verdict = classify(replace(smaller, events=events))
    assert verdict.outcome is Outcome.OUT_OF_MEMORY
    assert "the script caught the error, and fed batches of 2 instead of 4" in verdict.message
    one_rank = classify(replace(smaller, events={**with_batches(4, 4, 4, 4, 4).events, 1: events[1]}))
    assert (one_rank.outcome, one_rank.rank, one_rank.message) == (verdict.outcome, 1, f"rank 1{verdict.message[6:]}")


@pytest.mark.parametrize(("at_step", "outcome"), [(0, "measured"), (2, "measured"), (4, "out_of_memory")])
def test_a_launch_is_not_measured_if_the_script_caught_errors_in_counted_steps(at_step: int, outcome: str) -> None:
    """It skipped every second batch, and was as fast as if it had trained on all."""
    launch = with_batches(4, 4, 4, 4, 4)
    steps = [replace(step(1, number), caught=at_step and int(number >= at_step)) for number in range(1, 6)]
    events = {**launch.events, 1: [ready(1), *steps, replace(finished(1), allocation_failures=1)]}
    verdict = classify(replace(launch, events=events, start_profile_step=3))
    assert verdict.outcome.value == outcome
    assert outcome == "measured" or verdict.message.endswith("1 time: the script caught the error, and trained on")


def test_data_smaller_than_a_micro_batch_are_out_of_data() -> None:
    what = with_batches(2, 2, 2, 2, 2)
    loader = {"batch_size": 4, "file": "t.py", "line": 1, "samples": 2, "trains": True}
    sources = BatchSourcesFound(rank=0, time=1.0, options={}, defaults={}, settings=[], loaders=[loader])
    events = {**what.events, 0: [*what.events[0], sources]}
    verdict = classify(facts(events=events, micro_batch=4))
    assert verdict.outcome is Outcome.OUT_OF_DATA
    assert "give a rank 2 samples, fewer than the micro-batch of 4" in verdict.message


def test_a_record_of_too_few_samples_is_no_error_of_the_script() -> None:
    record = failed(0, "out_of_data", error_type="TooFewSamplesError", message="The training data has 3 samples")
    verdict = classify(facts(record, failed(1, "script_error", error_type="ValueError", message="later")))
    assert verdict.outcome is Outcome.OUT_OF_DATA
    assert "has 3 samples" in verdict.message


@pytest.mark.parametrize(
    ("seconds", "message"),
    [
        (
            [0.0, 0.0, 2.5],
            "measured to step 3; 56% of the steps' time is left out: evaluation or generation between some of them",
        ),
        ([1.0, 1.0, 1.0], "measured to step 3"),
    ],
)
def test_evaluation_that_is_left_out_is_told(seconds: list[float], message: str) -> None:
    steps = [replace(step(0, n), latency_s=1 + item, evaluation_s=item) for n, item in enumerate(seconds, start=1)]
    seen = {0: [started(0), ready(0), *steps, finished(0, steps=3)]}
    verdict = classify(facts(events=seen, slots=1, start_profile_step=2, end_profile_step=3, exit_codes={}))
    assert (verdict.outcome, verdict.message) == (Outcome.MEASURED, message)


@pytest.mark.parametrize(
    ("config", "message", "text"),
    [
        (
            *({"optimizer.type": "AdmW"}, "AdmW is not a supported DeepSpeed Optimizer"),
            "; optimizer.type is 'AdmW'. Write AdamW",
        ),
        (
            *({"optimizer.type": "OneBitAdam"}, "OneBitAdam is not a supported DeepSpeed Optimizer"),
            "; optimizer.type is 'OneBitAdam'. Write one of Adam, AdamW, Adagrad, Lamb, Lion, Muon, SGD",
        ),
        ({"optimizer.type": "auto"}, "auto is not a supported DeepSpeed Optimizer", "; optimizer.type is 'auto'"),
        (
            {"scheduler.type": "Cosine"},
            "DeepSpeed does not recognize LR scheduler Cosine",
            "; scheduler.type is 'Cosine'. Write one of LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR",
        ),
        (
            {"scheduler.params.warmup_num_steps": "auto", "scheduler.params.total_num_steps": "auto"},
            "warmup_num_steps must be a positive integer, got auto",
            "; scheduler.params.warmup_num_steps is 'auto'",
        ),
        (
            {"optimizer.type": "Adam", "optimizer.params.lr": "1e-3", "gradient_clipping": "1.0"},
            "'<=' not supported between instances of 'float' and 'str'",
            "; optimizer.params.lr is '1e-3': it must be a number; gradient_clipping is '1.0': it must be a number",
        ),
        (
            {"gradient_clipping": "1.0", "optimizer.params.lr": "1e-3"},
            "Values mismatch TrainingArguments values: ds gradient_clipping=1.0 vs hf max_grad_norm=1.0",
            "; gradient_clipping is '1.0': it must be a number",
        ),
        ({"optimizer.params.lr": "auto"}, "'<=' not supported between instances of 'float' and 'str'", ""),
        ({"optimizer.type": "Adam"}, "Adam.__init__() got an unexpected keyword argument 'rate'", ""),
    ],
)
def test_an_error_that_names_no_key_is_followed_by_the_values_in_doubt(
    config: dict[str, Any], message: str, text: str
) -> None:
    error = failed(0, INVALID, phase="initialize", error_type="TypeError", message=message)
    assert classify(facts(error, None, config=config)).message == f"rank 0: TypeError in initialize: {message}{text}"
    differs = ConfigDiffers(rank=0, time=1.0, differences={key: [value, None] for key, value in config.items()})
    events = {0: [differs, error], 1: []}
    assert classify(facts(events=events)).message.endswith(f"{message}{text}")


def test_a_checkpoint_that_some_ranks_saved_without_the_others_is_noted() -> None:
    saving, silent = replace(finished(0), saves=2), finished(1)
    assert lone_save({0: silent, 1: saving}, slots=2) == 1
    assert lone_save({0: saving, 1: saving}, slots=2) is None
    assert lone_save({0: saving, 1: failed(1, OOM)}, slots=2) is None
