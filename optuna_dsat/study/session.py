"""One study from its spec to its result: open or create, profile, search, confirm, export."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial

from optuna_dsat.config import ds_config
from optuna_dsat.config.op_builders import operators_of
from optuna_dsat.config.space_builder import SearchSpace
from optuna_dsat.errors import StudyConflictError
from optuna_dsat.guided.prior_knowledge import PriorKnowledge
from optuna_dsat.launch.measurement import LaunchRecord
from optuna_dsat.launch.protocol import Launcher, LaunchReport
from optuna_dsat.launch.waiting import SlotWait
from optuna_dsat.store import Store, StoredProfile, StudyRecord
from optuna_dsat.study.confirmation import Confirmation
from optuna_dsat.study.finalists import Finalist, choose_winner, standing_of
from optuna_dsat.study.loss_check import LossCheck, check_loss
from optuna_dsat.study.methods import Method, make_method
from optuna_dsat.study.profile import Profiled, fingerprint, measure_profile
from optuna_dsat.study.progress import (
    Message,
    Observer,
    ProfileFinished,
    ProfileStarted,
)
from optuna_dsat.study.request import StudyRequest
from optuna_dsat.study.result import TuneResult, learning_rate_advice, trainable_config, training_command, write_best
from optuna_dsat.study.space import largest_micro_batches, space_of
from optuna_dsat.study.spec import StudySpec
from optuna_dsat.study.standing import compared, speed_up_over
from optuna_dsat.study.trial_recorder import objective
from optuna_dsat.study.tuner import EndReason, Tuner
from optuna_dsat.study.user_config import follow_trainer, user_config
from optuna_dsat.study.warm_start import check_warm_start, prior_knowledge_of
from optuna_dsat.trials import attributes
from optuna_dsat.words import differences_in_words

__all__ = ["Session", "check_study", "open_study"]

_WAIT_S = 1.0
"""Pause between two looks for a profile that another worker measures, in seconds."""


def open_study(store: Store, spec: StudySpec, *, relocated: bool = False) -> tuple[StudyRecord, StudySpec]:
    """Return the study's record and its spec; create the study if it does not exist.

    Budgets of ``spec`` win over the stored ones, so a study can be given more. A study without any trial takes the new
    spec whole. A ``relocated`` spec is the stored one with this machine's paths: it is neither compared nor stored.

    Raises:
        StudyConflictError: If a study of this name exists for something else; says what differs.
    """
    found = store.find_study(spec.name)
    if found is None:
        record = store.create_study(spec.name, spec.model_dump(mode="json"), direction=spec.direction)
        return record, spec
    if relocated:
        return found, spec
    check_study(store, spec)
    if spec != StudySpec.model_validate(found.spec):
        store.update_spec(found.uuid, spec.model_dump(mode="json"))
    return found, spec


def check_study(store: Store, spec: StudySpec) -> None:
    """Refuse a spec whose name belongs to a study of something else.

    Raises:
        StudyConflictError: Says what differs.
    """
    found = store.find_study(spec.name)
    if found is None:
        return
    stored = StudySpec.model_validate(found.spec)
    begun = store.storage.get_n_trials(store.storage.get_study_id_from_name(spec.name)) > 0
    differing = _differences(stored.identity(), spec.identity())
    if differing and (begun or stored.direction != spec.direction):
        raise StudyConflictError(
            f"A study named {spec.name!r} exists in this storage with other settings: {'; '.join(differing)}. "
            f"Give this one another name with --study, continue that one with "
            f"`optuna-dsat resume {spec.name}`, or delete it with `optuna-dsat delete {spec.name}`."
        )


def _differences(stored: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    lines = []
    for key in stored:
        if stored[key] != given.get(key):
            old, new = str(stored[key]), str(given.get(key))
            detail = f"{key} was {old}, is {new}" if len(old) + len(new) < 80 else f"{key} differs"
            lines.append(detail)
    return lines


class Session:
    """Runs one study from its spec to its result.

    Args:
        request: What to tune, where, and how far.
        store: The opened database of the study.
        launcher: Runs the launches.
        observer: Called with each progress event.
    """

    def __init__(self, request: StudyRequest, *, store: Store, launcher: Launcher, observer: Observer) -> None:
        self._request = request
        self.interrupted = False
        check_warm_start(store, request.spec)
        self.record, self.spec = open_study(store, request.spec, relocated=request.relocated)
        self._store = store
        self._launcher = launcher
        self._fingerprint = fingerprint(self.spec, device_names=request.device_names)
        self._observer = observer
        self._wait = SlotWait(
            launcher.holders,
            slots=self.spec.slots_per_trial,
            limit_s=self.spec.wait_for_gpus_s,
            study=self.spec.name,
            on_notice=lambda text: observer(Message(text=text)),
        )

    def run(self) -> TuneResult | None:
        """Profile, search, confirm and export.

        Returns:
            The result; None if nothing was measured or the request leaves the conclusion to another worker.

        Raises:
            ScriptFailedError: If the script fails whatever the configuration.
            NothingRunnableError: If no configuration runs.
            DeviceError: If others hold the devices for too long.
            StorageError: If the database failed and did not come back in time.
        """
        profiled = self._profile()
        self._follow_trainer(profiled)
        space = space_of(self.spec, profiled)
        self._launcher.prepare(
            profiled.preload.changed(added=self.spec.preload, left_out=self.spec.no_preload),
            operators=operators_of(self.spec.ds_config, space),
        )
        method = make_method(self.spec, profiled, space, prior_knowledge=self._prior_knowledge(profiled))
        study = self._load_study(method.sampler, method.pruner)
        study.set_user_attr(attributes.FINGERPRINT, self._fingerprint)
        self._enqueue_user_config(study, space, profiled)
        reason = Tuner(
            self.spec,
            study=study,
            study_uuid=self.record.uuid,
            space=space,
            profiled=profiled,
            method=method,
            store=self._store,
            launcher=self._launcher,
            observer=self._observer,
            wait=self._wait,
        ).run()
        self.interrupted = reason is EndReason.INTERRUPTED
        if not self._request.conclude:
            return None
        return self._conclude(study, profiled, reason, method)

    def _profile(self) -> Profiled:
        """Return the stored profile of the same script, config and hardware, else measure it; announce it."""
        profiled, reused = self._find_or_measure_profile()
        largest = {
            stage: size
            for (stage, offloaded), size in largest_micro_batches(self.spec, profiled).items()
            if not offloaded
        }
        self._observer(
            ProfileFinished(
                profile=profiled.profile,
                measured_with=profiled.measured_with,
                reused=reused,
                largest_micro_batches=largest,
            )
        )
        if objective(self.spec, profiled) != self.spec.metric:
            self._observer(
                Message(
                    text="FLOPs could not be counted for this model: throughput is optimised instead, "
                    "which ranks configurations in the same order."
                )
            )
        return profiled

    def _follow_trainer(self, profiled: Profiled) -> None:
        if profiled.trainer is not None:
            self._observer(Message(text=profiled.trainer.announcement()))
        self.spec = follow_trainer(self.spec, profiled.trainer)

    def _find_or_measure_profile(self) -> tuple[Profiled, bool]:
        """Return the profile and whether it was there; where another worker measures it, wait for that."""
        waiting = False
        while True:
            with self._store.profile_turn(self.record.uuid) as mine:
                stored = self._stored_profile() if self._request.reuse_profile or waiting else None
                if stored is not None:
                    return Profiled.from_json(stored.profile), True
                if mine:
                    profiled = measure_profile(
                        self.spec,
                        self._launcher,
                        on_attempt=lambda attempt: self._observer(ProfileStarted(words=attempt.words)),
                        on_report=self._profile_launched,
                        wait=self._wait,
                    )
                    self._store.save_profile(self._fingerprint, profiled.to_json(), study_uuid=self.record.uuid)
                    return profiled, False
            if not waiting:
                waiting = True
                self._observer(Message(text="Another worker measures the profile; waiting for it."))
            time.sleep(_WAIT_S)

    def _stored_profile(self) -> StoredProfile | None:
        """Return the profile that the study's trials were planned with; before there are any, that of its fingerprint.

        So a comment changed in a file beside the script costs a study that is resumed no launch.
        """
        storage = self._store.storage
        study_id = storage.get_study_id_from_name(self.spec.name)
        own = storage.get_study_user_attrs(study_id).get(attributes.FINGERPRINT)
        if own is not None and own != self._fingerprint and storage.get_n_trials(study_id) > 0:
            stored = self._store.find_profile(own)
            if stored is not None:
                self._observer(
                    Message(
                        text="The script, a file beside it or the hardware is not the one this study was profiled "
                        "with; it goes on with its own profile (--no-profile-reuse measures anew)."
                    )
                )
                self._fingerprint = own
                return stored
        return self._store.find_profile(self._fingerprint)

    def _profile_launched(self, report: LaunchReport, record: LaunchRecord) -> None:
        self._keep(report, record, purpose="profile")
        if record.engine is not None and record.engine.config_differences and not report.outcome.infeasible:
            file = Path(self.spec.script.config_path).name
            self._observer(Message(text=differences_in_words(record.engine.config_differences, file=file)))

    def _prior_knowledge(self, profiled: Profiled) -> PriorKnowledge | None:
        """Return what the study begins with, told in one line where it was found only now."""
        study = optuna.load_study(study_name=self.spec.name, storage=self._store.storage)
        found, new = prior_knowledge_of(
            study, store=self._store, spec=self.spec, profiled=profiled, fingerprint=self._fingerprint
        )
        if found is not None and new:
            self._observer(Message(text=found.in_words()))
        return found

    def _load_study(self, sampler: optuna.samplers.BaseSampler, pruner: optuna.pruners.BasePruner) -> optuna.Study:
        return optuna.load_study(study_name=self.spec.name, storage=self._store.storage, sampler=sampler, pruner=pruner)

    def _enqueue_user_config(self, study: optuna.Study, space: SearchSpace, profiled: Profiled) -> None:
        """Have the user's present config measured first, once per study."""
        if not self.spec.enqueue_user_config:
            return
        config, _ = user_config(self.spec, data_parallel_size=profiled.data_parallel_size)
        params = space.params_of(config) or {}
        with self._store.exclusive("enqueue the user's config"):
            trials = study.get_trials(deepcopy=False)
            if not any(t.user_attrs.get(attributes.PURPOSE) == attributes.USER_CONFIG for t in trials):
                study.enqueue_trial(params, user_attrs={attributes.PURPOSE: attributes.USER_CONFIG})

    def _keep(
        self, report: LaunchReport, record: LaunchRecord, *, purpose: str, trial: FrozenTrial | None = None
    ) -> None:
        self._store.record_launch(
            self.record.uuid,
            report,
            trial_number=None if trial is None else trial.number,
            purpose=purpose,
            attempt=0,
        )
        self._store.record_steps(self.record.uuid, report.launch_id, record.events)

    def _conclude(
        self, study: optuna.Study, profiled: Profiled, reason: EndReason, method: Method
    ) -> TuneResult | None:
        metric = objective(self.spec, profiled)
        maximize = self.spec.direction == "maximize"
        trials = study.get_trials(deepcopy=False)
        candidates = method.ranked(trials, maximize=maximize)
        if not candidates:
            return None
        finalists: list[Finalist] = []
        if reason is not EndReason.INTERRUPTED:
            confirmation = Confirmation(
                self.spec,
                study=study,
                launcher=self._launcher,
                observer=self._observer,
                metric=metric,
                flops_per_sample=profiled.profile.flops_per_sample,
                keep=lambda report, record, trial: self._keep(report, record, purpose="confirm", trial=trial),
                wait=self._wait,
            )
            finalists = confirmation.run(trials, candidates)
            self.interrupted |= confirmation.interrupted
            if self.interrupted:
                reason = EndReason.INTERRUPTED
        posterior_means = None if method.posterior_means is None else method.posterior_means(trials)
        winner, finalist = choose_winner(candidates, finalists, maximize=maximize, posterior_means=posterior_means)
        return self._result(
            study,
            trials,
            winner,
            finalist,
            finalists,
            metric=metric,
            reason=reason,
            maximize=maximize,
            profiled=profiled,
        )

    def _result(
        self,
        study: optuna.Study,
        trials: Sequence[FrozenTrial],
        winner: FrozenTrial,
        finalist: Finalist | None,
        finalists: Sequence[Finalist],
        *,
        metric: str,
        reason: EndReason,
        maximize: bool,
        profiled: Profiled,
    ) -> TuneResult:
        spec, trainer = self.spec, profiled.trainer
        ranks = attributes.data_parallel_size(winner, slots=spec.slots_per_trial)
        complete = trainable_config(winner.user_attrs[attributes.CONFIG], world_size=ranks)
        config = complete if trainer is None else trainer.trainable(complete)
        metrics = dict(finalist.metrics if finalist is not None else winner.user_attrs[attributes.METRICS])
        baseline = attributes.user_config_trial(trials)
        again = {one.number: one for one in finalists}
        best = standing_of(winner, finalist)
        user = None if baseline is None else standing_of(baseline, again.get(baseline.number))
        ratio = None if user is None else speed_up_over(user, best, maximize=maximize)
        user_value = None if user is None else compared(user, best)[0]
        check = self._compare_losses(config, ranks) if reason is not EndReason.INTERRUPTED else None
        launches = self._store.launches(self.record.uuid)
        config_path, metrics_path = write_best(
            spec.study_dir,
            config,
            {
                "study": spec.name,
                "trial": winner.number,
                "metric": metric,
                "value": best.value,
                "confidence_interval_95": None if finalist is None else [finalist.low, finalist.high],
                "user_config_value": user_value,
                "speed_up": ratio,
                "metrics": metrics,
                "finalists": [asdict(f) for f in finalists],
                "loss_check": None if check is None else asdict(check),
            },
        )
        command, names_config = training_command(
            spec,
            complete,
            config_path,
            deepspeed_launcher=profiled.deepspeed_launcher,
            host_threads=winner.user_attrs.get(attributes.HOST_THREADS),
        )
        own, _ = user_config(spec, data_parallel_size=ranks)
        batch = complete["train_batch_size"]
        user_batch = ds_config.batch_triangle(own, world_size=ranks).train_batch_size
        study.set_user_attr(attributes.WINNER, winner.number)
        study.set_user_attr(attributes.END_REASON, reason.value)
        return TuneResult(
            study=spec.name,
            reason=reason.value,
            metric=metric,
            trial=winner.number,
            value=best.value,
            low=None if finalist is None else finalist.low,
            high=None if finalist is None else finalist.high,
            user_value=user_value,
            speed_up=ratio,
            speed_up_confirmed=user is not None and user.confirmed and best.confirmed,
            config=config,
            metrics=metrics,
            config_path=str(config_path),
            metrics_path=str(metrics_path),
            command=command,
            train_batch_size=batch,
            user_train_batch_size=user_batch,
            learning_rate_advice=learning_rate_advice(config, batch=batch, user_batch=user_batch),
            loss_check=None if check is None else asdict(check),
            command_names_config=names_config,
            advice="" if trainer is None else trainer.advice(complete),
            launches=dict(Counter(row.report.outcome.value for row in launches if row.purpose == "trial")),
            slot_minutes=sum(_slot_seconds(row.report) for row in launches) / 60,
        )

    def _compare_losses(self, config: Mapping[str, Any], ranks: int) -> LossCheck | None:
        """Return what the losses say where that was asked for; an interruption ends it without an answer."""
        if not self._request.check_loss:
            return None
        self._observer(Message(text="Comparing the first losses under the best config with those under yours ..."))
        try:
            return check_loss(
                self.spec,
                config,
                data_parallel_size=ranks,
                launcher=self._launcher,
                on_report=lambda report, record: self._keep(report, record, purpose="confirm"),
                wait=self._wait,
            )
        except KeyboardInterrupt:
            self.interrupted = True
            return None


def _slot_seconds(report: LaunchReport) -> float:
    return report.held_s * len(report.devices)
