"""The jobs that are recorded: what is launched for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from benchmarks.launch_overhead import EXAMPLES, ROOT, Example

__all__ = ["JOBS"]


def _job(folder: str) -> Example:
    """Return a job whose script takes the config as ``--deepspeed_config``."""
    config = ROOT / folder / "ds_config.json"
    return Example(script=ROOT / folder / "train.py", config=config, args=("--deepspeed_config", str(config)))


JOBS: Mapping[str, Example] = MappingProxyType(
    {
        "gpt": _job("examples/gpt"),
        "cnn": _job("benchmarks/jobs/cnn"),
        "huggingface": replace(EXAMPLES["huggingface"], args=(*EXAMPLES["huggingface"].args, "--samples", "65536")),
    }
)
"""By name, which is also that of the record."""
