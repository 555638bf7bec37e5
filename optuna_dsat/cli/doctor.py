"""``doctor``: the capabilities and problems of this machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optuna_dsat.cli.parsing.parameters import option
from optuna_dsat.cli.plan import PlanOptions, plan_with_launch
from optuna_dsat.cli.tables import console_of, notify
from optuna_dsat.study.options.declaration import DEFAULT_OUTPUT_DIR, OUTPUT_DIR_ENV, STORAGE_ENV
from optuna_dsat.study.options.parse import named_config

if TYPE_CHECKING:
    from optuna_dsat.doctor.finding import Finding


_MARKS = {
    "fine": ("ok", "green"),
    "note": ("note", "cyan"),
    "problem": ("problem", "yellow"),
    "fatal": ("FATAL", "red"),
}
"""Status of a finding -> its symbol and colour."""


def doctor(
    script: Annotated[
        Path | None,
        typer.Argument(
            help="Your script, or its command. With a config, the host memory to load its model, of steps and to save "
            "it is predicted, from a launch unless it was profiled.",
            metavar="[SCRIPT]",
            show_default=False,
        ),
    ] = None,
    ds_config: Annotated[
        Path | None,
        typer.Argument(help="The script's DeepSpeed config (JSON).", metavar="[DS_CONFIG]", show_default=False),
    ] = None,
    script_args: Annotated[
        list[str] | None,
        typer.Argument(help="Arguments of the script, after --.", metavar="[-- SCRIPT_ARGS]", show_default=False),
    ] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module's name.")] = False,
    storage: Annotated[str | None, option("--storage", help="Database to check, too.", envvar=STORAGE_ENV)] = None,
    output_dir: Annotated[
        Path, typer.Option("--output-dir", help="Where launches would write.", envvar=OUTPUT_DIR_ENV)
    ] = Path(DEFAULT_OUTPUT_DIR),
    nvme_path: Annotated[
        Path | None,
        option(
            "--nvme-path",
            help="Folder on a drive for NVMe offload: its speed is measured with a file of 1 GiB, removed at once.",
        ),
    ] = None,
    python: Annotated[
        str | None,
        option("--python", help="Python of your script; without it the one that a search would choose."),
    ] = None,
    gpus_per_node: Annotated[
        int | None, option("--gpus-per-node", help="GPUs of a launch whose host memory is predicted.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check whether this machine can run a search, and what limits it; exit with 3 if no launch can run."""
    from optuna_dsat.doctor.examination import examine
    from optuna_dsat.doctor.finding import exit_code, to_json
    from optuna_dsat.tuning.options.tune_options import TuneOptions
    from optuna_dsat.tuning.target import find_target

    ds_config = named_config(ds_config)
    if script is not None:
        find_target(TuneOptions(script, ds_config, module=module), python=python)
    findings = examine(output_dir=output_dir, storage=storage, nvme_path=nvme_path, python=python)
    if script is not None and ds_config is not None and not exit_code(findings):
        options = PlanOptions(
            script=script,
            ds_config=ds_config,
            script_args=script_args,
            module=module,
            output_dir=output_dir,
            python=python,
            gpus=gpus_per_node,
        )
        findings.append(_host_memory(options if storage is None else replace(options, storage=storage)))
    if as_json:
        print(json.dumps(to_json(findings), indent=2))
    else:
        print_findings(findings)
    code = exit_code(findings)
    if code:
        notify("optuna-dsat: no launch can run until the FATAL problems above are fixed.")
        raise typer.Exit(code)


def _host_memory(options: PlanOptions) -> Finding:
    """Return the finding on the host memory to load the script's model, of its steps and to save it."""
    from dataclasses import asdict

    from optuna_dsat.config import ds_config
    from optuna_dsat.config.structures import Structure
    from optuna_dsat.cost.memory import host_peaks
    from optuna_dsat.doctor.finding import finding_of
    from optuna_dsat.study.profile.host import host_memory_in_words

    subject = plan_with_launch(options).subject
    config = ds_config.effective(subject.config)
    peaks = host_peaks(subject.profile, config, hardware=subject.hardware)
    words = f"your config ({Structure.of(config).words})"
    text, remedy = host_memory_in_words(words, peaks, subject.hardware)
    return finding_of("host", "memory of training", text, remedy, data=asdict(peaks))


def print_findings(findings: Sequence[Finding]) -> None:
    """Print findings as a table for each area."""
    from rich.table import Table
    from rich.text import Text

    console = console_of()
    for area in dict.fromkeys(finding.area for finding in findings):
        console.print(Text(area.capitalize(), style="bold"))
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True, min_width=7)
        table.add_column(overflow="fold")
        for finding in findings:
            if finding.area == area:
                words, style = _MARKS[finding.status.value]
                text = Text(finding.text)
                if finding.remedy:
                    text.append(f"\n{finding.remedy}", style="italic")
                table.add_row(Text(words, style=style), text)
        console.print(table)
