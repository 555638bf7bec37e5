"""optuna-dsat finds the DeepSpeed configuration that trains a given model fastest on the GPUs at hand.

Public names are resolved on first use, so that the runtime inside a training process and ``optuna-dsat --help``
import neither Optuna nor torch.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC: dict[str, str] = {
    "DsatCallback": "optuna_dsat.integrations.huggingface",
    "dsat_reporting_context": "optuna_dsat.runtime.reporting",
    "get_ds_config_from_hparams": "optuna_dsat.runtime.reporting",
    "get_hf_args_with_overwrites": "optuna_dsat.integrations.huggingface",
}
"""Public name -> module that defines it."""

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)
