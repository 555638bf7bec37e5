"""A model definition as a class, ``NAME:CLASS``: found without importing it, with its hyperparameters and lengths.

The class runs in the ranks (``integrations/deepspeed_trial``). This module also serves the command line, and imports
neither torch nor DeepSpeed. It has the names of Determined's API: supported ones, and replacements for the others.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optuna_dsat.config.documents import as_written, checked, read_document
from optuna_dsat.config.ds_config import BATCH_KEYS
from optuna_dsat.errors import UsageError
from optuna_dsat.runtime.overlay import merge, nest, read_config
from optuna_dsat.script.command.source import module_file, python_tree

RUNNER = "optuna_dsat.integrations.deepspeed_trial"
"""The package for trial classes, which the ranks run; its first argument is then ``NAME:CLASS``."""

CONFIG_OPTION = "--deepspeed_config"
LENGTH_OPTION, CHECKPOINT_OPTION = "--max-length", "--checkpoint-dir"
DEFAULT_LENGTH = "1epochs"
"""Default length of a training."""
CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints of a training with the best config, in the study's folder."""
CONFIG, OVERWRITES = "deepspeed_config", "overwrite_deepspeed_args"
_SEARCHED = frozenset({"int", "double", "log", "categorical"})
"""Hyperparameter types whose value Determined's search would choose."""


@dataclass(frozen=True)
class Length:
    """A duration or a period of training."""

    count: int
    unit: str
    """``batches`` (optimizer steps), ``epochs`` or ``records`` (samples)."""

    @classmethod
    def parse(cls, text: str) -> Length:
        """Parse ``100batches``, ``3epochs`` or ``5000records``; a bare number counts batches.

        Raises:
            ValueError: If the text has another form, or the number is 0.
        """
        match = re.fullmatch(r"\s*(\d+)\s*(batch|batches|epochs?|records?)?\s*", text)
        if match is None or int(match.group(1)) == 0:
            raise ValueError(f"{text!r} is not a length: write 100batches, 3epochs or 5000records.")
        units = {"b": "batches", "e": "epochs", "r": "records"}
        return cls(count=int(match.group(1)), unit=units[(match.group(2) or "batches")[0]])

    def batches(self, *, per_epoch: int, train_batch_size: int) -> int:
        """Return the length in batches, at least 1; records are rounded up to whole batches."""
        if self.unit == "records":
            return -(-self.count // train_batch_size)
        return max(1, self.count * per_epoch if self.unit == "epochs" else self.count)


@dataclass(frozen=True)
class Hparams:
    """The content of a hyperparameter file."""

    hyperparameters: Mapping[str, Any]
    experiment: Mapping[str, Any] | None = None
    """The experiment configuration that contains them as a section; None for a file of hyperparameters only."""

    @classmethod
    def load(cls, path: str | Path) -> Hparams:
        """Read a YAML or JSON file: hyperparameters, or an experiment configuration with a section of them.

        Raises:
            UsageError: If the file is missing or not a mapping, or a hyperparameter has a range instead of a value.
        """
        record = read_settings(path, what="The hyperparameters")
        section = record.get("hyperparameters", record) if isinstance(record, dict) else None
        if not isinstance(section, dict):
            raise UsageError(f"{path} contains no hyperparameters: a mapping of names to values is expected.")
        whole = "hyperparameters" in record
        values = {str(name): _value(str(name), value, path) for name, value in section.items()}
        if isinstance(values.get(OVERWRITES), Mapping):
            values[OVERWRITES] = nest(values[OVERWRITES])
        return cls(hyperparameters=values, experiment={**record, "hyperparameters": values} if whole else None)

    def with_config(self, config: str | Path, *, keep_overwrites: bool) -> dict[str, Any]:
        """Return the hyperparameters with all DeepSpeed settings taken from one config file.

        ``deepspeed_config`` becomes the path of that file. A config inside the hyperparameters, under that name or at
        top level, has its sections replaced by the file's.
        """
        result = dict(self.hyperparameters)
        named = result.get(CONFIG)
        if isinstance(named, Mapping):
            result[CONFIG] = _replaced(named, read_config(str(config)))
        elif any(key in result for key in BATCH_KEYS):
            result = _replaced(result, read_config(str(config)))
        else:
            result[CONFIG] = str(config)
        if OVERWRITES in result and not keep_overwrites:
            result[OVERWRITES] = {}
        return result


def overwrites_of(hparams: Hparams, config: str | Path, cwd: Path) -> Mapping[str, Any]:
    """Return the settings with which the hyperparameters override ``config``; empty if they name another file.

    ``best_ds_config.json`` already contains the overwrites; settings of the search take precedence there.

    Raises:
        UsageError: If the overwrites are not a mapping.
    """
    overwrites = hparams.hyperparameters.get(OVERWRITES) or {}
    if not isinstance(overwrites, Mapping):
        raise UsageError(
            f"The hyperparameter {OVERWRITES} is a mapping of DeepSpeed settings; got {as_written(overwrites)}."
        )
    named = hparams.hyperparameters.get(CONFIG)
    if isinstance(named, str) and (cwd / named).resolve() != (cwd / config).resolve():
        return {}
    return merge({}, overwrites)


def is_trial_class(text: str) -> bool:
    """Return whether a command-line argument is ``NAME:CLASS``."""
    return re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", text) is not None


def find_trial_class(entry: str, cwd: Path) -> Path:
    """Return the file of the module of ``NAME:CLASS`` in the working directory, without importing anything.

    Raises:
        UsageError: If there is no such module, it is not Python, or it has no such name.
    """
    module, _, name = entry.partition(":")
    file = module_file(module, cwd, of_package="__init__.py")
    if file is None:
        raise UsageError(
            f"{entry} names the class {name} of the module {module}, but there is no {module.replace('.', '/')}.py in "
            f"{cwd}, and no such module is installed."
        )
    tree = python_tree(file, f"The module {module}")
    bound = _names(tree)
    check_imports(tree, file)
    if name not in bound and "*" not in bound:
        classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
        raise UsageError(f"{file.name} has no class {name}; it has {', '.join(classes) or 'none'}.")
    return file


def runner_arguments(entry: str, *, config: str, hparams: str | None, rest: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the arguments of ``RUNNER``."""
    return (entry, CONFIG_OPTION, config, *(() if hparams is None else ("--hparams", hparams)), *rest)


def complete_training(arguments: Sequence[str], folder: str | Path) -> list[str]:
    """Complete arguments of ``RUNNER`` with the length of the training and the folder of its checkpoints."""
    named = {argument.partition("=")[0] for argument in arguments}
    completed = list(arguments)
    for option, value in ((LENGTH_OPTION, DEFAULT_LENGTH), (CHECKPOINT_OPTION, str(folder))):
        if option not in named:
            completed += [option, value]
    return completed


def train_command(arguments: Sequence[str], *, config: str, device: str, slots: int) -> list[str]:
    """Return the command for a training with ``config``, from arguments of ``RUNNER``."""
    entry, _, _, *rest = arguments
    ranks = ["--gpus" if device == "cuda" else "--cpu-ranks", str(slots)]
    return ["optuna-dsat", "train", entry, config, *rest, *ranks]


def read_settings(path: str | Path, *, what: str) -> Any:
    """Return the data of a YAML or JSON file; an empty mapping for an empty file. ``what`` is the subject of messages.

    Raises:
        UsageError: If it cannot be read.
    """
    try:
        import yaml
    except ModuleNotFoundError:  # the environment of a script need not have it
        raise UsageError(f"{what} {path} cannot be read without PyYAML: install it, or pass no file.") from None

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """Reads ``1e-3`` as a number, as YAML 1.2 and JSON; it is a string in PyYAML's YAML 1.1."""

    number = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    try:
        text = read_document(path).decode()
        record = checked(yaml.load(text, Loader), str(path))
    except OSError as error:
        raise UsageError(f"{what} {path} cannot be read: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is neither YAML nor JSON: {' '.join(str(error).split())}.") from None
    except UsageError:
        raise
    except (ValueError, OverflowError, RecursionError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(
            f"{path} is neither YAML nor JSON: its values are unknown to both, or nested too deeply ({reason})."
        ) from None
    return {} if record is None else record


def _replaced(user: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``user`` updated by ``config``; a batch size in ``config`` drops all batch sizes of ``user``."""
    sizes = any(key in config for key in BATCH_KEYS)
    kept = {key: value for key, value in user.items() if not (sizes and key in BATCH_KEYS)}
    return {**kept, **config}


def _value(name: str, value: Any, path: str | Path) -> Any:
    """Return a hyperparameter's value, with ``{type: const, val: VALUE}`` resolved at any depth."""
    if not isinstance(value, dict):
        return value
    kind = value.get("type")
    if kind == "const" and "val" in value:
        return value["val"]
    if isinstance(kind, str) and kind in _SEARCHED and value.keys() & {"minval", "maxval", "vals"}:
        raise UsageError(
            f"{path}: {name} is a range to search ({kind}). optuna-dsat searches DeepSpeed configurations; give {name} "
            "one value."
        )
    return {key: _value(f"{name}.{key}", item, path) for key, item in value.items()}


def _names(tree: ast.Module) -> set[str]:
    """Return the names that a module binds, also within ``if`` and ``try``."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.ImportFrom, ast.Import)):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


PROVIDED = frozenset(
    {
        "DataLoader", "DeepSpeedTrial", "DeepSpeedTrialContext", "DistributedContext", "MetricReducer",
        "ModelParallelUnit", "PyTorchCallback", "TorchData", "dsat_reporting_context", "get_ds_config_from_hparams",
        "make_data_parallel_mpu", "make_deepspeed_mpu", "overwrite_deepspeed_config",
    }
)  # fmt: skip
"""Names of ``determined.pytorch``, ``.pytorch.deepspeed`` and ``.pytorch.dsat`` that this package also provides."""

_OWN_LOOP = "a training loop of one's own is tuned as a script: optuna-dsat tune train.py ds_config.json"
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
        raise UsageError(f"{file.name} is written for Determined; change it for {RUNNER}:{lines}")


def _imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    installed = importlib.util.find_spec("determined") is not None
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module == RUNNER:
            yield from ((node.lineno, _remedy(alias.name)) for alias in node.names if alias.name in REFUSED)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] == "determined":
            for alias in node.names:
                remedy = _remedy(alias.name)
                if remedy or not installed or (node.module or "").startswith("determined.pytorch"):
                    yield node.lineno, remedy or f"{alias.name} of {node.module} is not here; leave it out"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "determined" and not (installed and alias.name == "determined"):
                    yield node.lineno, f"`import {alias.name}`: import the names that you use from {RUNNER}"


def _remedy(name: str) -> str:
    """Return the replacement of a name imported from Determined; empty if unknown."""
    if name in PROVIDED:
        return f"from {RUNNER} import {name}"
    if name in REFUSED:
        return f"{name} of Determined is not here: {REFUSED[name]}"
    if name in ("pytorch", "deepspeed"):
        return f"import the names that you use of {name} from {RUNNER}"
    return ""


def _context_attributes(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES:
            owner = node.value
            name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
            if name == "context":
                yield node.lineno, f"context.{node.attr} of Determined is not here: {ATTRIBUTES[node.attr]}"
