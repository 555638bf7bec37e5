"""A tuner that is killed in the middle of a real launch; what it leaves: ``tests/launch/test_leftovers.py``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.commands import Command, search, write_config
from tests.harness.workers import StoredStudy, wait_until

pytestmark = pytest.mark.torchrun


def test_kill_9_ends_the_launch_and_resume_spends_the_budget_exactly(tmp_path: Path) -> None:
    write_config(tmp_path)
    url = "sqlite:///study.db"
    tuner = Command(tmp_path, *search("killed", url, budget=2))
    try:
        events = tmp_path / "optuna-dsat-output" / "killed" / "trial-0001" / "events" / "rank0.jsonl"
        wait_until(events.exists, what="the rank of the second launch is alive")
        assert len(tuner.launched()) >= 2, "torchrun and its rank"
    finally:
        tuner.kill()
    wait_until(lambda: not tuner.launched(), what="its launch and what that started are gone", limit_s=10.0)
    Command(tmp_path, "resume", "killed", "--storage", url, "--quiet").finish()
    study = StoredStudy.read(f"sqlite:///{tmp_path}/study.db", "killed")
    study.check_whole(budget=2)
    assert len(study.lost) == 1
