"""Print versions and capabilities of torch and DeepSpeed as a line of JSON (``python -m optuna_dsat.doctor.probe``).

Runs in a separate process, because importing both takes seconds and initializes CUDA.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

_OPERATORS = ("CPUAdamBuilder", "FusedAdamBuilder", "AsyncIOBuilder", "ShareMemCommBuilder")
_NVCC_TIMEOUT_S = 30.0


def probe() -> dict[str, Any]:
    """Return versions and capabilities as JSON values; ``error`` for a package that cannot be imported."""
    facts: dict[str, Any] = {"torch": _torch()}
    facts["deepspeed"] = _deepspeed() if "error" not in facts["torch"] else {"error": "torch cannot be imported"}
    return facts


def _torch() -> dict[str, Any]:
    try:
        import torch
    except Exception as error:  # noqa: BLE001 - any error of a broken installation is the answer
        return {"error": _reason(error)}
    facts: dict[str, Any] = {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "cuda_works": False,
        "cuda_error": "",
    }
    if torch.version.cuda is not None:
        with contextlib.suppress(Exception):
            facts["nccl_version"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
            facts["cuda_works"] = torch.cuda.is_available()
            facts["architectures"] = torch.cuda.get_arch_list()
            facts["capabilities"] = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]
        except Exception as error:  # noqa: BLE001 - likewise
            facts["cuda_error"] = _reason(error)
        facts["toolkit"] = _toolkit()
    return facts


def _toolkit() -> dict[str, Any]:
    """Return the folder of the CUDA toolkit used by torch and the version of its nvcc, or the reason if missing."""
    facts: dict[str, Any] = {"home": None, "version": None, "why_not": ""}
    try:
        from torch.utils.cpp_extension import CUDA_HOME

        facts["home"] = CUDA_HOME
        if CUDA_HOME is None:
            return {**facts, "why_not": "there is no CUDA toolkit: no CUDA_HOME, nvcc or /usr/local/cuda"}
        command = [str(Path(CUDA_HOME, "bin", "nvcc")), "--version"]
        output = subprocess.run(command, capture_output=True, text=True, timeout=_NVCC_TIMEOUT_S, check=True).stdout
    except Exception as error:  # noqa: BLE001 - likewise
        return {**facts, "why_not": _reason(error)}
    release = re.search(r"release (\d+(?:\.\d+)*)", output)
    return {**facts, "version": release and release.group(1), "why_not": "" if release else "nvcc tells no version"}


def _deepspeed() -> dict[str, Any]:
    try:
        import deepspeed
        from deepspeed.accelerator import get_accelerator
    except Exception as error:  # noqa: BLE001 - likewise
        return {"error": _reason(error)}
    accelerator = get_accelerator()
    operators: dict[str, Any] = {}
    for name in _OPERATORS:
        try:
            builder = accelerator.create_op_builder(name)
            compatible = builder is not None and bool(builder.is_compatible(verbose=False))
            operators[name] = {
                "compatible": compatible,
                "why_not": "" if compatible else _why_not(builder),
                "installed": bool(deepspeed.git_version_info.installed_ops.get(getattr(builder, "NAME", ""), False)),
            }
        except Exception as error:  # noqa: BLE001 - likewise
            operators[name] = {"compatible": False, "why_not": _reason(error)}
    return {
        "version": deepspeed.__version__,
        "accelerator": accelerator.device_name(),
        "backend": accelerator.communication_backend_name(),
        "operators": operators,
    }


def _why_not(builder: Any) -> str:
    """Return DeepSpeed's reason why an operator cannot be built; DeepSpeed keeps the last message if asked."""
    messages: list[str] = []
    builder.warning = messages.append
    builder.is_compatible(verbose=True)
    return messages[0] if messages else str(getattr(builder, "error_log", None) or "")


def _reason(error: Exception) -> str:
    """Return an error's type and the first line of its message."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}".rstrip(": ")


def _print_alone() -> None:
    """Print the result as a line of JSON to the real stdout, without output of the libraries, and exit."""
    out = os.dup(1)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        facts = probe()
    os.write(out, f"{json.dumps(facts)}\n".encode())
    os._exit(0)  # skips the teardown of native libraries


if __name__ == "__main__":
    _print_alone()
