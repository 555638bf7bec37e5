"""Whole studies in this process, over simulated landscapes, in one database."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna

from optuna_dsat.cost.memory import ModelProfile
from optuna_dsat.launch.protocol import Launcher
from optuna_dsat.store import Store
from optuna_dsat.study.profile.profiled import Profiled
from optuna_dsat.study.progress import ProgressEvent
from optuna_dsat.study.result import StudyResult
from optuna_dsat.study.session import Session
from optuna_dsat.study.spec import StudyRequest, StudySpec, make_spec
from tests.harness.simulated import SIMULATED_DEVICES, Landscape, SimulatedLauncher

USER_CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
}


def profiled_with(**facts: Any) -> Profiled:
    """Return the result of a profile launch of a script with these properties."""
    profile = ModelProfile(
        params=1, trainable_params=1, largest_layer_params=1, param_bytes=4, activation_bytes_per_sample=1,
        flops_per_sample=1, device_memory_bytes=1, host_memory_bytes=1, peak_bytes=1,
    )  # fmt: skip
    return Profiled(profile=profile, measured_with="ZeRO 1", pipeline=False, device="cuda", **facts)


class StudyBench:
    """Runs studies over simulated landscapes in one database."""

    def __init__(self, folder: Path, store: Store) -> None:
        self.folder = folder
        self.store = store
        self.news: list[ProgressEvent] = []

    def spec(self, **changes: Any) -> StudySpec:
        values: dict[str, Any] = {
            "name": "s",
            "method": "random",
            "script": {
                "script": str(self.folder / "train.py"),
                "args": ("--deepspeed_config", "ds.json"),
                "cwd": str(self.folder),
                "config_path": str(self.folder / "ds.json"),
            },
            "ds_config": USER_CONFIG,
            "device": "cuda",
            "slots_per_trial": 2,
            "max_trials": 8,
            "metric": "throughput",
            "output_dir": str(self.folder / "out"),
        }
        return make_spec(**{**values, **changes})

    def run(self, spec: StudySpec, landscape: Landscape, *, slots: int = 2, noise: float = 0.0) -> StudyResult | None:
        launcher = SimulatedLauncher(landscape, total_slots=slots, noise=noise)
        return self.session(spec, launcher).run()

    def session(self, spec: StudySpec, launcher: Launcher, **request: Any) -> Session:
        asked = StudyRequest(spec=spec, devices=SIMULATED_DEVICES, storage=self.store.url, **request)
        return Session(asked, store=self.store, launcher=launcher, observer=self.news.append)

    def study(self, name: str = "s") -> optuna.Study:
        return optuna.load_study(study_name=name, storage=self.store.storage)
