"""Draws the figures of the documentation from simulated searches.

    python -m docs.generate.figures

Runs one search per method on a machine of ``benchmarks/random_machines/typical.py``, writes what was launched to
``docs/figures/searches.json`` and draws an SVG per method from that. Everything follows from the seed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna

from benchmarks import ours
from benchmarks.random_machines.typical import TYPICAL
from benchmarks.rig import Launch, Rig, throughput
from optuna_dsat.outcome import Outcome
from optuna_dsat.study.options.methods import METHODS

FOLDER = Path(__file__).resolve().parents[1] / "figures"
SEARCHES = FOLDER / "searches.json"
MACHINE = TYPICAL["7B, 8 x 80 GB"].machine
BUDGET, SEED, NOISE = 32, 0, 0.02
STAGES = {0: "#56B4E9", 1: "#0072B2", 2: "#009E73", 3: "#D55E00"}
"""ZeRO stage -> colour; those of Okabe and Ito (2008), distinguishable with colour blindness."""


def search(method: str) -> list[dict[str, Any]]:
    """Run one search; return its trials in order: purpose, ZeRO stage, offload, micro-batch, outcome, samples/s."""
    rig = Rig(MACHINE, budget=BUDGET, noise=NOISE, seed=SEED)
    ours.run(method, rig, budget=BUDGET, seed=SEED)
    return [_row(launch) for launch in rig.launches]


def _row(launch: Launch) -> dict[str, Any]:
    config = launch.ds_config
    zero = config.get("zero_optimization") or {}
    offloads = [key for key in ("offload_optimizer", "offload_param") if (zero.get(key) or {}).get("device") == "cpu"]
    measured = launch.outcome is Outcome.MEASURED
    return {
        "purpose": launch.purpose,
        "stage": zero.get("stage", 0),
        "offload": offloads,
        "micro_batch": config["train_micro_batch_size_per_gpu"],
        "outcome": launch.outcome.value,
        "samples_per_s": round(throughput(MACHINE, config), 3) if measured else None,
    }


def draw(method: str, launches: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the launches of a search: micro-batch of each above, best so far below."""
    import matplotlib as mpl
    import matplotlib.ticker
    from matplotlib.figure import Figure

    mpl.rcParams.update({"svg.hashsalt": method, "svg.fonttype": "none", "font.size": 9})
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    trials = [one for one in launches if one["purpose"] == "trial"]
    for stage, colour in STAGES.items():
        for offload, marker in ((False, "o"), (True, "s")):
            label = f"ZeRO {stage}{' + offload' if offload else ''}"
            for fits in (True, False):
                chosen = [
                    (number, one["micro_batch"])
                    for number, one in enumerate(trials, start=1)
                    if one["stage"] == stage and bool(one["offload"]) is offload and _fits(one) is fits
                ]
                if chosen:
                    face = colour if fits else "none"
                    above.scatter(*zip(*chosen, strict=True), marker=marker, c=face, edgecolors=colour, label=label)
                    label = "_"  # one entry of the legend is enough
    above.set_yscale("log", base=2)
    above.yaxis.set_major_formatter(mpl.ticker.FormatStrFormatter("%d"))
    above.set_ylabel("micro-batch per GPU")
    above.legend(title="hollow: did not fit,\nor was stopped", fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    below.step(range(1, len(trials) + 1), _best_so_far(trials), where="post", color="#333333")
    below.set_ylabel("best so far\n(samples/s)")
    below.set_xlabel("trial")
    below.set_ylim(bottom=0)
    figure.savefig(path, metadata={"Date": None})


def _fits(launch: Mapping[str, Any]) -> bool:
    return bool(launch["outcome"] == Outcome.MEASURED.value)


def _best_so_far(launches: Sequence[Mapping[str, Any]]) -> list[float]:
    best, line = 0.0, []
    for one in launches:
        best = max(best, one["samples_per_s"] or 0.0)
        line.append(best)
    return line


def main() -> None:
    """Search with every method, store the launches, draw them."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    FOLDER.mkdir(exist_ok=True)
    found = {method: search(method) for method in METHODS}
    SEARCHES.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for method, launches in found.items():
        draw(method, launches, FOLDER / f"{method}.svg")


if __name__ == "__main__":
    main()
