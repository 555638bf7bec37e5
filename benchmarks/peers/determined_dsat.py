"""Determined AI's ``dsat`` search methods, driven through their own package (``determined==0.36.0``).

The search methods answer a master's events with operations. Here a stub plays the master: it runs what they create on
the rig, one trial at a time, and sends the events that Determined's master sends, in its order: trial created,
validation completed (or exited early), trial closed.
"""

from __future__ import annotations

import importlib
import json
import tempfile
import uuid
import warnings
from collections import deque
from pathlib import Path
from typing import Any

from benchmarks.rig import BudgetSpentError, Rig
from optuna_dsat.outcome import Outcome


def run(method: str, rig: Rig, *, budget: int, seed: int) -> None:
    """Run one search: ``dsat-random``, ``dsat-binary`` or ``dsat-asha``.

    All options have dsat's defaults, but for one trial at a time. Its ``--max-trials`` counts the profile launch, so it
    is one more than the budget.
    """
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")  # of old packages, on import
        searcher = importlib.import_module("determined.searcher")
        dsat = importlib.import_module("determined.pytorch.dsat")
        name = method.removeprefix("dsat-")
        arguments = [name, str(_experiment(rig, Path(folder))), folder, "--max-trials", str(budget + 1)]
        arguments += ["--max-concurrent-trials", "1", "--random-seed", str(seed)]
        args = dsat.get_full_parser().parse_args(arguments)
        args.experiment_id = 1
        config = dsat.get_custom_dsat_exp_conf_from_args(args)
        search = dsat.get_search_method_class(name)(args=args, exp_config=config)
        _Master(searcher, dsat, search, rig, Path(folder)).serve()


def _experiment(rig: Rig, folder: Path) -> Path:
    """Write the user's DeepSpeed config and the experiment config that names it; return the latter's path."""
    (folder / "ds_config.json").write_text(json.dumps(rig.landscape.user_config))
    experiment = {
        "name": "benchmark",
        "entrypoint": "python train.py",
        "hyperparameters": {"deepspeed_config": "ds_config.json"},
        "resources": {"slots_per_trial": rig.landscape.slots},
    }
    path = folder / "experiment.json"
    path.write_text(json.dumps(experiment))
    return path


class _Master:
    """Plays Determined's master for one custom searcher.

    Args:
        searcher: The package's searcher module: states, operations and reasons.
        dsat: The package's dsat module: how hyperparameters become a DeepSpeed config.
        search: The search method.
        rig: Where trials run.
        folder: The model directory, with the user's DeepSpeed config.
    """

    def __init__(self, searcher: Any, dsat: Any, search: Any, rig: Rig, folder: Path) -> None:
        self._searcher = searcher
        self._dsat = dsat
        self._search = search
        self._rig = rig
        self._folder = folder
        self._state = searcher.SearcherState()
        self._hparams: dict[uuid.UUID, dict[str, Any]] = {}
        self._operations: deque[Any] = deque()

    def serve(self) -> None:
        """Run the search until it shuts itself down, has nothing left to do or asks for more than its budget."""
        self._operations.extend(self._search.initial_operations(self._state))
        while self._operations:
            operation = self._operations.popleft()
            if isinstance(operation, self._searcher.Shutdown):
                return
            if isinstance(operation, self._searcher.Create):
                self._create(operation)
            elif isinstance(operation, self._searcher.ValidateAfter):
                try:
                    self._run(operation.request_id, operation.length)
                except BudgetSpentError:
                    return

    def _create(self, operation: Any) -> None:
        self._hparams[operation.request_id] = json.loads(operation.hparams)
        self._state.trials_created.add(operation.request_id)
        self._state.trial_progress[operation.request_id] = 0.0
        self._operations.extend(self._search.on_trial_created(self._state, operation.request_id))

    def _run(self, request_id: uuid.UUID, length: int) -> None:
        ds_config = self._dsat.get_ds_config_from_hparams(self._hparams[request_id], self._folder)
        profiling = "model_info" in ds_config.pop("autotuning", {})
        ds_config.pop("train_batch_size", None)
        launch = self._rig.measure(ds_config, purpose="profile" if profiling else "trial")
        if launch.outcome is Outcome.MEASURED:
            metric = dict(launch.profile) if profiling else dict(launch.metrics)
            self._operations.extend(self._search.on_validation_completed(self._state, request_id, metric, length))
        else:
            self._state.failures.add(request_id)
            reason = self._searcher.ExitedReason.ERRORED
            self._operations.extend(self._search.on_trial_exited_early(self._state, request_id, reason))
        self._state.trials_closed.add(request_id)
        self._operations.extend(self._search.on_trial_closed(self._state, request_id))
