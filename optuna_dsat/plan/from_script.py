"""Plan a script on this machine from its profile launch and from step times of earlier searches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

from optuna_dsat.cost.gpus import Priors, gpu_of_device, network_priors, peak_flops, priors_of_device
from optuna_dsat.launch.follow import SlotWait
from optuna_dsat.launch.protocol import Launcher
from optuna_dsat.plan.prediction import Subject, step_time_model
from optuna_dsat.plan.rows import Plan, plan_rows
from optuna_dsat.store import Store
from optuna_dsat.study.profile.fingerprint import fingerprint
from optuna_dsat.study.profile.profile import ProfileAttempt, measure_profile
from optuna_dsat.study.profile.profiled import Profiled
from optuna_dsat.study.search.warm_start import gather
from optuna_dsat.study.space import hardware_of
from optuna_dsat.study.spec import StudySpec
from optuna_dsat.words import bytes_in_words, flops_in_words, params_in_words, things_in_words


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
    """Return the plan of a script, after a profile launch, for which ``launcher`` is called, if none is stored.

    ``memory_margin`` is the share of the device's memory to leave free, ``seq_length`` the tokens per sample, ``nodes``
    the hosts to plan for, all like this host, which runs the profile launch. ``on_notice`` is called with the owner of
    the slots while the launch waits for them.

    Raises:
        DsatError: If the script fails, or does not fit in any configuration.
    """
    mark = fingerprint(spec, device_names=device_names)
    stored, origin = store.find_profile(mark), "measured before"
    profiled = None if stored is None else Profiled.if_readable(stored)
    if profiled is None:
        with launcher() as opened:
            wait = SlotWait(opened.holders, slots=spec.slots_per_trial, limit_s=spec.wait_for_gpus, on_notice=on_notice)
            profiled = measure_profile(
                spec, opened, on_attempt=on_attempt, on_report=lambda _report, _record: None, wait=wait
            )
        store.save_profile(mark, profiled.to_json(), study_uuid="")
        origin = f"measured with {profiled.measured_with}"
    spec = profiled.followed_by(spec)
    ranks = hardware_of(spec, profiled).world_size * nodes
    machine = priors_of_device(profiled.profile, spec.ds_config, device=spec.device, ranks=ranks)
    if network_gbit_per_s is not None:
        machine = {**machine, **network_priors(network_gbit_per_s)}
    subject, times = _fitted(_subject(spec, profiled, machine, ranks=ranks), spec, profiled, store=store, mark=mark)
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


def _fitted(subject: Subject, spec: StudySpec, profiled: Profiled, *, store: Store, mark: str) -> tuple[Subject, str]:
    """Return the subject fitted to earlier studies, if any, and a sentence on the basis of the predicted times."""
    prior_knowledge = gather(store, spec, profiled, fingerprint=mark)
    if prior_knowledge is not None:
        subject = replace(subject, fitted=prior_knowledge.prior(step_time_model(subject)))
        return subject, f"Times are fitted to launches of {' and '.join(prior_knowledge.studies)}."
    if gpu_of_device(profiled.profile.device_name) is not None:
        return subject, "Times are by the device's data sheet; no step was timed."
    why = "" if spec.device == "cpu" else "This device is not in the table of GPUs. "
    return subject, f"{why}No step was timed yet: times may be as far off as they say."


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
