"""The ways of tuning one script: the tool, DeepSpeed's autotuner, and the script alone."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.first_try.entry import Entry
from benchmarks.first_try.judge import (
    Verdict,
    judged,
    launches,
    plain,
    searched,
    tuned_by_deepspeed,
    wrong_batch,
)
from benchmarks.first_try.sandbox import Ran, Sandbox

_TRAIN_STEPS = "3"
_NO_COMMAND = Verdict(
    verdict="refused", message="what its README gives is no command that trains: there is none to put it in"
)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What each way may take; the same for every script."""

    method: str = "random"
    trials: int = 4
    search_s: float = 420.0
    train_s: float = 120.0


def _plain(sandbox: Sandbox, limits: Limits) -> dict[str, Any]:
    """Train by the script's own command, a few steps: what does not train at all is judged nowhere."""
    ran = sandbox.run("plain", shlex.split(sandbox.entry.command), limit_s=limits.train_s, FIRST_TRY_STEPS=_TRAIN_STEPS)
    return _record(ran, plain(ran))


def _prefix(sandbox: Sandbox, limits: Limits) -> dict[str, Any]:
    return _search(sandbox, limits, "prefix", ())


def _second(sandbox: Sandbox, limits: Limits) -> dict[str, Any]:
    """The same with the options that the first refusal names."""
    if not sandbox.entry.second:
        return {}
    return _search(sandbox, limits, "second", sandbox.entry.second)


def _search(sandbox: Sandbox, limits: Limits, name: str, options: tuple[str, ...]) -> dict[str, Any]:
    tool = str(Path(sandbox.python).with_name("optuna-dsat"))
    budget = ("--max-trials", str(limits.trials), "--confirm", "0", "--trial-timeout", str(limits.train_s))
    places = ("--output-dir", str(sandbox.folder / name), "--storage", f"sqlite:///{sandbox.folder}/{name}.db")
    witness = ("--writable", str(sandbox.folder / f"{name}.witness"))
    command = (tool, limits.method, *budget, "--json", *places, *witness, *options, *shlex.split(sandbox.entry.command))
    ran = sandbox.run(name, command, limit_s=limits.search_s, shared=True)
    verdict, result = searched(ran)
    record = _record(ran, verdict)
    if result is not None:
        record |= {"result": {key: result.get(key) for key in ("config", "command", "advice", "speed_up", "launches")}}
        if verdict.verdict == "worked":
            record["printed"] = _printed(sandbox, limits, name, result)
            if record["printed"] != "trains with it":
                record |= asdict(replace(verdict, verdict="wrong", message=f"the printed command: {record['printed']}"))
    return record


def _printed(sandbox: Sandbox, limits: Limits, name: str, result: Mapping[str, Any]) -> str:
    """Return what comes of the command that a search prints, run as it stands."""
    command = ("bash", "-c", str(result["command"]))
    ran = sandbox.run(f"{name}-printed", command, limit_s=limits.train_s, FIRST_TRY_STEPS=_TRAIN_STEPS)
    seen = [item for several in launches(ran.witnessed).values() for item in several if item.steps]
    if not seen:
        return f"does not train: {plain(ran).message}"
    best = result["config"].get("train_micro_batch_size_per_gpu")
    if not any(item.micro_batch == best for item in seen):
        return f"its engine has micro-batch {seen[0].micro_batch}, the best config {best}"
    return wrong_batch(seen) or "trains with it"


def _autotuning(sandbox: Sandbox, limits: Limits) -> dict[str, Any]:
    """DeepSpeed's autotuner, by the script's own command."""
    if not sandbox.entry.alone:
        return asdict(_NO_COMMAND)
    words = shlex.split(sandbox.entry.command)
    if words[0] != "deepspeed":
        message = f"the command begins with {words[0]}; the autotuner belongs to the deepspeed launcher"
        return asdict(Verdict(verdict="refused", message=message))
    words[1:1] = ["--autotuning", "tune"]
    _enable_autotuning(sandbox)
    sandbox.stand_in_for_pdsh()
    ran = sandbox.run("autotuning", words, limit_s=limits.search_s)
    experiments = sandbox.cwd / "autotuning_results"
    optimal = experiments / "ds_config_optimal.json"
    if not optimal.is_file():
        return _record(ran, tuned_by_deepspeed(ran, experiments))
    config = json.loads(optimal.read_text(encoding="utf-8"))
    best = config.get("train_micro_batch_size_per_gpu")
    one_launch = [{**row, "launch": str(row["pid"])} for row in ran.witnessed]
    names = [
        name for name, several in launches(one_launch).items() if any(item.micro_batch == best for item in several)
    ]
    return _record(
        ran, judged(replace(ran, witnessed=tuple(one_launch)), {"config": config}, names[-1] if names else "")
    )


def _enable_autotuning(sandbox: Sandbox) -> None:
    """Give the script's config file the section without which DeepSpeed's autotuner ends at once, as its guide says."""
    path = sandbox.cwd / sandbox.entry.config
    if not path.is_file():
        return
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({"autotuning": {"enabled": True}, **config}), encoding="utf-8")


def _record(ran: Ran, verdict: Verdict) -> dict[str, Any]:
    return {
        **asdict(verdict),
        "exit_code": ran.exit_code,
        "seconds": round(ran.seconds, 1),
        "command": shlex.join(ran.command),
    }


WAYS: dict[str, Callable[[Sandbox, Limits], dict[str, Any]]] = {
    "plain": _plain,
    "prefix": _prefix,
    "second": _second,
    "autotuning": _autotuning,
}
"""Name -> way, in the order in which they are run."""


def run_way(way: str, entry: Entry, folder: Path, *, limits: Limits, sources: Path | None) -> dict[str, Any]:
    """Run one script one way in a checkout of its own.

    Returns:
        The record: ``Verdict``'s fields, exit code, seconds and command; empty where the way has nothing to do.

    Raises:
        SourceError: If the script cannot be had.
        EntryError: If an edit does not apply.
    """
    record = json.dumps(WAYS[way](Sandbox(entry, folder, sources=sources), limits))
    for place, name in ((folder.resolve(), "SANDBOX"), (Path(sys.prefix), "PREFIX")):
        record = record.replace(str(place), name)
    result: dict[str, Any] = json.loads(record)
    return result
