"""Records every structure at micro-batches up to a step of a given length, in rounds, each in an order of its own."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.recorded import key_of, summary
from benchmarks.recording import plan
from benchmarks.recording.quiet import LOOK_S, Watch
from optuna_dsat.config import ds_config
from optuna_dsat.launch.follow import follow
from optuna_dsat.launch.protocol import Launcher
from optuna_dsat.outcome import Outcome
from optuna_dsat.study.launch_requests import launch_request
from optuna_dsat.study.spec import StudySpec

__all__ = ["ATTEMPTS", "Recorder"]

ATTEMPTS = 3
"""Most launches of one configuration in one round, while none was quiet."""


@dataclass(kw_only=True)
class Recorder:
    """Fills a record with launches; what it holds already is not launched again."""

    spec: StudySpec
    launcher: Launcher
    watch: Watch
    record: dict[str, Any]
    write: Callable[[], None]
    """Called whenever the record has changed."""
    structures: Sequence[Mapping[str, Any]]
    """ZeRO sections."""
    longest_step_s: float = 1.0
    rounds: int = 2
    within_s: float = 900.0
    """What all of it may take on a quiet machine: the ladder of micro-batches is thinned out until it does."""
    most_steps: int = 300
    """Of a launch, where steps take milliseconds."""
    _launches: int = field(default=0, init=False)

    def run(self) -> None:
        """Scout, plan and launch; the record is complete afterwards."""
        self.record.setdefault("scouts", [])
        for zero in self.structures:
            self._scout(zero)
        if "plan" not in self.record:
            self.record["plan"] = self._plan()
            self.write()
        for number, index, size in plan.order(
            self.record["plan"], rounds=self.rounds, seed=int(self.record.get("seed", 0))
        ):
            self._configuration(self.structures[index], size, number=number)
        self.record["summary"] = summary(self.record["runs"])
        self.write()

    def _scout(self, zero: Mapping[str, Any]) -> None:
        """Find how long steps of a structure take, by a few short launches."""
        known = self._scouted(zero)
        while (size := plan.next_scout(known, longest_step_s=self.longest_step_s)) is not None:
            self.watch.wait()
            run = self.launch(zero, size, counted=(2, 2))
            self.record["scouts"].append(run)
            self.write()
            known = self._scouted(zero)

    def _scouted(self, zero: Mapping[str, Any]) -> dict[int, float | None]:
        return {
            run["micro_batch"]: run.get("latency_s")
            for run in self.record["scouts"]
            if key_of(run["zero"]) == key_of(zero)
        }

    def _plan(self) -> list[list[int]]:
        """Return the micro-batches of each structure on the densest ladder that fits the time; says what it takes.

        Raises:
            ValueError: If no structure runs.
        """
        scouted = [self._scouted(zero) for zero in self.structures]
        ran = [{size: s for size, s in known.items() if s is not None} for known in scouted]
        most = [max(one, default=0) if len(one) < len(known) else None for one, known in zip(ran, scouted, strict=True)]
        runs = [run for run in self.record["scouts"] if "latency_s" in run]
        if not runs:
            raise ValueError("no structure runs here")
        beside_s = LOOK_S + statistics.median(run["beside_s"] for run in runs)
        spent_s = sum(run["held_s"] for run in self.record["scouts"])
        for level in plan.LEVELS:
            found = [
                plan.sizes(known, level, longest_step_s=self.longest_step_s, most=limit) if known else []
                for known, limit in zip(ran, most, strict=True)
            ]
            takes_s = spent_s + plan.estimate_s(ran, found, beside_s=beside_s, rounds=self.rounds)
            if takes_s <= self.within_s:
                break
        launches = self.rounds * sum(map(len, found))
        _say(f"about {takes_s / 60:.0f} minutes on a quiet machine: {launches} launches after {len(runs)} scouts")
        if takes_s > self.within_s:
            _say(f"this is more than {self.within_s / 60:.0f} minutes, and nothing is left to thin out")
        return found

    def _configuration(self, zero: Mapping[str, Any], size: int, *, number: int) -> None:
        """Launch a configuration of a round until a launch was quiet, or often enough."""
        done = [
            run
            for run in self.record["runs"]
            if run["round"] == number and run["micro_batch"] == size and key_of(run["zero"]) == key_of(zero)
        ]
        while len(done) < ATTEMPTS and not any(run["quiet"] or "latency_s" not in run for run in done):
            self.watch.wait()
            run = {"round": number, "attempt": len(done) + 1, **self.launch(zero, size)}
            done.append(run)
            self.record["runs"].append(run)
            self.write()
            self._show(run)

    def _show(self, run: Mapping[str, Any]) -> None:
        total = self.rounds * sum(map(len, self.record["plan"]))
        first = sum(one["attempt"] == 1 for one in self.record["runs"])
        seconds = run.get("latency_s")
        became = run["outcome"] if seconds is None else f"{1e3 * seconds:.0f} ms"
        noisy = "" if run["quiet"] else f" (not quiet: {', '.join(run['breaches'])})"
        stage = key_of(run["zero"])[:3]
        _say(f"{first}/{total} ZeRO {stage[0]}{_offloads(stage)}, micro-batch {run['micro_batch']}: {became}{noisy}")

    def launch(self, zero: Mapping[str, Any], size: int, *, counted: tuple[int, int] | None = None) -> dict[str, Any]:
        """Launch a configuration and return what became of it.

        Args:
            zero: The ZeRO section.
            size: The micro-batch.
            counted: First and last step that counts; None for as many as are enough.
        """
        first, last = counted or (plan.WARM_UP + 1, self.most_steps)
        request = launch_request(
            self.spec,
            launch_id=self._name(),
            purpose="trial",
            overlay={**ds_config.batch_overlay(size), "zero_optimization": dict(zero)},
            start_profile_step=first,
            end_profile_step=last,
        )
        record, report = follow(self.launcher, request, enough=plan.enough if counted is None else lambda _: False)
        around = self.watch.surroundings(report.conditions)
        breaches = around.breaches(self.watch.rule)
        run: dict[str, Any] = {
            "zero": {key: value for key, value in zero.items() if value is not None},
            "micro_batch": size,
            "outcome": report.outcome.value,
            "startup_s": round(report.startup_s, 4),
            "held_s": round(report.held_s, 4),
            "peak_bytes": record.peak_bytes,
            "quiet": not breaches,
            "surroundings": around.to_json(),
            **({"breaches": list(breaches)} if breaches else {}),
        }
        if report.outcome is not Outcome.MEASURED:
            _say(f"{request.launch_id}: {report.failure_in_words}")
            return run
        metrics = record.metrics(flops_per_sample=0.0)
        times = {f"{name}_s": round(metrics[name], 7) for name in ("forward", "backward", "step", "latency")}
        beside_s = max(0.0, report.held_s - sum(step.latency_s for step in record.boundaries))
        return {**run, **times, "steps": len(record.counted), "beside_s": round(beside_s, 4)}

    def _name(self) -> str:
        """Return a name that no launch of this record has."""
        self._launches += 1
        return f"run-{len(self.record['runs']):04d}-{self._launches:04d}"


def _offloads(key: tuple[int, bool, bool]) -> str:
    words = [word for word, chosen in zip(("optimizer", "parameters"), key[1:], strict=True) if chosen]
    return f" with offload of {' and '.join(words)}" if words else ""


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
