"""Real launches of the examples, through torchrun and DeepSpeed on the CPU."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from optuna_dsat.config import ds_config, user_file
from optuna_dsat.launch.follow import follow
from optuna_dsat.launch.launcher import TorchrunLauncher, local_launcher
from optuna_dsat.launch.machine.devices import cpu_devices
from optuna_dsat.launch.measurement import LaunchRecord
from optuna_dsat.launch.protocol import LaunchReport, LaunchRequest, ScriptCommand
from optuna_dsat.launch.run_directory import RunDirectory
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.events import EngineReady, Event, ProfileMeasured, StepMeasured
from tests.harness.launches import DS_CONFIG, request
from tests.harness.ranks import WarmRanks

ROOT = Path(__file__).parents[2]
CONFIG = "ds_config.json"
RANKS = 2

E = TypeVar("E", bound=Event)


@dataclass(frozen=True, kw_only=True)
class Launched:
    """A launch that is over."""

    report: LaunchReport
    record: LaunchRecord
    events: list[Event]
    directory: RunDirectory
    changed: set[str]
    """Files that the launch left in the example's folder or changed there."""

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def engine(self) -> EngineReady:
        return self.of(EngineReady)[0]

    @property
    def profile(self) -> ProfileMeasured:
        return self.of(ProfileMeasured)[0]

    @property
    def steps(self) -> list[StepMeasured]:
        return self.of(StepMeasured)

    @property
    def output(self) -> str:
        return self.directory.stdout(0).read_text(encoding="utf-8")

    @property
    def errors(self) -> str:
        return self.directory.stderr(0).read_text(encoding="utf-8")


Launch = Callable[..., Launched]


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.stat().st_size) for path in files}


@pytest.fixture
def example(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a copy of the example that the test module names in ``EXAMPLE``."""
    return copy_example(request.module.EXAMPLE, tmp_path)


def copy_example(name: str, folder: Path) -> Path:
    return Path(shutil.copytree(ROOT / "examples" / name, folder / name, ignore=shutil.ignore_patterns("__pycache__")))


def environment() -> dict[str, str]:
    """Return this process's environment with what a launch on the CPU needs."""
    extensions = os.environ.get("TORCH_EXTENSIONS_DIR", str(ROOT / ".cache" / "torch_extensions"))
    return {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_EXTENSIONS_DIR": extensions}


@pytest.fixture(scope="session")
def warm_launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchrunLauncher]:
    """Return the launcher of all examples' launches, forked as those of a search are; one has trained already."""
    folder = tmp_path_factory.mktemp("examples")
    (folder / "user_config.json").write_text(json.dumps(DS_CONFIG), encoding="utf-8")
    (folder / "out").mkdir()
    launcher = local_launcher(folder / "out", devices=cpu_devices(RANKS), base_env=environment(), warm=True)
    with closing(launcher):
        _, report = follow(launcher, request(folder, launch_id="first"), lambda _: None)
        assert report.outcome is Outcome.MEASURED, report
        yield launcher


@pytest.fixture(scope="session")
def warm_ranks(warm_launcher: TorchrunLauncher) -> WarmRanks:
    """Return ranks that are forked from the process of the launches."""
    return WarmRanks(warm_launcher._forking, of_launches=True)


@pytest.fixture
def launch(example: Path, warm_launcher: TorchrunLauncher) -> Launch:
    """Launch a script of the example on two ranks, to the end of its profile steps."""

    def run(
        script: str,
        *args: str,
        overlay: dict[str, Any],
        arg_mappings: Mapping[str, str] | None = None,
        **changes: Any,
    ) -> Launched:
        config = user_file.load(example / CONFIG).raw
        before, events = contents(example), list[Event]()
        command = ScriptCommand(
            script=str(example / script),
            args=args,
            cwd=str(example),
            config_path=str(example / CONFIG),
            arg_mappings=arg_mappings or {},
        )
        asked = LaunchRequest(
            ds_config=ds_config.merge(config, overlay),
            overlay=overlay,
            slots=RANKS,
            **{
                "command": command,
                "launch_id": "trial-0000",
                "purpose": "trial",
                "start_profile_step": 2,
                "end_profile_step": 3,
                **changes,
            },
        )
        record, report = follow(warm_launcher, asked, events.append)
        after = contents(example)
        return Launched(
            report=report,
            record=record,
            events=events,
            directory=warm_launcher.run_directory(asked.launch_id),
            changed={name for name in after if after[name] != before.get(name)} | (before.keys() - after.keys()),
        )

    return run
