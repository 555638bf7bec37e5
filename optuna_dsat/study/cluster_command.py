"""The command that trains on nodes of a SLURM cluster, as the trials ran."""

from __future__ import annotations

from collections.abc import Sequence

from optuna_dsat.secrecy.references import shell_join
from optuna_dsat.study.spec import StudySpec

__all__ = ["srun_training_command"]

_MASTER = (
    '$(scontrol show node "$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1)"'
    " | grep -o 'NodeAddr=[^ ]*' | cut -d= -f2)"
)
"""Address of the first node as SLURM itself reaches it; names of nodes need not resolve."""
_PORT = "$((20000 + (SLURM_JOB_ID * 7 + SLURM_STEP_ID) % 10000))"
_QUOTE = "'\\''"
"""An apostrophe within apostrophes, for a shell."""


def srun_training_command(spec: StudySpec, *, settings: Sequence[str], words: Sequence[str]) -> str:
    """Return the shell command that runs torchrun on each of as many nodes as a trial had.

    Args:
        spec: The study.
        settings: Variables of the ranks, as ``NAME=VALUE``.
        words: What follows torchrun's own options: the script and its arguments.
    """
    nodes = spec.nodes_per_trial
    asked = [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
    asked += [f"--gpus-per-node={spec.gpus_per_node}"] if spec.gpus_per_node else []
    prefix = shell_join(["srun", *asked, *spec.slurm_arg, *(["env", *settings] if settings else [])])
    torchrun = f"torchrun --nnodes {nodes} --nproc_per_node {spec.slots_per_node}"
    if nodes == 1:
        return f"{prefix} {torchrun} {shell_join(words)}"
    meeting = f"--node_rank $SLURM_PROCID --rdzv_backend static --master_addr {_MASTER} --master_port {_PORT}"
    inner = f'exec {torchrun} {meeting} "$@"'.replace("'", _QUOTE)
    return f"{prefix} bash -c '{inner}' train {shell_join(words)}"
