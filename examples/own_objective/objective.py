"""An Optuna study of one's own with optuna-dsat's sampler and pruner: the fastest way to train a small network.

python objective.py --trials 30 --memory-mib 24
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import optuna
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from optuna_dsat.pruners import AshaPruner
from optuna_dsat.samplers import BinarySearchSampler

BATCH = "batch_size"
LAYERS, WIDTH = 8, 128
WARM_UP, STEPS = 1, 4


class TooLargeError(Exception):
    """What is kept for the backward pass exceeds the budget, as a GPU's memory would."""


class Budget:
    """Counts the bytes that a forward pass keeps for its backward pass, and refuses more than there are."""

    def __init__(self, size: int) -> None:
        self._left = size

    def keep(self, tensor: Tensor) -> Tensor:
        self._left -= tensor.nbytes
        if self._left < 0:
            raise TooLargeError
        return tensor


def steps(batch: int, *, checkpointing: bool, bf16: bool, memory_bytes: int) -> Callable[[], float]:
    """Return a function that trains one step and returns its samples per second."""
    layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS))
    optimizer = torch.optim.AdamW(layers.parameters())
    inputs = torch.randn(batch, WIDTH)

    def step() -> float:
        start = time.perf_counter()
        budget, hidden = Budget(memory_bytes), inputs
        with (
            torch.autograd.graph.saved_tensors_hooks(budget.keep, lambda tensor: tensor),
            torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16),
        ):
            for layer in layers:
                hidden = checkpoint(layer, hidden, use_reentrant=False) if checkpointing else layer(hidden)
            loss = hidden.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return batch / (time.perf_counter() - start)

    return step


def objective(trial: optuna.Trial, memory_bytes: int) -> float:
    # The knobs come first: trials that agree in them form a lineage. The micro-batch comes last.
    knobs = {name: trial.suggest_categorical(name, [False, True]) for name in ("checkpointing", "bf16")}
    batch = trial.suggest_int(BATCH, 1, 4096, log=True)
    if trial.should_prune():  # the pruner knows before anything runs that this cannot win
        trial.set_user_attr("vetoed", "held back by the pruner")
        raise optuna.TrialPruned
    step = steps(batch, **knobs, memory_bytes=memory_bytes)
    rates = []
    try:
        for number in range(WARM_UP + STEPS):
            rate = step()
            if number < WARM_UP:
                continue
            rates.append(rate)
            trial.report(rate, number)
            if trial.should_prune():
                raise optuna.TrialPruned
    except TooLargeError:
        trial.set_user_attr("outcome", "out_of_memory")  # bounds the batch of its lineage
        raise optuna.TrialPruned from None
    return sum(rates) / len(rates)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--memory-mib", type=int, default=24)
    args = parser.parse_args()
    torch.manual_seed(0)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = BinarySearchSampler(micro_batch=BATCH, seed=0)
    study = optuna.create_study(direction="maximize", sampler=sampler, pruner=AshaPruner(micro_batch=BATCH))

    def stop_when_nothing_is_left(study: optuna.Study, _: optuna.trial.FrozenTrial) -> None:
        if sampler.exhausted(study, classes=4):
            study.stop()

    study.optimize(
        lambda trial: objective(trial, args.memory_mib * 2**20),
        n_trials=args.trials,
        callbacks=[stop_when_nothing_is_left],
    )
    for trial in study.trials:
        told = trial.user_attrs.get("outcome") or trial.user_attrs.get("vetoed") or trial.state.name.lower()
        shown = "" if trial.value is None else f" {trial.value:.0f} samples/s"
        print(f"{trial.number}: {trial.params} {told}{shown}")
    print(f"Best: {study.best_params}")


if __name__ == "__main__":
    main()
