"""Complete studies in this process, over simulated landscapes, in a single database."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna

from optuna_dsat.launch.protocol import Launcher
from optuna_dsat.store import Store
from optuna_dsat.study.progress import Message, Observer, ProgressEvent
from optuna_dsat.study.result import StudyResult
from optuna_dsat.study.session import Session
from optuna_dsat.study.spec import StudyRequest, StudySpec, make_spec
from optuna_dsat.trials import attributes
from tests.harness.simulated import SIMULATED_DEVICES, Landscape, SimulatedLauncher

USER_CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
}


def spec_of(folder: Path, **changes: Any) -> StudySpec:
    """Return the spec of a study ``s`` of a script in a folder, on two GPUs."""
    values: dict[str, Any] = {
        "name": "s",
        "method": "random",
        "script": {
            "script": str(folder / "train.py"),
            "args": ("--deepspeed_config", "ds.json"),
            "cwd": str(folder),
            "config_path": str(folder / "ds.json"),
        },
        "ds_config": USER_CONFIG,
        "device": "cuda",
        "slots_per_trial": 2,
        "max_trials": 8,
        "metric": "throughput",
        "batch": "free",
        "output_dir": str(folder / "out"),
    }
    return make_spec(**{**values, **changes})


class StudyBench:
    """Runs studies over simulated landscapes in a single database."""

    def __init__(self, folder: Path, store: Store) -> None:
        self.folder = folder
        self.store = store
        self.news: list[ProgressEvent] = []

    def spec(self, **changes: Any) -> StudySpec:
        return spec_of(self.folder, **changes)

    def run(self, spec: StudySpec, landscape: Landscape, *, slots: int = 2, noise: float = 0.0) -> StudyResult:
        return self.run_by(SimulatedLauncher(landscape, total_slots=slots, noise=noise), spec)

    def run_by(self, launcher: Launcher, spec: StudySpec, **request: Any) -> StudyResult:
        result = self.session(spec, launcher, **request).run()
        assert result is not None
        return result

    def session(
        self, spec: StudySpec, launcher: Launcher, *, observer: Observer | None = None, **request: Any
    ) -> Session:
        asked = StudyRequest(spec=spec, devices=SIMULATED_DEVICES, storage=self.store.url, **request)
        return Session(asked, store=self.store, launcher=launcher, observer=observer or self.news.append)

    @property
    def messages(self) -> list[str]:
        """Texts of all messages so far."""
        return [event.text for event in self.news if isinstance(event, Message)]

    @property
    def configs(self) -> list[dict[str, Any]]:
        """Configs of the trials of ``s`` that were launched, in order."""
        attrs = [trial.user_attrs for trial in self.study().trials]
        return [own[attributes.CONFIG] for own in attrs if attributes.CONFIG in own]

    def study(self, name: str = "s") -> optuna.Study:
        return optuna.load_study(study_name=name, storage=self.store.storage)
