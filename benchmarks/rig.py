"""The rig every method runs on: one simulated machine that counts launches and seconds and keeps what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.random_machines.machine import RandomMachine
from benchmarks.recorded import Recorded
from optuna_dsat.launch.measurement import LaunchRecord
from optuna_dsat.launch.protocol import Finished, LaunchRequest, LaunchUpdate, Observed, ScriptCommand
from optuna_dsat.outcome import Outcome
from tests.harness.simulated import SimulatedLauncher

Landscape = RandomMachine | Recorded

COMMAND = ScriptCommand(script="train.py", cwd="/", config_path="ds_config.json")
"""Launched nowhere: the landscape answers."""


def throughput(landscape: Landscape, ds_config: Mapping[str, Any]) -> float:
    """Return the noise-free samples per second over all GPUs, 0 for what does not run: what a config is worth."""
    result = landscape.run(ds_config, landscape.slots)
    if result.outcome is not Outcome.MEASURED:
        return 0.0
    samples = ds_config["train_micro_batch_size_per_gpu"] * int(ds_config.get("gradient_accumulation_steps") or 1)
    return float(samples) * landscape.slots / result.latency_s


class BudgetSpentError(BaseException):
    """The peer asks for a launch beyond its budget. No ``Exception``: DeepSpeed's tuners swallow those."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch that is over."""

    purpose: str
    """``profile``, ``trial`` or ``confirm``."""
    ds_config: Mapping[str, Any]
    outcome: Outcome
    metrics: Mapping[str, float]
    """As measured, with noise; empty for what was not measured to its end."""
    profile: Mapping[str, int]
    """What a profile launch taught; empty for others."""
    ended_s: float
    """Virtual seconds since the search began."""
    launch_id: str = ""
    root: str = ""
    """The launch that it continued; empty if it started its own processes."""


class Rig(SimulatedLauncher):
    """A simulated machine with a budget.

    Each trial counts as a launch here, also if it continues another.

    Args:
        landscape: What would become of each configuration.
        budget: Launches after the profile launches; another one raises.
        noise: Relative standard deviation of measured times.
        seed: Of the noise.
    """

    def __init__(
        self,
        landscape: Landscape,
        *,
        budget: int,
        noise: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__(landscape, total_slots=landscape.slots, noise=noise, seed=seed, continues=True)
        self.landscape = landscape
        self.launches: list[Launch] = []
        self.results: Sequence[Mapping[str, Any] | None] | None = None
        """Result of the search if it ended after each launch; None for peers, which name none."""
        self.same_batch: Mapping[str, Any] | None = None
        """Config of the answer at the user's global batch; None if it was not asked for, or without any."""
        self.statements: Sequence[tuple[Mapping[str, Any], float]] = ()
        """The config held and what may be left to gain as the method states it, the last at the end of the search."""
        self._budget = budget
        self._requests: dict[str, LaunchRequest] = {}
        self._records: dict[str, LaunchRecord] = {}

    def start(self, request: LaunchRequest) -> None:
        """Start a launch.

        Raises:
            BudgetSpentError: If the budget is spent.
        """
        used = sum(launch.purpose != "profile" for launch in self.launches) + len(self._requests)
        if request.purpose != "profile" and used >= self._budget:
            raise BudgetSpentError
        super().start(request)
        self._requests[request.launch_id] = request
        self._records[request.launch_id] = LaunchRecord(
            world_size=request.slots, start_profile_step=request.start_profile_step
        )

    def poll(self, timeout_s: float) -> Sequence[LaunchUpdate]:
        """Advance to the next thing that happens and keep what is over."""
        updates = super().poll(timeout_s)
        for update in updates:
            if isinstance(update, Observed):
                self._records[update.launch_id].add(update.event)
            elif isinstance(update, Finished):
                self._keep(update)
        return updates

    def measure(self, ds_config: Mapping[str, Any], *, purpose: str = "trial") -> Launch:
        """Run one launch to its end, as the tuner would run it; for methods that know no launcher.

        Raises:
            BudgetSpentError: If the budget is spent.
        """
        self.start(
            LaunchRequest(
                launch_id=f"{purpose}-{len(self.launches)}",
                purpose=purpose,
                command=COMMAND,
                ds_config=dict(ds_config),
                overlay={},
                slots=self.landscape.slots,
                start_profile_step=1 if purpose == "profile" else 3,
                end_profile_step=2 if purpose == "profile" else 5,
            )
        )
        while self._requests:
            self.poll(0.0)
        return self.launches[-1]

    def _keep(self, update: Finished) -> None:
        request = self._requests.pop(update.launch_id)
        record = self._records.pop(update.launch_id)
        measured = update.report.outcome is Outcome.MEASURED
        profile = record.profile
        flops = self.landscape.flops_per_sample
        self.launches.append(
            Launch(
                purpose=request.purpose,
                ds_config=request.ds_config,
                outcome=update.report.outcome,
                metrics=record.metrics(flops_per_sample=flops) if measured else {},
                profile={}
                if profile is None
                else {
                    "num_params": profile.params,
                    "trainable_num_params": profile.trainable_params,
                    "activation_mem_per_gpu": profile.activation_bytes_per_sample,
                    "gpu_mem": profile.device_memory_bytes,
                },
                ended_s=self.now_s,
                launch_id=update.launch_id,
                root=update.report.root,
            )
        )
