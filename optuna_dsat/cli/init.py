"""``init``: begin the option file of a project."""

from __future__ import annotations

import tomllib
from pathlib import Path

from optuna_dsat.cli.parsing.parameters import write
from optuna_dsat.errors import UsageError

TABLE = """\
[tool.optuna-dsat]  # defaults of all commands; all options: optuna-dsat tune --help-all
# storage = "postgresql://me@db.example/studies"  # database of the studies; default: sqlite:///optuna-dsat.db
# output-dir = "optuna-dsat-output"  # launches, logs and the best config
# max-trials = 64  # trials to measure
# timeout = 7200  # seconds after which a search ends
# batch = "keep"  # "keep": at your global batch only; "free": at any; "both"
# zero-stages = [0, 1, 2, 3]  # ZeRO stages to search
# fix = {overlap_comm = true}  # knobs that keep one value
# no-tune = ["reduce_bucket_size"]  # knobs that stay as your config has them
# gpus-per-trial = 8  # GPUs of one launch; default: all
# log = ["mlflow"]  # log each trial: "wandb", "mlflow" or "tensorboard"
# on-end = 'notify-send "$OPTUNA_DSAT_STUDY ended"'  # a command after each search
# price = 2.50  # price of a GPU hour
"""
"""The table, its options as comments."""


def init() -> None:
    """Add a [tool.optuna-dsat] table with the options that matter, as comments, to pyproject.toml in this folder."""
    path = Path("pyproject.toml")
    try:
        old = path.read_bytes().decode() if path.exists() else ""
        if "optuna-dsat" in tomllib.loads(old).get("tool", {}):
            raise UsageError(f"{path} has a table [tool.optuna-dsat] already.")
        lines_end = "\r\n" if "\r\n" in old else "\n"
        between = "" if not old.strip() else lines_end if old.endswith("\n") else 2 * lines_end
        text = f"{old}{between}{TABLE.replace(chr(10), lines_end)}"
        tomllib.loads(text)  # fails where `tool` cannot be extended
    except (ValueError, AttributeError, TypeError) as error:
        raise UsageError(
            f"{path} cannot be extended, since it is not such TOML: {str(error).splitlines()[0]}."
        ) from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from None
    write(path, text)
