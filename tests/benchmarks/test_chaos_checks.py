"""The harness of kills takes a trial whose launches were all killed for what it is: given up by design."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from benchmarks.chaos.checks import Ended, given_up, violations
from benchmarks.chaos.studies import roles_of
from optuna_dsat.outcome import Outcome
from optuna_dsat.store import Store
from optuna_dsat.trials import attributes
from tests.harness.waits import wait_until


@pytest.mark.parametrize(("attempts", "count"), [(3, 0), (4, 1)], ids=["too-early", "by-design"])
def test_a_trial_that_is_given_up_is_counted(tmp_path: Path, attempts: int, count: int) -> None:
    url = f"sqlite:///{tmp_path}/study.db"
    killed = {
        attributes.OUTCOME: Outcome.KILLED,
        attributes.ATTEMPTS: attempts,
        attributes.CONFIG_KEY: "a",
    }
    with Store.open(url) as store:
        study = optuna.create_study(study_name="chaos", storage=store.storage, direction="maximize")
        study.add_trial(optuna.trial.create_trial(state=TrialState.FAIL, user_attrs=killed))
    (tmp_path / "chaos").mkdir()
    (tmp_path / "chaos" / "best_ds_config.json").touch()
    ended = Ended(code=0, seen={}, processes=(), shared_memory=(), temporary=(), stderr="")
    assert given_up(url, "chaos") == count
    result = violations(ended, url=url, name="chaos", budget=1, output=tmp_path)
    assert len(result) == 1 - count
    assert all("killed by a kill" in item for item in result)


def test_processes_below_a_tuner_are_known_by_their_modules() -> None:
    """Their modules were moved, and for three days tuners alone were killed."""
    waits = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    names = {"warm parent": "optuna_dsat.runtime.agent.fork_server", "agent": "optuna_dsat.runtime.agent.torchrun"}
    assert all(map(find_spec, names.values()))
    for role, name in names.items():
        with subprocess.Popen([*waits, name], stdin=subprocess.PIPE) as child:
            # a process that has just started has no command line yet; warm parents of other tests may be there, too
            wait_until(lambda: child.pid in roles_of([os.getpid()]).get(role, ()), what=role)  # noqa: B023
