"""The modules that are imported before ranks are forked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from optuna_dsat.runtime.events import ModulesImported

__all__ = ["BASE_MODULES", "Preload"]

BASE_MODULES = (
    "numpy",
    "torch",
    "torch.distributed.run",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
    "torch._dynamo",
    "deepspeed",
    "deepspeed.runtime.zero.muon.original_muon",
)
"""Modules that every launch needs. NumPy is first, so that the threads of its OpenBLAS can be counted."""


@dataclass(frozen=True, kw_only=True)
class Preload:
    """Modules to import before ranks are forked."""

    modules: tuple[str, ...] = BASE_MODULES
    """In the order of import. One that cannot be imported is skipped: the rank that needs it reports the error."""
    operators: tuple[str, ...] = ()
    """Names of compiled operators of DeepSpeed (``deepspeed_shm_comm``)."""
    left_out: tuple[str, ...] = ()
    """Packages that are not imported, nor modules that import them."""
    environment: tuple[str, ...] = ()
    """Environment variables that the script changes, which no import may read before that."""

    @classmethod
    def learned(cls, imported: ModulesImported) -> Preload:
        """Return ``BASE_MODULES`` and the modules that a profile launch imported."""
        return cls(
            modules=(*BASE_MODULES, *imported.modules),
            operators=tuple(imported.operators),
            environment=tuple(imported.environment),
        )

    def changed(self, *, added: Sequence[str], left_out: Sequence[str]) -> Preload:
        """Return a copy with modules added and packages left out."""
        return replace(self, modules=(*self.modules, *added), left_out=(*self.left_out, *left_out))

    def to_json(self) -> dict[str, list[str]]:
        """Return what ``from_json`` reads back."""
        return {
            "modules": list(self.modules),
            "operators": list(self.operators),
            "left_out": list(self.left_out),
            "environment": list(self.environment),
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Sequence[str]]) -> Preload:
        """Build from what ``to_json`` returned."""
        return cls(
            modules=tuple(record["modules"]),
            operators=tuple(record["operators"]),
            left_out=tuple(record["left_out"]),
            environment=tuple(record.get("environment", ())),
        )
