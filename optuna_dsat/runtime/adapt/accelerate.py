"""Passes the launch's DeepSpeed config to accelerate if neither the script nor its environment specifies a config.

An ``Accelerator()`` or a Hugging Face Trainer uses DeepSpeed only if it gets a plugin, a config or the variables that
``accelerate launch`` sets. For scripts without any of these, the runtime sets the variables. The command that trains
with the best config contains them too.
"""

from __future__ import annotations

import inspect
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from optuna_dsat.runtime.events import EnvironmentSet, Event
from optuna_dsat.runtime.imports import patch
from optuna_dsat.runtime.overlay import GRADIENT_ACCUMULATION, LaidConfig, flatten, read_config
from optuna_dsat.runtime.rank import LaunchPlan, Rank

_USE = "ACCELERATE_USE_DEEPSPEED"
_CONFIG_FILE = "ACCELERATE_DEEPSPEED_CONFIG_FILE"
_OTHER_PLUGINS = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_MEGATRON_LM")
"""Variables with which ``accelerate launch`` selects other distributed backends."""
_DECIDED_IN_CODE = ("cpu", "deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin")
"""Arguments of ``Accelerator`` with which the script selects or rejects DeepSpeed."""
_SECTIONS = {"optimizer": ("Optimizer", "DummyOptim"), "scheduler": ("LRScheduler", "DummyScheduler")}
"""Section of the config -> base class of an object built by the script, accelerate's placeholder for DeepSpeed's."""


class AccelerateConfig:
    """Sets accelerate's variables in this rank, once."""

    def __init__(self, *, plan: LaunchPlan, rank: Rank, write: Callable[[Event], None]) -> None:
        self._plan = plan
        self._rank = rank
        self._write = write
        self._provided = False
        self.accelerators: list[Any] = []
        """Every ``Accelerator`` of the script."""
        self._left_open = _left_open(plan.user_config_path)  # later reads are the launch's

    def patch_accelerator(self, module: Any) -> None:
        """Provide the config when the script builds its first ``Accelerator``."""
        signature = inspect.signature(module.Accelerator.__init__)

        @patch(module.Accelerator, "__init__")
        def init(original: Any, *args: Any, **kwargs: Any) -> None:
            given = signature.bind(*args, **kwargs).arguments
            if not any(given.get(name) for name in _DECIDED_IN_CODE) and not module.AcceleratorState._shared_state:
                self.provide()
            original(*args, **kwargs)
            self.accelerators.append(args[0])

        @patch(module.Accelerator, "prepare")
        def prepare(original: Any, accelerator: Any, *args: Any, **kwargs: Any) -> Any:
            plugin = accelerator.state.deepspeed_plugin
            if plugin is not None:
                steps = accelerator.gradient_accumulation_steps
                self.note_filled_in(plugin.deepspeed_config, {GRADIENT_ACCUMULATION: steps})
            if plugin is not None and self._provided:
                for section, (kind, dummy) in _SECTIONS.items():
                    if any(_is_a(arg, kind) and not _is_a(arg, dummy) for arg in args):
                        plugin.deepspeed_config.pop(section, None)
            return original(accelerator, *args, **kwargs)

    def note_filled_in(self, config: Any, values: Mapping[str, Any]) -> None:
        """Record the values with which ``DeepSpeedPlugin`` fills in ``"auto"`` of the script's or the user's config.

        The user's file may contain ``"auto"`` where the launch's file, which the script then reads, has a number. Each
        of ``values``, by dotted key, is from arguments, else the environment, else accelerate's default.
        """
        if isinstance(config, LaidConfig):
            before, launch = flatten(config.scripts_own()), flatten(self._plan.overlay)
            for key in before.keys() & values.keys():
                is_open = before[key] == "auto" or (key in self._left_open and before[key] == launch.get(key))
                if is_open and values[key] != "auto":
                    config.note_own(key, values[key])

    def provide_for(self, arguments: Any) -> None:
        """Provide the config to ``TrainingArguments`` without a config; withdraw it if they are rebuilt with one."""
        if not getattr(arguments, "deepspeed", None) and not getattr(arguments, "fsdp", None):
            self.provide()
        elif self._provided:
            self._provided = False
            for name in (_USE, _CONFIG_FILE):
                os.environ.pop(name, None)
            self._announce({}, "the script names its DeepSpeed config after all: these are unset.")

    def leave_optimizer_to(self, arguments: Any) -> None:
        """Remove config sections that duplicate ``TrainingArguments`` settings, if the config was provided here."""
        plugin = getattr(arguments, "deepspeed_plugin", None)
        if self._provided and plugin is not None:
            for section in _SECTIONS:
                plugin.hf_ds_config.config.pop(section, None)

    def provide(self) -> None:
        """Set the variables, unless the environment or the script selects a training backend."""
        chosen = any(os.environ.get(name, "").lower() in ("1", "true", "yes") for name in (_USE, *_OTHER_PLUGINS))
        calls_deepspeed = "deepspeed" in vars(sys.modules["__main__"])
        if self._provided or not self._plan.user_config_path or chosen or calls_deepspeed:
            return
        self._provided = True
        os.environ.update({_USE: "true", _CONFIG_FILE: self._plan.config_path})
        self._announce(
            {_USE: "true", _CONFIG_FILE: self._plan.user_config_path},
            f"the script does not say that it trains with DeepSpeed: {_USE}=true and {_CONFIG_FILE} are set for it.",
        )

    def _announce(self, variables: Mapping[str, str], message: str) -> None:
        if self._rank.rank == 0:
            self._write(EnvironmentSet(rank=0, time=time.time(), variables=variables))
            print(f"optuna-dsat: {message}", file=sys.stderr)


def join_ranks(module: Any, *, rank: Rank, on_join: Callable[[], None]) -> None:
    """Use gloo for ranks without a GPU, where accelerate selects no backend and assumes a single process."""

    @patch(module.PartialState, "_prepare_backend")
    def prepare_backend(original: Any, *args: Any, **kwargs: Any) -> Any:
        backend, kind = original(*args, **kwargs)
        if backend is None and rank.world_size > 1:
            on_join()
            backend = "gloo"
        return backend, kind


def how_to_train_with_deepspeed() -> str:
    """Return advice for a script that trains without DeepSpeed."""
    state: Any = sys.modules.get("accelerate.state")
    if state is not None and state.AcceleratorState._shared_state.get("_cpu"):
        return (
            "accelerate leaves DeepSpeed out if it trains on the CPU: by Accelerator(cpu=True), use_cpu, "
            "`accelerate launch --cpu` or ACCELERATE_USE_CPU. Remove that: DeepSpeed takes the CPU where no GPU is"
        )
    return (
        "Tune the command that trains with DeepSpeed, such as `optuna-dsat tune accelerate launch ...`; a "
        'Trainer takes the config by its argument deepspeed=, Lightning by strategy="deepspeed"'
    )


def _left_open(path: str) -> frozenset[str]:
    """Return the dotted keys with value ``"auto"`` in a file; empty if the file cannot be read."""
    try:
        settings = flatten(read_config(path)) if path else {}
    except ValueError:  # already reported by the hook
        return frozenset()
    return frozenset(key for key, value in settings.items() if value == "auto")


def _is_a(candidate: Any, name: str) -> bool:
    return any(cls.__name__ == name for cls in type(candidate).__mro__)
