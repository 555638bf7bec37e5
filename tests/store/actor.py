"""Worker processes for the tests: ``python -m tests.store.actor ROLE URL [NUMBER]``.

Every role prints ``ready`` once its imports are done, waits for a line on stdin, and prints JSON when it is done.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable

import optuna

from optuna_dsat.store import Store
from optuna_dsat.trials import attributes

STUDY = "shared"
SPEC = {"zero_stages": [1, 2, 3]}


def wait() -> None:
    print("ready", flush=True)
    sys.stdin.readline()


def open_study(store: Store) -> tuple[str, optuna.Study]:
    record = store.create_study(STUDY, SPEC)
    return record.uuid, optuna.load_study(study_name=STUDY, storage=store.storage)


def claims(url: str, count: int, keys: int) -> object:
    """Claim configurations in competition with other workers, and complete a trial for each."""
    wait()
    won: list[str] = []
    with Store.open(url) as store:
        study_uuid, study = open_study(store)
        wanted = [f"config-{number}" for number in range(keys)]
        random.Random(time.time_ns()).shuffle(wanted)
        for key in wanted:
            if len(won) == count:
                break
            if key in {trial.user_attrs.get("key") for trial in study.get_trials(deepcopy=False)}:
                continue
            trial = study.ask()
            store.heartbeat.add(study_uuid, trial.number)
            if store.claim(study_uuid, key, trial.number):
                trial.set_user_attr("key", key)
                trial.report(1.0, 1)
                study.tell(trial, 1.0)
                won.append(key)
            else:
                study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            store.heartbeat.remove(study_uuid, trial.number)
    return won


def holds(url: str) -> object:
    """Run a trial until this process is killed."""
    with Store.open(url) as store:
        study_uuid, study = open_study(store)
        trial = study.ask()
        store.heartbeat.add(study_uuid, trial.number)
        micro_batch = trial.suggest_int("train_micro_batch_size_per_gpu", 1, 64)
        store.claim(study_uuid, f"mbs-{micro_batch}", trial.number)
        trial.set_user_attr(attributes.LAUNCH_ID, "trial-0000")
        wait()
        time.sleep(600)
    return None


def reclaims(url: str) -> object:
    """Reclaim lost trials for a while."""
    with Store.open(url, heartbeat_interval_s=0.2, grace_s=1.0) as store:
        _, study = open_study(store)
        wait()
        result: list[int] = []
        end = time.monotonic() + 0.75
        while time.monotonic() < end:
            result.extend(store.reclaim_stale(study))
    return result


def main() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    role, url, *numbers = sys.argv[1:]
    roles: dict[str, Callable[..., object]] = {
        "claims": claims,
        "holds": holds,
        "reclaims": reclaims,
    }
    print(json.dumps(roles[role](url, *map(int, numbers))), flush=True)


if __name__ == "__main__":
    main()
