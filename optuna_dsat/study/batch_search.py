"""Finds what sets a script's batch size: each guess is proven by a launch at another size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from optuna_dsat.config import ds_config
from optuna_dsat.launch.follow import follow
from optuna_dsat.launch.measurement import LaunchRecord
from optuna_dsat.launch.protocol import Launcher, LaunchReport, LaunchRequest
from optuna_dsat.launch.waiting import SlotWait
from optuna_dsat.outcome import Outcome
from optuna_dsat.script.batch_rule import BatchRule, guesses, held, samples_per_rank, varying
from optuna_dsat.script.trainer import ScriptTrainer, trainer_guesses
from optuna_dsat.study.launch_requests import launch_request
from optuna_dsat.study.spec import StudySpec
from optuna_dsat.study.user_config import follow_batch, follow_trainer

__all__ = ["find_batch_rule", "find_trainer"]


def find_batch_rule(
    spec: StudySpec,
    launcher: Launcher,
    record: LaunchRecord,
    *,
    overlay: Mapping[str, Any],
    present: int,
    on_report: Callable[[LaunchReport, LaunchRecord], None],
    wait: SlotWait | None = None,
) -> BatchRule | None:
    """Return what the script's batch size follows by; None if it already follows the DeepSpeed config.

    Args:
        spec: The study.
        launcher: Where to launch.
        record: The profile launch, measured.
        overlay: Its overlay, whose ZeRO settings are known to fit.
        present: Micro-batch of the user's own config.
        on_report: Called after each launch.
        wait: As for ``follow``.
    """
    configured = int(overlay[ds_config.MICRO_BATCH])
    own, found, engine = record.observed_micro_batch, record.batch_sources, record.engine
    if engine is None or own == configured or (engine.pipeline and own is None):
        return None
    if own is None:  # nothing was seen: what cannot be counted must not change
        return held(configured if ds_config.MICRO_BATCH in spec.fix else present)
    samples = None if found is None else samples_per_rank(found, own=own)
    if sizes := record.differing_micro_batches(samples=samples):
        return varying(configured if ds_config.MICRO_BATCH in spec.fix else present, sizes=sizes)
    if found is None or not spec.follow_batch:
        return held(own, found=found, ranks=engine.data_parallel_size)
    ranks = engine.data_parallel_size
    for index, guess in enumerate(guesses(found, own=own, ranks=ranks)):
        proven = _is_proven(
            follow_batch(spec, guess, ranks=ranks),
            partial(follow, launcher, wait=wait),
            name=f"profile-batch-{index}",
            overlay=overlay,
            own=own,
            holds=lambda proof, size: proof.observed_micro_batch == size,
            on_report=on_report,
        )
        if proven:
            return guess
    return held(own, found=found, ranks=ranks)


def find_trainer(
    spec: StudySpec,
    launcher: Launcher,
    record: LaunchRecord,
    *,
    overlay: Mapping[str, Any],
    on_report: Callable[[LaunchReport, LaunchRecord], None],
    wait: SlotWait | None = None,
) -> ScriptTrainer | None:
    """Return the script's trainer, with what is proven to set its batch sizes: options or a settings file.

    The trainer itself follows each configuration as it is; these are for the command that trains with the best.

    Args:
        spec: The study.
        launcher: Where to launch.
        record: The profile launch, measured.
        overlay: Its overlay, whose ZeRO settings are known to fit.
        on_report: Called after each launch.
        wait: As for ``follow``.
    """
    if record.trainer is None:
        return None
    trainer = ScriptTrainer.from_event(record.trainer)
    found, engine = record.batch_sources, record.engine
    mapped = ds_config.MICRO_BATCH in spec.script.arg_mappings
    if found is None or engine is None or trainer.micro_batch is None or mapped or not spec.follow_batch:
        return trainer
    for index, guess in enumerate(trainer_guesses(trainer, found, ranks=engine.data_parallel_size)):
        asked, expected = guess.proof_steps()
        proven = _is_proven(
            follow_trainer(spec, guess),
            partial(follow, launcher, wait=wait),
            name=f"profile-trainer-{index}",
            overlay={**overlay, ds_config.GRADIENT_ACCUMULATION: asked},
            own=trainer.micro_batch,
            holds=partial(_sets_itself, steps=expected),
            on_report=on_report,
        )
        if proven:
            return guess
    return trainer


def _sets_itself(proof: LaunchRecord, size: int, *, steps: int | None) -> bool:
    """Whether a script's trainer was made with a micro-batch and accumulation steps, before it was given any."""
    own = proof.trainer
    return own is not None and (own.micro_batch, own.gradient_accumulation_steps) == (size, steps)


def _is_proven(
    spec: StudySpec,
    launch: Callable[[LaunchRequest], tuple[LaunchRecord, LaunchReport]],
    *,
    name: str,
    overlay: Mapping[str, Any],
    own: int,
    holds: Callable[[LaunchRecord, int], bool],
    on_report: Callable[[LaunchReport, LaunchRecord], None],
) -> bool:
    """Whether a launch at another micro-batch than the script's own shows that it follows.

    Args:
        spec: The study, with what the batch size may follow by.
        launch: Runs a launch.
        name: Name of the launches, to which the micro-batch is added.
        overlay: ZeRO settings that are known to fit.
        own: The script's own micro-batch.
        holds: Whether a measured launch shows a micro-batch.
        on_report: Called after each launch.
    """
    for size in (2 * own, own // 2):  # the half where there is no room for twice as much
        if size == 0:
            continue
        request = launch_request(
            spec,
            launch_id=f"{name}-{size}",
            purpose="profile",
            overlay={**overlay, ds_config.MICRO_BATCH: size},
            start_profile_step=1,
            end_profile_step=1,
        )
        proof, report = launch(request)
        on_report(report, proof)
        if report.outcome is Outcome.MEASURED and holds(proof, size):
            return True
        if not report.outcome.infeasible:
            return False
    return False
