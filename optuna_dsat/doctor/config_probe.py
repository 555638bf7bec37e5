"""Load a DeepSpeed config with the installed DeepSpeed (``python -m optuna_dsat.doctor.config_probe``).

Runs in a separate process, because importing torch and DeepSpeed takes seconds. Reads ``{"config": ..., "ranks": N}``
from stdin and prints a line of JSON, see ``probe``.
"""

from __future__ import annotations

import copy
import importlib
import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from optuna_dsat.doctor.probe import print_alone, reason

UNKNOWN = "unknown key"
"""Text of the error for a key unknown to DeepSpeed."""
_ROUNDS = 25
"""Largest number of errors to collect."""
_NOT_BUILT = ("onebitadam", "onebitlamb", "zerooneadam", "muadam", "muadamw", "musgd", "muon")
"""Optimizers that need process groups, a model or third-party packages."""

_OF_ENGINE = "'DeepSpeedEngine' object has no attribute"

Asked = dict[str, dict[str, Any]]
"""Section ("" for the whole config) -> name that DeepSpeed reads from it -> default."""


def probe(config: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Return how the installed DeepSpeed reads a config, as JSON values; ``error`` if it cannot be imported.

    - ``refused``: errors, each with its ``text``, its causes ``keys`` (removing any single key avoids the error) and
      the class that raises it, ``model``.
    - ``asked``: the names that DeepSpeed reads by section ("" for the whole config), with their defaults.
    - ``quoted``: unread top-level keys that occur elsewhere in DeepSpeed's source.
    - ``models``: the valid names of sections, by class.
    - ``choices``: the valid values of a key.

    Args:
        config: The config.
        ranks: Data-parallel ranks.
    """
    try:
        import deepspeed
        import deepspeed.runtime.config as runtime_config
        import torch
        from deepspeed.runtime import lr_schedules
        from deepspeed.runtime.config_utils import DeepSpeedConfigModel
        from deepspeed.runtime.zero import utils
    except Exception as error:  # noqa: BLE001 - any error of a broken installation is the answer
        return {"error": reason(error)}
    logging.disable(logging.CRITICAL)
    _no_operators()
    runtime_config.dist = utils.dist = _Ranks(ranks)
    asked: Asked = {}
    refused = _refusals(config, asked)
    unread = [key for key in config if key not in asked[""]]
    source = "".join(path.read_text(errors="replace") for path in Path(deepspeed.__path__[0]).rglob("*.py") if unread)
    optimizers = [
        *runtime_config.DEEPSPEED_OPTIMIZERS,
        *(name for name, item in vars(torch.optim).items() if isinstance(item, type)),
    ]
    return {
        "version": deepspeed.__version__,
        "refused": refused,
        "asked": asked,
        "quoted": [key for key in unread if f"'{key}'" in source or f'"{key}"' in source],
        "models": {model.__name__: sorted(_names(model)) for model in _models(DeepSpeedConfigModel)},
        "choices": {
            "optimizer.type": [name for name in optimizers if name != "Optimizer"],
            "scheduler.type": lr_schedules.VALID_LR_SCHEDULES,
        },
    }


class _Ranks:
    """Substitute for ``deepspeed.comm``: a number of ranks without a process group."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def get_rank(self) -> int:
        return 0

    def get_world_size(self, _group: object = None) -> int:
        return self._ranks


class _Noted(dict[str, Any]):
    """A section of a config that records the names read from it."""

    def __init__(self, section: Mapping[str, Any], path: str, asked: Asked) -> None:
        prefix = f"{path}." if path else ""
        super().__init__(
            {
                key: _Noted(item, prefix + key, asked) if isinstance(item, dict) else item
                for key, item in section.items()
            }
        )
        self._names = asked.setdefault(path, {})

    def get(self, name: str, default: Any = None) -> Any:
        self._names[name] = default if isinstance(default, (bool, int, float)) else None
        return super().get(name, default)

    def __getitem__(self, name: str) -> Any:
        self._names.setdefault(name, None)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self._names.setdefault(str(name), None)
        return super().__contains__(name)

    def keys(self) -> Any:
        """Return the section itself, so that ``name in section.keys()`` is recorded as well."""
        return self


def _load(config: Mapping[str, Any], asked: Asked) -> tuple[int, dict[Any, str]]:
    """Return the number of steps completed by DeepSpeed, and the errors of the next step: identity -> text."""
    from deepspeed.runtime.config import DeepSpeedConfig

    done = 0
    try:
        loaded = DeepSpeedConfig(_Noted(copy.deepcopy(dict(config)), "", asked))
        for step in _steps(loaded):
            done += 1
            step()
    except Exception as error:  # noqa: BLE001 - any error is the answer
        if _OF_ENGINE in str(error):  # an error of its substitute
            return done, {}
        if not hasattr(error, "errors"):
            return done, {(type(error).__name__, str(error)): str(error).partition("\n")[0] or type(error).__name__}
        title = getattr(error, "title", "") or getattr(error, "model", Exception).__name__  # pydantic 2, 1
        return done, {(title, item["loc"], item["type"]): _text(item) for item in error.errors()}
    return done, {}


def _text(error: Mapping[str, Any]) -> str:
    return UNKNOWN if error["type"] in ("extra_forbidden", "value_error.extra") else str(error["msg"])


def _refusals(config: dict[str, Any], asked: Asked) -> list[dict[str, Any]]:
    """Return DeepSpeed's successive errors for a config; the causes of an error are removed before the next attempt.

    The causes are the innermost keys whose removal, each alone, avoids the error.
    """
    result: list[dict[str, Any]] = []
    for _ in range(_ROUNDS):
        done, problems = _load(config, asked)
        causes: dict[Any, list[tuple[str, ...]]] = {problem: [] for problem in problems}
        for path in _paths(config) if problems else ():
            reached, left = _load(_without(config, path), {})
            for problem in problems.keys() - left.keys() if reached >= done else ():
                if not any(other[: len(path)] == path for other in causes[problem]):
                    causes[problem].append(path)
        result += [
            {"keys": [".".join(path) for path in causes[item]], "text": problems[item], "model": item[0]}
            for item in problems
        ]
        removed = {max(paths, key=len) for paths in causes.values() if paths}
        if not removed:
            break
        for path in removed:
            config = _without(config, path)
    return result


def _paths(section: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the paths of all keys; keys within a section come before the section."""
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from _paths(value, (*above, key))
        yield (*above, key)


def _without(config: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """Return a config without a key; the section stays."""
    result: dict[str, Any] = copy.deepcopy(dict(config))
    section: Any = result
    for key in path[:-1]:
        section = section.get(key, {})
    section.pop(path[-1], None)
    return result


def _models(model: Any) -> Iterator[Any]:
    for item in model.__subclasses__():
        yield item
        yield from _models(item)


def _names(model: Any) -> set[str]:
    """Return the valid names of a section of a pydantic class."""
    fields = getattr(model, "model_fields", None) or model.__fields__
    return {*fields, *(field_.alias for field_ in fields.values() if field_.alias)}


def _steps(loaded: Any) -> list[Callable[[], Any]]:
    """Return the steps of ``deepspeed.initialize`` that need no model: optimizer and schedule."""
    import torch
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
    from deepspeed.runtime.engine import DeepSpeedEngine

    name = loaded.optimizer_name
    engine = object.__new__(DeepSpeedEngine)
    engine.__dict__.update(_config=loaded, client_optimizer=None, has_moe_layers=False, global_rank=0, zenflow=False)
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    tested = torch.optim.AdamW(parameters)
    is_built = name is not None and not (name in _NOT_BUILT and name in DEEPSPEED_OPTIMIZERS)
    return [
        lambda: engine._do_optimizer_sanity_check(
            engine._configure_basic_optimizer(parameters) if is_built else tested
        ),
        lambda: engine._scheduler_from_config(tested),
    ]


def _no_operators() -> None:
    """Replace the operators of optimizers by a stub, so that nothing is compiled, and their look at the CPU.

    That takes a second for each optimizer built, for a warning about half precision.
    """
    with suppress(ImportError):
        importlib.import_module("cpuinfo").get_cpu_info = dict  # type: ignore[attr-defined]
    for name in ("adam", "adagrad", "lamb", "lion"):
        importlib.import_module(f"deepspeed.ops.{name}")
    for name, module in list(sys.modules.items()):
        if name.startswith("deepspeed.ops."):
            for builder in [var for var in vars(module) if var.endswith("Builder")]:
                setattr(module, builder, MagicMock())


if __name__ == "__main__":
    given = json.load(sys.stdin)
    print_alone(lambda: probe(given["config"], given["ranks"]))
