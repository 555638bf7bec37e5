"""The real command on the stand-in, and what its launches did there."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.cuda.machine import Call, Machine

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 400.0

QUICK = ("--confirm", "0", "--metric", "throughput", "--start-profile-step", "2", "--end-profile-step", "3")
"""Options of a search that measures two steps a launch."""

GPT = ("random", "train.py", "ds_config.json")
SLOW = Path(__file__).with_name("scripts") / "slow.py"
SLOW_CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 5000, "allgather_bucket_size": 5000},
}
SMALL_GPT = ("--", "--layers", "1", "--hidden", "32", "--seq", "16")


def copy_example(name: str, folder: Path) -> Path:
    return Path(shutil.copytree(ROOT / "examples" / name, folder / name, ignore=shutil.ignore_patterns("__pycache__")))


def copy_gpt(folder: Path, **changes: Any) -> Path:
    """Copy the GPT with these changes to its config; its search keeps to micro-batches that are soon loaded."""
    copied = copy_example("gpt", folder)
    config = copied / "ds_config.json"
    limit = {"autotuning": {"max_train_micro_batch_size_per_gpu": 64}}
    config.write_text(json.dumps({**json.loads(config.read_text()), **limit, **changes}))
    return copied


@dataclass(frozen=True)
class Launched:
    """A launch, read from its run directory."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @cached_property
    def report(self) -> dict[str, Any]:
        """What the launcher reported; empty while it runs."""
        path = self.folder / "report.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    @cached_property
    def environment(self) -> dict[str, str]:
        return dict(json.loads((self.folder / "env.json").read_text()))

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of a kind, of all ranks."""
        lines = [line for path in sorted(self.folder.glob("events/*.jsonl")) for line in path.read_text().splitlines()]
        words = [json.loads(line) for line in lines if line.endswith("}")]
        return [event for event in words if event["kind"] == kind]

    @property
    def ranks(self) -> list[dict[str, Any]]:
        """Each rank's first event: its process, its local rank, whether it was forked from a warm process."""
        return self.events("rank_started")


class Search:
    """``optuna-dsat`` with arguments, or another program that tunes, in a process of its own on the stand-in.

    Args:
        machine: The machine it runs on.
        folder: Its working directory.
        arguments: Of the command.
        program: What to run in place of the command.
        visible: ``CUDA_VISIBLE_DEVICES``.
    """

    def __init__(
        self,
        machine: Machine,
        folder: Path,
        *arguments: str,
        program: Sequence[str] = (),
        visible: str | None = "0,1",
    ) -> None:
        self.machine = machine
        self.folder = folder
        self.output = ""
        self.errors = ""
        command = program or (str(machine.python.with_name("optuna-dsat")),)
        self.process = subprocess.Popen(
            [*command, *arguments],
            cwd=folder,
            env=machine.environment(visible=visible),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        machine.started.append(self.process)

    def finish(self, *, code: int = 0) -> Search:
        """Wait for the end, which must come with this exit code."""
        try:
            self.output, self.errors = self.process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.output, self.errors = self.process.communicate()
            raise AssertionError(f"No end after {TIMEOUT_S} s:\n{self.errors[-4000:]}") from None
        assert self.process.returncode == code, f"exit code {self.process.returncode}\n{self.errors[-6000:]}"
        return self

    @property
    def result(self) -> dict[str, Any]:
        """What the command printed with ``--json``."""
        return dict(json.loads(self.output))

    @property
    def launches(self) -> list[Launched]:
        """The launches so far, the profile among them, in the order in which they began."""
        result = self.folder.glob("optuna-dsat-output/*/*/launch.json")
        return [Launched(path.parent) for path in sorted(result, key=lambda path: path.stat().st_mtime_ns)]

    @property
    def trials(self) -> list[Launched]:
        return [launch for launch in self.launches if launch.name.startswith("trial-")]


def slow_search(
    machine: Machine, folder: Path, *options: str, seconds: float = 0.3, visible: str | None = "0,1"
) -> Search:
    """Start a search of two trials whose steps take at least so long."""
    (folder / "ds.json").write_text(json.dumps(SLOW_CONFIG))
    search = ("random", str(SLOW), "ds.json", *QUICK, "--max-trials", "2", *options, "--json")
    return Search(machine, folder, *search, "--", "ds.json", str(seconds), visible=visible)


def ran_as_they_should(search: Search, *, forked: bool) -> None:
    """Check every launch of a search that was measured throughout.

    Nobody but ranks initialised CUDA, each in a process that could; each rank has used the one GPU that is its own; all
    launches were forked from the warm process, or none; and the GPUs are free again.
    """
    machine = search.machine
    launches = search.launches
    assert launches
    owners: dict[int, str] = {}
    for launch in launches:
        assert launch.report["outcome"] in ("measured", "pruned"), (launch.name, launch.report, search.errors)
        assert [rank["forked"] for rank in launch.ranks] == [forked] * len(launch.ranks), search.errors
        devices = launch.report["devices"]
        assert len(launch.ranks) == len(devices)
        owners |= {rank["pid"]: machine.gpus[devices[rank["local_rank"]]].uuid for rank in launch.ranks}
    initialised = machine.calls("cuInit")
    assert {call.code for call in initialised} == {0}, "CUDA was asked for in a process forked after cuInit"
    assert {call.pid for call in initialised} == owners.keys(), _strangers(initialised, owners)
    for function in ("context", "cuMemAlloc"):
        assert {(call.pid, call.uuid) for call in machine.calls(function)} == set(owners.items())
    left_nothing(machine)


def _strangers(calls: Sequence[Call], owners: dict[int, str]) -> str:
    return f"cuInit was called by {[call for call in calls if call.pid not in owners]}, which are no ranks"


def left_nothing(machine: Machine) -> None:
    """Check that no GPU is in use."""
    assert [use.used_bytes for use in machine.use()] == [0] * len(machine.gpus)
