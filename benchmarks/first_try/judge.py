"""What became of one script tuned one way: pure functions of what the command said and what was witnessed."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.first_try.sandbox import Ran

_LONGEST = 400
_TRACE = "Traceback (most recent call last)"
_TOLD = (2, 3, 4, 5)
"""Exit codes with which the tool ends after a message of its own."""
_MOST_STEPS = 60
"""Steps of a launch that measures a few; with more it trained on."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of a script."""

    verdict: str
    """``worked``, ``refused``, ``wrong``, ``lost`` or ``not judged``."""
    message: str
    """Why, or what was handed over."""
    micro_batches: tuple[int, ...] = ()
    """Micro-batches that were witnessed in launches, as configured."""
    stages: tuple[int, ...] = ()
    """ZeRO stages that were witnessed in launches."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What was witnessed of one launch."""

    name: str
    micro_batch: int
    stage: int
    fed: int | None
    """Most frequent leading dimension of what the module was fed; None if nothing was seen."""
    steps: int


def launches(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Launch]]:
    """Return what the first rank's engines did, by launch; an engine a process where launches have no names."""
    engines: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["rank"] != 0:
            continue
        of_process = engines[row["launch"], row["pid"]]
        if row["event"] == "engine":
            of_process.append({**row, "fed": [], "steps": 0})
        elif of_process and row["event"] == "fed":
            of_process[row["engine"]]["fed"].append(row["size"])
        elif of_process:
            item = of_process[row["engine"]]
            item["steps"] = max(item["steps"], row["steps"])
    result: dict[str, list[Launch]] = defaultdict(list)
    for (name, _), of_process in engines.items():
        for item in of_process:
            sizes = Counter(size for size in item["fed"] if size is not None)
            most = sizes.most_common(1)
            fed = most[0][0] if most else None
            result[name].append(
                Launch(name=name, micro_batch=item["micro_batch"], stage=item["stage"], fed=fed, steps=item["steps"])
            )
    return result


def wrong_batch(of_launch: Iterable[Launch]) -> str:
    """Return what is wrong with the batch that a launch was fed; empty if it is that of its config."""
    fed = [item for item in of_launch if item.fed is not None]
    if not fed:
        return "nothing was fed to an engine"
    if any(item.fed == item.micro_batch for item in fed):
        return ""
    return f"the engine was fed {fed[0].fed}, its config says {fed[0].micro_batch}"


def plain(ran: Ran) -> Verdict:
    """Return whether the script trains here at all."""
    result = [item for several in launches(ran.witnessed).values() for item in several]
    if ran.exit_code in (0, None) and any(item.steps for item in result):
        return Verdict(verdict="worked", message=_batches(result), **_varied(result))
    return Verdict(verdict="not judged", message=f"does not train by its own command: {last_line(ran)}")


def judged(ran: Ran, result: Mapping[str, Any] | None, winner: str) -> Verdict:
    """Return what became of a search.

    Args:
        ran: The search's command.
        result: What it handed over; None if nothing.
        winner: Name of the winning launch among those witnessed.
    """
    of_search = launches(ran.witnessed)
    tried = [item for name, several in of_search.items() if not name.startswith("profile") for item in several]
    varied = _varied(tried)
    if ran.exit_code is None:
        return Verdict(verdict="lost", message=f"no end within {ran.seconds:.0f} s: {last_line(ran)}", **varied)
    if ran.exit_code and _TRACE in ran.errors and ran.exit_code not in _TOLD:
        return Verdict(verdict="lost", message=f"a traceback: {last_line(ran)}", **varied)
    if ran.exit_code:
        return Verdict(verdict="refused", message=last_line(ran), **varied)
    if result is None:
        return Verdict(verdict="wrong", message=f"exit code 0 and no config: {last_line(ran)}", **varied)
    attempts = [name for name in of_search if name == winner or name.startswith(f"{winner}-retry-")]
    last = max(attempts, key=lambda name: (len(name), name), default=winner)
    if problem := wrong_batch(of_search.get(last, ())):
        return Verdict(verdict="wrong", message=f"{winner}: {problem}", **varied)
    if (most := max(item.steps for item in tried)) > _MOST_STEPS:
        return Verdict(verdict="wrong", message=f"a launch trained on for {most} steps", **varied)
    return Verdict(verdict="worked", message=_handed_over(result), **varied)


def searched(ran: Ran) -> tuple[Verdict, Mapping[str, Any] | None]:
    """Return what became of a search by ``optuna-dsat ... --json``, and its result."""
    result = last_json(ran.output)
    winner = "" if result is None else f"trial-{int(result['trial']):04d}"
    return judged(ran, result, winner), result


def last_json(text: str) -> dict[str, Any] | None:
    """Return the last JSON object that a text ends with, None if there is none."""
    starts = [match.start() for match in re.finditer(r"^\{", text, re.MULTILINE)]
    for at in reversed(starts):
        try:
            result = json.loads(text[at:])
        except json.JSONDecodeError:
            continue
        return result if isinstance(result, dict) else None
    return None


def last_line(ran: Ran) -> str:
    """Return the last line that a command said, shortened; the tool's own where the script's log stands below it."""
    own = [line for line in ran.errors.splitlines() if line.startswith("optuna-dsat: The profile launch ended with ")]
    return last_of(own[-1] if own else ran.errors or ran.output) or f"exit code {ran.exit_code}, not a word"


def last_of(text: str) -> str:
    """Return the last line of a text that says something, shortened; empty if none does."""
    words = [line.strip() for line in text.splitlines() if line.strip()]
    lines = [line for line in words if not line.startswith("Full log: ")]
    line = lines[-1] if lines else ""
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} ..."


def tuned_by_deepspeed(ran: Ran, experiments: Path) -> Verdict:
    """Return what became of DeepSpeed's autotuner where it left no config, with what its first experiment said."""
    verdict = judged(ran, None, "")
    log = experiments / "profile_model_info" / "stderr.log"
    text = last_of(log.read_text(encoding="utf-8", errors="replace")) if log.is_file() else ""
    if ran.exit_code or not text:
        return verdict
    return replace(verdict, message=f"exit code {ran.exit_code} and no config; its profile launch said: {text}")


def _varied(tried: Iterable[Launch]) -> dict[str, Any]:
    tried = [item for item in tried if item.steps]
    return {
        "micro_batches": tuple(sorted({item.micro_batch for item in tried})),
        "stages": tuple(sorted({item.stage for item in tried})),
    }


def _batches(result: Iterable[Launch]) -> str:
    return "; ".join(f"config {item.micro_batch}, fed {item.fed}, stage {item.stage}" for item in list(result)[:3])


def _handed_over(result: Mapping[str, Any]) -> str:
    config = result["config"]
    stage = (config.get("zero_optimization") or {}).get("stage", 0)
    text = f"micro-batch {config.get('train_micro_batch_size_per_gpu')}, stage {stage}"
    return f"{text}; {result['speed_up']:.2f} times the user's own" if result.get("speed_up") else text
