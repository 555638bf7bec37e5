"""Finds what sets a script's batch size: each guess is proven by a launch at another size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from optuna_dsat.config import ds_config
from optuna_dsat.launch.follow import follow
from optuna_dsat.launch.measurement import LaunchRecord
from optuna_dsat.launch.protocol import Launcher, LaunchReport
from optuna_dsat.launch.waiting import SlotWait
from optuna_dsat.outcome import Outcome
from optuna_dsat.script.batch_rule import BatchRule, guesses, held
from optuna_dsat.study.launch_requests import launch_request
from optuna_dsat.study.spec import StudySpec
from optuna_dsat.study.user_config import follow_batch

__all__ = ["find_batch_rule"]


def find_batch_rule(
    spec: StudySpec,
    launcher: Launcher,
    record: LaunchRecord,
    *,
    overlay: Mapping[str, Any],
    on_report: Callable[[LaunchReport, LaunchRecord], None],
    wait: SlotWait | None = None,
) -> BatchRule | None:
    """Return what the script's batch size follows by; None if it already follows the DeepSpeed config.

    Args:
        spec: The study.
        launcher: Where to launch.
        record: The profile launch, measured.
        overlay: Its overlay, whose ZeRO settings are known to fit.
        on_report: Called after each launch.
        wait: As for ``follow``.
    """
    configured = int(overlay[ds_config.MICRO_BATCH])
    own, found, engine = record.observed_micro_batch, record.batch_sources, record.engine
    if engine is None or engine.pipeline or own == configured:
        return None
    if own is None:  # nothing was seen: what cannot be counted must not change
        present = ds_config.batch_triangle(ds_config.effective(spec.ds_config), world_size=spec.slots_per_trial)
        return held(configured if ds_config.MICRO_BATCH in spec.fix else present.micro_batch)
    if found is None or not spec.follow_batch:
        return held(own, found=found, ranks=engine.data_parallel_size)
    for index, guess in enumerate(guesses(found, own=own, ranks=engine.data_parallel_size)):
        for size in (2 * own, own // 2):  # the half where there is no room for twice as much
            if size == 0:
                continue
            request = launch_request(
                follow_batch(spec, guess, ranks=engine.data_parallel_size),
                launch_id=f"profile-batch-{index}-{size}",
                purpose="profile",
                overlay={**overlay, ds_config.MICRO_BATCH: size},
                start_profile_step=1,
                end_profile_step=1,
            )
            proof, report = follow(launcher, request, wait=wait)
            on_report(report, proof)
            if report.outcome is Outcome.MEASURED and proof.observed_micro_batch == size:
                return guess
            if not report.outcome.infeasible:
                break
    return held(own, found=found, ranks=engine.data_parallel_size)
