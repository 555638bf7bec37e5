"""Select the devices of a search or a training from its options."""

from __future__ import annotations

from optuna_dsat.errors import UsageError
from optuna_dsat.launch.machine.devices import Devices, cpu_devices, detect_devices
from optuna_dsat.launch.machine.slots import only_free
from optuna_dsat.study.options.parse import one_count
from optuna_dsat.tuning.options.tune_options import TuneOptions


def search_devices(options: TuneOptions) -> Devices:
    """Return the devices to tune on."""
    if options.on != "here":
        from optuna_dsat.tuning.cluster import cluster_devices

        return cluster_devices(options)
    return choose_devices(
        one_count(options.gpus_per_trial, option="--gpus-per-trial"),
        one_count(options.cpu_ranks, option="--cpu-ranks"),
        option="--gpus-per-trial",
        free_only=options.only_free_gpus,
    )


def choose_devices(wanted: int | None, cpu_ranks: int | None, *, option: str, free_only: bool = False) -> Devices:
    """Return the GPUs that may be used (all if no number is wanted), or CPU ranks.

    Raises:
        UsageError: If more GPUs are requested than exist, or both GPUs and CPU ranks.
        DeviceError: If GPUs do not respond, or only free GPUs were requested and all are in use.
    """
    if cpu_ranks is not None:
        if wanted is not None:
            raise UsageError(f"{option} and --cpu-ranks exclude each other: give one.")
        return cpu_devices(cpu_ranks)
    devices = detect_devices()
    if free_only:
        devices = only_free(devices)
    if wanted is None:
        return devices
    available = devices.per_launch if devices.kind == "cuda" else 0
    if wanted < 1 or wanted > available:
        offers = f"{'a launch can take' if devices.per_launch < len(devices.devices) else 'this machine offers'}"
        raise UsageError(
            f"{option} is {wanted}, but {offers} {available} GPU{'s' * (available != 1)}. "
            + ("Use --cpu-ranks to tune on the CPU." if available == 0 else f"Give 1 to {available}.")
            + "".join(f" {notice}" for notice in devices.notices)
        )
    return devices
