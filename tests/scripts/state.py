"""Writes down what a rank finds itself in: ``state.py CONFIG FILE [--disturb]``, then trains like ``tiny_launch``.

With ``--disturb`` it changes everything it can reach, as an ill-behaved script would.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import re
import resource
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import deepspeed
import neighbour  # type: ignore[import-not-found]  # beside the script
import numpy as np
import torch

PER_LAUNCH = ("OPTUNA_DSAT_", "TORCHELASTIC_", "MASTER_PORT", "COMET_", "MLFLOW_", "TENSORBOARD_", "WANDB_DIR")


def handler_name(number: int) -> str:
    """Return a signal's handler as text, without the address of a function, which differs between processes."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(signal.getsignal(number)))


def look() -> dict[str, Any]:
    """Return what may differ between one way of starting a rank and another."""
    main = sys.modules["__main__"]
    targets = [str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    return {
        "argv": [Path(sys.argv[1]).name, *sys.argv[3:]],
        "orig_argv": [part for part in sys.orig_argv if "/" not in part],
        "path": sys.path,
        "cwd": str(Path.cwd()),
        "main": [main.__name__, getattr(main, "__file__", None), str(getattr(main, "__spec__", None))],
        "environ": {k: v for k, v in os.environ.items() if not k.startswith(PER_LAUNCH)},
        "signals": {int(s): handler_name(s) for s in signal.valid_signals()},
        "threads": threading.active_count(),
        "main_thread": threading.current_thread() is threading.main_thread(),
        "session": os.getsid(0) == os.getpid(),
        "umask": os.umask(0o022),
        "name": Path("/proc/self/comm").read_text().strip()[:6],
        "limits": resource.getrlimit(resource.RLIMIT_NOFILE),
        "streams": [
            [s.encoding, s.errors, getattr(s, "write_through", None), s.isatty()] for s in (sys.stdout, sys.stderr)
        ],
        "recursion": sys.getrecursionlimit(),
        "gc": [gc.isenabled(), gc.get_threshold()],
        "logging": [logging.getLogger().level, len(logging.getLogger().handlers)],
        "filters": len(warnings.filters),
        "torch_seed": torch.initial_seed(),
        "torch_threads": torch.get_num_threads(),
        "default_dtype": str(torch.get_default_dtype()),
        "neighbour": neighbour.COUNTER,
        "attribute": getattr(deepspeed, "left_behind", None),
        "grad": torch.is_grad_enabled(),
        "sockets": sum(target.startswith("socket:") for target in targets),
    }


def disturb() -> None:
    """Leave traces wherever a process can keep any."""
    os.environ["LEFT_BEHIND"] = "1"
    os.environ.pop("HOME", None)
    os.chdir("/")
    os.umask(0o077)
    signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(99)
    torch.set_default_dtype(torch.float64)
    torch.set_default_dtype(torch.float32)
    neighbour.COUNTER.append(1)
    deepspeed.left_behind = True
    logging.getLogger().setLevel(1)
    warnings.simplefilter("ignore")
    sys.path.insert(0, "/nowhere")
    gc.disable()
    sys.setrecursionlimit(5000)


def main() -> None:
    config, file, *rest = sys.argv[1:]
    state = look()
    state["random"] = [random.random(), float(np.random.random())]
    Path(f"{file}.{os.environ['RANK']}").write_text(json.dumps(state, default=str))
    if "--disturb" in rest:
        disturb()
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 1))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for _ in range(100):
        loss = engine(torch.randn(4, 16)).square().mean()
        engine.backward(loss)
        engine.step()


main()
