"""Real launches of the examples, through torchrun and DeepSpeed on the CPU."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from optuna_dsat.config import ds_config
from optuna_dsat.launch.devices import cpu_devices
from optuna_dsat.launch.follow import follow
from optuna_dsat.launch.measurement import LaunchRecord
from optuna_dsat.launch.protocol import LaunchReport, LaunchRequest, ScriptCommand
from optuna_dsat.launch.run_directory import RunDirectory
from optuna_dsat.launch.torchrun import TorchrunLauncher
from optuna_dsat.runtime.events import EngineReady, Event, ProfileMeasured, StepMeasured

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


@pytest.fixture
def launch(example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    """Launch a script of the example on two ranks, to the end of its profile steps."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    extensions = os.environ.get("TORCH_EXTENSIONS_DIR", str(ROOT / ".cache" / "torch_extensions"))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", extensions)
    with closing(TorchrunLauncher(tmp_path / "out", devices=cpu_devices(RANKS))) as launcher:

        def run(
            script: str,
            *args: str,
            overlay: dict[str, Any],
            arg_mappings: Mapping[str, str] | None = None,
            **changes: Any,
        ) -> Launched:
            config = ds_config.load(example / CONFIG).raw
            before, events = contents(example), list[Event]()
            request = LaunchRequest(
                command=ScriptCommand(
                    script=str(example / script),
                    args=args,
                    cwd=str(example),
                    config_path=str(example / CONFIG),
                    arg_mappings=arg_mappings or {},
                ),
                ds_config=ds_config.merge(config, overlay),
                overlay=overlay,
                slots=RANKS,
                **{
                    "launch_id": "trial-0000",
                    "purpose": "trial",
                    "start_profile_step": 2,
                    "end_profile_step": 3,
                    **changes,
                },
            )
            record, report = follow(launcher, request, events.append)
            after = contents(example)
            return Launched(
                report=report,
                record=record,
                events=events,
                directory=launcher.run_directory(request.launch_id),
                changed={name for name in after if after[name] != before.get(name)} | (before.keys() - after.keys()),
            )

        yield run
