"""``doctor``: the capabilities and problems of this machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optuna_dsat.cli.parsing.parameters import option
from optuna_dsat.cli.tables import console_of, notify
from optuna_dsat.study.options.declaration import DEFAULT_OUTPUT_DIR, OUTPUT_DIR_ENV, STORAGE_ENV

if TYPE_CHECKING:
    from optuna_dsat.doctor.finding import Finding

__all__ = ["doctor", "print_findings"]


class _Cluster(StrEnum):
    """Clusters whose nodes can be examined."""

    SLURM = "slurm"
    RAY = "ray"


_MARKS = {
    "fine": ("ok", "green"),
    "note": ("note", "cyan"),
    "problem": ("problem", "yellow"),
    "fatal": ("FATAL", "red"),
}
"""Status of a finding -> its symbol and colour."""


def doctor(
    storage: Annotated[
        str | None, option("--storage", help="Look whether this database can be used, too.", envvar=STORAGE_ENV)
    ] = None,
    output_dir: Annotated[
        Path, typer.Option("--output-dir", help="Where launches would write.", envvar=OUTPUT_DIR_ENV)
    ] = Path(DEFAULT_OUTPUT_DIR),
    nvme: Annotated[
        Path | None,
        option(
            "--nvme",
            help="Folder on a drive for NVMe offload: its speed is measured with a file of 1 GiB, removed at once.",
        ),
    ] = None,
    python: Annotated[
        str | None,
        option("--python", help="Python of your script; without it the one that a search would choose."),
    ] = None,
    on: Annotated[
        _Cluster | None, option("--on", help="Look at nodes of this cluster, too, holding them for a moment.")
    ] = None,
    script: Annotated[
        Path | None, option("--script", help="File that they should have as this machine has it.", exists=True)
    ] = None,
    nodes_per_trial: Annotated[int, typer.Option("--nodes-per-trial", help="Nodes to look at, with --on.")] = 1,
    gpus_per_node: Annotated[
        int | None, option("--gpus-per-node", help="GPUs that each should have; none: the CPU.")
    ] = None,
    slurm_arg: Annotated[list[str] | None, option("--slurm-arg", help="Option for srun (repeatable).")] = None,
    ray_address: Annotated[str | None, option("--ray-address", help="Address of the Ray cluster.")] = None,
    ray_node: Annotated[list[str] | None, option("--ray-node", help="Node of it to look at (repeatable).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what this machine offers a search and what is wrong with it; exit with 3 where no launch can run."""
    from optuna_dsat.doctor.examination import examine
    from optuna_dsat.doctor.finding import exit_code, to_json

    findings = examine(output_dir=output_dir, storage=storage, nvme_path=nvme, python=python)
    if on is not None:
        from optuna_dsat.doctor import cluster
        from optuna_dsat.launch.agent.agent import digest_of
        from optuna_dsat.launch.places.place import Layout
        from optuna_dsat.tuning.cluster import engine_of

        files = [Path.cwd(), *([] if script is None else [Path.cwd() / script])]
        kind, gpus = ("cuda", gpus_per_node) if gpus_per_node else ("cpu", 0)
        layout = Layout(nodes=nodes_per_trial, slots=gpus or 1, kind=kind, gpus=gpus, python=python)
        engine = engine_of(on.value, slurm_arg=slurm_arg or (), ray_address=ray_address, ray_node=ray_node or ())
        findings += cluster.examine(engine, layout, files={str(path): digest_of(path) for path in files})
    if as_json:
        print(json.dumps(to_json(findings), indent=2))
    else:
        print_findings(findings)
    code = exit_code(findings)
    if code:
        notify("optuna-dsat: no launch can run before what is FATAL above is mended.")
        raise typer.Exit(code)


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
