"""optuna-dsat finds the DeepSpeed configuration that trains a given model fastest on the GPUs at hand.

Public names are resolved on first use, so that the runtime inside a training process and ``optuna-dsat --help``
import neither Optuna nor torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from optuna_dsat import errors
from optuna_dsat.version import __version__

if TYPE_CHECKING:
    from optuna_dsat.integrations.huggingface import DsatCallback, get_hf_args_with_overwrites
    from optuna_dsat.runtime.adapt.checkpointing import checkpoint_blocks
    from optuna_dsat.runtime.reporting import dsat_reporting_context, get_ds_config_from_hparams
    from optuna_dsat.tuning.tune import SearchInterrupted, TuneResult, tune

_PUBLIC: dict[str, str] = {
    "SearchInterrupted": "optuna_dsat.tuning.tune",
    "TuneResult": "optuna_dsat.tuning.tune",
    "tune": "optuna_dsat.tuning.tune",
    "DsatCallback": "optuna_dsat.integrations.huggingface",
    "checkpoint_blocks": "optuna_dsat.runtime.adapt.checkpointing",
    "dsat_reporting_context": "optuna_dsat.runtime.reporting",
    "get_ds_config_from_hparams": "optuna_dsat.runtime.reporting",
    "get_hf_args_with_overwrites": "optuna_dsat.integrations.huggingface",
}
"""Public name -> module that defines it."""

__all__ = [
    "DsatCallback",
    "SearchInterrupted",
    "TuneResult",
    "__version__",
    "checkpoint_blocks",
    "dsat_reporting_context",
    "errors",
    "get_ds_config_from_hparams",
    "get_hf_args_with_overwrites",
    "tune",
]


def __getattr__(name: str) -> Any:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)
