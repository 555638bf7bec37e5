"""The end of a study: the finalists are confirmed, the winner is chosen, compared and written to train with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import optuna
from optuna.trial import FrozenTrial

from optuna_dsat.config import ds_config
from optuna_dsat.launch.protocol import LaunchReport
from optuna_dsat.study.confirmation import Confirmation
from optuna_dsat.study.context import StudyContext
from optuna_dsat.study.finalists import Finalist, choose_winner, standing_of
from optuna_dsat.study.loss_check import LossCheck, check_loss
from optuna_dsat.study.methods import Method
from optuna_dsat.study.profile import Profiled
from optuna_dsat.study.result import TuneResult, complete_config, learning_rate_advice, training_command, write_best
from optuna_dsat.study.space import objective
from optuna_dsat.study.standing import Standing, compared, speed_up_over
from optuna_dsat.study.tuner import EndReason
from optuna_dsat.study.user_config import user_config
from optuna_dsat.trials import attributes

__all__ = ["Conclusion", "Decision"]


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The winner of a study and the measurements that decided."""

    metric: str
    """The metric that is optimised."""
    maximize: bool
    """Whether a larger metric is better."""
    best: Standing
    finalist: Finalist | None
    """Confirmation of the winner; None if it was not confirmed."""
    finalists: Sequence[Finalist]
    """Everything that was measured again."""
    user: Standing | None
    """The user's own config; None if it was not measured."""

    @property
    def trial(self) -> FrozenTrial:
        """The winning trial."""
        return self.best.trial

    @property
    def user_value(self) -> float | None:
        """The user's metric as ``speed_up`` takes it."""
        return None if self.user is None else compared(self.user, self.best)[0]

    @property
    def speed_up(self) -> float | None:
        """How many times as good as the user's own config the winner is; None if unknown."""
        return None if self.user is None else speed_up_over(self.user, self.best, maximize=self.maximize)

    @property
    def speed_up_confirmed(self) -> bool:
        """Whether ``speed_up`` compares two confirmed metrics."""
        return self.user is not None and self.user.confirmed and self.best.confirmed

    @property
    def metrics(self) -> dict[str, float]:
        """All metrics of the winner, of its confirmation if there is one."""
        return dict(self.trial.user_attrs[attributes.METRICS] if self.finalist is None else self.finalist.metrics)

    def to_json(self, *, study: str, loss_check: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the content of ``best_ds_metrics.json``."""
        finalist = self.finalist
        return {
            "study": study,
            "trial": self.trial.number,
            "metric": self.metric,
            "value": self.best.value,
            "confidence_interval_95": None if finalist is None else [finalist.low, finalist.high],
            "user_config_value": self.user_value,
            "speed_up": self.speed_up,
            "metrics": self.metrics,
            "finalists": [asdict(one) for one in self.finalists],
            "loss_check": loss_check,
        }


class Conclusion:
    """Concludes one study after its search.

    Args:
        context: The running study.
        study: The Optuna study.
        profiled: Result of the profile launch.
        method: Ranks the trials.
        reason: Why the search ended.
        with_loss_check: Whether to compare the first losses under the winner with those under the user's config.
    """

    def __init__(
        self,
        context: StudyContext,
        *,
        study: optuna.Study,
        profiled: Profiled,
        method: Method,
        reason: EndReason,
        with_loss_check: bool,
    ) -> None:
        self._context = context
        self._spec = context.spec
        self._study = study
        self._profiled = profiled
        self._method = method
        self._reason = reason
        self._with_loss_check = with_loss_check
        self._metric = objective(context.spec, profiled)
        self.interrupted = reason is EndReason.INTERRUPTED
        """Whether Ctrl-C ended the search, the confirmation or the comparison of losses."""

    def run(self) -> TuneResult | None:
        """Confirm, choose and write the winner; None if nothing was measured."""
        trials = self._study.get_trials(deepcopy=False)
        candidates = self._method.ranked(trials, maximize=self._spec.maximize)
        if not candidates:
            return None
        decision = self._decide(trials, candidates, self._confirm(trials, candidates))
        complete = complete_config(decision.trial, slots=self._spec.slots_per_trial)
        trainer = self._profiled.trainer
        config = complete if trainer is None else trainer.trainable(complete)
        check = self._compare_losses(config, self._ranks(decision.trial))
        loss_check = None if check is None else asdict(check)
        return self._write(decision, complete=complete, config=config, loss_check=loss_check)

    def _ranks(self, trial: FrozenTrial) -> int:
        return attributes.data_parallel_size(trial, slots=self._spec.slots_per_trial)

    def _confirm(self, trials: Sequence[FrozenTrial], candidates: Sequence[FrozenTrial]) -> list[Finalist]:
        """Return the finalists; none after an interruption."""
        if self._reason is EndReason.INTERRUPTED:
            return []
        confirmation = Confirmation(
            self._context,
            study=self._study,
            metric=self._metric,
            flops_per_sample=self._profiled.profile.flops_per_sample,
        )
        finalists = confirmation.run(trials, candidates)
        if confirmation.interrupted:
            self.interrupted = True
            self._reason = EndReason.INTERRUPTED
        return finalists

    def _decide(
        self, trials: Sequence[FrozenTrial], candidates: Sequence[FrozenTrial], finalists: Sequence[Finalist]
    ) -> Decision:
        means = None if self._method.posterior_means is None else self._method.posterior_means(trials)
        winner, finalist = choose_winner(candidates, finalists, maximize=self._spec.maximize, posterior_means=means)
        baseline = attributes.user_config_trial(trials)
        by_number = {one.number: one for one in finalists}
        return Decision(
            metric=self._metric,
            maximize=self._spec.maximize,
            best=standing_of(winner, finalist),
            finalist=finalist,
            finalists=finalists,
            user=None if baseline is None else standing_of(baseline, by_number.get(baseline.number)),
        )

    def _compare_losses(self, config: Mapping[str, Any], ranks: int) -> LossCheck | None:
        """Return how the first losses compare; None if that was not asked for or an interruption ends it."""
        if not self._with_loss_check or self._reason is EndReason.INTERRUPTED:
            return None
        self._context.say("Comparing the first losses under the best config with those under yours ...")
        try:
            return check_loss(
                self._spec,
                config,
                data_parallel_size=ranks,
                launcher=self._context.launcher,
                on_report=lambda report, record: self._context.record_launch(report, record, purpose="confirm"),
                wait=self._context.wait,
            )
        except KeyboardInterrupt:
            self.interrupted = True
            return None

    def _write(
        self,
        decision: Decision,
        *,
        complete: Mapping[str, Any],
        config: Mapping[str, Any],
        loss_check: Mapping[str, Any] | None,
    ) -> TuneResult:
        """Write the winner's files and attributes; return the result.

        Args:
            decision: The winner.
            complete: Its DeepSpeed config with all batch sizes.
            config: The same as the script's trainer takes it.
            loss_check: Comparison of first losses; None if there is none.
        """
        spec, trial = self._spec, decision.trial
        launches = self._context.store.launches(self._context.study_uuid)
        metrics = decision.to_json(study=spec.name, loss_check=loss_check)
        config_path, metrics_path = write_best(spec.study_dir, config, metrics)
        command, names_config = training_command(
            spec,
            complete,
            config_path,
            deepspeed_launcher=self._profiled.deepspeed_launcher,
            host_threads=trial.user_attrs.get(attributes.HOST_THREADS),
            config_option=self._profiled.config_option,
        )
        batch, user_batch = complete[ds_config.TRAIN_BATCH], self._user_batch(ranks=self._ranks(trial))
        self._study.set_user_attr(attributes.WINNER, trial.number)
        self._study.set_user_attr(attributes.END_REASON, self._reason.value)
        return TuneResult(
            study=spec.name,
            reason=self._reason.value,
            metric=decision.metric,
            trial=trial.number,
            value=decision.best.value,
            low=decision.best.low,
            high=decision.best.high,
            user_value=decision.user_value,
            speed_up=decision.speed_up,
            speed_up_confirmed=decision.speed_up_confirmed,
            config=config,
            metrics=decision.metrics,
            config_path=str(config_path),
            metrics_path=str(metrics_path),
            command=command,
            train_batch_size=batch,
            user_train_batch_size=user_batch,
            learning_rate_advice=learning_rate_advice(config, batch=batch, user_batch=user_batch),
            loss_check=loss_check,
            command_names_config=names_config,
            advice=self._profiled.advice(complete),
            launches=dict(Counter(row.report.outcome.value for row in launches if row.purpose == "trial")),
            slot_minutes=sum(_slot_seconds(row.report) for row in launches) / 60,
        )

    def _user_batch(self, *, ranks: int) -> int:
        """Return the global batch of the user's own config, in samples."""
        own, _ = user_config(self._spec, data_parallel_size=ranks)
        return ds_config.batch_triangle(own, world_size=ranks).train_batch_size


def _slot_seconds(report: LaunchReport) -> float:
    return report.held_s * len(report.devices)
