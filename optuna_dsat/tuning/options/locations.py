"""Default locations of studies and their files.

Separate from the options, whose defaults come from the spec: commands without a search need neither.
"""

from __future__ import annotations

__all__ = ["DEFAULT_OUTPUT_DIR", "DEFAULT_STORAGE", "OUTPUT_DIR_ENV", "STORAGE_ENV"]

DEFAULT_STORAGE = "sqlite:///optuna-dsat.db"
STORAGE_ENV = "OPTUNA_DSAT_STORAGE"
"""Environment variable that commands read ``--storage`` from if it is not given."""
DEFAULT_OUTPUT_DIR = "optuna-dsat-output"
OUTPUT_DIR_ENV = "OPTUNA_DSAT_OUTPUT_DIR"
"""Environment variable that commands read ``--output-dir`` from if it is not given."""
