"""Confirmation: which finalists are measured again, and what replaces one that fails."""

from __future__ import annotations

from collections.abc import Sequence

import optuna
from optuna.trial import FrozenTrial

from optuna_dsat.launch.measurement import GlobalStep, LaunchRecord
from optuna_dsat.launch.protocol import LaunchReport, LaunchRequest
from optuna_dsat.study.context import StudyContext
from optuna_dsat.study.finalists import Finalist, confirm
from optuna_dsat.study.progress import FinalistMeasured, FinalistStarted, TrialStepped
from optuna_dsat.trials import attributes
from optuna_dsat.words import config_in_words

__all__ = ["Confirmation"]


class Confirmation:
    """Measures the finalists of one study again and stores each with the study at once.

    Args:
        context: The running study.
        study: The Optuna study.
        metric: The metric that is optimised.
        flops_per_sample: FLOPs of forward and backward, per sample.
    """

    def __init__(self, context: StudyContext, *, study: optuna.Study, metric: str, flops_per_sample: float) -> None:
        self._context = context
        self._spec = context.spec
        self._study = study
        self._observer = context.observer
        self._metric = metric
        self._flops_per_sample = flops_per_sample
        self.interrupted = False
        """Whether Ctrl-C ended it."""

    def run(self, trials: Sequence[FrozenTrial], candidates: Sequence[FrozenTrial]) -> list[Finalist]:
        """Measure the finalists again; one that fails with more steps is replaced by the next best trial.

        At most ``--confirm`` trials are tried as replacements.

        Args:
            trials: All trials.
            candidates: The measured trials, best first.
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
        """Return the best few trials and that of the user's own config: both sides of the speed-up are measured alike.

        The best measurement is among them even if its posterior mean is worse: the model may be wrong.
        """
        chosen = list(candidates[: self._spec.confirm])
        best_measured = attributes.best_trials(candidates, maximize=self._spec.maximize)[0]
        if len(chosen) > 1 and best_measured not in chosen:
            chosen[-1] = best_measured
        baseline = attributes.user_config_trial(trials)
        if chosen and baseline is not None and baseline not in chosen:
            chosen.append(baseline)
        return chosen

    def _confirm(self, candidates: Sequence[FrozenTrial]) -> list[Finalist]:
        """Measure trials again, except those confirmed by an earlier run of this study.

        An interruption ends it with the finalists measured so far.
        """
        known = {f["number"]: Finalist(**f) for f in self._study.user_attrs.get(attributes.FINALISTS, [])}
        todo = {trial.number: trial for trial in candidates if trial.number not in known}
        try:
            for finalist in confirm(
                self._spec,
                list(todo.values()),
                launcher=self._context.launcher,
                metric=self._metric,
                flops_per_sample=self._flops_per_sample,
                on_report=self._record,
                on_start=self._finalist_started,
                on_step=self._finalist_stepped,
                wait=self._context.wait,
            ):
                known[finalist.number] = finalist
                self._study.set_user_attr(attributes.FINALISTS, [f.to_json() for f in known.values()])
                self._announce(finalist, todo[finalist.number])
        except KeyboardInterrupt:
            self.interrupted = True
        return [known[trial.number] for trial in candidates if trial.number in known]

    def _record(self, report: LaunchReport, record: LaunchRecord, trial: FrozenTrial) -> None:
        self._context.record_launch(report, record, purpose="confirm", trial_number=trial.number)

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
