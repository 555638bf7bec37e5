from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from benchmarks import ours, search_efficiency
from benchmarks.random_machines.typical import TYPICAL
from benchmarks.rig import BudgetSpentError, Launch, Rig, throughput
from optuna_dsat.outcome import Outcome
from optuna_dsat.store import Store

FAST = TYPICAL["1.3B, 8 x 80 GB"].machine


def launch(micro_batch: int, value: float, *, purpose: str = "trial", outcome: Outcome = Outcome.MEASURED) -> Launch:
    return Launch(
        purpose=purpose,
        ds_config={**FAST.user_config, "train_micro_batch_size_per_gpu": micro_batch},
        outcome=outcome,
        metrics={"throughput": value},
        profile={},
        ended_s=1.0,
    )


def test_a_peer_that_is_not_installed_is_left_out_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    search_efficiency.main(["--seeds", "1", "--methods", "dsat-asha", "--results", str(tmp_path / "results.jsonl")])
    assert "dsat-asha is left out: determined not installed" in capsys.readouterr().out


def test_trials_in_memory_lead_to_the_same_launches_as_in_sqlite(tmp_path: Path) -> None:
    in_memory, on_disk = (Rig(FAST, budget=10, noise=0.02, seed=3) for _ in range(2))
    with ours.quick_store(tmp_path) as quick, Store.open(f"sqlite:///{tmp_path / 'real.db'}") as real:
        for rig, store in ((in_memory, quick), (on_disk, real)):
            ours.search("asha", rig, budget=10, seed=3, store=store)
    assert [item.ds_config for item in in_memory.launches] == [item.ds_config for item in on_disk.launches]
    assert len(in_memory.launches) == 11


def test_noise_is_the_same_for_the_same_seed_and_differs_between_seeds() -> None:
    def measured(seed: int) -> float:
        return Rig(FAST, budget=1, noise=0.02, seed=seed).measure(FAST.user_config).metrics["throughput"]

    assert measured(1) == measured(1)
    assert measured(1) != measured(2)
    assert measured(1) == pytest.approx(throughput(FAST, FAST.user_config), rel=0.1)


def test_a_rig_refuses_launches_beyond_its_budget_but_not_profiles() -> None:
    rig = Rig(FAST, budget=1)
    rig.measure(FAST.user_config, purpose="profile")
    rig.measure(FAST.user_config)
    with pytest.raises(BudgetSpentError):
        rig.measure(FAST.user_config)
    assert [item.purpose for item in rig.launches] == ["profile", "trial"]
    assert rig.launches[0].profile["num_params"] == FAST.net.params


def test_held_is_what_a_search_hands_over_or_what_measured_best() -> None:
    launches = [
        launch(1, 99.0, purpose="profile"),
        launch(4, 50.0),
        launch(8, 0.0, outcome=Outcome.OUT_OF_MEMORY),
        launch(2, 60.0),
    ]
    four = launch(4, 0).ds_config
    worth = {size: throughput(FAST, launch(size, 0).ds_config) for size in (2, 4)}
    held = search_efficiency._held(FAST, launches, None)
    assert held == pytest.approx([0.0, worth[4], worth[4], worth[2]])
    held = search_efficiency._held(FAST, launches, [None, four, four, four])
    assert held == pytest.approx([0.0, worth[4], worth[4], worth[4]])
