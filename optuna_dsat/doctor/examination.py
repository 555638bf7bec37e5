"""Looks at everything that a search needs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from optuna_dsat.doctor import launchers, libraries, nvme, offloads
from optuna_dsat.doctor import storage as storage_check
from optuna_dsat.doctor.finding import Finding
from optuna_dsat.doctor.machine import device_findings, find_gpus, host_findings
from optuna_dsat.launch.devices import Nvml

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
        output_dir: Where launches would write.
        storage: Database to reach, None for none.
        nvme_path: Folder whose drive is measured for offload, None for none.
        environ: Environment of launches, this process's for None.
        nvml: NVML to ask, the machine's for None.
        ask: Asks torch and DeepSpeed.
    """
    environ = os.environ if environ is None else environ
    gpus = find_gpus(environ=environ, nvml=nvml)
    found = ask(cpu=gpus.count == 0, environ=environ)
    findings = [
        *device_findings(gpus),
        *libraries.findings(found, gpus=gpus.count),
        *host_findings(output_dir=output_dir, environ=environ),
        launchers.finding(found),
        *offloads.findings(found, nvme=nvme_path),
    ]
    if nvme_path is not None:
        findings.append(nvme.examine(nvme_path))
    if storage is not None:
        findings.append(storage_check.examine(storage))
    return findings
