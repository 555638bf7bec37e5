"""Names in Determined's API: the supported ones, and replacements for the others."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from optuna_dsat.errors import UsageError

__all__ = ["ATTRIBUTES", "PROVIDED", "REFUSED", "check_imports"]

_PACKAGE = "optuna_dsat.integrations.deepspeed_trial"

PROVIDED = frozenset(
    {
        "DataLoader", "DeepSpeedTrial", "DeepSpeedTrialContext", "DistributedContext", "MetricReducer",
        "ModelParallelUnit", "PyTorchCallback", "TorchData", "dsat_reporting_context", "get_ds_config_from_hparams",
        "make_data_parallel_mpu", "make_deepspeed_mpu", "overwrite_deepspeed_config",
    }
)  # fmt: skip
"""Names of ``determined.pytorch``, ``.pytorch.deepspeed`` and ``.pytorch.dsat`` that this package also provides."""

_OWN_LOOP = "a training loop of one's own is tuned as a script: optuna-dsat asha train.py ds_config.json"
REFUSED = {
    "ClipGradsL2Norm": "set gradient_clipping in the DeepSpeed config",
    "ClipGradsL2Value": "set gradient_clipping in the DeepSpeed config",
    "DeepSpeedTrialController": "the training loop is started by `optuna-dsat train`",
    "LRScheduler": "give the scheduler to deepspeed.initialize (lr_scheduler=), which steps it",
    "PyTorchTrial": "derive from DeepSpeedTrial",
    "PyTorchTrialContext": "use DeepSpeedTrialContext",
    "Reducer": "wrap a function or a MetricReducer with context.wrap_reducer",
    "TorchWriter": "use context.get_tensorboard_writer()",
    "Trainer": f"`optuna-dsat train` trains a DeepSpeedTrial; {_OWN_LOOP}",
    "dsat": "import dsat_reporting_context and get_ds_config_from_hparams from this package",
    "init": f"`optuna-dsat train` trains a DeepSpeedTrial; {_OWN_LOOP}",
    "samplers": "use torch.utils.data's samplers; DataLoader shares their order among the ranks",
}
"""Names of Determined that this package does not provide -> replacement."""

ATTRIBUTES = {
    "env": "use get_hparams(), get_experiment_config() and get_trial_seed()",
    "get_experiment_id": "there is no cluster; name what you write by get_trial_seed()",
    "get_global_batch_size": "use engine.train_batch_size()",
    "get_initial_batch": "use current_train_batch()",
    "get_per_slot_batch_size": "use get_train_micro_batch_size_per_gpu() and get_num_micro_batches_per_slot()",
    "get_trial_id": "there is no cluster; name what you write by get_trial_seed()",
    "set_enable_tensorboard_logging": "only what the definition writes itself goes to TensorBoard",
    "set_profiler": "use torch.profiler.profile around the training step",
}
"""Attributes of Determined's ``DeepSpeedTrialContext`` that this package's context lacks -> replacement."""


def check_imports(tree: ast.Module, file: Path) -> None:
    """Raise if a model definition imports Determined, or uses context attributes that only Determined has.

    Imports within ``try`` or functions are ignored.

    Raises:
        UsageError: Lists each line with its replacement.
    """
    result = [*_imports(tree), *_context_attributes(tree)]
    if result:
        lines = "".join(f"\n  line {line}: {text}" for line, text in result)
        raise UsageError(f"{file.name} is written for Determined; change it for {_PACKAGE}:{lines}")


def _imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    installed = importlib.util.find_spec("determined") is not None
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module == _PACKAGE:
            yield from ((node.lineno, _remedy(alias.name)) for alias in node.names if alias.name in REFUSED)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] == "determined":
            for alias in node.names:
                remedy = _remedy(alias.name)
                if remedy or not installed or (node.module or "").startswith("determined.pytorch"):
                    yield node.lineno, remedy or f"{alias.name} of {node.module} is not here; leave it out"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "determined" and not (installed and alias.name == "determined"):
                    yield node.lineno, f"`import {alias.name}`: import the names that you use from {_PACKAGE}"


def _remedy(name: str) -> str:
    """Return the replacement of a name imported from Determined; empty if unknown."""
    if name in PROVIDED:
        return f"from {_PACKAGE} import {name}"
    if name in REFUSED:
        return f"{name} of Determined is not here: {REFUSED[name]}"
    if name in ("pytorch", "deepspeed"):
        return f"import the names that you use of {name} from {_PACKAGE}"
    return ""


def _context_attributes(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES:
            owner = node.value
            name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
            if name == "context":
                yield node.lineno, f"context.{node.attr} of Determined is not here: {ATTRIBUTES[node.attr]}"
