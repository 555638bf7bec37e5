"""Disables side effects of a trial: it must not overwrite checkpoints or log among the user's real runs.

Files that the script writes directly are still written. Checkpoints are loaded as usual. DeepSpeed cannot load a
checkpoint of another ZeRO stage; the trial then continues without it, so that scripts that resume can be tuned.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from optuna_dsat.runtime.files import write_text_atomic
from optuna_dsat.runtime.imports import patch

_MONITORS = ("tensorboard", "wandb", "csv_monitor", "comet", "flops_profiler")
"""Optional sections of a DeepSpeed config that make DeepSpeed write outside the run directory."""


_STATES_OF_DEEPSPEED = frozenset(
    {
        "buffer_names",
        "data_sampler",
        "dp_world_size",
        "ds_config",
        "ds_version",
        "frozen_param_fragments",
        "frozen_param_shapes",
        "global_samples",
        "global_steps",
        "lr_scheduler",
        "module",
        "mp_world_size",
        "optimizer",
        "param_shapes",
        "random_ltd",
        "shared_params",
        "skipped_steps",
        "sparse_tensor_module_names",
    }
)
"""Keys of ``*model_states.pt`` that are not client state (``DeepSpeedEngine._save_checkpoint``, DeepSpeed 0.19)."""


def without_monitors(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a DeepSpeed config without the sections that log to the user's trackers and files."""
    return {key: value for key, value in config.items() if key not in _MONITORS}


def redirect_tensorboard(module: Any, folder: Path) -> None:
    """Write TensorBoard summaries below ``folder``, in a subfolder with the base name of the script's ``log_dir``."""
    signature = inspect.signature(module.SummaryWriter.__init__)
    names = [name for name in ("log_dir", "logdir") if name in signature.parameters]  # tensorboardX has both

    @patch(module.SummaryWriter, "__init__")
    def init(original: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        given = [bound.arguments.pop(name, None) for name in names]
        wanted = next((item for item in given if item), None)
        bound.arguments[names[0]] = str(folder / Path(str(wanted)).name if wanted else folder)
        original(*bound.args, **bound.kwargs)


def redirect_accelerates_tensorboard(module: Any, folder: Path) -> None:
    """Write the additional file (``hparams.yml``) of accelerate's ``TensorBoardTracker`` below ``folder``."""
    signature = inspect.signature(module.TensorBoardTracker.__init__)

    @patch(module.TensorBoardTracker, "__init__")
    def init(original: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.arguments["logging_dir"] = str(folder)
        original(*bound.args, **bound.kwargs)


def silent_loggers(loggers: Sequence[Any]) -> list[Any]:
    """Return a logger of Lightning with the first one's folder that logs nothing; an empty list for none.

    Code of the script may call it, and some callbacks require a logger.
    """
    for package in ("lightning.pytorch", "pytorch_lightning"):
        module: Any = sys.modules.get(f"{package}.loggers.logger")
        if module is not None and loggers and isinstance(loggers[0], module.Logger):
            folder = getattr(loggers[0], "log_dir", None) or loggers[0].save_dir
            return [type("SilentLogger", (module.DummyLogger,), {"save_dir": folder, "log_dir": folder})()]
    return []


_SAVED = "_optuna_dsat_saved"
"""Attribute of an engine: folder, tag, whether it is the latest, and client state of the last skipped checkpoint."""


def disable_checkpoints(engine_class: Any, skipped: list[str], *, is_safe: Callable[[Path], bool]) -> None:
    """Make engines of this class skip writing checkpoints; the first call prints a notice to the rank's log.

    ``save_checkpoint`` and ``save_16bit_model`` keep their signatures and return values: True, or False for
    ``save_16bit_model`` if ZeRO 3 may not gather the weights. They do not synchronize the ranks. ``skipped`` gets the
    name of each called method.

    Scripts write into a checkpoint's folder, read ``latest`` or load their last checkpoint. The paths are made if
    ``is_safe(path)``: if the launch does not change the user's files there.
    """

    def skip(name: str, leave: Callable[[Any, Mapping[str, Any]], bool]) -> None:
        signature = inspect.signature(getattr(engine_class, name))

        @patch(engine_class, name)
        def save(_original: Any, *args: Any, **kwargs: Any) -> bool:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = bound.arguments
            if not given["save_dir"]:
                raise ValueError(f"save_dir must be a non-empty string, got {given['save_dir']!r}")
            skipped.append(name)
            if len(skipped) == 1:
                print(
                    f"optuna-dsat: no checkpoint is written during a trial; {name} to {given['save_dir']} was skipped, "
                    "and so are those that follow.",
                    file=sys.stderr,
                    flush=True,
                )
            with contextlib.suppress(OSError):
                return leave(args[0], given)
            return True

    def leave_checkpoint(engine: Any, given: Mapping[str, Any]) -> bool:
        folder = Path(given["save_dir"]).absolute()
        tag = str(f"global_step{engine.global_steps}" if given["tag"] is None else given["tag"])
        is_latest = bool(given.get("save_latest", True))
        setattr(engine, _SAVED, (folder, tag, is_latest, given["client_state"]))
        if is_safe(folder):
            (folder / tag).mkdir(parents=True, exist_ok=True)
            if is_latest and engine.global_rank == 0:
                write_text_atomic(folder / "latest", tag)
        return True

    def leave_model(engine: Any, given: Mapping[str, Any]) -> bool:
        gathers = engine.zero_gather_16bit_weights_on_model_save()
        if engine.zero_optimization_partition_weights() and not gathers:
            return False
        path = Path(given["save_dir"], given["save_filename"])
        if is_safe(path) and engine.global_rank == 0:
            import torch

            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({}, path)
        return True

    skip("save_checkpoint", leave_checkpoint)
    skip("save_16bit_model", leave_model)


def tolerate_skipped_checkpoints(module: Any, *, skipped: list[str]) -> None:
    """Give a script that converts a checkpoint which was not written an empty one; ``module`` is ``zero_to_fp32``."""

    @patch(module, "get_fp32_state_dict_from_zero_checkpoint")
    def read(original: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except (FileNotFoundError, ValueError):  # no folder of the tag, no file "latest"
            if not skipped:
                raise
            return {}


def tolerate_mismatched_checkpoints(
    engine_class: Any, *, is_mismatch: Callable[[Exception], bool], on_load: Callable[[Path], None]
) -> None:
    """Make a trial continue with the script's initial weights if a checkpoint does not match its configuration.

    Step times do not depend on the weights' values; a notice is printed to the rank's log. The client state is returned
    if the checkpoint's files contain it. The last checkpoint that was skipped is the present state. DeepSpeed handles
    missing checkpoints. Errors that a mismatch cannot explain (``is_mismatch``), such as out-of-memory, are raised.
    ``on_load`` gets the folder of an existing checkpoint.
    """
    signature = inspect.signature(engine_class.load_checkpoint)

    @patch(engine_class, "load_checkpoint")
    def load(original: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        folder, given = bound.arguments["load_dir"], bound.arguments.get("tag")
        saved_in, saved, is_latest, client_state = getattr(args[0], _SAVED, (None, "", False, {}))
        if saved_in == Path(folder).absolute() and (given == saved or (given is None and is_latest)):
            return str(Path(folder, saved)), client_state
        latest = "latest_universal" if args[0].load_universal_checkpoint() else "latest"
        states = _model_states(folder, given, latest=latest)
        if states is not None:
            on_load(states.parent)
        try:
            return original(*args, **kwargs)
        except Exception as error:
            if states is None or not is_mismatch(error):
                raise
            print(
                f"optuna-dsat: {states.parent} was saved with another configuration than this trial's and cannot be "
                f"loaded into it ({type(error).__name__}: {error}); the trial continues from the weights that the "
                "script built.",
                file=sys.stderr,
                flush=True,
            )
            epilogue = getattr(args[0].optimizer, "checkpoint_event_epilogue", None)
            if epilogue is not None:
                epilogue()
            import torch

            record = torch.load(states, map_location="cpu", mmap=True, weights_only=False)  # as DeepSpeed loads it
            return str(states), {key: value for key, value in record.items() if key not in _STATES_OF_DEEPSPEED}


def _model_states(load_dir: Any, tag: Any, *, latest: str) -> Path | None:
    folder = Path(load_dir)
    if tag is None and (folder / latest).is_file():
        tag = (folder / latest).read_text(encoding="utf-8").strip()
    return None if tag is None else min((folder / str(tag)).glob("*model_states.pt"), default=None)
