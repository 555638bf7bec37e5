"""All checks, and those of commands: ``doctor``, the examples, warm launches in turns, a whole search."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import math
import shutil
import statistics
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.launch_overhead import EXAMPLES as OVERHEAD_EXAMPLES
from benchmarks.launch_overhead import PHASES, Launch, measure
from benchmarks.prove_gpu.context import Command, Context, dsat
from benchmarks.prove_gpu.ending import killing, pruning
from benchmarks.prove_gpu.filling import EDGES, FILL_HIGH, FILL_LOW, LAUNCH_S, TOLERANCE, edge, filling, load_filling
from benchmarks.prove_gpu.proof import ROOT, Check, NotRunError, PartOverError, Status, Verdict, write
from optuna_dsat.runtime.events import RankStarted, StepMeasured

PAIRS = 5
_SHORT = (
    *("--max-trials", "2", "--confirm", "0", "--metric", "throughput", "--no-profile-reuse"),
    *("--start-profile-step", "2", "--end-profile-step", "4", "--storage", "sqlite:///study.db", "--json"),
    *("--max-retries", "0"),
)
_TRIAL_S, _TRIAL_ON_A_STAND_IN_S = 120, 30
"""Most seconds of a launch. On a stand-in gradients may be any bytes, and steps that overflow are skipped for ever."""
_EXAMPLE_S = 400.0
_LARGEST_MICRO_BATCH = 64
_CELLS = """
import json, sys
cells = json.load(open(sys.argv[1]))["cells"]
code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
exec(compile("\\n".join(code), sys.argv[1], "exec"), {"__name__": "__main__"})
"""
_CONFIG = "--deepspeed_config ds_config.json"
_MAPPED = "--arg-mapping train_micro_batch_size_per_gpu="
EXAMPLES: Mapping[str, tuple[str, str]] = {
    "gpt": ("gpt", f"random train.py ds_config.json -- {_CONFIG}"),
    "huggingface": (
        "huggingface",
        "random train.py ds_config.json -- --deepspeed ds_config.json --output_dir output --do_train --report_to none",
    ),
    "plain-by-flag": ("plain", f"random by_flag.py ds_config.json -- --deepspeed {_CONFIG}"),
    "plain-by-path": ("plain", "random by_path.py ds_config.json -- --deepspeed ds_config.json"),
    "plain-in-code": ("plain", f"random in_code.py ds_config.json {_MAPPED}--micro-batch"),
    "plain-two-engines": ("plain", f"random two_engines.py ds_config.json -- {_CONFIG}"),
    "module": ("module", f"random -m trainer.train ds_config.json -- {_CONFIG}"),
    "core-api": ("core_api", "random train.py ds_config.json"),
    "deepspeed-trial": ("deepspeed_trial", "asha model_def:MyTrial ds_config.json --hparams hparams.yaml"),
    "pipeline": ("pipeline", f"random train.py ds_config.json --zero-stages 0 1 -- {_CONFIG} --stages GPUS"),
    "accelerate": (
        "accelerate",
        f"random train.py ds_config.json {_MAPPED}--batch-size -- --config ds_config.json --batch-size 8",
    ),
    "lightning": ("lightning", "random train.py ds_config.json -- --config ds_config.json"),
    "python-api": ("python_api", "python tune.py --max-trials 2"),
    "notebook": ("notebook", "python -c CELLS tune.ipynb"),
    "own-objective": ("own_objective", "python objective.py --trials 6"),
}
"""Example -> its folder and the arguments of ``optuna-dsat`` without those that make it short, or of Python."""
_NEEDS = {"huggingface": ("transformers", "accelerate"), "accelerate": ("accelerate",), "lightning": ("lightning",)}
_TRIALS, _CONFIRM = 12, 2
_INTERRUPTED = 130


def all_checks() -> list[Check[Context]]:
    """Return every check in the order in which they run: the most informative in the least time come first.

    Those that need the model of ``filling`` ask for no less time than it does: a part that passes it over has none for
    them either.
    """
    first, *others = (
        Check[Context](
            name=f"example-{name}",
            asked=f"The example {name} runs to its end on the GPU, its launches forked.",
            run=partial(_example, name=name),
            needs_s=75.0,
        )
        for name in EXAMPLES
    )
    edges = (
        Check[Context](
            name=f"edge-{name}",
            asked=f"Out-of-memory edge and peaks at {name} are within {TOLERANCE:.0%} of the memory model's.",
            run=partial(edge, name=name),
            needs_s=2 * LAUNCH_S,
            values=True,
        )
        for name in EDGES
    )
    return [
        Check(
            name="doctor",
            asked="`optuna-dsat doctor` sees the GPUs and says that launches can run.",
            run=_doctor,
            needs_s=60.0,
        ),
        first,
        others[0],
        Check(
            name="warm-against-torchrun",
            asked=f"Forked launches cost less than plain ones ({PAIRS} pairs in turns), and their losses are the same.",
            run=_turns,
            needs_s=170.0,
            values=True,
        ),
        Check(
            name="filling",
            asked=f"A model runs at {FILL_LOW:.0%} to {FILL_HIGH:.0%} of the GPU's memory, as predicted.",
            run=filling,
            needs_s=120.0,
            values=True,
        ),
        Check(
            name="pruning",
            asked="A launch that is stopped leaves the GPU's memory free, and the next launch runs.",
            run=pruning,
            needs_s=150.0,
            values=True,
        ),
        Check(
            name="killing",
            asked="A launch of which a rank is killed leaves the GPU's memory free, and the next launch runs.",
            run=killing,
            needs_s=150.0,
            values=True,
        ),
        *edges,
        Check(
            name="guided-search",
            asked="A guided search of the model that fills the GPU finds a config no slower than the user's.",
            run=_guided,
            needs_s=150.0,
            values=True,
        ),
        *others[1:],
    ]


def _failed(done: Command) -> Verdict:
    figures = {"stderr": done.stderr.splitlines()[-12:]}
    return Verdict(status=Status.FAILED, why=done.why, figures=figures, command=done.shown)


def _doctor(context: Context) -> Verdict:
    words, _ = dsat("doctor", "--json", "--output-dir", str(context.folder("doctor")))
    done = context.run(words, cwd=ROOT, shown="optuna-dsat doctor --json", log="doctor")
    findings = done.result()["findings"]
    wrong = [finding for finding in findings if finding["status"] in ("problem", "fatal")]
    gpus = [finding for finding in findings if finding["area"] == "devices" and finding["name"].startswith("gpu ")]
    figures = {f"{item['area']}: {item['name']}": f"{item['status']}: {item['text']}" for item in findings}
    remarks = "; ".join(item["text"] for item in wrong)
    status, why = Status.PROVEN, f"{len(gpus)} GPU(s) free, launches can run. {remarks}".rstrip()
    if done.exit_code or len(gpus) != len(context.devices.devices):
        status, why = Status.FAILED, remarks or f"{len(gpus)} GPUs were found, exit code {done.exit_code}"
    elif any(item["area"] in ("devices", "launches") for item in wrong):
        status, why = Status.FELL_SHORT, remarks
    return Verdict(status=status, why=why, figures={"findings": figures}, command=done.shown)


def _example(context: Context, *, name: str) -> Verdict:
    """Run an example by the command that its README gives, made short, in a copy of the examples."""
    missing = [package for package in _NEEDS.get(name, ()) if importlib.util.find_spec(package) is None]
    if missing:
        raise NotRunError(f"not installed: {' and '.join(missing)}")
    copy = context.state / "work" / "examples" / name
    shutil.rmtree(copy, ignore_errors=True)
    # Some examples use files of others, so all of them are copied.
    shutil.copytree(ROOT / "examples", copy, ignore=shutil.ignore_patterns("__pycache__"))
    folder, text = EXAMPLES[name]
    cwd, gpus = copy / folder, len(context.devices.devices)
    given = text.replace("GPUS", str(min(2, gpus))).split()
    if given[0] == "python":
        words, shown = [sys.executable, *(_CELLS if word == "CELLS" else word for word in given[1:])], text
    else:
        _bound_micro_batch(cwd / "ds_config.json")
        trial_s = _TRIAL_ON_A_STAND_IN_S if context.machine["stand_in"] else _TRIAL_S
        end = given.index("--") if "--" in given else len(given)
        limits = ("--gpus-per-trial", str(gpus), "--trial-timeout", str(trial_s))
        words, shown = dsat(*given[:end], *_SHORT, *limits, *given[end:])
    shown = f"cd examples/{folder} && {shown}"
    done = context.run(words, cwd=cwd, shown=shown, log=f"example-{name}", most_s=_EXAMPLE_S)
    if done.exit_code:
        return _failed(done)
    if name == "own-objective":  # its trials are no launches
        return Verdict(status=Status.PROVEN, why="It ran to its end.", command=shown)
    status, why, figures = _judged(cwd, stand_in=bool(context.machine["stand_in"]))
    return Verdict(status=status, why=why, figures=figures, command=shown)


def _bound_micro_batch(path: Path) -> None:
    """Keep the micro-batch of an example to what its few thousand samples give for several steps."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config["autotuning"] = {"max_train_micro_batch_size_per_gpu": _LARGEST_MICRO_BATCH}
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")


def _judged(cwd: Path, *, stand_in: bool) -> tuple[Status, str, dict[str, Any]]:
    """Judge a search by the run directories of its trials: outcomes, devices, and whether they were forked."""
    outcomes: list[str] = []
    forked, kinds = 0, set()
    for file in sorted(cwd.glob("**/trial-*/report.json")):
        lines = "".join(log.read_text(encoding="utf-8") for log in file.parent.glob("events/rank0.jsonl")).splitlines()
        events = [json.loads(line) for line in lines]
        outcomes.append(json.loads(file.read_text(encoding="utf-8"))["outcome"])
        forked += any(event["kind"] == "rank_started" and event.get("forked") for event in events)
        kinds |= {event["device"] for event in events if event["kind"] == "engine_ready"}
    counts = {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))}
    figures = {"trials": len(outcomes), "outcomes": counts, "forked": forked, "kinds": sorted(kinds)}
    ended = ", ".join(f"{count} {outcome}" for outcome, count in counts.items()) or "no trial was launched"
    measured = counts.get("measured", 0)
    if not measured or kinds != {"cuda"}:
        return Status.FAILED, f"Trials: {ended}, on {' and '.join(sorted(kinds)) or 'nothing'}.", figures
    if forked < len(outcomes):
        return Status.FELL_SHORT, f"{forked} of {len(outcomes)} trials were forked.", figures
    if measured + counts.get("timeout", 0) == len(outcomes) > measured and stand_in:
        return Status.RAN, f"Trials: {ended}. On a stand-in steps may overflow for ever.", figures
    bad = set(outcomes) - {"measured", "out_of_memory", "pruned"}
    return Status.FELL_SHORT if bad else Status.PROVEN, f"Trials: {ended}, each forked.", figures


def _turns(context: Context) -> Verdict:
    """Launch ``examples/gpt`` by torchrun and warm in turns; compare times outside of steps, and losses."""
    folder = context.folder("warm-against-torchrun")
    for old in folder.iterdir():
        shutil.rmtree(old)
    with contextlib.redirect_stdout(io.StringIO()):
        result = measure(OVERHEAD_EXAMPLES["gpt"], launches=PAIRS, devices=context.devices, folder=folder)
    plain, warm = result["torchrun"], result["warm"]
    outside = {kind: statistics.median(launch.outside() for launch in result[kind]) for kind in ("torchrun", "warm")}
    forked = sum(all(event.forked for event in launch.of(RankStarted)) for launch in warm)
    apart = max(losses_apart(_losses(one), _losses(other)) for one, other in zip(plain, warm, strict=True))
    own = max(losses_apart(_losses(plain[0]), _losses(other)) for other in plain)
    figures: dict[str, Any] = {
        "pairs": PAIRS,
        "outside_steps_s": outside,
        "warm_over_torchrun": outside["warm"] / outside["torchrun"],
        "forked": forked,
        "losses_apart": str(apart),
        "torchrun_runs_apart": str(own),
        "phases_s": {
            kind: {phase: statistics.median(launch.phases()[phase] for launch in launches) for phase in PHASES}
            for kind, launches in result.items()
        },
        "losses": _losses(plain[0]),
    }
    why = (
        f"{forked} of {PAIRS} warm launches were forked. Warm takes {figures['warm_over_torchrun']:.1%} of torchrun's "
        f"{outside['torchrun']:.1f} s outside of steps; losses differ by {apart:.2e}, those of torchrun's own runs by "
        f"{own:.2e}."
    )
    good = forked == PAIRS and _losses(warm[0]) and apart <= own and outside["warm"] < outside["torchrun"]
    status = Status.PROVEN if good else Status.FELL_SHORT
    return Verdict(
        status=status, why=why, figures=figures, command="python -m benchmarks.launch_overhead --examples gpt"
    )


def _losses(launch: Launch) -> list[float | None]:
    steps = [event for event in launch.of(StepMeasured) if event.rank == 0]
    return [step.loss for step in sorted(steps, key=lambda step: step.step)]


def losses_apart(first: list[float | None], second: list[float | None]) -> float:
    """Return the largest relative difference of two rows of losses; infinite where a step is in one alone."""
    if len(first) != len(second):
        return math.inf
    apart = [0.0]
    for item, other in zip(first, second, strict=True):
        if item is None or other is None or not (math.isfinite(item) and math.isfinite(other)):
            apart.append(0.0 if repr(item) == repr(other) else math.inf)
        elif item != other:
            apart.append(abs(item - other) / max(abs(item), abs(other)))
    return max(apart)


def _guided(context: Context) -> Verdict:
    """Search the model that fills the GPU; a search that an earlier part interrupted is resumed."""
    model, folder = load_filling(context), context.folder("guided-search")
    storage = f"sqlite:///{folder}/study.db"
    if any(folder.glob("filling/trial-*")):
        words, shown = dsat("resume", "filling", "--storage", storage, "--json")
    else:
        for left in folder.glob("study.db*"):  # of a search that an earlier part ended before its first trial
            left.unlink()
        options = ("--max-trials", str(_TRIALS), "--confirm", str(_CONFIRM), "--zero-stages", "0", "1", "2", "3")
        places = ("--study", "filling", "--storage", storage, "--output-dir", str(folder), "--json")
        gpus = ("--gpus-per-trial", str(len(context.devices.devices)))
        script = (str(model.script.script), str(model.script.config))
        words, shown = dsat("guided", *script, *options, *gpus, *places, "--", *model.script.args)
    done = context.run(words, cwd=ROOT, shown=shown, log="guided", clean_stop=True)
    if done.exit_code == _INTERRUPTED:
        raise PartOverError
    if done.exit_code:
        return _failed(done)
    result = done.result()
    write(context.state / "best_ds_config.json", json.dumps(result["config"], indent=2))
    speed_up, launches = result["speed_up"], result["launches"]
    share = result["metrics"].get("peak_allocated_bytes", 0.0) / model.hardware.device_memory_bytes
    kept = ("reason", "launches", "slot_minutes", "value", "low", "high", "metrics", "speed_up", "config")
    why = (
        f"{result['reason']}: speed-up {'unknown' if speed_up is None else f'{speed_up:.2f}'} over micro-batch 1 at "
        f"ZeRO 1, {share:.0%} of the GPU; launches: "
        f"{', '.join(f'{count} {outcome}' for outcome, count in sorted(launches.items()))}."
    )
    bad = set(launches) - {"measured", "out_of_memory", "host_out_of_memory", "pruned"}
    good = speed_up is not None and speed_up >= 1 and result["low"] is not None and not bad
    figures = {**{key: result[key] for key in kept}, "peak_share": share}
    return Verdict(status=Status.PROVEN if good else Status.FELL_SHORT, why=why, figures=figures, command=shown)
