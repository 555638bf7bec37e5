"""Run all checks of the doctor."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from optuna_dsat.doctor import launchers, libraries, nvme, offloads, operators
from optuna_dsat.doctor import storage as storage_check
from optuna_dsat.doctor.finding import Finding
from optuna_dsat.doctor.machine import device_findings, find_gpus, host_findings
from optuna_dsat.launch.machine.devices import Nvml

__all__ = ["examine"]


def examine(
    *,
    output_dir: Path,
    storage: str | None = None,
    nvme_path: Path | None = None,
    environ: Mapping[str, str] | None = None,
    nvml: Nvml | None = None,
    ask: Callable[..., libraries.Libraries] = libraries.ask,
) -> list[Finding]:
    """Return all findings, area by area.

    Args:
        output_dir: Output directory of launches.
        storage: Storage URL to check; None to skip.
        nvme_path: Folder on the drive to measure for offload; None to skip.
        environ: Environment of launches; None for this process's.
        nvml: NVML to query; None for the machine's.
        ask: Queries torch and DeepSpeed.
    """
    environ = os.environ if environ is None else environ
    gpus = find_gpus(environ=environ, nvml=nvml)
    result = ask(cpu=gpus.count == 0, environ=environ)
    findings = [
        *device_findings(gpus),
        *libraries.findings(result, gpus=gpus.count),
        *host_findings(output_dir=output_dir, environ=environ),
        launchers.finding(result),
        *operators.findings(result, gpus=gpus.count, environ=environ),
        *offloads.findings(result, nvme=nvme_path, environ=environ),
    ]
    if nvme_path is not None:
        findings.append(nvme.examine(nvme_path))
    if storage is not None:
        findings.append(storage_check.examine(storage))
    return findings
