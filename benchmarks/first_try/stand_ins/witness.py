"""Writes down, beside whatever tunes, what each DeepSpeed engine was configured with and what its module was fed.

A file per process in the folder ``FIRST_TRY_WITNESS``. Where ``FIRST_TRY_STEPS`` is set, a process ends after so many
optimizer steps. It is no part of the tool, and reads nothing that the tool writes but the name of the launch.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import time
from pathlib import Path
from types import ModuleType
from typing import Any

_MOST_BATCHES = 64


def _launch() -> str:
    plan = os.environ.get("OPTUNA_DSAT_LAUNCH")
    return Path(plan).parent.name if plan else ""


def _write(**row: Any) -> None:
    folder = Path(os.environ["FIRST_TRY_WITNESS"])
    row = {"pid": os.getpid(), "launch": _launch(), "rank": int(os.environ.get("RANK", "0")), **row}
    with (folder / f"{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def _size(value: Any) -> int | None:
    """Return the leading dimension of the first tensor in a model's input that has one."""
    shape = getattr(value, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else None
    inside = value.values() if hasattr(value, "values") else value if isinstance(value, (list, tuple)) else ()
    return next((size for size in map(_size, inside) if size is not None), None)


def _engine(module: ModuleType) -> None:
    if "FIRST_TRY_WITNESS" not in os.environ:
        return
    engine_class, numbers = module.DeepSpeedEngine, itertools.count()
    begin, take_step = engine_class.__init__, engine_class._take_model_step

    @functools.wraps(begin)
    def began(engine: Any, *args: Any, **kwargs: Any) -> None:
        begin(engine, *args, **kwargs)
        engine.first_try_number = next(numbers)
        _engines.append(engine)
        _write_engine(engine)
        _watch(engine)

    @functools.wraps(take_step)
    def stepped(engine: Any, *args: Any, **kwargs: Any) -> Any:
        result = take_step(engine, *args, **kwargs)
        steps = engine.first_try_steps = getattr(engine, "first_try_steps", 0) + 1
        _write(event="step", engine=engine.first_try_number, steps=steps)
        if steps >= int(os.environ.get("FIRST_TRY_STEPS") or 10**9):
            time.sleep(1.0)  # the other ranks end the same step
            os._exit(0)
        return result

    engine_class.__init__, engine_class._take_model_step = began, stepped


_engines: list[Any] = []


def _write_engine(engine: Any) -> None:
    engine.first_try_launch = _launch()
    engine.first_try_steps = 0
    _write(
        event="engine",
        micro_batch=engine.train_micro_batch_size_per_gpu(),
        stage=engine.zero_optimization_stage(),
        accumulation=engine.gradient_accumulation_steps(),
    )


def _watch(engine: Any) -> None:
    import torch

    seen, number = 0, engine.first_try_number

    def fed(_: Any, args: Any, kwargs: Any) -> None:
        nonlocal seen
        if engine.first_try_launch != _launch():  # the ranks went on with another trial
            seen = 0
            for each in _engines:
                _write_engine(each)
        if seen < _MOST_BATCHES and torch.is_grad_enabled():
            seen += 1
            _write(event="fed", engine=number, size=_size([*args, *kwargs.values()]))

    engine.module.register_forward_pre_hook(fed, with_kwargs=True)


AFTER = {"deepspeed.runtime.engine": _engine}
