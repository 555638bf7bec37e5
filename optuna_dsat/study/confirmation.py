"""The end of a search: which finalists are measured again, and what takes the place of one that fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import optuna
from optuna.trial import FrozenTrial

from optuna_dsat.launch.measurement import GlobalStep, LaunchRecord
from optuna_dsat.launch.protocol import Launcher, LaunchReport, LaunchRequest
from optuna_dsat.launch.waiting import SlotWait
from optuna_dsat.study.finalists import Finalist, confirm
from optuna_dsat.study.progress import FinalistMeasured, FinalistStarted, Observer, TrialStepped
from optuna_dsat.study.spec import StudySpec
from optuna_dsat.trials import attributes
from optuna_dsat.words import config_in_words

__all__ = ["Confirmation"]


class Confirmation:
    """Measures the finalists of one study; they are kept on the study one by one.

    Args:
        spec: The study's spec.
        study: The Optuna study.
        launcher: Where launches run.
        observer: Hears the news.
        metric: The metric that is optimised.
        flops_per_sample: FLOPs of forward and backward, per sample.
        keep: Stores a launch: its report, what was recorded, its trial.
        wait: Says who holds the slots, and how long that is waited for.
    """

    def __init__(
        self,
        spec: StudySpec,
        *,
        study: optuna.Study,
        launcher: Launcher,
        observer: Observer,
        metric: str,
        flops_per_sample: float,
        keep: Callable[[LaunchReport, LaunchRecord, FrozenTrial], None],
        wait: SlotWait,
    ) -> None:
        self._spec = spec
        self._study = study
        self._launcher = launcher
        self._observer = observer
        self._metric = metric
        self._flops_per_sample = flops_per_sample
        self._keep = keep
        self._wait = wait
        self.interrupted = False
        """Whether Ctrl-C ended it."""

    def run(self, trials: Sequence[FrozenTrial], candidates: Sequence[FrozenTrial]) -> list[Finalist]:
        """Measure the finalists again; where one fails with more steps, the next best takes its place.

        At most as many take a place as there were finalists.

        Args:
            trials: All trials.
            candidates: Those that were measured, best first.
        """
        chosen = self._to_confirm(trials, candidates)
        finalists = self._confirm(chosen)
        missing = sum(finalist.value is None for finalist in finalists)
        for trial in [trial for trial in candidates if trial not in chosen][: self._spec.confirm]:
            if missing == 0 or self.interrupted:
                break
            substitutes = self._confirm([trial])
            missing -= sum(finalist.value is not None for finalist in substitutes)
            finalists += substitutes
        return finalists

    def _to_confirm(self, trials: Sequence[FrozenTrial], candidates: Sequence[FrozenTrial]) -> list[FrozenTrial]:
        """Return the best few and the user's own config: both sides of the speed-up are measured alike.

        What measured best is among them, also where the model behind the search thinks it was luck: it may be the model
        that errs.
        """
        chosen = list(candidates[: self._spec.confirm])
        luckiest = attributes.best_trials(candidates, maximize=self._spec.direction == "maximize")[0]
        if len(chosen) > 1 and luckiest not in chosen:
            chosen[-1] = luckiest
        baseline = attributes.user_config_trial(trials)
        if chosen and baseline is not None and baseline not in chosen:
            chosen.append(baseline)
        return chosen

    def _confirm(self, candidates: Sequence[FrozenTrial]) -> list[Finalist]:
        """Measure the finalists again; those that an earlier run of this study confirmed are not launched twice.

        An interruption ends it with the finalists there are.
        """
        known = {f["number"]: Finalist(**f) for f in self._study.user_attrs.get(attributes.FINALISTS, [])}
        todo = {trial.number: trial for trial in candidates if trial.number not in known}
        try:
            for finalist in confirm(
                self._spec,
                list(todo.values()),
                launcher=self._launcher,
                metric=self._metric,
                flops_per_sample=self._flops_per_sample,
                on_report=self._keep,
                on_start=self._finalist_started,
                on_step=self._finalist_stepped,
                wait=self._wait,
            ):
                known[finalist.number] = finalist
                self._study.set_user_attr(attributes.FINALISTS, [f.to_json() for f in known.values()])
                self._announce(finalist, todo[finalist.number])
        except KeyboardInterrupt:
            self.interrupted = True
        return [known[trial.number] for trial in candidates if trial.number in known]

    def _finalist_started(self, trial: FrozenTrial, request: LaunchRequest) -> None:
        words = config_in_words(trial.user_attrs[attributes.CONFIG])
        self._observer(FinalistStarted(number=trial.number, words=words, end_profile_step=request.end_profile_step))

    def _finalist_stepped(self, trial: FrozenTrial, step: GlobalStep) -> None:
        self._observer(
            TrialStepped(
                number=trial.number,
                step=step.step,
                samples_per_s=step.samples / step.latency_s,
                peak_bytes=step.peak_allocated_bytes,
            )
        )

    def _announce(self, finalist: Finalist, trial: FrozenTrial) -> None:
        self._observer(
            FinalistMeasured(
                number=finalist.number,
                words=config_in_words(trial.user_attrs[attributes.CONFIG]),
                value=finalist.value,
                low=finalist.low,
                high=finalist.high,
                message=finalist.message,
            )
        )
