"""Searches at several numbers of GPUs, run one after another, and a comparison of their results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from optuna_dsat.errors import NothingRunnableError
from optuna_dsat.study.result import StudyResult
from optuna_dsat.tuning.prepare import Prepared
from optuna_dsat.tuning.run import StudyRun

__all__ = ["AtGpus", "best_of", "search_each"]


@dataclass(frozen=True, kw_only=True)
class AtGpus:
    """Outcome of the search at one number of GPUs."""

    gpus: int
    """GPUs, or CPU ranks, of a launch."""
    study: str
    run: StudyRun | None
    """None if no configuration could run on this number of GPUs."""

    @property
    def result(self) -> StudyResult | None:
        """Result of the search; None if nothing was measured."""
        return None if self.run is None else self.run.result

    @property
    def samples_per_s(self) -> float | None:
        """Throughput of the winner over all GPUs; None if nothing was measured."""
        return None if self.result is None else self.result.metrics.get("throughput")

    @property
    def samples_per_s_per_gpu(self) -> float | None:
        """Throughput per GPU; None if nothing was measured."""
        return None if self.samples_per_s is None else self.samples_per_s / self.gpus


def search_each(
    studies: Sequence[Prepared], search: Callable[[Prepared], StudyRun], *, on_notice: Callable[[str], None]
) -> Iterator[AtGpus]:
    """Run searches one after another and yield each outcome; a search without a runnable config does not stop the rest.

    Raises:
        DsatError: As ``search``, except for ``NothingRunnableError``.
    """
    for prepared in studies:
        spec = prepared.request.spec
        gpus = spec.slots_per_trial
        try:
            ended: StudyRun | None = search(prepared)
        except NothingRunnableError as error:
            what = "GPU" if spec.device == "cuda" else "CPU rank"
            on_notice(f"{gpus} {what}{'s' * (gpus > 1)}: {error}")
            ended = None
        yield AtGpus(gpus=gpus, study=spec.name, run=ended)
        if ended is not None and ended.interrupted:
            return


def best_of(found: Sequence[AtGpus]) -> tuple[StudyRun, StudyResult]:
    """Return the search with the highest total samples per second, and its result including the other results.

    Ties go to the fewest GPUs.

    Raises:
        NothingRunnableError: If no search measured anything.
    """
    results = {row.gpus: row.result for row in found if row.result is not None}
    if not results:
        raise NothingRunnableError("No configuration could be measured at any of these numbers of ranks.")
    best = max(found, key=lambda row: (row.samples_per_s or 0.0, -row.gpus))
    assert best.run is not None
    return best.run, replace(results[best.gpus], by_gpus=results)
