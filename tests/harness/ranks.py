"""Starts scripts under the runtime: with torchrun, or alone if neither torch nor DeepSpeed is needed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from optuna_dsat.launch.machine.processes import new_mark
from optuna_dsat.launch.run_directory import PreparedLaunch, RunDirectory
from optuna_dsat.launch.warm.forking import _PER_LAUNCH, Forking
from optuna_dsat.runtime.agent.preload import BASE_MODULES, Preload
from optuna_dsat.runtime.agent.processes import MARK_ENV
from optuna_dsat.runtime.events import Event, decode_event
from optuna_dsat.runtime.overlay import merge
from optuna_dsat.runtime.rank import LAUNCH_ENV, LaunchPlan, Rank

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "scripts"

USER_CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "torch_adam": True}},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000, "allgather_bucket_size": 1000},
    "steps_per_print": 1000000,
}

E = TypeVar("E", bound=Event)


def plan_of(**changes: Any) -> LaunchPlan:
    """Return the description of a launch that is not started."""
    folders = {"events_dir": "/run/events", "log_dir": "/run/logs"}
    paths = {"config_path": "/run/ds_config.json", "user_config_path": "/home/ds_config.json"}
    return LaunchPlan(**{"launch_id": "trial-0000", "purpose": "trial", **folders, **paths, **changes})


def rank_of(world_size: int = 1, number: int = 0) -> Rank:
    """Return a rank of a launch on this host."""
    numbers = {"rank": number, "local_rank": number, "world_size": world_size, "local_world_size": world_size}
    return Rank(**numbers, launch_path="launch.json", can_compile=False)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A finished launch."""

    folder: Path
    exit_code: int
    output: str
    """Output of the launcher."""

    def events(self, rank: int = 0) -> list[Event]:
        lines = (self.folder / f"rank{rank}.jsonl").read_text(encoding="utf-8").splitlines()
        events = [decode_event(line) for line in lines]
        assert None not in events
        return [event for event in events if event is not None]

    def of(self, kind: type[E], rank: int = 0) -> list[E]:
        return [event for event in self.events(rank) if isinstance(event, kind)]

    def log(self, stream: str, rank: int = 0) -> str:
        return (self.folder / f"rank{rank}.{stream}.log").read_text(encoding="utf-8")


class WarmRanks:
    """Runs torchrun forked from a process that has imported torch and DeepSpeed, like most launches of a search.

    Saves about ten seconds of CPU time per launch; for tests of ranks' behaviour, not of their start.
    """

    def __init__(self, warm: Forking, *, of_launches: bool = False) -> None:
        self._warm = warm
        self._of_launches = of_launches  # their environment is that of launches forked from the same process
        self._count = 0

    def begin(self, environment: Mapping[str, str]) -> None:
        """Import what all launches need, in the environment that they share."""
        self._warm._ready_server(without_pytest(environment), python=sys.executable)

    def run(self, arguments: Sequence[str], environment: Mapping[str, str], folder: Path) -> tuple[int, str]:
        """Run torchrun; return its exit code and output.

        Raises:
            WarmUnavailableError: If the environment differs from the shared environment.
        """
        self._count += 1
        environ = without_pytest(environment)
        if self._of_launches:
            environ = {**self._warm._environ, **{name: environ[name] for name in _PER_LAUNCH & environ.keys()}}
        directory, mark = RunDirectory.create(folder, f"torchrun-{self._count}"), new_mark()
        agent = self._warm.fork(
            PreparedLaunch(
                python=sys.executable,
                launch_id=f"launch-{self._count}",
                mark=mark,
                shown=(),
                arguments=arguments,
                environ={**environ, MARK_ENV: mark},
                cwd=str(folder),
                directory=directory,
            )
        )
        return agent.wait(), directory.agent_log.read_text(encoding="utf-8")

    def train_engines(self, script: Path, asked: Sequence[Any], folder: Path) -> Any:
        """Run a script that trains several engines, unmeasured; return the JSON that it prints for what is asked."""
        launch = Starter(folder).torchrun(script, json.dumps(asked), warm=self, purpose="full")
        assert launch.exit_code == 0, launch.output[-3000:] + launch.log("stderr")[-3000:]
        return json.loads(launch.log("stdout").strip().splitlines()[-1])

    def close(self) -> None:
        self._warm.close()


def without_pytest(environment: Mapping[str, str]) -> dict[str, str]:
    """Remove variables that pytest changes for each test, and those that torch and DeepSpeed set in its process."""
    changing = ("PYTEST_", "PYTORCH_NVML_BASED_CUDA_CHECK", "TORCHINDUCTOR_", "TRITON_")
    return {name: value for name, value in environment.items() if not name.startswith(changing)}


def other_python(version: str) -> str:
    """Return an interpreter of a version; the test is skipped if there is none."""
    by_pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    return next(map(str, by_pyenv), shutil.which(f"python{version}")) or pytest.skip(f"no Python {version} here")


@pytest.fixture(scope="session")
def warm_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmRanks]:
    yield from warm_ranks_with(tmp_path_factory.mktemp("warm-ranks"))


def warm_ranks_with(folder: Path, *libraries: str) -> Iterator[WarmRanks]:
    """Yield ranks forked from a process that has also imported some libraries."""
    forking = Forking(folder / "warm.log", enabled=True, on_notice=print)
    forking.prepare(Preload(modules=(*BASE_MODULES, *libraries)))
    warm = WarmRanks(forking)
    try:
        warm.begin(Starter(folder).environment({}))
        yield warm
    finally:
        warm.close()


class Starter:
    """Writes the files of a launch into a folder and starts it."""

    def __init__(self, folder: Path, config: Mapping[str, Any] = USER_CONFIG) -> None:
        self.folder = folder
        self.given = config
        self.user_config = folder / "user_config.json"
        self.user_config.write_text(json.dumps(config), encoding="utf-8")
        self.config = folder / "ds_config.json"

    def environment(self, overlay: Mapping[str, Any], **plan: Any) -> dict[str, str]:
        """Write ``launch.json`` and the launch's config; return the environment of its ranks."""
        self.config.write_text(json.dumps(merge(self.given, overlay)), encoding="utf-8")
        described = LaunchPlan(
            launch_id="trial-0000",
            events_dir=str(self.folder),
            config_path=str(self.config),
            overlay=overlay,
            **{
                "purpose": "trial",
                "log_dir": str(self.folder),
                "user_config_path": str(self.user_config),
                **plan,
            },
        )
        (self.folder / "launch.json").write_text(json.dumps(asdict(described)), encoding="utf-8")
        return {
            "TORCH_EXTENSIONS_DIR": str(ROOT / ".cache" / "torch_extensions"),
            **os.environ,
            LAUNCH_ENV: str(self.folder / "launch.json"),
            "DS_ACCELERATOR": "cpu",
            "LOCAL_SIZE": "2",
            "OMP_NUM_THREADS": "1",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
        }

    def torchrun(
        self,
        script: str | Path,
        *args: str,
        overlay: Mapping[str, Any] | None = None,
        warm: WarmRanks | None = None,
        **plan: Any,
    ) -> Launch:
        """Run a script of ``tests/scripts`` on two ranks, forked if ``warm`` is given."""
        arguments = ["--standalone", "--nproc_per_node", "2", "-m", "optuna_dsat.runtime", str(SCRIPTS / script), *args]
        environment = self.environment(overlay or {}, **plan)
        if warm is not None:
            code, output = warm.run(arguments, environment, self.folder)
            return Launch(folder=self.folder, exit_code=code, output=output)
        return self._run([sys.executable, "-m", "torch.distributed.run", *arguments], environment)

    def alone(
        self, *command: str, overlay: Mapping[str, Any] | None = None, stubs: Path | None = None, **plan: Any
    ) -> Launch:
        """Run a command under the runtime as the only rank, with stub packages if given."""
        environment = self.environment(overlay or {}, **plan)
        if stubs is not None:
            environment["PYTHONPATH"] += f"{os.pathsep}{stubs}"
        return self._run([sys.executable, "-m", "optuna_dsat.runtime", *command], environment)

    def _run(self, command: list[str], environment: Mapping[str, str]) -> Launch:
        done = subprocess.run(
            command,
            env=environment,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return Launch(folder=self.folder, exit_code=done.returncode, output=done.stdout)


def script(start: Starter, text: str) -> str:
    """Write a script into the folder of a launch; return its path."""
    path = start.folder / "script.py"
    path.write_text(text, encoding="utf-8")
    return str(path)
