"""Scripts written for other launchers run under torchrun: their rank, rendezvous and spawned ranks."""

from __future__ import annotations

import argparse
import functools
import json
import os
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext, suppress
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from optuna_dsat.runtime.adapt.ranks import (
    await_processes,
    bind_cores,
    default_local_rank,
    join_group,
    processes_in_place,
    spawn_in_place,
    with_local_rank,
)
from optuna_dsat.runtime.events import EngineReady, RankFinished, StepMeasured
from optuna_dsat.runtime.rank import CORES_ENV
from tests.harness.ranks import Starter, WarmRanks, rank_of

RANK = rank_of(2, number=1)


@pytest.fixture(autouse=True)
def _own_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    # restored after the test
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", argparse.ArgumentParser.parse_known_args)


def test_a_rank_and_its_threads_run_on_its_own_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    usable, ended = os.sched_getaffinity(0), threading.Event()
    threads: list[int] = []
    seen: list[set[int]] = []
    monkeypatch.setenv(CORES_ENV, json.dumps([[], [min(usable)]]))
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(set_num_threads=threads.append))

    def work() -> None:
        ended.wait()
        seen.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        bind_cores()
        seen.append(os.sched_getaffinity(0))
    finally:
        ended.set()
        thread.join()
        for each in Path("/proc/self/task").iterdir():
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(each.name), usable)
    assert (seen, threads) == ([{min(usable)}] * 2, [1])


@pytest.mark.parametrize("option", ["--local_rank", "--local-rank"])
def test_the_option_follows_the_rank_unless_it_is_given(option: str) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(option, type=int, default=0)
    parser.add_argument("--other", type=int, default=0)
    options: list[str] = []
    default_local_rank(3, on_found=options.append)
    assert parser.parse_args([]) == argparse.Namespace(local_rank=3, other=0)
    assert options == [option]
    assert parser.parse_args([f"{option}=1"]).local_rank == 1


def test_parsers_without_the_option_get_none() -> None:
    default_local_rank(3)
    assert argparse.ArgumentParser().parse_args([]) == argparse.Namespace()


def click_command(option: str) -> Callable[[list[str]], Any]:
    click = pytest.importorskip("click")
    command = click.Command(
        "train",
        callback=lambda **values: values,
        params=[click.Option([option], type=int, required=True), click.Option(["--other"], type=int, default=0)],
    )
    return functools.partial(command.main, standalone_mode=False)


def typer_command(option: str) -> Callable[[list[str]], Any]:
    typer = pytest.importorskip("typer")
    application = typer.Typer()

    def train(local_rank: int = typer.Option(-1, option), other: int = 0) -> dict[str, int]:
        return {"local_rank": local_rank, "other": other}

    application.command()(train)
    return functools.partial(application, standalone_mode=False)


def fire_command(_: str) -> Callable[[list[str]], Any]:
    fire = pytest.importorskip("fire")

    def train(other: int = 0, *, local_rank: int = -1) -> dict[str, int]:
        return {"local_rank": local_rank, "other": other}

    def run(words: list[str]) -> Any:
        return fire.Fire({"train": train}, command=["train", *words], name="train", serialize=lambda _: None)

    return run


@pytest.mark.parametrize(
    ("command", "option"),
    [
        *(
            (command, option)
            for command in (click_command, typer_command)
            for option in ("--local_rank", "--local-rank")
        ),
        (fire_command, "--local_rank"),
    ],
)
def test_the_option_of_other_parsers_follows_the_rank_too(
    command: Callable[[str], Callable[[list[str]], Any]], option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = command(option)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    for name in ("click.core", "typer._click.core"):
        if (module := sys.modules.get(name)) is not None:
            monkeypatch.setattr(module.Command, "parse_args", module.Command.parse_args)
    if (core := sys.modules.get("fire.core")) is not None:
        monkeypatch.setattr(core, "_ParseKeywordArgs", vars(core)["_ParseKeywordArgs"])
    result: list[str] = []
    default_local_rank(3, on_found=result.append)
    assert run([]) == {"local_rank": 3, "other": 0}
    assert len({*result}) == 1 if command is fire_command else {*result} == {option}
    assert run([f"{option}=1", "--other=2"]) == {"local_rank": 1, "other": 2}


@pytest.mark.parametrize(
    ("source", "looks"),
    [
        ('rank = next(one.split("=")[1] for one in sys.argv if one.startswith("--local_rank="))', True),
        ('rank = re.search(r"--local_rank=(\\d+)", " ".join(sys.argv))', True),
        ('parser.add_argument("--local_rank", type=int)\nname = sys.argv[0]', False),
        ('@click.option("--local_rank")\ndef main(local_rank): print(sys.argv)', False),
        ('rank, config = os.environ["LOCAL_RANK"], sys.argv[1]', False),
        ('print("--local_rank is no option")', False),
        ("rank =", False),
    ],
)
def test_a_script_that_looks_for_the_option_by_itself_is_given_it(source: str, looks: bool, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(source)
    first = ("--local_rank=3",) if looks else ()
    assert with_local_rank(("ds.json",), 3, script=script) == (*first, "ds.json")
    assert with_local_rank(("--local_rank=0",), 3, script=script) == ("--local_rank=0",), "given by the user"
    assert with_local_rank(("ds.json",), 3, script=None) == ("ds.json",)


@pytest.fixture
def distributed(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": "4711", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    module: Any = ModuleType("torch.distributed")
    module.called = []

    def init_process_group(
        backend: str | None = None,
        init_method: str | None = None,
        world_size: int = -1,
        rank: int = -1,
        store: Any = None,
    ) -> None:
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        module.called.append((backend, init_method, world_size, rank, store, place))

    module.init_process_group = init_process_group
    join_group(RANK)(module)
    return module


@pytest.mark.parametrize("method", [None, "env://", "tcp://localhost:12355"])
def test_a_place_of_the_scripts_own_is_the_launchs(
    distributed: Any, monkeypatch: pytest.MonkeyPatch, method: str | None
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "9994")
    distributed.init_process_group("gloo", init_method=method, world_size=2, rank=1)
    assert distributed.called == [("gloo", None, 2, 1, None, "localhost:4711")]


def test_files_and_stores_are_left_alone(distributed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "9994")
    distributed.init_process_group("gloo", "file:///tmp/x", world_size=2, rank=1)
    distributed.init_process_group("gloo", store="own", world_size=7, rank=1)
    assert [(call[1], call[-1]) for call in distributed.called] == [
        ("file:///tmp/x", "localhost:9994"),
        (None, "localhost:9994"),
    ]


@pytest.mark.parametrize("given", [{"world_size": 1, "rank": 0}, {}])
def test_another_number_of_ranks_is_refused_with_the_option_for_it(
    distributed: Any, monkeypatch: pytest.MonkeyPatch, given: dict[str, int]
) -> None:
    if not given:
        monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(
        ValueError, match=r"\(WORLD_SIZE\) to 1 itself, .* launch has 2 ranks: tune with --gpus-per-trial 1"
    ):
        distributed.init_process_group("gloo", **given)
    monkeypatch.setitem(sys.modules, "mpi4py", ModuleType("mpi4py"))
    with pytest.raises(ValueError, match=r"^mpi4py has a single process in each rank, .*: let the script read RANK"):
        distributed.init_process_group("gloo", **given)
    assert not distributed.called


def test_a_main_process_that_is_another_rank_beside_its_processes_is_refused(
    distributed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BaseProcess, "start", BaseProcess.start)  # restored after the test
    processes_in_place(SimpleNamespace(BaseProcess=BaseProcess), rank=RANK, on_spawn=lambda: None)
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed)
    process = get_context("fork").Process(target=_join_group)
    process.start()
    wait([process.sentinel])  # it ends where it would join
    distributed.init_process_group("gloo", rank=1)
    with pytest.raises(ValueError, match=r"trains in its own process and in others .*: start all ranks by torchrun"):
        distributed.init_process_group("gloo", rank=0)
    with pytest.raises(ValueError, match="starts 1 process by"):
        process.join()
    assert [call[3] for call in distributed.called] == [1]


def multiprocessing(spawn: Callable[..., Any], *, on_spawn: Callable[[], None] = lambda: None) -> Any:
    module: Any = ModuleType("torch.multiprocessing")
    module.spawn = module.start_processes = spawn
    spawn_in_place(module, rank=RANK, on_spawn=on_spawn)
    return module


@pytest.fixture(autouse=True)
def launcher(monkeypatch: pytest.MonkeyPatch) -> Any:
    class ElasticLaunch:
        def __init__(self, count: int, entrypoint: Any) -> None:
            self._config, self._entrypoint = SimpleNamespace(nproc_per_node=count), entrypoint

        def __call__(self, *_: Any) -> str:
            return "started"

    module: Any = ModuleType("torch.distributed.launcher.api")
    module.elastic_launch = ElasticLaunch
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    return module


def test_ranks_of_torchrun_as_a_function_are_the_ranks(launcher: Any) -> None:
    ran: list[Any] = []
    multiprocessing(print, on_spawn=lambda: ran.append("noted"))
    assert launcher.elastic_launch(2, lambda word: ran.append(word))("a") == {1: None}
    assert ran == ["noted", "a"]
    assert launcher.elastic_launch(4, "train.py")() == "started"
    with pytest.raises(ValueError, match=r"the script starts 4 ranks itself, .* tune with --gpus-per-trial 4"):
        launcher.elastic_launch(4, print)()


@pytest.mark.parametrize("workers", [2, [2], "gpu"])
def test_ranks_of_torchrunx_are_the_ranks(monkeypatch: pytest.MonkeyPatch, workers: Any) -> None:
    module: Any = ModuleType("torchrunx.launcher")
    module.Launcher = type("Launcher", (SimpleNamespace,), {"run": None})
    module.LaunchResult = lambda results: results
    ran: list[Any] = []
    group = SimpleNamespace(init_process_group=ran.append, is_initialized=lambda: "gloo" in ran)
    torch = SimpleNamespace(distributed=group)
    for name, value in (("torchrunx.launcher", module), ("torch", torch)):
        monkeypatch.setitem(sys.modules, name, value)
    multiprocessing(print, on_spawn=lambda: ran.append("noted"))
    launcher = module.Launcher(workers_per_host=workers, backend="gloo")
    for _ in range(2):
        assert launcher.run(lambda word, *, end: word + end, "a", end="b") == {"localhost": ["ab", "ab"]}
    assert ran == ["noted", "gloo", "noted"]
    with pytest.raises(ValueError, match=r"the script starts 4 ranks itself, .* tune with --gpus-per-trial 4"):
        module.Launcher(workers_per_host=4, backend=None).run(print)


@pytest.mark.parametrize(
    ("module", "name"),
    [("ray.train.base_trainer", "BaseTrainer"), ("ray.train.v2.api.data_parallel_trainer", "DataParallelTrainer")],
)
def test_actors_of_ray_train_are_no_ranks(monkeypatch: pytest.MonkeyPatch, module: str, name: str) -> None:
    trainer = type(name, (SimpleNamespace,), {"fit": lambda _: "ran"})
    imported: Any = ModuleType(module)
    setattr(imported, name, trainer)
    monkeypatch.setitem(sys.modules, module, imported)
    multiprocessing(print)
    with pytest.raises(ValueError, match=r"trains in actors of Ray Train, .*: have it pass ScalingConfig"):
        trainer(running_in_local_mode=False).fit()
    assert trainer(running_in_local_mode=True).fit() == "ran"


def test_as_many_processes_as_ranks_are_the_ranks() -> None:
    ran: list[Any] = []

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("started")

    module = multiprocessing(never, on_spawn=lambda: ran.append("told"))
    assert not ran
    module.spawn(lambda index, word: ran.append((index, word)), args=("a",), nprocs=2, join=True)
    assert ran == ["told", (1, "a")]


def test_other_processes_are_started_and_may_not_train(monkeypatch: pytest.MonkeyPatch) -> None:
    deepspeed: Any = ModuleType("deepspeed")
    deepspeed.initialize = deepspeed.init_distributed = None
    monkeypatch.setitem(sys.modules, "deepspeed", deepspeed)
    group: Any = ModuleType("torch.distributed")
    group.init_process_group = None
    monkeypatch.setitem(sys.modules, "torch.distributed", group)
    started: list[int] = []

    def spawn(fn: Callable[..., None], args: tuple[Any, ...], nprocs: int, **_: Any) -> None:
        for index in range(nprocs):
            try:
                fn(index, *args)
            except ValueError as error:  # as torch reports errors of spawned processes
                raise RuntimeError(f"-- Process {index} terminated with the following error:\n{error}") from error

    module = multiprocessing(spawn)
    module.start_processes(started.append, nprocs=3)
    assert started == [0, 1, 2]
    with pytest.raises(
        ValueError, match=r"^the script starts 4 processes by .* launch has 2 ranks: tune with --gpus-per"
    ):
        module.spawn(lambda _: deepspeed.initialize(), nprocs=4)
    for joins in (lambda _: deepspeed.init_distributed(), lambda _: group.init_process_group()):
        with pytest.raises(ValueError, match="launch has 2 ranks"):
            module.spawn(joins, nprocs=4)
    with pytest.raises(RuntimeError, match="another"):
        module.spawn(_another_error, nprocs=1)


def _another_error(_: int) -> None:
    raise ValueError("another")


@pytest.mark.parametrize("kind", ["function", "partial", "method", "class"])
@pytest.mark.parametrize("seen", ["join", "is_alive", "exit"])
def test_processes_that_train_run_in_place_and_others_apart(
    monkeypatch: pytest.MonkeyPatch, kind: str, seen: str
) -> None:
    group: Any = ModuleType("torch.distributed")
    group.init_process_group = joined = None
    monkeypatch.setitem(sys.modules, "torch.distributed", group)
    monkeypatch.setattr(BaseProcess, "start", BaseProcess.start)  # restored after the test
    context = get_context("fork")
    ran: list[Any] = []

    def train(rank: int, *, ranks: int) -> None:
        if joined is group.init_process_group:  # in place
            ran.append((rank, ranks, os.getpid()))
        else:
            group.init_process_group(rank)
        os._exit(1) if os.getpid() != tester else None

    class Worker(context.Process):  # type: ignore[name-defined,misc] # a class of the context
        def __init__(self, number: int, ranks: int) -> None:
            super().__init__()
            self.number, self.ranks = number, ranks

        def run(self) -> None:
            train(self.number, ranks=self.ranks)

    def process_of(number: int, ranks: int) -> Any:
        if kind == "class":
            return Worker(number, ranks)
        if kind == "function":
            return context.Process(target=train, args=(number,), kwargs={"ranks": ranks})
        partial = functools.partial(train, number, ranks=ranks)
        return context.Process(target=partial if kind == "partial" else Worker(number, ranks).run)

    def end(process: Any) -> None:
        if seen == "exit":
            await_processes()
        elif seen == "join":
            process.join()
        while process.is_alive():
            pass

    tester = os.getpid()
    processes_in_place(SimpleNamespace(BaseProcess=BaseProcess), rank=RANK, on_spawn=lambda: ran.append("noted"))
    manager = context.Manager()
    for count in (2, 3):
        helper = context.Process(target=ran.append, args=("apart",))
        ranks = [process_of(rank, count) for rank in range(count)]
        for process in (helper, *ranks):
            process.start()
        helper.join()
        with nullcontext() if count == 2 else pytest.raises(ValueError, match=r"starts 3 processes by .*trial 3 "):
            end(ranks[0])
            end(ranks[1])
            assert [process.exitcode for process in (helper, *ranks)] == [0, 0, 0]
        assert ran == ["noted", (1, 2, tester)]
    manager.shutdown()


def test_a_pool_trains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    group: Any = ModuleType("torch.distributed")
    group.init_process_group = None
    monkeypatch.setitem(sys.modules, "torch.distributed", group)
    monkeypatch.setattr(BaseProcess, "start", BaseProcess.start)  # restored after the test
    processes_in_place(SimpleNamespace(BaseProcess=BaseProcess), rank=RANK, on_spawn=lambda: None)
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
        assert pool.submit(abs, -1).result() == 1
        with pytest.raises(ValueError, match=r"trains in the processes of a pool, .*: start all ranks by torchrun"):
            pool.submit(_join_group).result()


def _join_group() -> None:
    sys.modules["torch.distributed"].init_process_group()


@pytest.mark.torchrun
@pytest.mark.parametrize("started_by", [(), ("Process",), ("Worker",)])
def test_each_rank_runs_its_share(tmp_path: Path, warm_ranks: WarmRanks, started_by: tuple[str, ...]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    overlay = {"train_batch_size": None, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 1}
    launch = Starter(tmp_path).torchrun("spawned.py", port, *started_by, overlay=overlay, warm=warm_ranks)
    assert launch.exit_code == 0, launch.output + launch.log("stderr")
    for rank in (0, 1):
        engine = launch.of(EngineReady, rank)[0]
        assert (engine.train_micro_batch_size_per_gpu, engine.data_parallel_size) == (3, 2)
        assert engine.starts_ranks
        assert {step.observed_micro_batch for step in launch.of(StepMeasured, rank)} == {3}
        assert launch.of(RankFinished, rank)[0].reason == "profile_done"
