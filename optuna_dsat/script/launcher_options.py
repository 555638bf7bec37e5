"""``python -m optuna_dsat.script.launcher_options LAUNCHER WORDS...``: a launcher's options, read by its own parser.

Prints the command that is left as one line of JSON (``launch_command.LaunchCommand``), or ``{"error": ...}``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from optuna_dsat.script.launch_command import LaunchCommand, as_json, read_command

__all__ = ["main", "of_accelerate", "of_torchrun", "read_options"]

_LOCAL = ("localhost", "127.0.0.1", os.uname().nodename)


def main(argv: Sequence[str]) -> None:
    """Read the options of the launcher that the first word names; print what is left."""
    launcher, words = argv[0], list(argv[1:])
    try:
        found = read_options(launcher, words)
    except (ValueError, argparse.ArgumentError) as error:
        print(json.dumps({"error": f"{launcher}: {error}"}))
        return
    except SystemExit as error:
        if not error.code:
            print(json.dumps({"error": f"{launcher} was only asked for its help."}))
            return
        raise
    print(as_json(found))


def read_options(launcher: str, words: Sequence[str]) -> LaunchCommand:
    """Return what is left of a command once its launcher's options are read.

    Args:
        launcher: A value that ``launch_command.launcher_of`` returns for a launcher.
        words: The command without the launcher itself.

    Raises:
        ValueError: If the options do not go together.
        SystemExit: If the launcher's parser refuses them.
    """
    return _READERS[launcher](words)


def _target(name: str, args: Sequence[str], *, is_module: bool, no_python: bool) -> dict[str, Any]:
    """Return script and arguments of a command whose launcher's options are read."""
    if not no_python:
        return {"script": name, "is_module": is_module, "args": tuple(args)}
    inner = read_command([name, *args], cwd=Path.cwd())
    if inner is None:
        return {"script": name, "is_module": False, "args": tuple(args)}
    return {"script": inner.script, "is_module": inner.is_module, "args": inner.args}


def _elsewhere(options: Mapping[str, Any]) -> list[str]:
    """Return a sentence on those options, name -> given value, that say where other nodes or the rendezvous are."""
    given = [f"{name} {value}" for name, value in options.items() if value not in (None, "", -1, False)]
    if not given:
        return []
    return [f"{', '.join(given)}: tuned on this machine alone, and each launch chooses its own rendezvous."]


def _without_effect(options: Mapping[str, Any]) -> list[str]:
    given = [name for name, value in options.items() if value]
    return [f"{', '.join(given)} has no effect on a trial."] if given else []


def _deepspeed(words: Sequence[str]) -> LaunchCommand:
    from deepspeed.launcher.runner import parse_args

    given = parse_args(list(words))
    notes = _elsewhere(
        {
            "--num_nodes": given.num_nodes if given.num_nodes > 1 else None,
            "--hostfile": given.hostfile if any(word.startswith(("--hostfile", "-H")) for word in words) else None,
            "--master_addr": given.master_addr,
        }
    )
    notes += _without_effect(
        {
            "--autotuning": given.autotuning,
            "--bind_cores_to_rank": given.bind_cores_to_rank,
            "--venv_script": getattr(given, "venv_script", None),
        }
    )
    return LaunchCommand(
        **_target(given.user_script, given.user_args, is_module=given.module, no_python=given.no_python),
        ranks=given.num_gpus if given.num_gpus > 0 else None,
        gpus=_indices(given.include, "--include"),
        without_gpus=_indices(given.exclude, "--exclude"),
        notes=tuple(notes),
    )


def _indices(text: str, option: str) -> str | None:
    """Return the GPUs of this machine that ``NODE:SLOT,SLOT@NODE:...`` names; None if it names no single slots.

    Raises:
        ValueError: If it names other machines alone.
    """
    if not text:
        return None
    nodes = dict(_node(one) for one in text.split("@"))
    here = next((slots for name, slots in nodes.items() if name in _LOCAL), None)
    if here is None:
        if len(nodes) > 1:
            raise ValueError(f"{option} names {', '.join(nodes)}; give the slots of this machine as localhost:0,1")
        here = next(iter(nodes.values()))
    return here or None


def _node(text: str) -> tuple[str, str]:
    name, _, slots = text.partition(":")
    expanded = [
        str(index)
        for part in slots.split(",")
        if part
        for index in (range(int(part.split("-")[0]), int(part.split("-")[1]) + 1) if "-" in part else [int(part)])
    ]
    return name, ",".join(expanded)


def _torchrun(words: Sequence[str]) -> LaunchCommand:
    from torch.distributed.run import get_args_parser

    return of_torchrun(get_args_parser().parse_args(list(words)))


def _torch_launch(words: Sequence[str]) -> LaunchCommand:
    from torch.distributed.launch import parse_args

    return of_torchrun(parse_args(list(words)))  # type: ignore[no-untyped-call]


def of_torchrun(given: argparse.Namespace) -> LaunchCommand:
    """Return what is left of ``torchrun`` once its parser has read the options."""
    several = str(given.nnodes).split(":")[-1] != "1"
    notes = _elsewhere({"--nnodes": given.nnodes if several else None, "--rdzv-endpoint": given.rdzv_endpoint})
    ranks = str(given.nproc_per_node)
    return LaunchCommand(
        **_target(given.training_script, given.training_script_args, is_module=given.module, no_python=given.no_python),
        ranks=int(ranks) if ranks.isdigit() else None,
        notes=tuple(notes),
    )


def _accelerate(words: Sequence[str]) -> LaunchCommand:
    if not words or words[0] not in ("launch",):
        raise ValueError(f"only `accelerate launch` trains; got `accelerate {' '.join(words[:1])}`")
    return _accelerate_launch(words[1:])


def _accelerate_launch(words: Sequence[str]) -> LaunchCommand:
    from accelerate.commands import launch

    return of_accelerate(launch.launch_command_parser().parse_args(list(words)))


def of_accelerate(given: argparse.Namespace) -> LaunchCommand:
    """Return what is left of ``accelerate launch`` once its parser has read the options."""
    from accelerate.commands import launch
    from accelerate.utils.launch import prepare_deepspeed_cmd_env

    asked = given.num_processes
    given, _defaults, _mixed = launch._validate_launch_command(given)
    environment: dict[str, str] = {}
    notes: list[str] = []
    if given.use_deepspeed:
        given.main_process_port = 0
        fields = getattr(given, "deepspeed_fields_from_accelerate_config", None) or []
        given.deepspeed_fields_from_accelerate_config = ",".join(fields)
        machines, given.num_machines = given.num_machines, 1
        _, made = prepare_deepspeed_cmd_env(given)
        environment = {name: value for name, value in made.items() if name.startswith("ACCELERATE_")}
        notes = _elsewhere({"--num_machines": machines if machines and machines > 1 else None})
    gpus = None if given.gpu_ids in (None, "all") else str(given.gpu_ids)
    return LaunchCommand(
        **_target(
            given.training_script,
            given.training_script_args,
            is_module=bool(given.module),
            no_python=bool(given.no_python),
        ),
        ranks=(asked or given.num_processes) or None,
        gpus=gpus,
        config=given.deepspeed_config_file if given.use_deepspeed else None,
        environment=environment,
        notes=tuple(notes),
    )


_READERS: dict[str, Callable[[Sequence[str]], LaunchCommand]] = {
    "deepspeed": _deepspeed,
    "torchrun": _torchrun,
    "torch.distributed.launch": _torch_launch,
    "accelerate": _accelerate,
    "accelerate-launch": _accelerate_launch,
}

if __name__ == "__main__":
    main(sys.argv[1:])
