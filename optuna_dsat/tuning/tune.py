"""``optuna_dsat.tune``: the search as a function, with every option of the command as a keyword."""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

from optuna_dsat.errors import NothingRunnableError, ScriptFailedError, UsageError
from optuna_dsat.study.result import TuneResult
from optuna_dsat.tuning.options import AutotuningOptions
from optuna_dsat.tuning.prepare import prepare

__all__ = ["SearchInterrupted", "TuneResult", "tune"]

P = ParamSpec("P")
R = TypeVar("R")

_GIVEN: ContextVar[frozenset[str]] = ContextVar("given")
"""Names of the arguments that the running call of ``tune`` was given; the others have their defaults."""


class SearchInterrupted(KeyboardInterrupt):
    """Ctrl-C ended ``optuna_dsat.tune``. The study is stored: calling again with the same arguments continues it.

    Attributes:
        result: What was found until then, not confirmed; None where nothing was.
        study: Name of the study.
    """

    def __init__(self, result: TuneResult | None, *, study: str) -> None:
        super().__init__(f"The search of study {study!r} was interrupted; call again to continue it.")
        self.result = result
        self.study = study


def _noting_what_is_given(function: Callable[P, R]) -> Callable[P, R]:
    """Let ``function`` read from ``_GIVEN`` which arguments its caller named.

    An argument that was given wins over the config's ``autotuning`` section, also where it equals the default.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def noted(*args: P.args, **kwargs: P.kwargs) -> R:
        token = _GIVEN.set(frozenset(signature.bind(*args, **kwargs).arguments))
        try:
            return function(*args, **kwargs)
        finally:
            _GIVEN.reset(token)

    return noted


@_noting_what_is_given
def tune(
    script: str | os.PathLike[str],
    ds_config: str | os.PathLike[str],
    script_args: Sequence[str] | None = None,
    *,
    method: str | None = None,
    module: bool = False,
    hparams: str | os.PathLike[str] | None = None,
    metric: str = "FLOPS_per_gpu",
    zero_stages: Sequence[int] | None = None,
    fix: Mapping[str, Any] | None = None,
    no_tune: Sequence[str] | None = None,
    arg_mapping: Mapping[str, str] | None = None,
    train_batch_size: int | None = None,
    nvme_path: str | os.PathLike[str] | None = None,
    enqueue_user_config: bool = True,
    profile_reuse: bool = True,
    max_trials: int = 64,
    max_concurrent_trials: int = 16,
    max_slots: int | None = None,
    timeout: float | None = None,
    trial_timeout: float | None = None,
    stall_timeout: float = 600.0,
    max_retries: int = 1,
    confirm: int = 3,
    start_profile_step: int = 3,
    end_profile_step: int = 5,
    adaptive_steps: int | None = None,
    random_seed: int = 42,
    gpus_per_trial: int | None = None,
    only_free_gpus: bool = False,
    wait_for_gpus: float = 600.0,
    cpu_ranks: int | None = None,
    device_memory: str | int | None = None,
    launcher: Literal["warm", "torchrun"] = "warm",
    preload: Sequence[str] | None = None,
    no_preload: Sequence[str] | None = None,
    storage: str = "sqlite:///optuna-dsat.db",
    study: str | None = None,
    output_dir: str | os.PathLike[str] = "optuna-dsat-output",
    check_loss: bool = False,
    run_full_experiment: bool = False,
    quiet: bool = False,
    trials_per_random_config: int = 5,
    early_stopping: int | None = None,
    search_range_factor: float = 1.0,
    max_rungs: int = 5,
    min_binary_search_trials: int = 3,
    divisor: int = 2,
    asha_early_stopping: int = 0,
    memory_margin: float = 0.05,
    min_gain: float = 0.003,
    warm_start: str | None = None,
    no_warm_start: bool = False,
) -> TuneResult:
    """Find the DeepSpeed configuration that trains a script fastest; the command ``optuna-dsat tune`` as a function.

    The script runs in processes of its own, some steps at a time, and is not imported. A study that is there under
    the same name is continued. The environment and option files are not read; the config's ``autotuning`` section is,
    for arguments that are not given.

    Args:
        script: The training script; with ``module`` the name of a module; ``NAME:CLASS`` for a ``DeepSpeedTrial``.
        ds_config: The script's DeepSpeed config, a JSON file.
        script_args: Arguments of the script, as on its command line.
        method: ``random``, ``binary``, ``asha`` or ``guided``; None for ``autotuning.tuner_type`` of the config, else
            ``asha``.
        module: Whether ``script`` names a module, run as ``python -m`` does.
        hparams: Hyperparameters of ``NAME:CLASS``, a YAML or JSON file.
        metric: What to optimise: ``FLOPS_per_gpu`` (FLOP/s), ``throughput`` (samples/s over all ranks), or a time in
            seconds per step: ``latency``, ``forward``, ``backward``, ``step``.
        zero_stages: ZeRO stages to search; None for 1, 2 and 3.
        fix: Knob -> the one value that it keeps.
        no_tune: Knobs that stay as the config has them.
        arg_mapping: Key of the DeepSpeed config -> option of the script that follows it, such as
            ``{"train_micro_batch_size_per_gpu": "--batch-size"}``.
        train_batch_size: Global batch, in samples, that every trial keeps; None to let it follow the micro-batch.
        nvme_path: Directory for NVMe offload; None to leave NVMe out.
        enqueue_user_config: Whether the present config is measured first, to compare with.
        profile_reuse: Whether the profile of an earlier study of the same script, config and hardware is taken.
        max_trials: Launches of trials; the profile launch and those of the finalists are not counted.
        max_concurrent_trials: Launches in flight.
        max_slots: GPUs (CPU ranks) in use at once; None for all.
        timeout: Seconds after which the search ends; None for no limit.
        trial_timeout: Seconds after which one launch is ended; None for no limit.
        stall_timeout: Seconds without a sign of life after which one launch is ended: an event of a rank or, until it
            trains, processes at work.
        max_retries: Further launches of a trial after a communication error, a stall or a time-out.
        confirm: Finalists that are measured again with more steps.
        start_profile_step: First step that counts, from 1.
        end_profile_step: Last step that counts; a launch whose step time is known to 1 % ends before it.
        adaptive_steps: Steps that a finalist may count while its step time is still uncertain; None for five times a
            trial's, at least 10.
        random_seed: Seed of the search.
        gpus_per_trial: GPUs of one launch; None for all.
        only_free_gpus: Whether to tune on those GPUs that are free at the start, instead of waiting for all.
        wait_for_gpus: Seconds to wait for GPUs that others hold, counted anew when the holders change; 0 for not at
            all.
        cpu_ranks: Run on the CPU with this many ranks; None for GPUs, and 2 where there are none.
        device_memory: What one rank may allocate: bytes, or text such as ``2GiB``; None for all there is.
        launcher: How trials are launched: ``warm`` (forked from a process that has the heavy modules ready, by torchrun
            where that is unsafe), or always ``torchrun``.
        preload: Modules to import, too, before a warm launch.
        no_preload: Packages that every warm launch imports for itself.
        storage: Database of the study: ``sqlite:///FILE`` or ``postgresql://USER@HOST/DATABASE``.
        study: Name of the study; None for ``SCRIPT-METHOD``.
        output_dir: Directory for launches, logs and the best config.
        check_loss: Whether the first losses under the best config are compared with those under the present one.
        run_full_experiment: Whether to train with the best config at the end, before returning.
        quiet: Whether to print nothing; otherwise progress goes to stderr.
        trials_per_random_config: ``random``: launches of one class of configurations at most.
        early_stopping: ``random``: end after this many launches without a new best; None for never.
        search_range_factor: ``binary``, ``asha``: factor on the largest micro-batch that the memory model predicts.
        max_rungs: ``asha``: rungs.
        min_binary_search_trials: ``asha``: launches that complete the lowest rung.
        divisor: ``asha``: the best ``1 / divisor`` of a rung goes on (eta of arXiv:1810.05934).
        asha_early_stopping: ``asha``: rungs start ``divisor ** asha_early_stopping`` higher (s of arXiv:1810.05934).
        memory_margin: ``guided``: share of the device's memory that a launch is expected to leave free.
        min_gain: ``guided``: the search ends when no configuration is expected to be better than the best by this
            share; 0 for never.
        warm_start: ``guided``: a study of the same storage whose launches teach this one; None for those of the same
            script, config and hardware.
        no_warm_start: ``guided``: whether to begin without what earlier studies taught.

    Returns:
        The best configuration with its metrics, and where all of it lies.

    Raises:
        UsageError: If something given cannot be used; nothing was launched or written. The message calls arguments by
            their names on the command line.
        NothingRunnableError: If no configuration could be measured on this hardware.
        ScriptFailedError: If the script fails whatever the configuration, or the training at the end does.
        StorageError: If the database failed while the study ran; calling again continues it.
        SearchInterrupted: A ``KeyboardInterrupt`` that carries what was found until then; calling again continues.
    """
    options = _options(dict(locals()), _GIVEN.get())
    prepared = prepare(None, options)

    from optuna_dsat.display.live import make_observer
    from optuna_dsat.display.stopping import Stopping
    from optuna_dsat.tuning.run import run_study, train_with_best

    if not quiet:
        sys.stderr.writelines(f"{note}\n" for note in prepared.notes)
    with make_observer(quiet=quiet, stopping=Stopping()) as observer:
        ended = run_study(prepared.request, observer=observer)
    if ended.interrupted:
        raise SearchInterrupted(ended.result, study=prepared.request.spec.name)
    if ended.result is None:
        raise NothingRunnableError(f"The study {prepared.request.spec.name!r} has measured nothing yet.")
    if run_full_experiment and (code := train_with_best(ended, ended.result)):
        raise ScriptFailedError(f"Training with {ended.result.config_path} ended with exit code {code}.")
    return ended.result


def _options(arguments: Mapping[str, Any], given: frozenset[str]) -> AutotuningOptions:
    """Return the arguments of ``tune`` in the form in which the command line has them."""
    values = {name: value for name, value in arguments.items() if value is not None}
    for name in ("script", "ds_config", "hparams", "output_dir"):
        if name in values:
            values[name] = Path(values[name])
    for name in ("script_args", "zero_stages", "no_tune", "preload", "no_preload"):
        if name in values:
            if isinstance(values[name], str):
                raise UsageError(f"{name} is {values[name]!r}; it must be a list, such as {values[name].split()!r}.")
            values[name] = [str(one) for one in values[name]]
    if "fix" in values:
        values["fix"] = [f"{key}={json.dumps(value)}" for key, value in values["fix"].items()]
    if "arg_mapping" in values:
        values["arg_mapping"] = [f"{key}={option}" for key, option in values["arg_mapping"].items()]
    for name in ("device_memory", "nvme_path"):
        if name in values:
            values[name] = str(values[name])
    return AutotuningOptions(**values, origins=dict.fromkeys(given, "argument"))
