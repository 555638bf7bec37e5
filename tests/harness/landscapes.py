"""A small landscape for the tests of tuner and session."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from optuna_dsat.outcome import Outcome
from tests.harness.simulated import SimulatedProfile, SimulatedResult

GIB = 2**30


@dataclass
class Hill:
    """1B parameters; 40 samples fit at ZeRO 1 and 2, 50 at ZeRO 3, which is slower; launches take a few seconds."""

    override: Callable[[Mapping[str, Any]], SimulatedResult | None] = lambda _: None
    configs: list[dict[str, Any]] = field(default_factory=list)
    """All configs that were run, in order."""
    optimizer: str = "AdamW"
    optimizer_tested: bool = True

    def profile(self, slots: int) -> SimulatedProfile:  # noqa: ARG002 - the protocol's
        return SimulatedProfile(
            params=10**9,
            trainable_params=10**9,
            largest_layer_params=10**7,
            param_bytes=2,
            activation_bytes_per_sample=GIB,
            flops_per_sample=6 * 10**12,
            device_memory_bytes=60 * GIB,
            host_memory_bytes=512 * GIB,
            peak_bytes=20 * GIB,
            optimizer=self.optimizer,
            optimizer_tested=self.optimizer_tested,
        )

    def run(self, ds_config: Mapping[str, Any], slots: int) -> SimulatedResult:  # noqa: ARG002 - the protocol's
        self.configs.append(dict(ds_config))
        special = self.override(ds_config)
        if special is not None:
            return special
        micro_batch = ds_config["train_micro_batch_size_per_gpu"]
        stage = ds_config.get("zero_optimization", {}).get("stage", 0)
        if micro_batch > (50 if stage == 3 else 40):
            return SimulatedResult(outcome=Outcome.OUT_OF_MEMORY, startup_s=10, missing_bytes=GIB)
        forward_s = 0.01 * (micro_batch + 4) * (1.0 + 0.2 * (stage == 3))
        forward_s *= ds_config.get("gradient_accumulation_steps", 1)
        return SimulatedResult(
            startup_s=10,
            forward_s=forward_s,
            backward_s=2 * forward_s,
            step_s=0.02,
            peak_bytes=(18 + micro_batch) * GIB,
        )


class Interrupted(Hill):
    """Ctrl-C comes when the launch after ``left`` others starts."""

    left = 3

    def run(self, ds_config: Mapping[str, Any], slots: int) -> SimulatedResult:
        if len(self.configs) == self.left:
            raise KeyboardInterrupt
        return super().run(ds_config, slots)
