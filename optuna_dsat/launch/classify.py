"""The outcome of a launch: pure functions of its observations.

Logs are never parsed. The rules, in order of precedence:

1. An ``out_of_memory`` record of any rank: it explains the communication errors of the others, and holds even if the
   launch was being stopped at that moment. Then a ``host_out_of_memory`` record.
2. A stop of the launch: by the pruner, at its time limit, because all ranks were silent, or because the step time was
   known well enough (then rules 8 and 9 decide).
3. A rank that the kernel killed because the host was out of memory: SIGKILL not sent by the launcher, and no record.
   The kernel's count of such kills decides. If it cannot be read, SIGKILL of a rank means ``host_out_of_memory``, since
   nothing else commonly sends it; if it has not changed, another process sent it (rule 5).
4. An ``out_of_data`` record (a loader that cannot fill a batch), then ``invalid_config``, then ``script_error``.
5. A rank that ended without a record: after a fault or with an exit code (``script_error``), or by a signal sent by
   another process, which may also have ended torchrun or the process it was forked from (``killed``). SIGABRT and
   SIGTERM rank below a communication error: NCCL and gloo abort processes, and torchrun ends the siblings of a failed
   rank with SIGTERM.
6. A ``communication_error`` record, or ranks that never started. As in rule 2, it is ``out_of_memory`` if another rank
   caught that and ended: the script skipped the batch there alone.
7. A rank that ended before the profile steps were done: ``out_of_data`` if the script ended normally while training
   (``out_of_memory`` if an allocator counted failures, which the script then caught), else ``script_error``. Also if
   so many steps were skipped that none is left to count.
8. All profile steps done, but the engine's batch differs from the configured batch (``invalid_config``), a rank caught
   out of memory in counted steps, or no step of positive duration can be read (``script_error``).
9. Otherwise the launch is measured.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping

from optuna_dsat.config.ds_config import AUTO
from optuna_dsat.config.user_file import QUOTED_NUMBER, correction_of_type
from optuna_dsat.launch.measurement import LaunchRecord
from optuna_dsat.launch.protocol import LaunchFacts, Verdict
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.events import (
    STEPS_SKIPPED,
    BatchSourcesFound,
    ConfigDiffers,
    EngineReady,
    Event,
    RankFailed,
    RankFinished,
    RankStarted,
    StepMeasured,
)
from optuna_dsat.runtime.failure import failure_line
from optuna_dsat.script.batch_rule import samples_per_rank
from optuna_dsat.signals import ENDING
from optuna_dsat.words import bytes_in_words, outcome_in_words, steps_in_words, things_in_words

_EXCERPT_LINES = 20
"""Maximum lines of a traceback in a report; the last lines are kept."""

_SENT_BY_OTHERS = frozenset({*ENDING, signal.SIGKILL}) - {signal.SIGXCPU}
"""Signals sent by other processes to end a process; a process's own fault does not raise them."""

_LEAST_SHARED_BYTES = 2**25
"""Free bytes in shared memory below which communication on the CPU may fail."""

_SHARED_MEMORY_FULL = "; a full /dev/shm is the usual cause (in a container: --shm-size)"

_FROM_OUTSIDE = " from outside: neither by the search nor, by its count, the kernel's OOM killer"

_WORKER_KILLED = "is killed by signal: Killed"
"""torch's error for a data loader worker that ended by SIGKILL."""

_QUIET_SIGNALS = frozenset({signal.SIGABRT, signal.SIGTERM})
"""Signals that are usually the consequence of another rank's failure, not the cause."""

_ALONE = "went on without the other ranks, which waited for it"

_TYPES = {
    "optimizer": "is not a supported DeepSpeed Optimizer",
    "scheduler": "does not recognize LR scheduler",
}
"""Section -> DeepSpeed's error for its ``type``, which does not contain the key (0.19)."""
MISMATCH = "mismatch TrainingArguments"
"""The Hugging Face Trainer's error for values that differ from its own, which recommends 'auto'."""
NO_ENGINE = "the script never called deepspeed.initialize"


def classify(facts: LaunchFacts) -> Verdict:
    """Return the outcome of a launch by the rules in the module docstring."""
    rules = (
        _out_of_memory,
        _stopped,
        _killed_by_kernel,
        _own_failure,
        _killed_from_outside,
        _silent_death,
        _communication,
        _left_early,
        _never_updated,
        _batch_differs,
        _nothing_counts,
    )
    verdict = next((verdict for rule in rules if (verdict := rule(facts)) is not None), None)
    return verdict or Verdict(outcome=Outcome.MEASURED, message=_measured_message(facts))


def observed_micro_batch(facts: LaunchFacts, *, rank: int | None = None) -> int | None:
    """Return the largest batch fed in a counted step, by any rank or one (the last of an epoch may be smaller)."""
    steps = [(step.number, step.observed_micro_batch) for step in facts.of(StepMeasured) if rank in (None, step.rank)]
    seen = [(number, size) for number, size in steps if size is not None]
    counted = [size for number, size in seen if number >= facts.start_profile_step]
    return max(counted or [size for _, size in seen], default=None)


def _failures(facts: LaunchFacts, *outcomes: Outcome) -> list[RankFailed]:
    """Return the failure records with one of ``outcomes``, earliest first."""
    failures = [event for event in facts.of(RankFailed) if event.outcome in outcomes]
    return sorted(failures, key=lambda event: (event.time, event.rank))


def _from_record(record: RankFailed, text: str, *, cause: str = "") -> Verdict:
    where = f" in {record.phase}" if record.phase not in ("script", "between") else ""
    after = f" after {things_in_words(record.steps, 'step')}" if record.steps else ""
    lines = record.traceback.rstrip().splitlines()[-_EXCERPT_LINES:]
    first = next((place for place, line in enumerate(lines) if line.startswith(("Traceback ", "  File "))), 0)
    excerpt = "\n".join(lines[first:])
    return Verdict(
        outcome=record.outcome,
        message=f"rank {record.rank}: {f'{text}{where}{after}'.removesuffix(',')}{cause and f': {cause}'}",
        error_excerpt=excerpt or f"{record.error_type}: {record.message}",
        missing_bytes=record.missing_bytes,
        rank=record.rank,
    )


def _out_of_memory(facts: LaunchFacts) -> Verdict | None:
    for outcome, text in (
        (Outcome.OUT_OF_MEMORY, "out of memory"),
        (Outcome.HOST_OUT_OF_MEMORY, "out of host memory"),
    ):
        records = _failures(facts, outcome)
        if records:
            known = [record for record in records if record.missing_bytes is not None]
            record = (known or records)[0]
            if record.missing_bytes is not None:
                text = f"{text}, {bytes_in_words(record.missing_bytes)} could not be allocated,"
            return _from_record(record, text)
    return None


def _stopped(facts: LaunchFacts) -> Verdict | None:
    if facts.stop is None:
        return None
    if facts.stop.outcome is Outcome.MEASURED:  # enough steps were measured
        message = facts.stop.message + _remarks(facts)
        return _batch_differs(facts) or Verdict(outcome=Outcome.MEASURED, message=message)
    if facts.stop.outcome in (Outcome.STALLED, Outcome.TIMEOUT) and (caught := _caught_out_of_memory(facts, _ALONE)):
        return caught
    return Verdict(outcome=facts.stop.outcome, message=facts.stop.message or f"stopped: {facts.stop.outcome.value}")


def _deaths(facts: LaunchFacts) -> dict[int, int]:
    """Return rank -> exit code of the ranks without a record of their end."""
    return {
        rank: code
        for rank, code in sorted(facts.exit_codes.items())
        if not any(isinstance(event, RankFailed | RankFinished) for event in facts.events.get(rank, ()))
    }


def _killed_by_kernel(facts: LaunchFacts) -> Verdict | None:
    killed = {rank: f"rank {rank}" for rank, code in _deaths(facts).items() if code == -signal.SIGKILL} or {
        failed.rank: f"rank {failed.rank}: a data loader worker"
        for failed in facts.of(RankFailed)
        if _WORKER_KILLED in failed.message
    }
    agent = facts.agent_exit_code == -signal.SIGKILL and facts.oom_kills is not None
    if not (killed or agent) or facts.oom_kills == 0:
        return None
    who = next(iter(killed.values()), "torchrun")
    how = "the kernel's OOM killer ended it" if facts.oom_kills else "most likely the kernel's OOM killer ended it"
    return Verdict(
        outcome=Outcome.HOST_OUT_OF_MEMORY,
        message=f"{who}: killed (SIGKILL), host out of memory: {how}",
        rank=next(iter(killed), 0),
    )


def _own_failure(facts: LaunchFacts) -> Verdict | None:
    for outcome in (Outcome.OUT_OF_DATA, Outcome.INVALID_CONFIG, Outcome.SCRIPT_ERROR):
        records = _failures(facts, outcome)
        if records:
            record = records[0]
            cause = failure_line(record.message) + _values_in_doubt(record, facts)
            if "[Errno 28]" in record.message and "/multiprocessing/" in record.traceback:  # a semaphore, or a queue
                cause += _SHARED_MEMORY_FULL
            return _from_record(record, record.error_type, cause=cause)
    for event in facts.of(RankFinished):
        _, is_exit, code = event.reason.partition("exit_code_")
        if is_exit and code != "0":
            if caught := _caught_out_of_memory(facts, f"left with exit code {code}"):
                return caught
            return Verdict(
                outcome=Outcome.SCRIPT_ERROR,
                message=f"rank {event.rank}: the script left with sys.exit({code}) after "
                f"{things_in_words(event.steps, 'step')}",
                rank=event.rank,
            )
    return None


def _values_in_doubt(failed: RankFailed, facts: LaunchFacts) -> str:
    """Return the values of the config that an error of DeepSpeed refers to without their keys, with a remedy."""
    text = failed.message
    config = {**facts.config}
    for event in facts.of(ConfigDiffers):
        config |= {key: values[0] for key, values in event.differences.items()}
    strings = {key: value for key, value in config.items() if isinstance(value, str)}
    quoted = {key: value for key, value in strings.items() if QUOTED_NUMBER.fullmatch(value)}
    if MISMATCH in text:  # written as equal: "gradient_clipping=1.0 vs hf max_grad_norm=1.0"
        return _not_numbers({key: value for key, value in quoted.items() if f" {key}=" in text})
    strings = {key: value for key, value in strings.items() if key not in text}
    for section, sign in _TYPES.items():
        if sign in text and (value := strings.get(f"{section}.type")):
            remedy = "" if value == AUTO else f". {correction_of_type(section, value)}"
            return f"; {section}.type is {value!r}{remedy}"
    built = {key: value for key, value in strings.items() if key.startswith(("optimizer.params.", "scheduler.params."))}
    if named := [key for key in built if built[key] in text and re.search(rf"\b{key.rpartition('.')[2]}\b", text)]:
        return "".join(f"; {key} is {built[key]!r}" for key in named)
    if failed.error_type != "TypeError" or "'str'" not in text or failed.phase in ("script", "between"):
        return ""
    return _not_numbers(quoted or {key: value for key, value in built.items() if value != AUTO})


def _not_numbers(values: Mapping[str, str]) -> str:
    return "".join(f"; {key} is {value!r}: it must be a number" for key, value in values.items())


def _killed_from_outside(facts: LaunchFacts) -> Verdict | None:
    """Return ``killed`` if others ended ranks (torchrun's record) or torchrun itself; None if the ranks failed."""
    recorded = [
        any(isinstance(event, RankFailed | RankFinished) for event in facts.events.get(rank, ()))
        for rank in range(facts.slots)
    ]
    deaths = _deaths(facts)
    codes = {-code for code in deaths.values()}
    aborted = signal.SIGABRT in codes and codes <= _QUIET_SIGNALS  # and torchrun ended the siblings
    if all(recorded) or aborted or codes - _SENT_BY_OTHERS - _QUIET_SIGNALS:
        return None
    lost_others = bool(_failures(facts, Outcome.COMMUNICATION_ERROR))
    killed = [rank for rank, code in deaths.items() if not (lost_others and -code in _QUIET_SIGNALS)]
    if killed:
        rank = min(killed, key=lambda number: -deaths[number] in _QUIET_SIGNALS)  # skip siblings of the killed rank
        text = f"rank {rank}: killed by {signal.Signals(-deaths[rank]).name}{_FROM_OUTSIDE}"
        return Verdict(outcome=Outcome.KILLED, message=text, rank=rank)
    number = _signal_of(facts.agent_exit_code)
    if deaths or number not in _SENT_BY_OTHERS:
        return None
    name = signal.Signals(number).name
    text = f"torchrun, or the process that it was forked from, was killed by {name}{_FROM_OUTSIDE}"
    return Verdict(outcome=Outcome.KILLED, message=text, rank=recorded.index(False))


def _signal_of(exit_code: int | None) -> int:
    """Return the signal that ended a process, from its exit code (negative or above 128); 0 for none."""
    if exit_code is None:
        return 0
    return -exit_code if exit_code < 0 else max(0, exit_code - 128)


def _describe_death(rank: int, code: int, *, scarce: bool) -> str:
    if code >= 0:
        return f"rank {rank}: left with exit code {code} and no traceback"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hints = {
        -signal.SIGBUS: _SHARED_MEMORY_FULL,
        # DeepSpeed's operator uses a buffer that was not allocated.
        -signal.SIGSEGV: _SHARED_MEMORY_FULL if scarce else "",
        -signal.SIGXCPU: ", as its CPU time is limited (ulimit -t)",
    }
    return f"rank {rank}: killed by {name}{hints.get(code, '')}"


def _silent_death(facts: LaunchFacts) -> Verdict | None:
    deaths = _deaths(facts)
    loud = [rank for rank, code in deaths.items() if -code not in _QUIET_SIGNALS]
    unexplained = () if _failures(facts, Outcome.COMMUNICATION_ERROR) else deaths
    quiet = sorted(unexplained, key=lambda rank: deaths[rank] == -signal.SIGTERM)  # sent by torchrun to the siblings
    started = {rank for rank, events in facts.events.items() if any(isinstance(e, RankStarted) for e in events)}
    candidates = [rank for rank in (*loud, *quiet) if rank in started]
    if not candidates:
        return None
    rank = candidates[0]
    scarce = facts.shared_memory_free is not None and facts.shared_memory_free < _LEAST_SHARED_BYTES
    message = _describe_death(rank, deaths[rank], scarce=scarce)
    return Verdict(outcome=Outcome.SCRIPT_ERROR, message=message, rank=rank)


def _communication(facts: LaunchFacts) -> Verdict | None:
    records = _failures(facts, Outcome.COMMUNICATION_ERROR)
    if records:
        if caught := _caught_out_of_memory(facts, _ALONE):
            return caught
        record = records[0]
        return _from_record(record, f"communication failed: {record.error_type}", cause=failure_line(record.message))
    missing = [rank for rank in range(facts.slots) if not facts.events.get(rank)]
    if missing:
        return Verdict(
            outcome=Outcome.COMMUNICATION_ERROR,
            message=f"ranks {', '.join(map(str, missing))} never started; "
            f"torchrun ended with {_exit_text(facts.agent_exit_code)}",
            rank=missing[0],
        )
    return None


def _exit_text(code: int | None) -> str:
    if code is None:
        return "no exit code"
    return f"exit code {code}" if code >= 0 else f"signal {-code}"


def _left_early(facts: LaunchFacts) -> Verdict | None:
    ends = {end.rank: end for end in facts.of(RankFinished)}
    for rank in sorted(range(facts.slots), key=lambda rank: rank not in ends):  # their end may have ended the others
        finished = ends.get(rank)
        if finished is None:
            return Verdict(
                outcome=Outcome.SCRIPT_ERROR,
                message=f"rank {rank}: ended without a record ({_exit_text(facts.agent_exit_code)} of torchrun); "
                "os._exit in the script leaves none",
                rank=rank,
            )
        if finished.reason in ("profile_done", STEPS_SKIPPED) or finished.steps >= facts.end_profile_step:
            continue
        if not facts.of(EngineReady):
            text = f"rank {rank}: {NO_ENGINE}"
            return Verdict(outcome=Outcome.SCRIPT_ERROR, message=text, rank=rank)
        steps = things_in_words(finished.steps, "global step")
        if caught := _caught_out_of_memory(facts, f"ended after {steps}"):
            return caught
        cause = "check its data, its number of steps, a finished run that it may resume, and errors that it catches"
        if finished.skipped and not finished.steps:
            cause = _skipped(facts, finished)
        elif finished.skipped:
            steps += f" (and {finished.skipped} that the loss scaler skipped)"
        text = f"the script ended by itself after {steps}, before step {facts.end_profile_step}: {cause}"
        return Verdict(outcome=Outcome.OUT_OF_DATA, message=text, rank=rank)
    return None


def _caught_out_of_memory(facts: LaunchFacts, then: str, *, rank: int | None = None) -> Verdict | None:
    """Return out of memory if the script caught such an error in a rank with a record of its end, and did ``then``."""
    ends = [end for end in facts.of(RankFinished) if rank in (None, end.rank)]
    worst = max(ends, key=lambda end: (end.allocation_failures, end.host_allocation_failures), default=None)
    if worst is None or not (worst.allocation_failures or worst.host_allocation_failures):
        return None
    outcome = Outcome.OUT_OF_MEMORY if worst.allocation_failures else Outcome.HOST_OUT_OF_MEMORY
    times = things_in_words(worst.allocation_failures or worst.host_allocation_failures, "time")
    message = f"rank {worst.rank}: {outcome_in_words(outcome)} {times}: the script caught the error, and {then}"
    return Verdict(outcome=outcome, message=message, rank=worst.rank)


def _trained_on(facts: LaunchFacts, rank: int) -> Verdict | None:
    """Return out of memory if a rank lost batches in counted steps: attempts before them may find out what fits."""
    steps = [step for step in facts.of(StepMeasured) if step.rank == rank]
    before = max((step.caught for step in steps if step.number < facts.start_profile_step), default=0)
    is_lost = any(step.caught > before for step in steps)
    return _caught_out_of_memory(facts, "trained on", rank=rank) if is_lost else None


def _batch_differs(facts: LaunchFacts) -> Verdict | None:
    observed = observed_micro_batch(facts)
    if facts.micro_batch is None or observed is None:
        return None
    for rank in [end.rank for end in facts.of(RankFinished) if end.allocation_failures or end.host_allocation_failures]:
        # the script may have replaced the batch of this rank alone
        fed = observed_micro_batch(facts, rank=rank)
        then = f"fed batches of {fed} instead of {facts.micro_batch}"
        if fed and fed < facts.micro_batch and (caught := _caught_out_of_memory(facts, then, rank=rank)):
            return caught
        if caught := _trained_on(facts, rank):
            return caught
    if observed == facts.micro_batch:
        return None
    config = facts.config_path or "the config that it passes to deepspeed.initialize"
    if observed < facts.micro_batch:
        samples = _training_samples(facts)
        if samples is not None and samples < facts.micro_batch:
            return Verdict(
                outcome=Outcome.OUT_OF_DATA,
                message=f"the data give a rank {things_in_words(samples, 'sample')}, fewer than the micro-batch of "
                f"{facts.micro_batch}",
            )
        return Verdict(
            outcome=Outcome.OUT_OF_DATA,  # the script may feed smaller batches: a bound, for any reason
            message=(
                f"the config says train_micro_batch_size_per_gpu {facts.micro_batch}, but the script fed batches of at "
                f"most {observed}. If its data set gives no more, set autotuning.max_train_micro_batch_size_per_gpu to "
                f"{observed} in {config}; if it takes its batch size from somewhere else than that, "
                "name its option: --arg-mapping train_micro_batch_size_per_gpu=--OPTION"
            ),
        )
    followed = any(step.observed_micro_batch == facts.micro_batch for step in facts.of(StepMeasured))
    message = (
        f"the config says train_micro_batch_size_per_gpu {facts.micro_batch}, but the script fed batches of {observed}"
    ) + (
        ", too: it changes its batch size during training. Tune it with one size, the largest that it trains with"
        if followed
        else f": it takes its batch size from somewhere else than {config}. Make it read the config, or name its own "
        "option: --arg-mapping train_micro_batch_size_per_gpu=--OPTION"
    )
    return Verdict(outcome=Outcome.INVALID_CONFIG, message=message)


def _training_samples(facts: LaunchFacts) -> int | None:
    """Return the samples per rank and epoch of the engine's data loader; None if unknown."""
    sizes = (samples_per_rank(event) for event in facts.of(BatchSourcesFound))
    return min((size for size in sizes if size is not None), default=None)


def _never_updated(facts: LaunchFacts) -> Verdict | None:
    """Reject a launch without counted steps because too many steps were skipped."""
    given_up = [end for end in facts.of(RankFinished) if end.reason == STEPS_SKIPPED]
    if not given_up or _record(facts).counted:
        return None
    end = given_up[0]
    message = f"rank {end.rank}: {_skipped(facts, end, then='; a launch waits for no more')}"
    return Verdict(outcome=Outcome.SCRIPT_ERROR, message=message, rank=end.rank)


def _skipped(facts: LaunchFacts, end: RankFinished, then: str = "") -> str:
    """Return why a rank's steps were skipped, and a remedy."""
    precision = next((event.precision for event in facts.of(EngineReady)), "")
    if precision in ("bf16", "fp32"):
        who = f"DeepSpeed, in {precision},"
        remedy = "Look for what makes the loss or its gradients infinite: data, learning rate, initial values"
    else:
        who = "the loss scaler"
        remedy = (
            "Lower fp16.initial_scale_power (or a fixed fp16.loss_scale), use bf16, or look for what makes the loss "
            "infinite"
        )
    steps = things_in_words(end.skipped + end.steps, "step")
    return f"{who} skipped {end.skipped} of {steps}, since gradients were not finite{then}. {remedy}"


def _nothing_counts(facts: LaunchFacts) -> Verdict | None:
    """Reject a launch whose ranks finished all profile steps but recorded no step that counts."""
    if _record(facts).counted:
        return None
    return Verdict(
        outcome=Outcome.SCRIPT_ERROR,
        message=(
            f"the steps from step {facts.start_profile_step} on took no time, or not every rank has written them: does "
            "the script stop the clock (freezegun, its own time.perf_counter), or change the files of events?"
        ),
    )


def _record(facts: LaunchFacts) -> LaunchRecord:
    """Return the steps of a launch, merged over the ranks that recorded any event."""
    record = LaunchRecord(world_size=len(facts.events), start_profile_step=facts.start_profile_step)
    for event in facts.of(Event):
        record.add(event)
    return record


def _measured_message(facts: LaunchFacts) -> str:
    steps = [event for event in facts.events.get(0, ()) if isinstance(event, StepMeasured)]
    if not steps:
        return "profile taken"
    last = max((step.step for step in _record(facts).steps), default=0)
    given_up = any(event.reason == STEPS_SKIPPED for event in facts.events[0] if isinstance(event, RankFinished))
    short = f" of {facts.end_profile_step}, since a launch waits for no more skipped steps" if given_up else ""
    return f"measured to step {last}{short}{_remarks(facts)}"


def _remarks(facts: LaunchFacts) -> str:
    """Return remarks on the counted steps; empty without remarks."""
    record = _record(facts)
    variation = record.input_variation
    metrics = record.metrics(flops_per_sample=0.0) if variation else {}
    words = steps_in_words(skipped=record.skipped_steps, variation=variation, metrics=metrics, left_out=record.left_out)
    return f"; {words}" if words else ""
