"""Tune a training script from Python, and look at what the search found.

python tune.py --cpu-ranks 2 --max-trials 6
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import optuna_dsat

GPT = Path(__file__).resolve().parents[1] / "gpt"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--script", default=str(GPT / "train.py"))
    parser.add_argument("--ds-config", default=str(GPT / "ds_config.json"))
    parser.add_argument("--max-trials", type=int, default=12)
    parser.add_argument("--cpu-ranks", type=int, help="run on the CPU, with this many ranks")
    args = parser.parse_args()
    try:
        result = optuna_dsat.tune(
            args.script,
            args.ds_config,
            ["--deepspeed_config", args.ds_config],
            metric="throughput",
            zero_stages=[1, 2],
            fix={"overlap_comm": True},
            max_trials=args.max_trials,
            confirm=2,
            cpu_ranks=args.cpu_ranks,
            study="from-python",
        )
    except optuna_dsat.SearchInterrupted as stopped:  # Ctrl-C; running this again goes on
        sys.exit(f"Stopped. Best so far: {stopped.result and stopped.result.value}")

    print(f"{result.value:.4g} samples/s (95% CI {result.low:.4g} to {result.high:.4g})")
    print(f"{result.speed_up and round(result.speed_up, 2)} times as fast as {args.ds_config}")
    print(json.dumps(dict(result.config["zero_optimization"]), indent=2))
    for row in result.trials():
        print(row["number"], row["outcome"], row["value"], row["configuration"])
    study = result.optuna_study()  # an ordinary Optuna study: plot it, analyse it
    print(f"{len(study.trials)} trials in {result.storage}")
    print(f"Train with it: {result.command}")


if __name__ == "__main__":
    main()
