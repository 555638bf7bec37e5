"""Launch requests of a study: its script, limits and profile steps, and the configuration of a launch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from optuna_dsat.config import ds_config
from optuna_dsat.cost.memory import swap_needs
from optuna_dsat.launch.protocol import LaunchRequest, ScriptCommand
from optuna_dsat.runtime.events import EngineReady, Event, RankStarted
from optuna_dsat.runtime.overlay import is_compiled, over_command
from optuna_dsat.script.trial_class import CHECKPOINTS, RUNNER, complete_training
from optuna_dsat.study.profile.profiled import Profiled
from optuna_dsat.study.space import hardware_of
from optuna_dsat.study.spec import StudySpec

_FIRST_COMPILED_STEP = 3
"""First step of a compiled engine that may count: torch compiles in the first, and again for the second if it differs,
as at ZeRO 3, which traces its modules in the first.
"""


def script_command(spec: StudySpec) -> ScriptCommand:
    """Return the launch command of the user's script."""
    script = spec.script
    return ScriptCommand(
        script=script.script,
        args=script.args,
        is_module=script.is_module,
        cwd=script.cwd,
        config_path=script.config_path,
        arg_mappings=script.arg_mappings,
        data_parallel_size=spec.data_parallel_ranks,
        batch_source=script.batch_source,
        python=spec.python,
    )


def steps_to_compile(spec: StudySpec) -> int:
    """Return by how many steps a study's launches of a compiled engine are measured later than its others."""
    return max(0, _FIRST_COMPILED_STEP - spec.start_profile_step)


def launch_request(
    spec: StudySpec,
    *,
    launch_id: str,
    purpose: str,
    overlay: Mapping[str, Any],
    config: Mapping[str, Any] | None = None,
    start_profile_step: int | None = None,
    end_profile_step: int | None = None,
    profiled: Profiled | None = None,
) -> LaunchRequest:
    """Return a measured launch of a study's script under the study's limits.

    ``overlay`` is laid over the config that the script passes to DeepSpeed; its None removes a key. ``config`` is the
    whole config if that is not the user's with the overlay. Steps default to the study's, later ones in a compiled
    engine. ``profiled`` is for space on NVMe.
    """
    compiled = is_compiled(overlay)
    later = steps_to_compile(spec) if compiled and start_profile_step is None else 0
    first = (spec.start_profile_step if start_profile_step is None else start_profile_step) + later
    last = (spec.end_profile_step if end_profile_step is None else end_profile_step) + later
    config = ds_config.merge(ds_config.effective(spec.ds_config), overlay) if config is None else config
    swap_bytes, locked_bytes = 0, 0
    if profiled is not None:
        swap_bytes, locked_bytes = swap_needs(profiled.profile, config, hardware_of(spec, profiled))
    return LaunchRequest(
        launch_id=launch_id,
        purpose=purpose,
        command=script_command(spec),
        ds_config=_with_global_batch(config, spec),
        in_file=_in_file(spec, purpose),
        overlay=over_command(overlay, spec.ds_config),
        slots=spec.slots_per_trial,
        start_profile_step=first,
        end_profile_step=last,
        device_memory_bytes=spec.device_memory_bytes,
        env=spec.script.environment,
        timeout_s=spec.trial_timeout,
        stall_s=spec.stall_timeout,
        isolation=spec.isolation,
        writable=tuple(map(str, spec.writable or ())),
        prepared="" if spec.prepared is None else str(spec.prepared),
        continues=spec.continues and purpose in ("profile", "trial") and not compiled,
        swap_bytes=swap_bytes,
        locked_bytes=locked_bytes,
    )


def _with_global_batch(config: Mapping[str, Any], spec: StudySpec) -> dict[str, Any]:
    """Return a launch's config for the scripts that read the user's file, with the global batch if the user's has it.

    What DeepSpeed gets has none: it follows from the micro-batch on the ranks that the engine has.
    """
    config = ds_config.merge(config, {ds_config.TRAIN_BATCH: None})
    if not isinstance(spec.ds_config.get(ds_config.TRAIN_BATCH), int):
        return config
    triangle = ds_config.batch_triangle(config, world_size=spec.data_parallel_ranks)
    return {**config, ds_config.TRAIN_BATCH: triangle.train_batch_size}


def _in_file(spec: StudySpec, purpose: str) -> dict[str, Any]:
    """Return the batch sizes that the script finds as in the user's file.

    It may fill in ``"auto"`` itself: a profile launch leaves all of them open, which shows the script's values; later
    launches the global batch alone. A micro-batch that is not the script's may be compared with a constant.
    """
    keys = ds_config.BATCH_KEYS if purpose == "profile" else (ds_config.TRAIN_BATCH,)
    auto = {key: ds_config.AUTO for key in keys if spec.ds_config.get(key) == ds_config.AUTO}
    unused = spec.script.unused_micro_batch
    return auto if unused is None else {**auto, ds_config.MICRO_BATCH: unused}


def full_request(
    spec: StudySpec,
    *,
    config: Mapping[str, Any],
    overlay: Mapping[str, Any],
    args: Sequence[str] = (),
    host_threads: int | None = None,
) -> LaunchRequest:
    """Return a training run to its end under a trial's config; the limits of measured launches do not apply.

    A ``DeepSpeedTrial`` keeps its checkpoints in the study's folder, unless its arguments name another, and continues
    from them. ``host_threads`` are per rank, as measured.
    """
    command = script_command(spec)
    command = replace(command, args=(*command.args, *args))
    if command.script == RUNNER:
        args = complete_training(command.args, spec.study_dir / CHECKPOINTS)
        command = replace(command, args=(*args, *([] if "--resume" in args else ["--resume"])))
    sets_threads = host_threads is not None and "OMP_NUM_THREADS" not in os.environ
    threads = {"OMP_NUM_THREADS": str(host_threads)} if sets_threads else {}
    return LaunchRequest(
        launch_id="full",
        purpose="full",
        command=command,
        ds_config=_with_global_batch(config, spec),
        in_file=_in_file(spec, "full"),
        overlay=over_command(overlay, spec.ds_config),
        slots=spec.slots_per_trial,
        env={**threads, **spec.script.environment},
    )


def phase_of(event: Event) -> str | None:
    """Return the phase of a launch that starts with this event, or None."""
    if event.rank != 0:
        return None
    if isinstance(event, RankStarted):
        return "loading" if event.forked else "importing"
    return "first step" if isinstance(event, EngineReady) else None
