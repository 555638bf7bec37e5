"""The command that trains with a config of a study: the script's own, on nodes of a cluster too."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optuna_dsat.escape.shell import in_folder, program
from optuna_dsat.launch.agent.command import allocator_settings
from optuna_dsat.launch.places.slurm import place_arguments
from optuna_dsat.runtime.adapt.config import with_option
from optuna_dsat.runtime.overlay import binds_cores
from optuna_dsat.runtime.rank import OF_JOB, names_rank
from optuna_dsat.script.arg_mapping import map_arguments
from optuna_dsat.script.settings_file import SettingsCopy, find_config_key, names_file, settings_copy
from optuna_dsat.script.trial_class import CHECKPOINTS, RUNNER, complete_training, train_command
from optuna_dsat.secrecy.references import resolved, shell_join
from optuna_dsat.study.config_changes import BIND_CORES_OPTION, changes_model
from optuna_dsat.study.spec import ScriptSpec, StudySpec

if TYPE_CHECKING:
    from optuna_dsat.study.profile.profiled import Profiled

BEST_CONFIG = "best_ds_config.json"
SAME_BATCH_CONFIG = "best_ds_config.same-batch.json"
"""File of the fastest config at the user's global batch (``--batch both``)."""
_MASTER = (
    '$(scontrol show node "$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1)"'
    " | grep -o 'NodeAddr=[^ ]*' | cut -d= -f2)"
)
"""Address of the first node as SLURM itself reaches it; names of nodes need not resolve."""
_PORT = "$((20000 + (SLURM_JOB_ID * 7 + SLURM_STEP_ID) % 10000))"
_QUOTE = "'\\''"
"""An apostrophe within apostrophes, for a shell."""


def best_settings(spec: StudySpec, config: Mapping[str, Any], directory: Path) -> SettingsCopy | None:
    """Return the copy, in ``directory``, of the script's settings file with a config's batch size and path.

    None without any. If the file, or a section of it, is the script's DeepSpeed config, it is replaced with the config.
    """
    script = spec.script
    source = script.batch_source if "kind" in script.batch_source else {}
    return settings_copy(
        source,
        resolved(config),
        user=resolved(spec.ds_config),
        args=script.args,
        cwd=script.cwd,
        folder=directory,
        sections=not script.config_path,
        user_config="" if script.script == RUNNER else script.config_path,  # its command gives it the config
        best_config=str(directory / BEST_CONFIG),
    )


def cluster_training_command(spec: StudySpec, *, settings: Sequence[str], words: Sequence[str]) -> str:
    """Return the shell command that runs torchrun on each of as many nodes as a trial had."""
    return (_ray_command if spec.on == "ray" else _srun_command)(spec, settings=settings, words=words)


def device_settings(spec: StudySpec) -> list[str]:
    """Return the variables of the device with which launches were measured, as ``NAME=VALUE``."""
    if spec.device == "cuda":
        settings = allocator_settings({**os.environ, **spec.script.environment})
        return [f"{name}={value}" for name, value in settings.items()]
    return ["DS_ACCELERATOR=cpu", f"LOCAL_SIZE={spec.slots_per_node}"]


def environment_words(spec: StudySpec, settings: Sequence[str]) -> list[str]:
    """Return the words before a command that set its variables and its working directory; empty for neither."""
    words = [*in_folder(spec.script.cwd), *settings]
    return ["env", *words] if words else []


def _ray_command(spec: StudySpec, *, settings: Sequence[str], words: Sequence[str]) -> str:
    where = ["--address", spec.ray_address] if spec.ray_address else []
    shape = ["--nodes", str(spec.nodes_per_trial), "--ranks", str(spec.slots_per_node)]
    shape += ["--gpus", str(spec.gpus_per_node)] if spec.gpus_per_node else []
    shape += [word for name in spec.ray_node or () for word in ("--node", name)]
    shape += [] if spec.python is None else ["--python", spec.python]
    runner = [sys.executable, "-m", "optuna_dsat.launch.places.ray_train", *where, *shape]
    return shell_join([*environment_words(spec, settings), *runner, "--", *words])


def _srun_command(spec: StudySpec, *, settings: Sequence[str], words: Sequence[str]) -> str:
    nodes = spec.nodes_per_trial
    of_ranks = [setting for setting in settings if names_rank(setting.partition("=")[2])]
    settings = [setting for setting in settings if setting not in of_ranks]
    of_ranks = [setting for setting in of_ranks if setting.partition("=")[2] not in OF_JOB]
    asked = place_arguments(nodes=nodes, slots=spec.gpus_per_node or 0, arguments=spec.slurm_arg or ())
    prefix = shell_join(["srun", *asked, *environment_words(spec, settings)])
    torchrun = shell_join([*(["env", *of_ranks] if of_ranks else []), program("torchrun", spec.python)])
    torchrun += f" --nnodes {nodes} --nproc_per_node {spec.slots_per_node}"
    if nodes == 1:
        return f"{prefix} {torchrun} {shell_join(words)}"
    meeting = f"--node_rank $SLURM_PROCID --rdzv_backend static --master_addr {_MASTER} --master_port {_PORT}"
    inner = f'exec {torchrun} {meeting} "$@"'.replace("'", _QUOTE)
    return f"{prefix} bash -c '{inner}' train {shell_join(words)}"


def command_to_train(
    spec: StudySpec,
    config: Mapping[str, Any],
    *,
    profiled: Profiled | None,
    host_threads: int | None,
    storage: str,
    same_batch: int | None = None,
) -> str:
    """Return the shell command that trains with a complete config of a study, without any change of the script.

    It is the script's own command where that applies all of the config, which no file does for settings that change the
    model, and where torchrun sets all variables of its ranks; else ``optuna-dsat train``. ``storage`` is a URL without
    a password; ``same_batch`` the number of the trial in ``SAME_BATCH_CONFIG``, None for ``BEST_CONFIG``, which alone
    has a copy of the script's settings file.
    """
    path = spec.study_dir / (BEST_CONFIG if same_batch is None else SAME_BATCH_CONFIG)
    command, names_config = training_command(spec, config, path, profiled=profiled, host_threads=host_threads)
    copy = best_settings(spec, config, spec.study_dir)
    written = copy is not None and copy.sets_batch
    applies = names_config and (same_batch is None or copy is None) and not changes_model(config, spec.ds_config)
    applies = applies and (not binds_cores(config) or BIND_CORES_OPTION in command)
    variables = {**spec.script.environment, **({} if profiled is None else profiled.environment)}
    applies = applies and not any(map(names_rank, variables.values()))
    if applies and (profiled is None or profiled.trains_by_command(spec, config, settings_written=written)):
        return command
    trial = [] if same_batch is None else ["--trial", str(same_batch)]
    return shell_join([program("optuna-dsat"), "train", spec.name, *trial, "--storage", storage])


def training_command(
    spec: StudySpec,
    config: Mapping[str, Any],
    config_path: Path,
    *,
    profiled: Profiled | None = None,
    host_threads: int | None = None,
) -> tuple[str, bool]:
    """Return the script's own command with ``config``, written to ``config_path``, and whether it names that file.

    Arguments that name the user's config, or a settings file with a copy in ``best_settings``, are replaced. If such a
    file names the config and the script lets arguments override the file, an argument is added. ``host_threads`` are
    per rank, as measured; torchrun sets 1 without them.
    """
    script = spec.script
    pointed, replaced = _point_to(script, config_path)
    if profiled is not None and profiled.config_in_code:
        replaced = False  # the argument has no effect
    elif profiled is not None and profiled.config_option and not replaced:
        pointed, replaced = with_option(pointed, profiled.config_option, str(config_path)), True
    environment = _environment(script, config_path)
    if (copy := best_settings(spec, config, config_path.parent)) is not None:
        pointed, replaced = copy.pointed(pointed, cwd=script.cwd), replaced or copy.names_config
    if not replaced and (key := _overridden_key(script)) is not None:
        pointed, replaced = with_option(pointed, f"{key}=", str(config_path)), True
    args = map_arguments(pointed, script.arg_mappings, config, world_size=spec.data_parallel_ranks)
    if script.script == RUNNER:
        completed = complete_training(args, config_path.parent / CHECKPOINTS)
        words = train_command(completed, config=str(config_path), device=spec.device, slots=spec.slots_per_trial)
        variables = [f"{name}={value}" for name, value in environment.items()]
        return shell_join([*environment_words(spec, variables), program(words[0], spec.python), *words[1:]]), replaced
    ranks = str(spec.slots_per_trial)
    rank_option = profiled is not None and profiled.trainer is None and profiled.takes_local_rank  # trainers need none
    python, module = program("python", spec.python), ["-m"] if script.is_module else []
    if profiled is not None and profiled.starts_ranks:
        launcher = [python, *module]
    elif rank_option == "--local-rank" and spec.train_launcher is None:
        launcher = [python, "-m", "torch.distributed.launch", "--nproc_per_node", ranks, *module, *_separator(args)]
    elif spec.train_launcher == "deepspeed" or (
        spec.train_launcher is None and (rank_option or spec.source.says_where_to_meet())
    ):
        without = [] if rank_option == "--local_rank" else ["--no_local_rank"]
        deepspeed_module = ["--module"] if script.is_module else []
        binding = [BIND_CORES_OPTION] if binds_cores(config) and shutil.which("numactl") else []
        launcher = [program("deepspeed", spec.python), "--num_gpus", ranks, *binding, *without, *deepspeed_module]
    else:
        launcher = [program("torchrun", spec.python), "--nproc_per_node", ranks, *module, *_separator(args)]
    settings = device_settings(spec)
    if host_threads:
        settings.append(f"OMP_NUM_THREADS={host_threads}")
    settings += [f"{name}={value}" for name, value in environment.items()]
    if spec.on != "here":
        target = [*module, *_separator(args), script.script, *args]
        command = cluster_training_command(spec, settings=settings, words=target)
    else:
        command = shell_join([*environment_words(spec, settings), *launcher, script.script, *args])
    return command, replaced or _ACCELERATE_CONFIG in environment


_OF_TORCHRUN = (
    *("duplicate-stderr-filters", "duplicate-stdout-filters", "event-log-handler", "local-addr", "local-ranks-filter"),
    *("log-dir", "logs-specs", "master-addr", "master-port", "max-restarts", "monitor-interval", "no-python"),
    *("node-rank", "nproc-per-node", "numa-binding", "rdzv-backend", "rdzv-conf", "rdzv-endpoint", "rdzv-id"),
    *("run-path", "shutdown-timeout", "signals-to-handle", "start-method", "virtual-local-rank"),
)
"""Options of torchrun (2.13) that are also written with underscores."""


def _separator(args: Sequence[str]) -> list[str]:
    """Return ``--`` if torchrun would refuse an argument of the script as an ambiguous abbreviation, such as --run."""
    spelled = [f"--{mark.join(name.split('-'))}" for name in _OF_TORCHRUN for mark in "-_"]
    typed = {arg.partition("=")[0] for arg in args if arg.startswith("--") and arg != "--"} - {*spelled}
    return ["--"] if any(sum(option.startswith(word) for option in spelled) > 1 for word in typed) else []


_ACCELERATE = "ACCELERATE_USE_DEEPSPEED"


_ACCELERATE_CONFIG = "ACCELERATE_DEEPSPEED_CONFIG_FILE"


_ACCELERATE_FIELDS = ("ACCELERATE_DEEPSPEED_", "ACCELERATE_GRADIENT_", "ACCELERATE_CONFIG_DS_FIELDS")
"""Variables from which accelerate's plugin builds its config; with a config file it rejects duplicate settings."""


_OF_NO_CONFIG = ("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES", "ACCELERATE_DEEPSPEED_ZERO3_INIT")
"""Variables of the plugin without a key in a config file, which it also reads together with a config file."""


def _environment(script: ScriptSpec, config_path: Path) -> dict[str, str]:
    """Return the script's variables for training with a config; accelerate's plugin reads the file."""
    if _ACCELERATE not in script.environment:
        return dict(script.environment)
    kept = {
        name: value
        for name, value in script.environment.items()
        if name in _OF_NO_CONFIG or not name.startswith(_ACCELERATE_FIELDS)
    }
    return {**kept, _ACCELERATE_CONFIG: str(config_path)}


def _overridden_key(script: ScriptSpec) -> str | None:
    """Return the key of a settings file that names the user's config, if the script lets ``KEY=VALUE`` override it."""
    if not script.config_path or not any(option.endswith("=") for option in script.arg_mappings.values()):
        return None
    return find_config_key(script.args, cwd=Path(script.cwd), config=Path(script.config_path))


def _point_to(script: ScriptSpec, config_path: Path) -> tuple[list[str], bool]:
    replaced = False
    args = []
    for arg in script.args:
        flag, equals, _ = arg.rpartition("=")
        if script.config_path and names_file(arg, script.config_path, cwd=script.cwd):
            arg = f"{flag}{equals}{config_path}"
            replaced = True
        args.append(arg)
    return args, replaced
