"""What one run of a study is asked to do, passed on whole from the options to the session."""

from __future__ import annotations

from dataclasses import dataclass

from optuna_dsat.launch.devices import Devices
from optuna_dsat.study.spec import StudySpec

__all__ = ["StudyRequest"]


@dataclass(frozen=True, kw_only=True)
class StudyRequest:
    """One run of a study: what to tune, where, and how far to take it."""

    spec: StudySpec
    devices: Devices
    storage: str
    """URL of the study's database, its password included; an SQLite file that does not exist is created."""
    reuse_profile: bool = True
    """Whether a stored profile of the same script, config and hardware replaces the profile launch."""
    check_loss: bool = False
    """Whether to compare the first losses under the winner with those under the user's config."""
    conclude: bool = True
    """Whether to confirm and export the winner; a worker that joins leaves that to the study's owner."""
    relocated: bool = False
    """Whether ``spec`` is the stored one with this machine's paths: it is neither compared nor stored."""

    @property
    def device_names(self) -> tuple[str, ...]:
        """Name of each device, for the profile's fingerprint."""
        return tuple(device.name for device in self.devices.devices)
