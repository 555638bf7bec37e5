"""What a script's launch, or earlier ones, say for a plan: profile, machine, and speeds where any were measured."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from optuna_dsat.cost.gpus import gpu_of_device, priors_of_device
from optuna_dsat.launch.protocol import Launcher
from optuna_dsat.launch.waiting import SlotWait
from optuna_dsat.plan.structures import Subject, theory_of
from optuna_dsat.store import Store
from optuna_dsat.study.profile import ProfileAttempt, Profiled, fingerprint, measure_profile
from optuna_dsat.study.space import hardware_of
from optuna_dsat.study.spec import StudySpec
from optuna_dsat.study.warm_start import gather
from optuna_dsat.words import bytes_in_words

__all__ = ["ScriptPlan", "plan_script"]


@dataclass(frozen=True, kw_only=True)
class ScriptPlan:
    """A script on this machine, as far as a plan needs it."""

    subject: Subject
    about: tuple[str, ...]
    """What it rests on, in lines."""
    bf16_hardware: bool | None


def plan_script(
    spec: StudySpec,
    *,
    store: Store,
    device_names: tuple[str, ...],
    launcher: Callable[[], AbstractContextManager[Launcher]],
    on_attempt: Callable[[ProfileAttempt], None],
    memory_margin: float,
    on_notice: Callable[[str], None] = lambda _: None,
) -> ScriptPlan:
    """Return what is known of a script, after a profile launch where none was made before.

    Args:
        spec: The script and where it runs.
        store: Where profiles and studies are kept.
        device_names: Names of the devices, for the fingerprint.
        launcher: Opens a launcher, asked for only where one is needed.
        on_attempt: Called before each launch.
        memory_margin: Share of the device's memory to leave free.
        on_notice: Told who holds the slots while they are waited for.

    Raises:
        DsatError: If the script fails, or does not fit at all.
    """
    mark = fingerprint(spec, device_names=device_names)
    stored = store.find_profile(mark)
    if stored is not None:
        profiled = Profiled.from_json(stored.profile)
    else:
        with launcher() as opened:
            wait = SlotWait(
                opened.holders, slots=spec.slots_per_trial, limit_s=spec.wait_for_gpus_s, on_notice=on_notice
            )
            profiled = measure_profile(
                spec, opened, on_attempt=on_attempt, on_report=lambda _report, _record: None, wait=wait
            )
        store.save_profile(mark, profiled.to_json(), study_uuid="")
    profile = profiled.profile
    subject = Subject(
        profile=profile,
        hardware=hardware_of(spec, profiled),
        config=spec.ds_config,
        machine=priors_of_device(profile.device_name, device=spec.device, ranks=spec.slots_per_trial),
        memory_margin=memory_margin,
        pipeline=profiled.pipeline,
    )
    prior_knowledge = gather(store, spec, profiled, fingerprint=mark)
    gpu = gpu_of_device(profile.device_name)
    if prior_knowledge is not None:
        subject = replace(subject, learnt=prior_knowledge.prior(theory_of(subject)))
        times = f"Times are fitted to launches of {' and '.join(prior_knowledge.studies)}."
    elif gpu is not None:
        times = "Times are by the device's data sheet; no step was timed."
    else:
        times = "This device is not in the table of GPUs, and no step was timed: times may be as far off as they say."
    how = f"measured with {profiled.measured_with}" if stored is None else "measured before"
    return ScriptPlan(
        subject=subject,
        about=(
            f"Profile ({how}): {profile.params / 1e6:.4g} M parameters, "
            f"{bytes_in_words(profile.activation_bytes_per_sample)} of activations and "
            f"{profile.flops_per_sample / 1e9:.4g} GFLOP a sample.",
            f"{spec.slots_per_trial} ranks on {profile.device_name or spec.device}, "
            f"{bytes_in_words(profile.device_memory_bytes)} each, "
            f"{bytes_in_words(profile.host_memory_bytes)} on the host.",
            times,
        ),
        bf16_hardware=None if gpu is None else gpu.bf16,
    )
