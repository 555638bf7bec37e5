"""DeepSpeed's own autotuner, driven whole: its profile run, its search for micro-batches, its tuners.

Only what starts processes is replaced: a resource manager that answers each experiment from the rig and writes the
files a real one leaves behind, and the query for the GPU's memory.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import logging
import tempfile
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from benchmarks.rig import BudgetSpentError, Rig
from optuna_dsat.outcome import Outcome

_TUNERS: dict[str, dict[str, Any]] = {
    "deepspeed-fast": {"fast": True},
    "deepspeed-grid": {"fast": False, "tuner_type": "gridsearch"},
    "deepspeed-random": {"fast": False, "tuner_type": "random"},
    "deepspeed-model": {"fast": False, "tuner_type": "model_based"},
}
"""Method -> what the user's ``autotuning`` section says; all else has DeepSpeed's defaults. ``fast`` is the default and
tunes micro-batches only."""
_SPACES: dict[str, Any] = {}
"""DeepSpeed's search spaces as first imported."""


def run(method: str, rig: Rig, *, budget: int, seed: int) -> None:  # noqa: ARG001 - the budget is the rig's
    """Run one autotuning: ``deepspeed-fast``, ``deepspeed-grid``, ``deepspeed-random`` or ``deepspeed-model``."""
    _seed(seed)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        try:
            _autotuner(rig, Path(folder), _TUNERS[method]).tune()
        except BudgetSpentError:
            return


def _seed(seed: int) -> None:
    """Seed the generators that DeepSpeed's tuners draw from: the global ones."""
    importlib.import_module("random").seed(seed)
    importlib.import_module("numpy.random").seed(seed)


def _fresh_autotuner_module() -> Any:
    """Return DeepSpeed's module with its search spaces as in a new process: a tuning run writes into them."""
    module = importlib.import_module("deepspeed.autotuning.autotuner")
    for name in [name for name in vars(module) if name.startswith("DEFAULT_TUNING_SPACE")]:
        _SPACES.setdefault(name, copy.deepcopy(getattr(module, name)))
        setattr(module, name, copy.deepcopy(_SPACES[name]))
    return module


def _autotuner(rig: Rig, folder: Path, section: dict[str, Any]) -> Any:
    autotuner = _fresh_autotuner_module()
    scheduler = importlib.import_module("deepspeed.autotuning.scheduler")

    class Manager(scheduler.ResourceManager):  # type: ignore[misc, name-defined]
        def run(self) -> None:
            while self.experiment_queue:
                experiment = self.experiment_queue.pop(0)
                error = _answer(rig, experiment)
                self.finished_experiments[experiment["exp_id"]] = (experiment, error)

    machine = rig.landscape

    class Tuner(autotuner.Autotuner):  # type: ignore[misc, name-defined]
        def get_gpu_memory_info(self) -> int:
            return machine.device_bytes

        def _get_resource_manager(self, active_resources: dict[str, list[int]]) -> Any:
            return Manager(
                args=self.args,
                hosts=list(active_resources),
                num_gpus_per_node=min(map(len, active_resources.values())),
                results_dir=self.results_dir,
                exps_dir=self.exps_dir,
                arg_mappings=self.autotuning_config.arg_mappings,
            )

    config = _user_config(rig, folder, section)
    arguments = argparse.Namespace(
        user_args=["--deepspeed_config", str(config)],
        user_script="train.py",
        num_nodes=machine.nodes,
        num_gpus=machine.slots // machine.nodes,
        hostfile="hostfile",
        master_port=29500,
    )
    hosts = {f"node-{index}": list(range(arguments.num_gpus)) for index in range(machine.nodes)}
    return Tuner(arguments, hosts)


def _user_config(rig: Rig, folder: Path, section: dict[str, Any]) -> Path:
    """Write the user's config, with all ZeRO stages asked for; return its path."""
    autotuning = {
        "enabled": True,
        **section,
        "results_dir": str(folder / "results"),
        "exps_dir": str(folder / "experiments"),
    }
    config = rig.landscape.user_config
    config = {
        **config,
        "zero_optimization": {**config.get("zero_optimization", {}), "stage": "all"},
        "autotuning": autotuning,
    }
    path = folder / "ds_config.json"
    path.write_text(json.dumps(config))
    return path


def _answer(rig: Rig, experiment: dict[str, Any]) -> str | None:
    """Run an experiment and leave a real one's files; return the error that its standard error shows."""
    ds_config = dict(experiment["ds_config"])
    section = ds_config.pop("autotuning")
    ds_config.pop("train_batch_size", None)
    profiling = "model_info_path" in section
    launch = rig.measure(ds_config, purpose="profile" if profiling else "trial")
    folder = Path(experiment["result_dir"])
    folder.mkdir(parents=True, exist_ok=True)
    if launch.outcome is not Outcome.MEASURED:
        (folder / "stderr.log").write_text("torch.cuda.OutOfMemoryError: CUDA out of memory\n")
        return "CUDA out of memory"
    (folder / "stderr.log").write_text("")
    if profiling:
        path = Path(section["model_info_path"])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(launch.profile))
    else:
        Path(section["metric_path"]).write_text(json.dumps(launch.metrics))
    return None
