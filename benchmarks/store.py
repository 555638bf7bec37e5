"""Own time of one ask-to-tell round, without a launch, in an SQLite study with many finished trials.

    python benchmarks/store.py [--trials 10000] [--rounds 30] [--method random]

Prints the median and the largest time of each part in milliseconds; the parts are those of the tuner's loop. Beside the
whole stands what of it Optuna's storage took (SQL included) and in how many calls; the rest is our own time, Optuna's
study and trial objects included.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage
from optuna.trial import TrialState

from optuna_dsat.launch.protocol import LaunchReport
from optuna_dsat.outcome import Outcome
from optuna_dsat.pruners import AshaPruner, DeepSpeedPruner
from optuna_dsat.runtime.events import StepMeasured
from optuna_dsat.samplers import BinarySearchSampler, LineageRandomSampler
from optuna_dsat.store import Store
from optuna_dsat.trials import attributes
from optuna_dsat.trials.lineage import MICRO_BATCH

KNOBS: dict[str, BaseDistribution] = {
    "zero_stage": CategoricalDistribution([1, 2, 3]),
    "offload_optimizer": CategoricalDistribution(["none", "cpu"]),
    "reduce_bucket_size": CategoricalDistribution([5_000_000, 50_000_000, 500_000_000]),
    "allgather_bucket_size": CategoricalDistribution([5_000_000, 50_000_000, 500_000_000]),
    "overlap_comm": CategoricalDistribution([False, True]),
    "contiguous_gradients": CategoricalDistribution([False, True]),
    "sub_group_size": CategoricalDistribution([10**6, 10**7, 10**8, 10**9]),
    MICRO_BATCH: IntDistribution(1, 1024, log=True),
}
STEPS = 3


def fill(study: optuna.Study, count: int) -> None:
    draw = random.Random(0)
    for _ in range(count):
        params = {
            name: draw.choice(d.choices) if isinstance(d, CategoricalDistribution) else draw.randint(1, 64)
            for name, d in KNOBS.items()
        }
        value = draw.random()
        study.add_trial(
            optuna.create_trial(
                state=TrialState.COMPLETE,
                value=value,
                params=params,
                distributions=KNOBS,
                user_attrs={attributes.OUTCOME: Outcome.MEASURED.value, attributes.LAUNCH_ID: "trial"},
                intermediate_values=dict.fromkeys(range(3, 3 + STEPS), value),
            )
        )


def step(rank: int, number: int) -> StepMeasured:
    return StepMeasured(
        rank=rank,
        time=time.time(),
        step=number,
        latency_s=0.1,
        forward_s=0.03,
        backward_s=0.05,
        step_s=0.02,
        samples=4,
        observed_micro_batch=4,
        loss=1.0,
        peak_allocated_bytes=2**33,
        peak_reserved_bytes=2**33,
        rss_bytes=2**33,
    )


def report(launch_id: str) -> LaunchReport:
    return LaunchReport(
        launch_id=launch_id,
        outcome=Outcome.MEASURED,
        message="measured",
        exit_code=0,
        error_excerpt="",
        missing_bytes=None,
        log_path="rank-0.err",
        command=("torchrun", "train.py"),
        host="localhost",
        devices=(0, 1),
        pids=(1, 2),
        started_at=time.time(),
        startup_s=1.0,
        measured_s=1.0,
        exit_s=0.1,
    )


class Timed:
    """Passes calls on to Optuna's storage and adds up how many they are and how long they take."""

    def __init__(self, storage: BaseStorage) -> None:
        self._storage = storage
        self.calls = 0
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._storage, name)
        if not callable(found):
            return found

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return found(*args, **kwargs)
            finally:
                self.calls += 1
                self.seconds += time.perf_counter() - start

        return timed


class Stopwatch:
    """Sums the time of each part in each round.

    Args:
        optuna_storage: What is shown apart.
    """

    def __init__(self, optuna_storage: Timed) -> None:
        self.rounds: list[dict[str, float]] = []
        self._optuna = optuna_storage
        self._before: list[tuple[int, float]] = []

    def next_round(self) -> None:
        """Begin a round."""
        self.rounds.append(defaultdict(float))
        self._before.append((self._optuna.calls, self._optuna.seconds))

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Add what happens inside to a part of the round."""
        start, inside = time.perf_counter(), self._optuna.seconds
        yield
        self.rounds[-1][part] += time.perf_counter() - start
        self.rounds[-1][f"{part}, Optuna"] += self._optuna.seconds - inside

    def show(self) -> None:
        """Print the parts and the whole."""
        names = [name for name in self.rounds[0] if not name.endswith(", Optuna")]
        print(f"{'':<20} {'median':>9} {'largest':>9} {'of which Optuna':>16} {'ours':>9}   (ms)")
        for name in names:
            self._line(name, [r[name] for r in self.rounds], [r[f"{name}, Optuna"] for r in self.rounds])
        whole = [sum(r[name] for name in names) for r in self.rounds]
        self._line("whole round", whole, [sum(r.values()) - w for r, w in zip(self.rounds, whole, strict=True)])
        calls = (self._optuna.calls - self._before[0][0]) / len(self.rounds)
        print(f"{calls:.0f} calls of Optuna's storage a round")

    def total_ms(self) -> float:
        """Return the time of all rounds."""
        return 1000 * sum(value for r in self.rounds for name, value in r.items() if not name.endswith(", Optuna"))

    def _line(self, name: str, times: Sequence[float], inside: Sequence[float]) -> None:
        ours = [t - i for t, i in zip(times, inside, strict=True)]
        median, largest, theirs, own = (
            value * 1000
            for value in (statistics.median(times), max(times), statistics.median(inside), statistics.median(ours))
        )
        print(f"{name:<20} {median:9.2f} {largest:9.2f} {theirs:16.2f} {own:9.2f}")


def one_round(store: Store, study: optuna.Study, uuid: str, watch: Stopwatch) -> None:
    watch.next_round()
    sampler = study.sampler
    with watch("reclaim"):
        store.reclaim_stale(study)
    with watch("budget"):
        attributes.launches_used(study.get_trials(deepcopy=False))
    with watch("exhausted"):
        if isinstance(sampler, BinarySearchSampler | LineageRandomSampler):
            sampler.exhausted(study, 10**9)
    with watch("ask"):
        trial = study.ask()
    with watch("heartbeat"):
        store.heartbeat.add(trial)
    with watch("suggest"):
        for name, knob in KNOBS.items():
            trial._suggest(name, knob)
    with watch("claim"):
        store.claim(uuid, f"round-{trial.number}", trial.number)
    with watch("prune"):
        study.pruner.prune(study, store.storage.get_trial(trial._trial_id))
    with watch("attributes"):
        for name in (attributes.CONFIG, attributes.OVERLAY, attributes.METRICS, attributes.OUTCOME):
            trial.set_user_attr(name, Outcome.MEASURED.value)
    with watch("report and prune"):
        for number in range(3, 3 + STEPS):
            trial.report(0.5, number)
            study.pruner.prune(study, store.storage.get_trial(trial._trial_id))
    with watch("launch and steps"):
        launch_id = f"trial-{trial.number:04d}"
        store.record_launch(uuid, report(launch_id), trial_number=trial.number, purpose="trial", attempt=0)
        steps = [step(rank, number) for number in range(1, 6) for rank in range(2)]
        store.record_steps(uuid, launch_id, steps)
    with watch("tell"):
        study.tell(trial, 0.5)
    with watch("heartbeat"):
        store.heartbeat.remove(trial)


METHODS: Mapping[str, Callable[[], tuple[BaseSampler, BasePruner]]] = {
    "none": lambda: (optuna.samplers.RandomSampler(seed=0), optuna.pruners.NopPruner()),
    "random": lambda: (LineageRandomSampler(seed=0), DeepSpeedPruner()),
    "binary": lambda: (BinarySearchSampler(seed=0), optuna.pruners.NopPruner()),
    "asha": lambda: (BinarySearchSampler(seed=0), AshaPruner()),
}
"""``none`` shows the store alone."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=10_000, help="finished trials in the study")
    parser.add_argument("--rounds", type=int, default=30, help="rounds to time")
    parser.add_argument("--method", choices=list(METHODS), action="append", help="one or more; all by default")
    parser.add_argument("--classes", choices=["few", "many"], default="few", help="lineages: 864 or 41,472")
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if options.classes == "many":
        sizes = [1_000_000 * 2**n for n in range(12)]
        KNOBS.update((name, CategoricalDistribution(sizes)) for name in KNOBS if name.endswith("_size"))
    with tempfile.TemporaryDirectory() as folder, Store.open(f"sqlite:///{folder}/study.db") as store:
        record = store.create_study("benchmark", {})
        fill(optuna.load_study(study_name="benchmark", storage=store.storage), options.trials)
        timed = Timed(vars(store.storage)["_backend"])
        vars(store.storage)["_backend"] = timed
        for method in options.method or METHODS:
            sampler, pruner = METHODS[method]()
            study = optuna.load_study(study_name="benchmark", storage=store.storage, sampler=sampler, pruner=pruner)
            first = Stopwatch(timed)
            one_round(store, study, record.uuid, first)
            watch = Stopwatch(timed)
            for _ in range(options.rounds):
                one_round(store, study, record.uuid, watch)
            print(f"\nmethod {method}, {options.trials} finished trials; first round {first.total_ms():.0f} ms")
            watch.show()


if __name__ == "__main__":
    main()
