"""Plain Optuna by hand: what one writes without the tool, for a script with a DeepSpeed config file.

A study over ZeRO stage and micro-batch rewrites the fields of the file and times the whole command.
python -m benchmarks.first_try.by_hand CONFIG TRIALS LIMIT_S COMMAND...
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import optuna


def main() -> None:
    """Run the study, leave the best config in the file, print what was tried as JSON."""
    path, trials, limit_s, command = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:]
    user = json.loads(path.read_text(encoding="utf-8"))

    def write(params: dict[str, int]) -> None:
        config = {key: value for key, value in user.items() if key != "train_batch_size"}
        config["train_micro_batch_size_per_gpu"] = params["micro_batch"]
        config["zero_optimization"] = {**user.get("zero_optimization", {}), "stage": params["stage"]}
        path.write_text(json.dumps(config), encoding="utf-8")

    def objective(trial: optuna.Trial) -> float:
        trial.suggest_int("stage", 0, 3)
        trial.suggest_categorical("micro_batch", [1, 2, 4, 8, 16, 32])
        write(trial.params)
        environ = {**os.environ, "FIRST_TRY_TRIAL": f"trial-{trial.number:04d}"}
        begun = time.monotonic()
        subprocess.run(command, check=True, timeout=limit_s, env=environ, stdout=sys.stderr)
        return time.monotonic() - begun

    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=7))
    study.optimize(objective, n_trials=trials, catch=(subprocess.SubprocessError,))
    tried = [{"params": trial.params, "seconds": trial.value, "number": trial.number} for trial in study.trials]
    done = any(item["seconds"] is not None for item in tried)
    if done:
        write(study.best_params)
    print(json.dumps({"trial": study.best_trial.number if done else None, "tried": tried}))


if __name__ == "__main__":
    main()
