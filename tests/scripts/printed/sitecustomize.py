"""Notes each DeepSpeed engine's settings and the rows that it first trains on, in the folder that ENGINE_NOTES names.

Python imports this module at its start where its folder is in PYTHONPATH, so no script has to be changed.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Mapping
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

ENGINE = "deepspeed.runtime.engine"


class Finder(MetaPathFinder):
    """Patches the engine's class as soon as its module is imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        del path, target
        if name != ENGINE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            patch(module.DeepSpeedEngine)

        loader.exec_module = exec_module
        return spec


def patch(cls: Any) -> None:
    init, forward = cls.__init__, cls.forward

    @functools.wraps(init)
    def noted_init(engine: Any, *args: Any, **kwargs: Any) -> None:
        init(engine, *args, **kwargs)
        note(
            stage=engine.zero_optimization_stage(),
            micro_batch=engine.train_micro_batch_size_per_gpu(),
            accumulation=engine.gradient_accumulation_steps(),
            ranks=engine.dp_world_size,
        )

    @functools.wraps(forward)
    def noted_forward(engine: Any, *args: Any, **kwargs: Any) -> Any:
        if engine.module.training and not vars(engine).get("is_noted"):
            vars(engine)["is_noted"] = True
            note(rows=next(rows_of([args, kwargs]), None))
        return forward(engine, *args, **kwargs)

    cls.__init__, cls.forward = noted_init, noted_forward


def rows_of(value: Any) -> Iterator[int]:
    """Yield the rows of the tensors in arguments."""
    if isinstance(value, list | tuple | Mapping):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from rows_of(inner)
    elif getattr(value, "ndim", 0):
        yield len(value)


def note(**facts: Any) -> None:
    path = Path(os.environ["ENGINE_NOTES"], f"rank{os.environ.get('RANK', '0')}.jsonl")
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(facts) + "\n")


if "ENGINE_NOTES" in os.environ:
    sys.meta_path.insert(0, Finder())
