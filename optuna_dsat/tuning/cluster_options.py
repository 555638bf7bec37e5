"""Options on launches that run on nodes of a cluster instead of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from optuna_dsat.tuning.declaration import WHERE, Option
from optuna_dsat.tuning.defaults import default

__all__ = ["ClusterOptions"]


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Options of every method on the cluster whose nodes run the launches."""

    on: Annotated[
        Literal["here", "slurm", "ray"],
        Option(
            help="Where launches run: on this machine, or on nodes of a SLURM or Ray cluster.",
            python_help="Where launches run: on this machine (``here``), or on nodes of a SLURM or Ray cluster.",
            panel=WHERE,
        ),
    ] = default("on")
    nodes_per_trial: Annotated[
        int, Option(help="Nodes of one launch, with --on slurm or --on ray.", metavar="N", panel=WHERE)
    ] = default("nodes_per_trial")
    gpus_per_node: Annotated[
        int | None,
        Option(
            help="GPUs of each of these nodes; --cpu-ranks instead runs so many ranks on the CPU of each.",
            none="none",
            metavar="N",
            panel=WHERE,
        ),
    ] = None
    slurm_arg: Annotated[
        Sequence[str] | None,
        Option(
            help="Option for srun, such as --slurm-arg=--partition=a100 (repeatable).",
            python_help="Options for srun, such as ``--partition=a100``.",
            metavar="OPTION",
            text_type=list[str] | None,
            panel=WHERE,
        ),
    ] = None
    ray_address: Annotated[
        str | None,
        Option(
            help="Address of the Ray cluster, HOST:PORT.",
            none="the cluster that this machine belongs to",
            metavar="ADDRESS",
            panel=WHERE,
        ),
    ] = default("ray_address")
    ray_node: Annotated[
        Sequence[str] | None,
        Option(
            help="Node of the Ray cluster that may be used: its name, host name or address (repeatable).",
            python_help="Nodes of the Ray cluster that may be used: names, host names or addresses.",
            none="all",
            metavar="NODE",
            text_type=list[str] | None,
            panel=WHERE,
        ),
    ] = None
    queue_timeout: Annotated[
        float | None,
        Option(
            help="Seconds to wait for the cluster to grant nodes.",
            none="as long as it takes",
            metavar="SECONDS",
            panel=WHERE,
        ),
    ] = default("queue_timeout")
    idle_release: Annotated[
        float,
        Option(
            help="Seconds without a launch after which nodes are given back to the cluster.",
            metavar="SECONDS",
            panel=WHERE,
        ),
    ] = default("idle_release")
