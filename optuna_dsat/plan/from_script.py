"""Plan a script on this machine from its profile launch, and from timed steps of it or of earlier searches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

from optuna_dsat.config import ds_config
from optuna_dsat.cost.gpus import Priors, gpu_of_device, network_priors, peak_flops, priors_of_device
from optuna_dsat.cost.memory import estimate
from optuna_dsat.launch.follow import SlotWait, follow
from optuna_dsat.launch.protocol import Launcher
from optuna_dsat.outcome import Outcome
from optuna_dsat.plan.prediction import Subject, fitted_to_steps, step_time_model
from optuna_dsat.plan.rows import Plan, plan_rows
from optuna_dsat.store import Store
from optuna_dsat.study.profile.fingerprint import fingerprint
from optuna_dsat.study.profile.profile import ProfileAttempt, measure_profile
from optuna_dsat.study.profile.profiled import Profiled, TimedStep
from optuna_dsat.study.profile.script import user_config
from optuna_dsat.study.requests import launch_request
from optuna_dsat.study.search.warm_start import gather
from optuna_dsat.study.space import hardware_of
from optuna_dsat.study.spec import StudySpec
from optuna_dsat.words import bytes_in_words, flops_in_words, params_in_words, things_in_words

_LARGER = 4
"""Factor between the two micro-batches that are timed: from a single one, the gain of larger ones is not known."""


def plan_script(
    spec: StudySpec,
    *,
    store: Store,
    device_names: tuple[str, ...],
    launcher: Callable[[], AbstractContextManager[Launcher]],
    on_attempt: Callable[[ProfileAttempt], None],
    memory_margin: float,
    seq_length: int | None = None,
    nodes: int = 1,
    network_gbit_per_s: float | None = None,
    on_notice: Callable[[str], None] = lambda _: None,
) -> Plan:
    """Return the plan of a script, after launches, for which ``launcher`` is called, if none are stored.

    They profile the script and, unless earlier studies timed it, time the user's config. The plan has the data sheet's
    times if that does not run.

    ``memory_margin`` is the share of the device's memory to leave free, ``seq_length`` the tokens per sample, ``nodes``
    the hosts to plan for, all like this host, which runs the profile launch. ``on_notice`` is called with the owner of
    the slots while the launch waits for them.

    Raises:
        DsatError: If the script fails, or does not fit in any configuration.
    """
    mark = fingerprint(spec, device_names=device_names)
    stored, origin = store.find_profile(mark), "measured before"
    profiled = None if stored is None else Profiled.if_readable(stored)
    earlier = None if profiled is None else gather(store, profiled.followed_by(spec), profiled, fingerprint=mark)
    is_known = earlier is not None and earlier.same_model
    if profiled is None or not (is_known or profiled.timed is not None):
        with launcher() as opened:
            wait = SlotWait(opened.holders, slots=spec.slots_per_trial, limit_s=spec.wait_for_gpus, on_notice=on_notice)
            if profiled is None:
                profiled = measure_profile(
                    spec, opened, on_attempt=on_attempt, on_report=lambda _report, _record: None, wait=wait
                )
                origin = f"measured with {profiled.measured_with}"
                earlier = gather(store, profiled.followed_by(spec), profiled, fingerprint=mark)
            on_notice("Timing steps of your config ...")
            profiled = replace(profiled, timed=_timed_steps(profiled.followed_by(spec), profiled, opened, wait))
        store.save_profile(mark, profiled.to_json(), study_uuid="")
    spec = profiled.followed_by(spec)
    ranks = hardware_of(spec, profiled).world_size * nodes
    machine = priors_of_device(profiled.profile, spec.ds_config, device=spec.device, ranks=ranks)
    if network_gbit_per_s is not None:
        machine = {**machine, **network_priors(network_gbit_per_s)}
    subject, sources = _subject(spec, profiled, machine, ranks=ranks), list[str]()
    if earlier is not None:
        subject = replace(subject, fitted=earlier.prior(step_time_model(subject)))
        sources.append(f"launches of {' and '.join(earlier.studies)}")
    if profiled.timed:
        here = replace(subject, hardware=hardware_of(spec, profiled))
        subject = replace(subject, fitted=fitted_to_steps(here, profiled.timed))
        sizes = " and ".join(str(step.config[ds_config.MICRO_BATCH]) for step in profiled.timed)
        sources.append(f"steps of your config at micro-batch {sizes}")
    times = f"Times are fitted to {', and to '.join(sources)}." if sources else _untimed_in_words(spec, profiled)
    subject = replace(subject, memory_margin=memory_margin, seq_length=seq_length)
    gpu = gpu_of_device(profiled.profile.device_name)
    return Plan(
        subject=subject,
        rows=plan_rows(subject),
        bf16_hardware=None if gpu is None else gpu.bf16,
        about=(*_about(spec, profiled, nodes=nodes, origin=origin), times),
        model=profiled.profile.to_json(),
    )


def _subject(spec: StudySpec, profiled: Profiled, machine: Priors, *, ranks: int) -> Subject:
    """Return model and machine, on hosts like this one."""
    profile = profiled.profile
    return Subject(
        profile=profile,
        hardware=replace(hardware_of(spec, profiled), world_size=ranks),
        config=spec.ds_config,
        machine=machine,
        pipeline=profiled.pipeline,
        ranks_per_sample=spec.slots_per_trial // profiled.data_parallel_size,
        nvme_path=spec.nvme_folder,
        peak_flops=peak_flops(gpu_of_device(profile.device_name), spec.ds_config, param_bytes=profile.param_bytes),
    )


def _timed_steps(spec: StudySpec, profiled: Profiled, launcher: Launcher, wait: SlotWait) -> tuple[TimedStep, ...]:
    """Return steps of the user's config at its micro-batch and ``_LARGER`` times it, timed in one launch if it can.

    The larger has fewer accumulation steps where the script takes them. It is left out if it is predicted not to fit,
    and either where it does not run.
    """
    config, _ = user_config(spec, data_parallel_size=profiled.data_parallel_size)
    hardware, size = hardware_of(spec, profiled), config[ds_config.MICRO_BATCH]
    steps = config[ds_config.GRADIENT_ACCUMULATION]
    fewer = steps if profiled.holds_accumulation else max(1, steps // _LARGER)
    timed: list[TimedStep] = []
    for micro_batch, accumulation in ((size, steps), (_LARGER * size, fewer)):
        peak = estimate(profiled.profile, config, micro_batch=micro_batch, hardware=hardware).device_bytes
        if micro_batch > size and (not timed or peak > hardware.device_memory_bytes):
            break
        batch = ds_config.batch_overlay(micro_batch, accumulation)
        request = launch_request(
            spec, launch_id=f"timed-{micro_batch}", purpose="trial", overlay=batch, profiled=profiled
        )
        record, report = follow(launcher, request, wait=wait)
        if report.outcome is Outcome.MEASURED and record.counted:
            complete = ds_config.merge(config, batch)
            timed.append(TimedStep(config=complete, metrics=record.metrics(flops_per_sample=0.0)))
    return tuple(timed)


def _untimed_in_words(spec: StudySpec, profiled: Profiled) -> str:
    """Return a sentence on the predicted times of a script that could not be timed."""
    if gpu_of_device(profiled.profile.device_name) is not None:
        return "Times are by the device's data sheet: your config could not be timed."
    why = "" if spec.device == "cpu" else "This device is not in the table of GPUs. "
    return f"{why}Your config could not be timed: times may be as far off as they say."


def _about(spec: StudySpec, profiled: Profiled, *, nodes: int, origin: str) -> tuple[str, ...]:
    """Return lines that describe the profile and the machine."""
    profile = profiled.profile
    each = f"{nodes} hosts like this one: {nodes} x " if nodes > 1 else ""
    return (
        f"Profile ({origin}): {params_in_words(profile.params)} parameters, "
        f"{bytes_in_words(profile.activation_bytes_per_sample)} of activations and "
        f"{flops_in_words(profile.flops_per_sample)} a sample.",
        f"{each}{things_in_words(spec.slots_per_trial, 'rank')} on {profile.device_name or spec.device}, "
        f"{bytes_in_words(profile.device_memory_bytes)} each, "
        f"{bytes_in_words(profile.host_memory_bytes)} on the host.",
    )
