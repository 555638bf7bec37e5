"""Run all checks of the doctor."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

from optuna_dsat.doctor import libraries
from optuna_dsat.doctor.finding import Finding, Status, finding_of
from optuna_dsat.doctor.machine import device_findings, drive_finding, find_gpus, host_findings, refused_accelerator
from optuna_dsat.errors import DsatError, UsageError
from optuna_dsat.launch.machine.devices import refuse_build
from optuna_dsat.launch.machine.nvml import Nvml
from optuna_dsat.script.interpreter import OLDEST, examined, named_python, script_python
from optuna_dsat.store import database_exists, display_url

_RETRY_LIMIT_S = 5.0
"""Longest time to retry connecting to the database, in seconds."""


def examine(
    *,
    output_dir: Path,
    storage: str | None = None,
    nvme_path: Path | None = None,
    python: str | None = None,
    environ: Mapping[str, str] | None = None,
    nvml: Nvml | None = None,
    ask: Callable[..., libraries.Libraries] = libraries.ask,
) -> list[Finding]:
    """Return all findings, area by area; of ``storage``, a URL, and ``nvme_path``, a folder, if these are given.

    ``python`` is the script's interpreter, by default that of a search. ``environ`` and ``nvml`` default to this
    process's and the machine's; ``ask`` queries torch and DeepSpeed.
    """
    environ = os.environ if environ is None else environ
    gpus = find_gpus(environ=environ, nvml=nvml)
    python, interpreter = _interpreter(python)
    builds = _other_builds(interpreter.data["versions"].get("torch", ""))
    if examined(python).version < OLDEST:
        return [*device_findings(gpus), interpreter]  # the probe of its libraries does not start
    result = ask(cpu=gpus.count == 0, python=python, environ=environ)
    findings = [
        *device_findings(gpus),
        *builds,
        interpreter,
        *libraries.findings(result, gpus=gpus.count),
        *host_findings(output_dir=output_dir, environ=environ),
        *([libraries.launcher()] if result.usable else []),
        *libraries.operators(result, gpus=gpus.count, environ=environ),
        *libraries.offloads(result, nvme=nvme_path, environ=environ),
    ]
    if nvme_path is not None:
        findings.append(drive_finding(nvme_path))
    if storage is not None:
        findings.append(examine_storage(storage))
    return findings


def _other_builds(torch_version: str) -> list[Finding]:
    """Return the finding on a torch for devices on which launches do not run."""
    try:
        refuse_build(torch_version)
    except UsageError as error:
        return [refused_accelerator(str(error))]
    return []


def _interpreter(named: str | None) -> tuple[str, Finding]:
    """Return the interpreter of launches and its finding; ``UsageError`` if the named one does not exist."""
    named = None if named is None else named_python(named)
    running = f"{sys.executable}: Python {platform.python_version()}"
    try:
        python = script_python(named) or sys.executable
        text, status, versions = f"Launches run with {examined(python)}", Status.FINE, examined(python).all_versions
    except UsageError as error:
        python, text, status, versions = named or sys.executable, str(error), Status.FATAL, {}
    if python != sys.executable:
        text = f"{text.removesuffix('.')}. optuna-dsat runs with {running}"
    data = {"python": python, "versions": versions, "tuner": sys.executable}
    return python, finding_of("software", "interpreter", text, status=status, data=data)


def examine_storage(url: str) -> Finding:
    """Return the finding for a storage URL; the URL's password is masked."""
    from optuna_dsat.store import migrate
    from optuna_dsat.store.database import Database

    shown = display_url(url)
    data = {"url": shown}
    try:
        if not database_exists(url):
            return finding_of("database", "storage", f"{shown} is not there yet; the first study makes it.", data=data)
        with closing(Database(url, create=False, retry_limit_s=_RETRY_LIMIT_S)) as database:
            state = migrate.require_usable(database)
    except DsatError as error:
        text = str(error)
        remedy = (
            "Start the database, or correct the URL, its user or password (they may also come from the "
            "environment: PGPASSWORD, PGPASSFILE)."
        )
        return finding_of("database", "storage", text, remedy, data=data, status=Status.FATAL)
    words = "it holds no study yet" if state is migrate.SchemaState.NEW else "its tables are those of this version"
    return finding_of("database", "storage", f"{shown} answers; {words}.", data=data)
