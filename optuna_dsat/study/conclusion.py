"""Conclude a study: confirm the finalists, choose the winner, compare its losses and write its config."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

import optuna
from optuna.trial import FrozenTrial

from optuna_dsat.config import ds_config
from optuna_dsat.launch.isolation import describe_isolation, weakest_isolation
from optuna_dsat.launch.protocol import LaunchReport
from optuna_dsat.store import Turn, TurnLostError
from optuna_dsat.study.command import command_to_train
from optuna_dsat.study.config_changes import complete_config, config_changes, ready_config, trainable_config
from optuna_dsat.study.confirm.confirmation import Confirmation
from optuna_dsat.study.confirm.loss_check import LossCheck, check_loss, nothing_to_compare
from optuna_dsat.study.confirm.rounds import Rounds
from optuna_dsat.study.confirm.standing import finalists_of
from optuna_dsat.study.confirm.verdict import Verdict, verdict_of
from optuna_dsat.study.end_reason import EndReason, describe_structure_failures
from optuna_dsat.study.folder import BEING_WRITTEN, digests, set_others_aside
from optuna_dsat.study.profile.profiled import Profiled
from optuna_dsat.study.profile.script import own_train_batch_size, user_config
from optuna_dsat.study.progress import StudyContext
from optuna_dsat.study.result import (
    BEST_CONFIG,
    BEST_METRICS,
    StudyResult,
    best_settings,
    fields_of,
    learning_rate_advice,
    measurement_in_words,
    metrics_file,
    write_best,
    write_settings,
)
from optuna_dsat.study.search.methods import Method
from optuna_dsat.study.space import dataset_size, epoch_samples, objective, space_of
from optuna_dsat.trials import attributes

__all__ = ["Conclusion"]

_WAIT_S = 1.0
"""Polling interval while another worker concludes the study, in seconds."""


class Conclusion:
    """Concludes a study after its search.

    Args:
        context: The running study.
        study: The Optuna study.
        profiled: Result of the profile launch.
        method: Ranks the trials.
        reason: Why the search ended.
        with_loss_check: Whether to compare the first losses of the winner and the user's config.
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
        self._held: Turn | None = None
        """This worker's turn; None without a turn."""

    def run(self) -> StudyResult | None:
        """Confirm, choose and write the winner; None if nothing was measured."""
        while True:
            with ExitStack() as stack:
                if self._reason is not EndReason.INTERRUPTED and (self._spec.confirm or self._with_loss_check):
                    try:
                        self._held = stack.enter_context(self._turn())
                    except KeyboardInterrupt:
                        self.interrupted, self._reason = True, EndReason.INTERRUPTED
                try:
                    return self._conclude()
                except TurnLostError:
                    self._context.say("Another worker took the confirmation over while this one stood still.")
                finally:
                    self._held = None

    def _storing(self, purpose: str) -> AbstractContextManager[None]:
        """Hold this worker's turn while storing; raise ``TurnLostError`` if another worker has taken it."""
        return nullcontext() if self._held is None else self._held.held(purpose)

    @contextmanager
    def _turn(self) -> Iterator[Turn]:
        """Wait until no other worker concludes the study: rounds are sequential and share launch folders."""
        waiting = False
        while True:
            with self._context.store.conclusion_turn(self._context.study_uuid) as turn:
                if turn is not None:
                    yield turn
                    return
            if not waiting:
                waiting = True
                self._context.say("Another worker confirms the finalists; waiting for it.")
            self._context.launcher.poll(0.0)  # releases the devices of launches that have ended meanwhile
            time.sleep(_WAIT_S)

    def _conclude(self) -> StudyResult | None:
        trials = self._study.get_trials(deepcopy=False)
        candidates = self._method.ranked(trials, maximize=self._spec.maximize)
        if not candidates:
            return None
        rounds = self._confirm(trials, candidates)
        verdict = verdict_of(
            trials, rounds, maximize=self._spec.maximize, tie=self._spec.tie, slots=self._spec.slots_per_trial
        )
        if verdict is None:
            return None
        trial = next(one for one in candidates if one.number == verdict.handed_over)
        config = self._complete(trial)
        is_own = verdict.handed_over == verdict.baseline
        check = self._compare_losses(self._ready(config), self._ranks(trial), is_own=is_own)
        return self._write(verdict, rounds, trial, loss_check=None if check is None else asdict(check))

    def _ready(self, complete: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a config with all batch sizes as the script trains with it."""
        return ready_config(complete, own=self._spec.ds_config, trainer=self._profiled.trainer)

    def _complete(self, trial: FrozenTrial) -> dict[str, Any]:
        space = space_of(self._spec, self._profiled)
        return complete_config(trial, slots=self._spec.slots_per_trial, space=space)

    def _ranks(self, trial: FrozenTrial) -> int:
        return attributes.data_parallel_size(trial, slots=self._spec.slots_per_trial)

    def _confirm(self, trials: Sequence[FrozenTrial], candidates: Sequence[FrozenTrial]) -> Rounds:
        """Return the rounds; after an interruption, the stored rounds of earlier runs."""
        if self._reason is EndReason.INTERRUPTED:
            return Rounds.of(self._study.user_attrs)
        confirmation = Confirmation(
            self._context,
            study=self._study,
            metric=self._metric,
            profile=self._profiled.profile,
            method=self._method,
            storing=self._storing,
        )
        rounds = confirmation.run(trials, candidates)
        if confirmation.interrupted:
            self.interrupted = True
            self._reason = EndReason.INTERRUPTED
        return rounds

    def _compare_losses(self, config: Mapping[str, Any], ranks: int, *, is_own: bool) -> LossCheck | None:
        """Return the comparison of first losses; None if it was not requested or was interrupted."""
        if not self._with_loss_check or self._reason is EndReason.INTERRUPTED:
            return None
        if is_own:
            return nothing_to_compare(self._spec)
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
        self, verdict: Verdict, rounds: Rounds, trial: FrozenTrial, *, loss_check: Mapping[str, Any] | None
    ) -> StudyResult:
        """Write the files and attributes of the selected config; return the result.

        Args:
            verdict: Verdict on the study.
            rounds: Rounds of the confirmation.
            trial: The selected trial.
            loss_check: Comparison of first losses, or None.
        """
        spec, launches = self._spec, self._context.store.launches(self._context.study_uuid)
        complete = self._complete(trial)
        config = self._ready(complete)
        finalists = finalists_of(rounds)
        again = finalists.get(trial.number) if verdict.is_by_rounds else None
        metrics = dict(trial.user_attrs[attributes.METRICS] if again is None else again.metrics)
        file = metrics_file(
            spec.name, verdict, metric=self._metric, metrics=metrics, finalists=finalists, loss_check=loss_check
        )
        settings = best_settings(spec, config, spec.study_dir)
        files = [spec.study_dir / name for name in (BEST_CONFIG, BEST_METRICS)]
        files += [] if settings is None else [settings.path]
        with self._storing("store the result"):
            attrs = self._study.user_attrs
            if attributes.WRITTEN in attrs or attributes.WINNER not in attrs:  # else written by an older version
                for aside in set_others_aside(files, attrs.get(attributes.WRITTEN, {})):
                    self._context.say(f"A file that this study did not write is kept as {aside}.")
            self._study.set_user_attr(attributes.WRITTEN, {path.name: BEING_WRITTEN for path in files})
            config_path, metrics_path = write_best(spec.study_dir, config, file)
            if settings is not None:
                write_settings(settings, complete)
            self._study.set_user_attr(attributes.WRITTEN, digests(files))
            self._study.set_user_attr(attributes.WINNER, trial.number)
            self._study.set_user_attr(attributes.END_REASON, self._reason.value)
        command = command_to_train(
            spec,
            complete,
            profiled=self._profiled,
            host_threads=trial.user_attrs.get(attributes.HOST_THREADS),
            storage=self._context.store.absolute_url,
        )
        ranks = self._ranks(trial)
        batch, own = complete[ds_config.TRAIN_BATCH], own_train_batch_size(spec, ranks=ranks)
        before = trainable_config(user_config(spec, data_parallel_size=ranks)[0], world_size=ranks)
        samples = epoch_samples(spec, self._profiled)
        return StudyResult(
            study=spec.name,
            reason=self._reason.value,
            metric=self._metric,
            **fields_of(verdict),
            config=config,
            changes=config_changes(before, complete),
            metrics=metrics,
            config_path=str(config_path),
            metrics_path=str(metrics_path),
            command=command,
            train_batch_size=batch,
            user_train_batch_size=own,
            dataset_size=dataset_size(spec, self._profiled),
            learning_rate_advice=learning_rate_advice(
                config, batch=batch, user_batch=own, samples=samples, is_chosen=batch == spec.train_batch_size
            ),
            loss_check=loss_check,
            headroom=self._study.user_attrs.get(attributes.HEADROOM),
            measurement=measurement_in_words(trial, metrics=metrics),
            advice=self._profiled.advice(complete, settings_written=settings is not None and settings.sets_batch),
            failures=describe_structure_failures(self._study.get_trials(deepcopy=False)),
            launches=dict(Counter(row.report.outcome.value for row in launches if row.purpose == "trial")),
            slot_minutes=sum(_slot_seconds(row.report) for row in launches) / 60,
            device=spec.device,
            isolation=describe_isolation(weakest_isolation(row.report.conditions for row in launches)),
        )


def _slot_seconds(report: LaunchReport) -> float:
    return report.held_s * len(report.devices)
