"""The command that trains on nodes of a SLURM or Ray cluster, as the trials ran."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from optuna_dsat.escape.shell import in_folder, program
from optuna_dsat.secrecy.references import shell_join
from optuna_dsat.study.spec import StudySpec

__all__ = ["cluster_training_command", "device_settings", "environment_words"]

_MASTER = (
    '$(scontrol show node "$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1)"'
    " | grep -o 'NodeAddr=[^ ]*' | cut -d= -f2)"
)
"""Address of the first node as SLURM itself reaches it; names of nodes need not resolve."""
_PORT = "$((20000 + (SLURM_JOB_ID * 7 + SLURM_STEP_ID) % 10000))"
_QUOTE = "'\\''"
"""An apostrophe within apostrophes, for a shell."""


def cluster_training_command(spec: StudySpec, *, settings: Sequence[str], words: Sequence[str]) -> str:
    """Return the shell command that runs torchrun on each of as many nodes as a trial had.

    Args:
        spec: The study.
        settings: Variables of the ranks, as ``NAME=VALUE``.
        words: What follows torchrun's own options: the script and its arguments.
    """
    return (_ray_command if spec.on == "ray" else _srun_command)(spec, settings=settings, words=words)


def device_settings(spec: StudySpec) -> list[str]:
    """Return the variables that make DeepSpeed use the CPU, as ``NAME=VALUE``; empty for GPUs."""
    return [] if spec.device == "cuda" else ["DS_ACCELERATOR=cpu", f"LOCAL_SIZE={spec.slots_per_node}"]


def environment_words(spec: StudySpec, settings: Sequence[str]) -> list[str]:
    """Return the words before a command that set its variables and its working directory; empty for neither.

    Args:
        spec: The study.
        settings: Variables, as ``NAME=VALUE``.
    """
    words = [*in_folder(spec.script.cwd), *settings]
    return ["env", *words] if words else []


def _ray_command(spec: StudySpec, *, settings: Sequence[str], words: Sequence[str]) -> str:
    where = ["--address", spec.ray_address] if spec.ray_address else []
    shape = ["--nodes", str(spec.nodes_per_trial), "--ranks", str(spec.slots_per_node)]
    shape += ["--gpus", str(spec.gpus_per_node)] if spec.gpus_per_node else []
    shape += [word for name in spec.ray_node for word in ("--node", name)]
    runner = [sys.executable, "-m", "optuna_dsat.cluster.ray_train", *where, *shape]
    return shell_join([*environment_words(spec, settings), *runner, "--", *words])


def _srun_command(spec: StudySpec, *, settings: Sequence[str], words: Sequence[str]) -> str:
    nodes = spec.nodes_per_trial
    asked = [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
    asked += [f"--gpus-per-node={spec.gpus_per_node}"] if spec.gpus_per_node else []
    prefix = shell_join(["srun", *asked, *spec.slurm_arg, *environment_words(spec, settings)])
    torchrun = f"{shlex.quote(program('torchrun'))} --nnodes {nodes} --nproc_per_node {spec.slots_per_node}"
    if nodes == 1:
        return f"{prefix} {torchrun} {shell_join(words)}"
    meeting = f"--node_rank $SLURM_PROCID --rdzv_backend static --master_addr {_MASTER} --master_port {_PORT}"
    inner = f'exec {torchrun} {meeting} "$@"'.replace("'", _QUOTE)
    return f"{prefix} bash -c '{inner}' train {shell_join(words)}"
