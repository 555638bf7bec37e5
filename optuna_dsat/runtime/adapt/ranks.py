"""Lets scripts that are written for other launchers run under torchrun: their rank, rendezvous and spawned ranks.

The ``deepspeed`` launcher passes ``--local_rank=N`` to every rank, and scripts often have a default that is valid for a
single rank only. torchrun sets the environment variable ``LOCAL_RANK`` instead; DeepSpeed raises an error if the two
differ. Therefore the option's default is set to this rank's number, in the parsers of argparse, click, Typer and Python
Fire; an explicit argument takes precedence. For scripts that search ``sys.argv``, the option is added there.

Scripts that set ``os.environ["MASTER_PORT"] = "29500"`` or pass ``init_method="tcp://..."`` are written for launchers
without a store. Under torchrun, whose store listens elsewhere, they would wait forever: torchrun's settings are used.

For scripts that use ``torch.multiprocessing.spawn`` or ``multiprocessing.Process``, each rank of a launch runs a single
spawned rank. Scripts that start themselves again, as to set an environment variable, are measured in the new process.
"""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from optuna_dsat.runtime.adapt.config import is_same_file
from optuna_dsat.runtime.files import read_regular
from optuna_dsat.runtime.imports import ImportWatch, patch
from optuna_dsat.runtime.rank import CORES_ENV, LAUNCH_ENV, Rank
from optuna_dsat.runtime.user_code import LAUNCH_LINE, declares_option, parsed_source
from optuna_dsat.secrecy.references import secrets

_NAME = "local_rank"
LOCAL_RANK = "--local_rank"
_OPTIONS = (LOCAL_RANK, "--local-rank")
_BY_HAND = re.compile(r"--local_rank(?![\w-])")
_PLACE = ("MASTER_ADDR", "MASTER_PORT")
_PYTHON = re.compile("python|pypy")
_POOLS = ("concurrent", "joblib", "loky", "multiprocessing")
"""Packages whose processes call functions that they are sent."""
_NOT_MEASURED = (
    ", whose steps cannot be measured: start all ranks by torchrun, torch.multiprocessing.spawn or "
    "multiprocessing.Process"
)
_IN_POOL = f"the script trains in the processes of a pool{_NOT_MEASURED}"
_IN_MAIN = f"the script trains in its own process and in others that it starts{_NOT_MEASURED}"
_IN_ACTORS = (
    "the script trains in actors of Ray Train, whose steps cannot be measured: have it pass "
    "ScalingConfig(num_workers=0), for ranks of torchrun (Ray 2.51 or newer), and put torchrun before it"
)
_TRAINS = 86
"""Exit code of a process in the place of a rank."""
_NO_MPI = (
    "mpi4py has a single process in each rank, as ranks are started as by torchrun: let the script read RANK, "
    "LOCAL_RANK and WORLD_SIZE where they are set, as deepspeed.init_distributed() does"
)
RESTARTED_ENV = "OPTUNA_DSAT_RESTARTED"
"""Environment variable of a process that a rank's script has started to run the script again."""
_RESTART = (LAUNCH_ENV, "PYTHONPATH")
"""Variables by which a restarted rank finds its launch and this package."""


def default_local_rank(local_rank: int, *, on_found: Callable[[str], None] = lambda _: None) -> None:
    """Make ``local_rank`` the default of the option in every parser of this process; report its spelling."""

    @patch(argparse.ArgumentParser, "parse_known_args")
    def parse_known_args(original: Any, self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        for action in self._actions:
            if (option := _spelling(action.option_strings)) is not None:
                action.default = local_rank
                on_found(option)
        return original(self, *args, **kwargs)

    def fire_imported(core: Any) -> None:
        @patch(core, "_ParseKeywordArgs")
        def parse_keywords(original: Any, args: Any, spec: Any) -> Any:
            keywords, *left = original(args, spec)
            if _NAME in (*spec.args, *spec.kwonlyargs):
                keywords.setdefault(_NAME, str(local_rank))
                on_found(LOCAL_RANK)
            return (keywords, *left)

    def click_imported(click: Any) -> None:
        @patch(click.Command, "parse_args")
        def parse_args(original: Any, self: Any, ctx: Any, args: list[str]) -> Any:
            for parameter in self.params:
                if (option := _spelling(parameter.opts)) is not None:
                    parameter.default, parameter.required = local_rank, False
                    on_found(option)
            return original(self, ctx, args)

    # Newer versions of Typer include a copy of click.
    ImportWatch(
        {"fire.core": fire_imported, "click.core": click_imported, "typer._click.core": click_imported}
    ).install()


def _spelling(options: Sequence[str]) -> str | None:
    return next((option for option in _OPTIONS if option in options), None)


def with_local_rank(args: Sequence[str], local_rank: int, *, script: Path | None) -> tuple[str, ...]:
    """Return a script's arguments, with the option prepended if the script searches ``sys.argv`` for it."""
    given = any(word.partition("=")[0] in _OPTIONS for word in args)
    if given or script is None or not _reads_by_hand(script):
        return tuple(args)
    return (f"--local_rank={local_rank}", *args)


def _reads_by_hand(script: Path) -> bool:
    """Return whether a file uses ``sys.argv`` and contains the option's name outside of parser declarations."""
    try:
        nodes = list(ast.walk(parsed_source(script)))
    except (OSError, SyntaxError):
        return False
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    declared = {id(word) for call in calls if declares_option(call) for word in call.args}
    named = any(
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and _BY_HAND.match(node.value) is not None
        and id(node) not in declared
        for node in nodes
    )
    return named and any(isinstance(node, ast.Attribute) and node.attr == "argv" for node in nodes)


def bind_cores() -> None:
    """Have this rank, with the threads that it has by now, run on its own cores only (``CORES_ENV``).

    Like ``deepspeed --bind_cores_to_rank``, it has a thread of OpenMP for each. Memory that it fills from then on is in
    the NUMA node of its cores, unless that is full.
    """
    cores = json.loads(os.environ[CORES_ENV])[int(os.environ["LOCAL_RANK"])]
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cores)
    sys.modules["torch"].set_num_threads(len(cores))


def join_group(rank: Rank) -> Callable[[Any], None]:
    """Return a function that makes ``torch.distributed`` use torchrun's rendezvous; call this before the script."""
    place = {name: os.environ[name] for name in _PLACE if name in os.environ}

    def distributed_imported(distributed: Any) -> None:
        if not place or not hasattr(distributed, "init_process_group"):  # torch may be built without it
            return
        signature = inspect.signature(distributed.init_process_group)

        @patch(distributed, "init_process_group")
        def init_process_group(original: Any, *args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            given = bound.arguments
            if given.get("store") is None:
                wanted = given.get("world_size", -1)
                wanted = wanted if wanted > 0 else int(os.environ.get("WORLD_SIZE") or rank.world_size)
                if wanted != rank.world_size:
                    if wanted == 1 and "mpi4py" in sys.modules:
                        raise ValueError(_NO_MPI)
                    wrong = f"the script sets the number of its ranks (WORLD_SIZE) to {wanted} itself"
                    raise ValueError(wrong_number(wrong, wanted, rank.world_size))
                number = given.get("rank", -1)
                number = number if number >= 0 else int(os.environ.get("RANK") or rank.rank)
                if number != rank.rank and _watched_processes():
                    raise ValueError(_IN_MAIN)
                method = given.get("init_method")
                if method is None or str(method).startswith(("env://", "tcp://")):
                    os.environ.update(place)
                    given.pop("init_method", None)
            return original(*bound.args, **bound.kwargs)

    return distributed_imported


def ranks_in_place(rank: Rank, *, on_spawn: Callable[[], None]) -> dict[str, Callable[[Any], None]]:
    """Return functions, by the module to call them with, that make ranks which the script starts this process."""
    return {
        "torch.multiprocessing": functools.partial(spawn_in_place, rank=rank, on_spawn=on_spawn),
        "multiprocessing.process": functools.partial(processes_in_place, rank=rank, on_spawn=on_spawn),
    }


def spawn_in_place(multiprocessing: Any, *, rank: Rank, on_spawn: Callable[[], None]) -> None:
    """Make spawn functions run only this rank's function, in this process, if ``nprocs`` is the rank count.

    So do launchers called as functions: torchrun (``elastic_launch``), as by accelerate's ``notebook_launcher``, and
    torchrunx.
    """

    def start(
        original: Any, fn: Callable[..., Any], args: Sequence[Any] = (), nprocs: int = 1, *rest: Any, **options: Any
    ) -> Any:
        if nprocs == rank.local_world_size:
            on_spawn()
            fn(rank.local_rank, *args)
            return None
        refusal = _of_multiprocessing(nprocs, rank.local_world_size, "torch.multiprocessing")
        try:
            return original(functools.partial(_without_engine, fn, refusal), args, nprocs, *rest, **options)
        except Exception as error:
            if refusal in str(error):
                raise ValueError(refusal) from None
            raise

    for name in ("spawn", "start_processes"):
        patch(multiprocessing, name)(start)

    def check(count: int) -> None:
        if count != rank.local_world_size:
            ranks = "1 rank" if count == 1 else f"{count} ranks"
            raise ValueError(wrong_number(f"the script starts {ranks} itself", count, rank.local_world_size))

    def launch(original: Any, launcher: Any, *args: Any) -> Any:
        count = launcher._config.nproc_per_node
        if not callable(launcher._entrypoint):
            return original(launcher, *args)
        check(count)
        on_spawn()
        return {rank.local_rank: launcher._entrypoint(*args)}

    def launcher_imported(module: Any) -> None:
        patch(module.elastic_launch, "__call__")(launch)

    def torchrunx_imported(module: Any) -> None:
        @patch(module.Launcher, "run")
        def run(_: Any, launcher: Any, fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
            workers = launcher.workers_per_host
            for count in workers if isinstance(workers, list) else [workers]:
                check(rank.local_world_size if count in ("cpu", "gpu") else count)
            on_spawn()
            distributed = sys.modules["torch"].distributed
            if launcher.backend is not None and not distributed.is_initialized():
                distributed.init_process_group(launcher.backend)
            return module.LaunchResult({"localhost": [fn(*args, **options)] * rank.local_world_size})

    def ray_train_imported(module: Any, *, trainer: str) -> None:
        @patch(getattr(module, trainer), "fit")
        def fit(original: Any, self: Any, *args: Any) -> Any:
            if getattr(self, "running_in_local_mode", False):
                return original(self, *args)
            raise ValueError(_IN_ACTORS)

    ImportWatch(
        {
            "torch.distributed.launcher.api": launcher_imported,
            "torchrunx.launcher": torchrunx_imported,
            "ray.train.v2.api.data_parallel_trainer": functools.partial(
                ray_train_imported, trainer="DataParallelTrainer"
            ),
            "ray.train.base_trainer": functools.partial(ray_train_imported, trainer="BaseTrainer"),
        }
    ).install()


def processes_in_place(process: Any, *, rank: Rank, on_spawn: Callable[[], None]) -> None:
    """Make processes of ``multiprocessing`` that train run only this rank's function, in this process.

    They start as usual and end where they would join the ranks; where the script first sees this, the function runs.
    """
    started: dict[Any, Callable[[], Any]] = {}
    busy: list[int] = []
    """Threads that start or await processes."""

    @patch(process.BaseProcess, "start")
    def start(original: Any, self: Any) -> None:
        function = self._target or self.run
        package = str(getattr(function, "__module__", "")).partition(".")[0]
        if package == "torch":
            original(self)
            return
        call = functools.partial(function, *self._args, **self._kwargs) if self._target else function
        refusal = functools.partial(_without_engine, function, _IN_POOL)
        apart = refusal if package in _POOLS else functools.partial(_until_training, function)
        setattr(self, "_target" if self._target else "run", apart)
        busy.append(threading.get_ident())  # a start sees the ends of others, too
        try:
            original(self)
        finally:
            busy.remove(threading.get_ident())
            vars(self).pop("run", None)
        if package not in _POOLS:
            started[self] = call
            self._popen.poll = functools.partial(poll, self, self._popen.poll)

    def poll(self: Any, original: Any, *flags: int) -> int | None:
        code: int | None = original(*flags)
        if code is None or threading.get_ident() in busy:
            return None
        if code != _TRAINS or self not in started:
            started.pop(self, None)
            return code
        ranks = [each for each in started if _code(started[each]) is _code(started[self])]
        calls = [started.pop(each) for each in ranks]
        if len(ranks) != rank.local_world_size:
            raise ValueError(_of_multiprocessing(len(ranks), rank.local_world_size, "multiprocessing.Process"))
        busy.append(threading.get_ident())
        for each in ranks:
            each._popen.wait()
            each._popen.returncode = 0
        busy.remove(threading.get_ident())
        on_spawn()
        calls[rank.local_rank]()
        return 0


def await_processes() -> None:
    """Await the processes that a script leaves to the exit of Python: they may be its ranks."""
    for child in _watched_processes():
        if not child.daemon:
            child.join()


def _watched_processes() -> list[Any]:
    """Return processes of the script that may be ranks and were not seen to end, except pools' and managers'."""
    process = sys.modules.get("multiprocessing.process")
    children = [] if process is None else [(child, child._popen) for child in process._children]
    return [child for child, popen in children if "poll" in vars(popen) and popen.returncode in (None, _TRAINS)]


def _of_multiprocessing(count: int, ranks: int, name: str) -> str:
    processes = "1 process" if count == 1 else f"{count} processes"
    return wrong_number(f"the script starts {processes} by {name}", count, ranks)


def _until_training(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Run a process started by the script; end it where it joins the ranks or makes an engine."""
    _instead_of_training(fn, lambda *_, **__: os._exit(_TRAINS))
    fn(*args, **kwargs)


def _code(call: Any) -> Any:
    """Return what identical calls with other arguments share: the code of a function, or the class of a callable."""
    function = _function(call)
    return getattr(function, "__code__", type(function))


def _function(call: Any) -> Any:
    while isinstance(call, functools.partial):
        call = call.func
    return call


def _without_engine(fn: Callable[..., Any], refusal: str, *args: Any, **kwargs: Any) -> None:
    """Run a process started by the script; raise if it joins the ranks, where it might wait, or makes an engine."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise ValueError(refusal)

    _instead_of_training(fn, refuse)
    fn(*args, **kwargs)


def _instead_of_training(fn: Any, refuse: Callable[..., NoReturn]) -> None:
    """Replace the functions that start to train, wherever their names were imported to.

    The globals of ``fn`` are of no module in a spawned process.
    """

    def imported(module: Any) -> None:
        for name in {"initialize", "init_distributed", "init_process_group"} & vars(module).keys():
            original = inspect.unwrap(getattr(module, name))
            modules = [getattr(other, "__dict__", {}) for other in list(sys.modules.values())]
            for names in (getattr(_function(fn), "__globals__", {}), *modules):
                if name in names and inspect.unwrap(names[name]) is original:
                    names[name] = refuse

    ImportWatch({"deepspeed": imported, "torch.distributed": imported}).install()


def measure_restarts(script: str) -> None:
    """Make ``os.exec*`` and ``subprocess`` of Python with this rank's script, or module, start the rank again.

    A launcher that the script starts before it joins the ranks would train unmeasured: that is refused, unless it is
    torchrun with a script that does not use DeepSpeed, which prepares something.
    """

    def refuse_launch(args: Any) -> None:
        words = [args] if isinstance(args, (str, bytes, os.PathLike)) else args
        line = " ".join(os.fsdecode(word) for word in words)
        distributed = sys.modules.get("torch.distributed")
        has_joined = distributed and distributed.is_initialized()
        if LAUNCH_LINE.search(line) and not (has_joined or _trains_nothing(line)):
            raise ValueError(f"the script launches its training itself: tune that command instead, `{line}`")

    def restarted(argv: Any, env: Mapping[Any, Any] | None, **added: str) -> tuple[Any, Mapping[Any, Any] | None]:
        command = [os.fsdecode(word) for word in argv] if isinstance(argv, (list, tuple)) else []
        if (place := _place_of_script(command, script)) is None:
            return argv, env
        needed = {name: os.environ[name] for name in _RESTART if name in os.environ}
        module = ["--module"] if command[place - 1] == "-m" else []
        command[place - len(module) : place] = ["-m", "optuna_dsat.runtime", *module]
        return command, {**secrets(), **needed, **(os.environ if env is None else env), **added}

    def execute(_: Any, path: Any, argv: Any, env: Mapping[Any, Any] | None = None) -> NoReturn:
        refuse_launch(argv)
        argv, env = restarted(argv, env)
        replace_process(path, argv, {**os.environ} if env is None else env)

    replace_process = os.execve
    for name in ("execv", "execve"):
        patch(os, name, copies=True)(execute)

    @patch(os, "system")
    def run(original: Any, command: Any) -> Any:
        refuse_launch(command)
        return original(command)

    @patch(subprocess.Popen, "__init__")
    def start(original: Any, self: Any, args: Any, *rest: Any, **options: Any) -> None:
        refuse_launch(args)
        args, env = restarted(args, options.get("env"), **{RESTARTED_ENV: "1"})
        original(self, args, *rest, **({**options, "env": env} if env is not None else options))


def _trains_nothing(line: str) -> bool:
    """Return whether a launcher's command and its script, with the local modules that it imports, name no DeepSpeed."""
    sources = {Path(word): b"" for word in line.split() if word.endswith(".py")}
    try:
        _read_local([*sources], sources)
    except OSError:
        return False
    named = re.compile(rb"deepspeed|accelerate", re.IGNORECASE)
    return bool(sources) and not any(map(named.search, (line.encode(), *sources.values())))


def _read_local(files: Iterable[Path], sources: dict[Path, bytes]) -> None:
    """Add files, and modules next to them or in the working directory that they import, to path -> source."""
    for file in files:
        source = sources[file] = read_regular(file)
        names = {name.decode() for name in re.findall(rb"^\s*(?:from|import)\s+\.*(\w+)", source, re.MULTILINE)}
        places = [folder / name for folder in (file.parent, Path.cwd()) for name in names]
        imported = [path for place in places for path in (place.with_suffix(".py"), *place.rglob("*.py"))]
        _read_local([path for path in imported if path not in sources and path.is_file()], sources)


def _place_of_script(command: Sequence[str], script: str) -> int | None:
    """Return the index of the script or module in a command by which Python runs it; None for other commands."""
    pythons = [_PYTHON.match(Path(word).name) is not None for word in command]
    for place, (before, word) in enumerate(zip(command, command[1:]), 1):
        if before == "-m" or is_same_file(word, sys.argv[0]):
            runs = word == script if before == "-m" else pythons[place - 1] or before.startswith("-")
            return place if runs and any(pythons[:place]) else None
    return None


def wrong_number(wrong: str, wanted: int, ranks: int) -> str:
    """Return the message for a number of ranks that is not the launch's, with the option to set the launch's."""
    has = "1 rank" if ranks == 1 else f"{ranks} ranks"
    return f"{wrong}, and this launch has {has}: tune with --gpus-per-trial {wanted} (--cpu-ranks {wanted} on the CPU)"
