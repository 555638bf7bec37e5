"""Which of DeepSpeed's operators are compiled, without importing torch."""

from __future__ import annotations

from collections.abc import Mapping

from optuna_dsat.config.op_builders import COMMUNICATION
from optuna_dsat.launch.build_locks import extensions_dir

__all__ = ["BUILDING", "COMMUNICATION", "is_built", "operator_name"]

BUILDING = "building {} (first use only, 1 to 3 min)"
"""Phase of whoever waits for a compiler."""
_NAMES = {
    "AsyncIOBuilder": "async_io",
    "CPUAdagradBuilder": "cpu_adagrad",
    "CPUAdamBuilder": "cpu_adam",
    "CPULionBuilder": "cpu_lion",
    "FusedAdamBuilder": "fused_adam",
    "FusedLambBuilder": "fused_lamb",
    "FusedLionBuilder": "fused_lion",
    COMMUNICATION: "deepspeed_shm_comm",
}
"""Class of the builder -> its ``NAME`` in DeepSpeed 0.19.8, which is that of the folder and the library."""


def operator_name(builder: str) -> str:
    """Return the name of the operator of a builder; the builder's own if it is not known."""
    return _NAMES.get(builder, builder)


def is_built(builder: str, environ: Mapping[str, str]) -> bool:
    """Whether torch's folder of compiled extensions has the operator of a builder.

    Args:
        builder: Class name of DeepSpeed's builder.
        environ: Environment of the launches.
    """
    name, root = operator_name(builder), extensions_dir(environ)
    return any(True for pattern in (f"{name}/{name}.so", f"*/{name}/{name}.so") for _ in root.glob(pattern))
