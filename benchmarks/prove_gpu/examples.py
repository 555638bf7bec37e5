"""``doctor``, and every example of ``examples/`` by the command that its README gives, made short."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.prove_gpu.context import Context, dsat
from benchmarks.prove_gpu.proof import ROOT, NotRunError, Status, Verdict
from benchmarks.prove_gpu.runner import Check

__all__ = ["EXAMPLES", "Example", "doctor", "example_checks"]

_SHORT = (
    *("--max-trials", "2", "--confirm", "0", "--metric", "throughput", "--no-profile-reuse"),
    *("--start-profile-step", "2", "--end-profile-step", "4", "--storage", "sqlite:///study.db", "--json"),
    *("--max-retries", "0"),
)
_CONFIG = ("--deepspeed_config", "ds_config.json")
_TRIAL_S, _TRIAL_ON_A_STAND_IN_S = 120, 30
"""Most seconds of a launch. On a stand-in gradients may be any bytes, and steps that overflow are skipped for ever."""
_MOST_S = 400.0
_LARGEST_MICRO_BATCH = 64
_NOTEBOOK = """
import json, sys
cells = json.load(open(sys.argv[1]))["cells"]
code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
exec(compile("\\n".join(code), sys.argv[1], "exec"), {"__name__": "__main__"})
"""


@dataclass(frozen=True, kw_only=True)
class Example:
    """A way to use optuna-dsat, run in a copy of its folder."""

    name: str
    folder: str
    search: tuple[str, ...] = ()
    """What ``optuna-dsat`` is given, the options that make it short aside."""
    script_args: tuple[str, ...] = ()
    python: tuple[str, ...] = ()
    """Where the example is no search: what Python is given."""
    stages: bool = False
    """Whether it is a pipeline: of as many stages as there are GPUs, at most two."""
    needs: tuple[str, ...] = ()
    """Packages without which it cannot run."""

    def command(self, gpus: int, *, trial_s: int) -> tuple[list[str], str]:
        """Return the command, and the same as one would type it."""
        if self.python:
            return [sys.executable, *self.python], " ".join(("python", *self.python))
        stages = ("--stages", str(min(2, gpus))) if self.stages else ()
        rest = ("--", *self.script_args, *stages) if self.script_args else ()
        limits = ("--gpus-per-trial", str(gpus), "--trial-timeout", str(trial_s))
        return dsat(*self.search, *_SHORT, *limits, *rest)


_OWN = ("random", "train.py", "ds_config.json")
_HUGGING_FACE = ("--deepspeed", "ds_config.json", "--output_dir", "output", "--do_train", "--report_to", "none")
_BY_OPTION = ("--arg-mapping", "train_micro_batch_size_per_gpu=--batch-size")
_IN_CODE = ("--arg-mapping", "train_micro_batch_size_per_gpu=--micro-batch")
_EXAMPLES = (
    Example(name="gpt", folder="gpt", search=_OWN, script_args=_CONFIG),
    Example(name="plain-by-flag", folder="plain", search=("random", "by_flag.py", "ds_config.json"),
            script_args=("--deepspeed", *_CONFIG)),
    Example(name="plain-by-path", folder="plain", search=("random", "by_path.py", "ds_config.json"),
            script_args=("--deepspeed", "ds_config.json")),
    Example(name="plain-in-code", folder="plain", search=("random", "in_code.py", "ds_config.json", *_IN_CODE)),
    Example(name="plain-two-engines", folder="plain", search=("random", "two_engines.py", "ds_config.json"),
            script_args=_CONFIG),
    Example(name="module", folder="module", search=("random", "-m", "trainer.train", "ds_config.json"),
            script_args=_CONFIG),
    Example(name="core-api", folder="core_api", search=_OWN),
    Example(name="deepspeed-trial", folder="deepspeed_trial",
            search=("asha", "model_def:MyTrial", "ds_config.json", "--hparams", "hparams.yaml")),
    Example(name="pipeline", folder="pipeline", search=(*_OWN, "--zero-stages", "0", "1"), script_args=_CONFIG,
            stages=True),
    Example(name="huggingface", folder="huggingface", search=_OWN, script_args=_HUGGING_FACE,
            needs=("transformers", "accelerate")),
    Example(name="accelerate", folder="accelerate", search=(*_OWN, *_BY_OPTION), needs=("accelerate",),
            script_args=("--config", "ds_config.json", "--batch-size", "8")),
    Example(name="lightning", folder="lightning", search=_OWN, script_args=("--config", "ds_config.json"),
            needs=("lightning",)),
    Example(name="python-api", folder="python_api", python=("tune.py", "--max-trials", "2")),
    Example(name="notebook", folder="notebook", python=("-c", _NOTEBOOK, "tune.ipynb")),
    Example(name="own-objective", folder="own_objective", python=("objective.py", "--trials", "6")),
)  # fmt: skip
EXAMPLES = tuple(example.name for example in _EXAMPLES)


def example_checks(names: Collection[str]) -> Iterator[Check[Context]]:
    """Yield a check for each of these examples."""
    for position, name in enumerate(EXAMPLES):
        if name not in names:
            continue

        def run(context: Context, position: int = position) -> Verdict:
            return _run(context, _EXAMPLES[position])

        yield Check(
            name=f"example-{name}",
            asked=f"The example {name} runs to its end"
            + ("." if name == "own-objective" else " on the GPU, its launches forked."),
            run=run,
            needs_s=75.0,
        )


def _run(context: Context, example: Example) -> Verdict:
    missing = [name for name in example.needs if importlib.util.find_spec(name) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise NotRunError(f"{' and '.join(missing)} {verb} not installed")
    folder = context.state / "work" / "examples" / example.name
    shutil.rmtree(folder, ignore_errors=True)
    # Some examples reach for their neighbours, so all of them are copied.
    shutil.copytree(ROOT / "examples", folder, ignore=shutil.ignore_patterns("__pycache__"))
    cwd = folder / example.folder
    if example.search:
        _bound_micro_batch(cwd / "ds_config.json")
    trial_s = _TRIAL_ON_A_STAND_IN_S if context.machine.stand_in else _TRIAL_S
    words, shown = example.command(len(context.devices.devices), trial_s=trial_s)
    if example.name == "notebook":
        shown = "the cells of tune.ipynb"
    done = context.run(words, cwd=cwd, shown=shown, log=f"example-{example.name}", most_s=_MOST_S)
    shown = f"cd examples/{example.folder} && {shown}"
    if done.exit_code:
        return Verdict(
            status=Status.FAILED,
            why=f"It exited with {done.exit_code}: {done.last_line}",
            figures={"stderr": done.stderr.splitlines()[-12:]},
            command=shown,
        )
    if example.name == "own-objective":  # its trials are no launches
        figures = {"output": done.stdout.splitlines()[-5:]}
        return Verdict(status=Status.PROVEN, why="It ran to its end.", figures=figures, command=shown)
    result = {} if example.python else done.result()
    return _judged(result, _launched(cwd), shown, stand_in=context.machine.stand_in)


def _bound_micro_batch(path: Path) -> None:
    """Keep the micro-batch of an example to what its few thousand samples give for several steps."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config["autotuning"] = {"max_train_micro_batch_size_per_gpu": _LARGEST_MICRO_BATCH}
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")


def _judged(result: Mapping[str, Any], launched: Mapping[str, Any], shown: str, *, stand_in: bool) -> Verdict:
    """Judge a search by what it left in its folder; its result, where it printed one, is kept."""
    figures = dict(launched)
    if result:
        figures["throughput_samples_per_s"] = result["value"]
    trials, forked, outcomes = (launched[key] for key in ("trials", "forked", "outcomes"))
    measured = outcomes.get("measured", 0)
    ended = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items()) or "no trial was launched"
    status, why = Status.PROVEN, f"Trials: {ended}, each forked."
    if not measured or launched["kinds"] != ["cuda"]:
        status, why = Status.FAILED, f"Trials: {ended}, on {' and '.join(launched['kinds']) or 'nothing'}."
    elif forked < trials:
        status = Status.FELL_SHORT
        why = f"{forked} of {trials} trials were forked, the others ran by plain torchrun."
    elif measured + outcomes.get("timeout", 0) == trials > measured and stand_in:
        status, why = Status.RAN, f"Trials: {ended}. On a stand-in steps may overflow for ever: nothing is computed."
    elif set(outcomes) - {"measured", "out_of_memory", "pruned"}:
        status, why = Status.FELL_SHORT, f"Trials: {ended}."
    return Verdict(status=status, why=why, figures=figures, command=shown)


def _launched(cwd: Path) -> dict[str, Any]:
    """Return how many trials were launched and forked, how they ended, and on what kinds of device they trained."""
    outcomes: list[str] = []
    forked = 0
    kinds = set()
    for file in sorted(cwd.glob("**/trial-*/report.json")):
        events = [
            json.loads(line)
            for log in file.parent.glob("events/rank0.jsonl")
            for line in log.read_text(encoding="utf-8").splitlines()
        ]
        outcomes.append(json.loads(file.read_text(encoding="utf-8"))["outcome"])
        forked += any(event["kind"] == "rank_started" and event.get("forked") for event in events)
        kinds |= {event["device"] for event in events if event["kind"] == "engine_ready"}
    counts = {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))}
    return {"trials": len(outcomes), "outcomes": counts, "forked": forked, "kinds": sorted(kinds)}


def doctor(context: Context) -> Verdict:
    """Ask ``optuna-dsat doctor``."""
    words, _ = dsat("doctor", "--json", "--output-dir", str(context.folder("doctor")))
    shown = "optuna-dsat doctor --json"
    done = context.run(words, cwd=ROOT, shown=shown, log="doctor")
    result = done.result()
    findings = result["findings"]
    wrong = [finding for finding in findings if finding["status"] in ("problem", "fatal")]
    figures = {
        "findings": {
            f"{finding['area']}: {finding['name']}": f"{finding['status']}: {finding['text']}" for finding in findings
        },
        "problems": len(wrong),
    }
    gpus = [finding for finding in findings if finding["area"] == "devices" and finding["name"].startswith("gpu ")]
    if done.exit_code or not result["can_run"] or len(gpus) != len(context.devices.devices):
        why = "; ".join(item["text"] for item in wrong) or f"{len(gpus)} GPUs were found, exit code {done.exit_code}"
        return Verdict(status=Status.FAILED, why=why, figures=figures, command=shown)
    if any(item["area"] in ("devices", "launches") for item in wrong):
        why = "; ".join(item["text"] for item in wrong)
        return Verdict(status=Status.FELL_SHORT, why=why, figures=figures, command=shown)
    words_of_wrong = "; ".join(item["text"] for item in wrong)
    why = f"{len(gpus)} GPU(s) free, launches can run." + (f" To mend: {words_of_wrong}" if wrong else "")
    return Verdict(status=Status.PROVEN, why=why, figures=figures, command=shown)
