"""Where studies and their files are kept unless one says otherwise.

Apart from the options, whose defaults come from the spec: a command that searches nothing needs neither.
"""

from __future__ import annotations

__all__ = ["DEFAULT_OUTPUT_DIR", "DEFAULT_STORAGE", "OUTPUT_DIR_ENV", "STORAGE_ENV"]

DEFAULT_STORAGE = "sqlite:///optuna-dsat.db"
STORAGE_ENV = "OPTUNA_DSAT_STORAGE"
"""Environment variable that commands read ``--storage`` from if it is not given."""
DEFAULT_OUTPUT_DIR = "optuna-dsat-output"
OUTPUT_DIR_ENV = "OPTUNA_DSAT_OUTPUT_DIR"
"""Environment variable that commands read ``--output-dir`` from if it is not given."""
