"""In which order ``guided`` tries structures on simulated machines, and why, as an expert would."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from benchmarks.named_landscapes import LANDSCAPES
from benchmarks.ours import quick_store, run
from benchmarks.rig import Rig
from optuna_dsat.config.structures import Structure
from optuna_dsat.study.stored import read_stored
from optuna_dsat.trials import attributes

BUDGET = 18
"""Fourteen trials, and the launches of the confirmation."""

ORDERS = {
    # Everything fits: the user's ZeRO 1 climbs to large batches, then stages without offloads.
    "tiny-many-gpus": ("ZeRO 1",),
    # 1.3 B parameters fit at any stage of 8 x 80 GB: the user's ZeRO 2, then ZeRO 0, the simplest.
    "fast-links": ("ZeRO 2", "ZeRO 0"),
    # Over Ethernet the search reaches the edge of memory of ZeRO 2 first; ZeRO 1 moves fewer bytes than ZeRO 3.
    "slow-links": ("ZeRO 2", "ZeRO 1"),
    # 6.7 B parameters on 8 x 40 GB: ZeRO 1 fits and is simpler, ZeRO 3 has room for a larger batch.
    "zero-3-larger-batch": ("ZeRO 2", "ZeRO 1", "ZeRO 3"),
}


@pytest.mark.parametrize("name", ORDERS)
def test_simple_structures_go_first(name: str) -> None:
    landscape = LANDSCAPES[name]
    rig = Rig(landscape, budget=BUDGET, noise=0.005, seed=0, continues=True)
    with tempfile.TemporaryDirectory() as folder, quick_store(Path(folder)) as store:
        run("guided", rig, budget=BUDGET, seed=0, store=store)
        study = read_stored(store, "benchmark")
    trials = [trial for trial in study.trials if attributes.LAUNCH_ID in trial.user_attrs]
    order = list(dict.fromkeys(Structure.of(trial.user_attrs[attributes.CONFIG]).words for trial in trials))
    assert tuple(order[: len(ORDERS[name])]) == ORDERS[name]
    reasons = [trial.user_attrs[attributes.REASON] for trial in trials]
    assert reasons[0] == "your config"
    assert all("predicted" in reason for reason in reasons[1:8])
    for trial, reason in zip(trials, reasons, strict=True):
        if "was not measured" in reason:
            assert reason.startswith(Structure.of(trial.user_attrs[attributes.CONFIG]).words)
