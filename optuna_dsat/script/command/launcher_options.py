"""Parse a launcher's options with the launcher's own parser.

Started as ``python -m optuna_dsat.script.command.launcher_options LAUNCHER WORDS...``.

Prints the remaining command as one line of JSON (``launch_command.LaunchCommand``), or ``{"error": ...}``.
"""

from __future__ import annotations

import argparse
import base64
import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar
from unittest import mock

from optuna_dsat.runtime.files import read_regular
from optuna_dsat.script.command.launch_command import LaunchCommand, as_json, read_command
from optuna_dsat.script.command.stand_ins import StandIn, StandInUsedError, imported_alone

__all__ = [
    "MOST_SLOTS",
    "at_least_one",
    "gpu_indices",
    "main",
    "nodes_of_torchrun",
    "of_accelerate",
    "of_torchrun",
    "ranks_of_torchrun",
    "read_options",
    "slots_of",
]

# Values of launchers' options that their parsers accept but their launch would reject later.
# Each function raises ``ValueError`` with the option and its value.

MOST_SLOTS = 1024
"""Maximum number of slots of one machine in ``--include`` and ``--exclude``."""
_DEVICES = frozenset({"auto", "cpu", "gpu", "xpu", "npu", "hpu", "mlu", "musa", "sdaa", "privateuseone"})
"""Device names accepted by ``--nproc-per-node`` instead of a number: torch's own, and third-party backends."""


def _whole(text: str) -> int | None:
    """Return a whole number; None if the text is not a whole number or has more digits than any count."""
    try:
        return int(text) if len(text) < 20 else None
    except ValueError:
        return None


def at_least_one(value: int, option: str) -> int:
    """Return a count.

    Args:
        value: The count.
        option: The option that gives it.

    Raises:
        ValueError: If it is less than 1.
    """
    if value < 1:
        raise ValueError(f"{option} is at least 1; got {value}")
    return value


def ranks_of_torchrun(text: str) -> int | None:
    """Return the ranks of ``--nproc-per-node``; None if it names a kind of device.

    Raises:
        ValueError: If it is neither a count nor a kind of device.
    """
    ranks = _whole(text)
    if ranks is not None:
        return at_least_one(ranks, "--nproc-per-node")
    if text not in _DEVICES:
        raise ValueError(f"--nproc-per-node is a number, or auto, cpu, gpu or xpu; got {text!r}")
    return None


def nodes_of_torchrun(text: str) -> int:
    """Return the maximum number of nodes of ``--nnodes``, a number or ``LEAST:MOST``.

    Raises:
        ValueError: If it is neither, or the number is 0.
    """
    ends = [_whole(part) for part in text.split(":")]
    known = [one for one in ends if one is not None]
    if len(known) != len(ends) or len(ends) > 2 or not 1 <= known[0] <= known[-1]:
        raise ValueError(f"--nnodes is a number from 1, or LEAST:MOST; got {text!r}")
    return known[-1]


def gpu_indices(text: str, option: str) -> str:
    """Return GPUs as given: indices, or identifiers such as ``GPU-...`` and ``MIG-...``.

    Args:
        text: The GPUs, separated by commas.
        option: The option that gives them.

    Raises:
        ValueError: If an entry is neither.
    """
    for part in text.split(","):
        if not part.strip().isdecimal() and not part.strip().startswith(("GPU-", "MIG-")):
            raise ValueError(f"{option} is a list of GPUs as 0,1; got {text!r}")
    return text


def slots_of(text: str, option: str) -> list[int]:
    """Return the slots in a list such as ``0,2-3``.

    Args:
        text: The slots; empty for all.
        option: The option that gives them.

    Raises:
        ValueError: If a part is not a slot or range of slots, or there are more than ``MOST_SLOTS``.
    """
    found: list[int] = []
    for part in text.split(",") if text else ():
        first, dash, last = part.partition("-")
        ends = [_whole(first), _whole(last) if dash else _whole(first)]
        low, high = (-1 if one is None else one for one in ends)
        if not 0 <= low <= high or len(found) + high - low >= MOST_SLOTS:
            raise ValueError(f"{option} names slots as 0,2-3, at most {MOST_SLOTS}; got {part!r}")
        found += range(low, high + 1)
    return found


_Read = TypeVar("_Read")
_LEFT_OPEN = -1
"""Value in DeepSpeed's runner for a number that is not given."""
_LOCAL = ("localhost", "127.0.0.1", os.uname().nodename)


def main(argv: Sequence[str]) -> None:
    """Parse the options of the launcher in the first word and print the remaining command."""
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
    """Parse a launcher's options and return the remaining command.

    Args:
        launcher: A value that ``launch_command.launcher_of`` returns for a launcher.
        words: The command without the launcher itself.

    Raises:
        ValueError: If the options conflict.
        SystemExit: If the launcher's parser rejects them.
    """
    return _READERS[launcher](words)


def _target(name: str, args: Sequence[str], *, is_module: bool, no_python: bool) -> dict[str, Any]:
    """Return script and arguments of a command after its launcher's options."""
    if not no_python:
        return {"script": name, "is_module": is_module, "args": tuple(args)}
    inner = read_command([name, *args], cwd=Path.cwd())
    if inner is None:
        return {"script": name, "is_module": False, "args": tuple(args)}
    return {"script": inner.script, "is_module": inner.is_module, "args": inner.args}


def _given(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the options that have a value in command-line form, from a mapping of name -> given value."""
    return tuple(f"{name} {value}" for name, value in options.items() if value not in (None, "", -1, False))


def _without_effect(options: Mapping[str, Any]) -> list[str]:
    given = [name for name, value in options.items() if value]
    return [f"{', '.join(given)} has no effect on a trial."] if given else []


def _options(
    words: Sequence[str],
    module: str,
    *beside: str,
    without: Sequence[str] = (),
    parse: Callable[[ModuleType, list[str]], _Read],
) -> _Read:
    """Parse words with a launcher's own parser.

    Args:
        words: The command without the launcher itself.
        module: The module that contains the parser.
        beside: Modules that the parser needs; other modules of the same packages are imported only if it needs them,
            too.
        without: Other packages that the parser usually does not need.
        parse: Parses words, given the parser's module.
    """
    try:
        with imported_alone((module, *beside), without=without) as stage:
            found = importlib.import_module(module)
            stage.end_imports()
            given = parse(found, list(words))
            if not any(isinstance(value, StandIn) for value in vars(given).values()):
                return given
    except ValueError:  # the options were rejected
        raise
    except (StandInUsedError, Exception):  # noqa: BLE001 - a stand-in may be insufficient
        pass
    return parse(importlib.import_module(module), list(words))


def _deepspeed(words: Sequence[str]) -> LaunchCommand:
    given = _options(
        words,
        "deepspeed.launcher.runner",
        *("deepspeed.launcher", "deepspeed.launcher.constants", "deepspeed.constants"),
        parse=_with_slots,
    )
    slots: Mapping[str, Sequence[int]] = given.slots
    hosts = tuple(slots) if len(slots) > 1 else ()
    counts = [given.num_gpus if given.num_gpus > 0 else len(one) for one in slots.values()]
    uneven = f"{', '.join(hosts)} have {', '.join(map(str, counts))} slots: {min(counts, default=0)} of each are used."
    notes = [uneven] if len(set(counts)) > 1 else []
    notes += _without_effect(
        {
            "--autotuning": given.autotuning,
            "--bind_cores_to_rank": given.bind_cores_to_rank,
            "--venv_script": getattr(given, "venv_script", None),
        }
    )
    named = any(word.startswith(("--hostfile", "-H")) for word in words)
    return LaunchCommand(
        **_target(given.user_script, given.user_args, is_module=given.module, no_python=given.no_python),
        ranks=min(counts) if counts else given.num_gpus if given.num_gpus > 0 else None,
        nodes=max(1, len(slots) if slots else given.num_nodes),
        hosts=hosts,
        elsewhere=_given(
            {
                "--num_nodes": given.num_nodes if given.num_nodes > 1 else None,
                "--hostfile": given.hostfile if named else None,
            }
        ),
        rendezvous=_given({"--master_addr": given.master_addr}),
        gpus=None if hosts else _indices(given.include, "--include"),
        without_gpus=None if hosts else _indices(given.exclude, "--exclude"),
        notes=tuple(notes),
    )


def _deepspeed_launch(words: Sequence[str]) -> LaunchCommand:
    """Parse the command that the ``deepspeed`` launcher starts on each node."""
    given = _options(words, "deepspeed.launcher.launch", "deepspeed.launcher", "deepspeed.constants", parse=_as_argv)
    slots: Mapping[str, Sequence[int]] = json.loads(base64.urlsafe_b64decode(given.world_info))
    counts = [len(one) for one in slots.values()]
    several = len(slots) > 1
    return LaunchCommand(
        **_target(given.training_script, given.training_script_args, is_module=given.module, no_python=given.no_python),
        ranks=min(counts, default=None),
        nodes=max(1, len(slots)),
        hosts=tuple(slots) if several else (),
        elsewhere=(f"its nodes {', '.join(slots)}",) if several else (),
        gpus=None if several else ",".join(str(slot) for one in slots.values() for slot in one) or None,
    )


def _as_argv(launch: Any, words: list[str]) -> argparse.Namespace:
    with mock.patch.object(sys, "argv", ["launch", *words]):
        given: argparse.Namespace = launch.parse_args()
    return given


def _with_slots(runner: Any, words: list[str]) -> argparse.Namespace:
    """Parse options with DeepSpeed's runner; add the slots of each host if there is a hostfile.

    Raises:
        ValueError: If the options, or the lines of the hostfile, conflict.
    """
    given: argparse.Namespace = runner.parse_args(words)
    for option in ("num_gpus", "num_nodes"):
        if getattr(given, option) != _LEFT_OPEN:
            at_least_one(getattr(given, option), f"--{option}")
            if given.include or given.exclude:
                raise ValueError(f"--{option} goes with neither --include nor --exclude")
    given.slots = {}
    if Path(given.hostfile).is_file():
        _check_readable(given.hostfile, "--hostfile")
        slots = runner.parse_inclusion_exclusion(runner.fetch_hostfile(given.hostfile), given.include, given.exclude)
        hosts = list(slots)[: given.num_nodes if given.num_nodes > 0 else None]
        given.slots = {host: slots[host] for host in hosts}
    elif given.include and given.exclude:
        raise ValueError("--include and --exclude exclude each other")
    return given


def _check_readable(path: str, option: str) -> None:
    """Raise for a file on which a launcher would block or read without end.

    Raises:
        ValueError: If it cannot be read, or only once, such as a kernel log in ``/proc``.
    """
    try:
        for _ in range(2):
            read_regular(path)
    except OSError as error:
        raise ValueError(f"{option} is {path}, which cannot be read: {error.strerror}") from None


def _indices(text: str, option: str) -> str | None:
    """Return the GPUs of this machine in ``NODE:SLOT,SLOT@NODE:...``; None if no single slots are named.

    Raises:
        ValueError: If only other machines are named.
    """
    if not text:
        return None
    nodes = dict(_node(one, option) for one in text.split("@"))
    here = next((slots for name, slots in nodes.items() if name in _LOCAL), None)
    if here is None:
        if len(nodes) > 1:
            raise ValueError(f"{option} names {', '.join(nodes)}; give the slots of this machine as localhost:0,1")
        here = next(iter(nodes.values()))
    return here or None


def _node(text: str, option: str) -> tuple[str, str]:
    name, _, slots = text.partition(":")
    return name, ",".join(map(str, slots_of(slots, option)))


_TORCHRUN = ("torch.distributed.argparse_util", "torch.numa.binding")


def _torchrun(words: Sequence[str]) -> LaunchCommand:
    module = "torch.distributed.run"
    return of_torchrun(
        _options(words, module, *_TORCHRUN, parse=lambda run, all_: run.get_args_parser().parse_args(all_))
    )


def _torch_launch(words: Sequence[str]) -> LaunchCommand:
    beside = ("torch.distributed.run", *_TORCHRUN)
    return of_torchrun(
        _options(words, "torch.distributed.launch", *beside, parse=lambda launch, all_: launch.parse_args(all_))
    )


def of_torchrun(given: argparse.Namespace) -> LaunchCommand:
    """Return the remaining command of ``torchrun`` from its parsed options.

    Raises:
        ValueError: If a value is invalid.
    """
    nodes = nodes_of_torchrun(str(given.nnodes))
    return LaunchCommand(
        **_target(given.training_script, given.training_script_args, is_module=given.module, no_python=given.no_python),
        ranks=ranks_of_torchrun(str(given.nproc_per_node)),
        nodes=nodes,
        elsewhere=_given({"--nnodes": given.nnodes if nodes > 1 else None}),
        rendezvous=_given({"--rdzv-endpoint": given.rdzv_endpoint}),
    )


def _accelerate(words: Sequence[str]) -> LaunchCommand:
    if not words or words[0] not in ("launch",):
        raise ValueError(f"only `accelerate launch` trains; got `accelerate {' '.join(words[:1])}`")
    return _accelerate_launch(words[1:])


_ACCELERATE = (
    "accelerate.commands",
    *(f"accelerate.commands.{name}" for name in ("utils", "config")),
    *(f"accelerate.commands.config.{name}" for name in ("config", "config_args", "config_utils", "cluster")),
    *(f"accelerate.commands.config.{name}" for name in ("default", "sagemaker", "update")),
    "accelerate.state",
    "accelerate.utils",
    *(f"accelerate.utils.{name}" for name in ("constants", "dataclasses", "environment", "imports")),
    *(f"accelerate.utils.{name}" for name in ("launch", "other", "versions")),
)
"""All modules involved in option parsing, as of accelerate 1.15."""


def _accelerate_launch(words: Sequence[str]) -> LaunchCommand:
    def read(launch: Any, all_: list[str]) -> LaunchCommand:
        return of_accelerate(launch.launch_command_parser().parse_args(all_))

    return _options(words, "accelerate.commands.launch", *_ACCELERATE, without=("torch", "safetensors"), parse=read)


def of_accelerate(given: argparse.Namespace) -> LaunchCommand:
    """Return the remaining command of ``accelerate launch`` from its parsed options.

    Raises:
        ValueError: If a value is invalid.
    """
    from accelerate.commands import launch
    from accelerate.utils.launch import prepare_deepspeed_cmd_env

    asked = given.num_processes
    for option in ("num_processes", "num_machines"):
        if getattr(given, option) is not None:
            at_least_one(getattr(given, option), f"--{option}")
    by_file = given.config_file is not None or (Path(launch.default_config_file).is_file() and not given.cpu)
    if not by_file and (asked is None or not given.multi_gpu):
        # Without a number of ranks accelerate would count the devices, which imports torch, and start a rank on each.
        # The number set here has the same effect.
        given.num_processes = 2 if given.multi_gpu else 1
    if by_file:
        _check_readable(given.config_file or launch.default_config_file, "--config_file")
    given, defaults, _mixed = launch._validate_launch_command(given)
    environment: dict[str, str] = {}
    notes: tuple[str, ...] = ()
    machines = given.num_machines or 1
    ranks = (asked or given.num_processes) or None if by_file else asked
    if given.use_deepspeed:
        given.main_process_port = 0
        fields = getattr(given, "deepspeed_fields_from_accelerate_config", None) or []
        given.deepspeed_fields_from_accelerate_config = ",".join(fields)
        given.num_machines = 1
        _, made = prepare_deepspeed_cmd_env(given)
        environment = {name: value for name, value in made.items() if name.startswith("ACCELERATE_")}
        if given.deepspeed_config_file is not None and defaults is not None:
            notes = _dropped_fields(defaults.deepspeed_config, given.deepspeed_config_file)
    gpus = None if given.gpu_ids in (None, "all") else gpu_indices(str(given.gpu_ids), "--gpu_ids")
    return LaunchCommand(
        **_target(
            given.training_script,
            given.training_script_args,
            is_module=bool(given.module),
            no_python=bool(given.no_python),
        ),
        ranks=None if ranks is None else max(1, ranks // machines),
        nodes=machines,
        elsewhere=_given({"--num_machines": machines if machines > 1 else None}),
        gpus=gpus,
        config=given.deepspeed_config_file if given.use_deepspeed else None,
        environment=environment,
        notes=notes,
    )


def _dropped_fields(fields: Mapping[str, Any], config: str) -> tuple[str, ...]:
    """Return a note on DeepSpeed settings in accelerate's YAML that are dropped in favour of the config file."""
    dropped = {name: value for name, value in fields.items() if name in _OF_A_CONFIG}
    if not dropped:
        return ()
    named = ", ".join(f"{name} {value}" for name, value in dropped.items())
    return (
        f"Dropped from accelerate's config: {named}. With deepspeed_config_file accelerate refuses them; "
        f"{config} counts alone. Move them there, or remove them.",
    )


_OF_A_CONFIG = (
    *("gradient_accumulation_steps", "gradient_clipping", "zero_stage", "zero3_save_16bit_model"),
    *(f"offload_{part}_{what}" for part in ("optimizer", "param") for what in ("device", "nvme_path")),
)
"""Fields of accelerate's ``deepspeed_config`` that ``DeepSpeedPlugin`` rejects together with a config file.

Source: ``_deepspeed_config_checks`` of accelerate 1.15.
"""


_READERS: dict[str, Callable[[Sequence[str]], LaunchCommand]] = {
    "deepspeed": _deepspeed,
    "deepspeed.launcher.launch": _deepspeed_launch,
    "torchrun": _torchrun,
    "torch.distributed.launch": _torch_launch,
    "accelerate": _accelerate,
    "accelerate-launch": _accelerate_launch,
}

if __name__ == "__main__":
    main(sys.argv[1:])
