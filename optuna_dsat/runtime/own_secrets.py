"""Secrets of a launch, on its way into a rank: references in its command and config become values again."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from dataclasses import replace
from pathlib import Path

from optuna_dsat.runtime.launch_plan import LaunchPlan
from optuna_dsat.secrecy.references import PREFIX, keep, names_in, resolved

__all__ = ["take_secrets", "with_secrets"]


def take_secrets(environ: MutableMapping[str, str]) -> None:
    """Take the values of references out of the environment, which the script's processes inherit, and note them."""
    keep({name: environ.pop(name) for name in [*environ] if name.startswith(PREFIX)})


def with_secrets(plan: LaunchPlan) -> LaunchPlan:
    """Return a launch with the values of its references.

    A config file that has any is given to the script from memory: the path is that of a file of this process that has
    no name in any folder.
    """
    plan = replace(plan, overlay=resolved(plan.overlay), batch_source=resolved(plan.batch_source))
    try:
        text = Path(plan.config_path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return plan
    if not names_in(text):
        return plan
    descriptor = os.memfd_create("ds_config.json")
    os.write(descriptor, resolved(text).encode())
    return replace(plan, config_path=f"/proc/{os.getpid()}/fd/{descriptor}")
