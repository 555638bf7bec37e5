"""Conclude a study: confirm the finalists, choose the winner, compare its losses and write its config."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from optuna.trial import FrozenTrial

from optuna_dsat.config.ds_config import write_json_atomic
from optuna_dsat.store import Turn, TurnLostError
from optuna_dsat.study.command import SAME_BATCH_CONFIG, best_settings
from optuna_dsat.study.confirm.confirmation import Confirmation
from optuna_dsat.study.confirm.loss_check import STEPS_OF_NUMBERS, LossCheck, check_loss, nothing_to_compare
from optuna_dsat.study.confirm.measured import lossy_of, may_be_result
from optuna_dsat.study.confirm.rounds import CheckedSettings, Rounds
from optuna_dsat.study.confirm.verdict import Verdict
from optuna_dsat.study.context import SearchContext
from optuna_dsat.study.end_reason import EndReason
from optuna_dsat.study.folder import BEING_WRITTEN, digests, set_others_aside
from optuna_dsat.study.result import StudyResult, result_of, write_config, write_settings
from optuna_dsat.study.stored import StoredStudy, read_stored
from optuna_dsat.trials import attributes

_WAIT_S = 1.0
"""Polling interval while another worker concludes the study, in seconds."""


class Conclusion:
    """Concludes a study after its search."""

    def __init__(self, context: SearchContext, *, reason: EndReason, with_loss_check: bool) -> None:
        self._context = context
        self._spec = context.spec
        self._study = context.study
        self._reason = reason
        self._with_loss_check = with_loss_check
        self.interrupted = reason is EndReason.INTERRUPTED
        """Whether Ctrl-C ended the search, the confirmation or the comparison of losses."""
        self._checks_numbers = "lossy" in (self._spec.allow or ())
        self._held: Turn | None = None
        """This worker's turn; None without a turn."""

    def run(self) -> StudyResult | None:
        """Confirm, choose and write the winner; None if nothing was measured."""
        while True:
            with ExitStack() as stack:
                checks = self._with_loss_check or self._checks_numbers
                if self._reason is not EndReason.INTERRUPTED and (self._spec.confirm or checks):
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
        trials = self._context.trials()
        candidates = self._context.method.ranked(trials, maximize=self._spec.maximize)
        if not candidates:
            return None
        self._check_numbers(trials, candidates)
        rounds, spec = Rounds.of(self._study.user_attrs), self._spec
        self._confirm(trials, [trial for trial in candidates if may_be_result(trial, rounds, spec)])
        store, study = self._context.store, self._stored()
        if study.verdict is None:
            return None
        check = self._compare_losses(study.verdict)
        result = result_of(
            study,
            store.launches(self._context.study_uuid),
            storage=store.absolute_url,
            reason=self._reason.value,
            loss_check=None if check is None else asdict(check),
        )
        if result is not None:
            self._write(study, result)
        return result

    def _stored(self) -> StoredStudy:
        spec = self._spec
        return replace(read_stored(self._context.store, spec.name), spec=spec, profiled=self._context.profiled)

    def _check_numbers(self, trials: Sequence[FrozenTrial], candidates: Sequence[FrozenTrial]) -> None:
        """Compare the losses of the best trials whose settings change numbers with those of the user's config.

        Compared are trials that may become finalists, and that the search ranks before the user's config. Trials with
        equal settings of this kind train alike up to rounding: one of them is launched.
        """
        if self._reason is EndReason.INTERRUPTED or not self._checks_numbers:
            return
        baseline, slots = attributes.user_config_trial(trials), self._spec.slots_per_trial
        batch = None if baseline is None else attributes.train_batch_size(baseline, slots=slots)
        same = [trial for trial in candidates if attributes.train_batch_size(trial, slots=slots) == batch]
        losses: dict[str, Sequence[float]] = {}
        try:
            for ranked, most in ((candidates, max(1, self._spec.confirm)), (same, 1)):
                left = most
                for trial in ranked:
                    if not left or (baseline is not None and trial.number == baseline.number):
                        break
                    left -= self._trains_alike(trial, losses)
        except KeyboardInterrupt:
            self.interrupted, self._reason = True, EndReason.INTERRUPTED

    def _trains_alike(self, trial: FrozenTrial, losses: dict[str, Sequence[float]]) -> bool:
        """Return whether a trial may be the result; if open, compare losses, adding the user config's to ``losses``."""
        settings, rounds = lossy_of(trial, self._spec), Rounds.of(self._study.user_attrs)
        if settings and rounds.checked(settings) is None:
            self._context.say(f"Comparing the first losses of trial {trial.number} with those of your config ...")
            check = self._check(trial, name=f"trial-{trial.number:04d}", steps=STEPS_OF_NUMBERS, known=losses)
            losses |= {
                which: values
                for which, values in check.losses.items()
                if which != "best" and len(values) == STEPS_OF_NUMBERS
            }
            checked = CheckedSettings(settings=settings, number=trial.number, check=asdict(check))
            rounds = replace(rounds, losses=(*rounds.losses, checked))
            with self._storing("store a comparison of losses"):
                self._study.set_user_attr(attributes.CONFIRMATION, rounds.to_json())
            self._context.say(check.message)
        return may_be_result(trial, rounds, self._spec)

    def _check(self, trial: FrozenTrial, **how: Any) -> LossCheck:
        """Compare the losses of a trial with those of the user's config, as ``check_loss``."""
        ranks = attributes.data_parallel_size(trial, slots=self._spec.slots_per_trial)
        overlay = self._stored().overlay_of(trial)
        return check_loss(self._spec, overlay, data_parallel_size=ranks, launch=self._context.launch, **how)

    def _confirm(self, trials: Sequence[FrozenTrial], candidates: Sequence[FrozenTrial]) -> None:
        """Measure the finalists in rounds; after an interruption, the stored rounds of earlier runs remain."""
        if self._reason is EndReason.INTERRUPTED or not candidates:
            return
        confirmation = Confirmation(self._context, storing=self._storing)
        confirmation.run(trials, candidates)
        if confirmation.interrupted:
            self.interrupted = True
            self._reason = EndReason.INTERRUPTED

    def _compare_losses(self, verdict: Verdict) -> LossCheck | None:
        """Return the comparison of first losses; None if it was not requested or was interrupted."""
        if not self._with_loss_check or self._reason is EndReason.INTERRUPTED:
            return None
        if lossy_of(verdict.result.trial, self._spec):
            return None  # compared already, over more steps
        if verdict.is_baseline:
            return nothing_to_compare(self._spec)
        self._context.say("Comparing the first losses under the best config with those under yours ...")
        try:
            return self._check(verdict.result.trial)
        except KeyboardInterrupt:
            self.interrupted = True
            return None

    def _write(self, study: StoredStudy, result: StudyResult) -> None:
        """Write the files and attributes of the selected config."""
        folder = self._spec.study_dir
        settings = best_settings(self._spec, result.config, folder)
        config, metrics = Path(result.config_path), Path(result.metrics_path)
        files = [config, metrics]
        files += [] if settings is None else [settings.path]
        same_batch = result.same_batch
        files += [] if same_batch is None else [Path(same_batch.config_path)]
        with self._storing("store the result"):
            attrs = self._study.user_attrs
            for aside in set_others_aside(files, attrs.get(attributes.WRITTEN, {})):
                self._context.say(f"A file that this study did not write is kept as {aside}.")
            self._study.set_user_attr(attributes.WRITTEN, {path.name: BEING_WRITTEN for path in files})
            write_config(config, result.config)
            write_json_atomic(metrics, result.metrics_file(study.rounds.finalists()))
            if same_batch is not None:
                write_config(Path(same_batch.config_path), same_batch.config)
            else:
                self._remove_written(folder / SAME_BATCH_CONFIG, attrs.get(attributes.WRITTEN, {}))
            if settings is not None:
                write_settings(settings, result.config)
            self._study.set_user_attr(attributes.WRITTEN, digests(files))
            self._study.set_user_attr(attributes.WINNER, result.trial)
            self._study.set_user_attr(attributes.END_REASON, self._reason.value)

    @staticmethod
    def _remove_written(path: Path, written: Mapping[str, str]) -> None:
        """Remove a file of an earlier result, unless it was changed since the study wrote it."""
        if written.get(path.name) == digests([path]).get(path.name, ""):
            path.unlink(missing_ok=True)
