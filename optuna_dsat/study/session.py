"""A study from its request to its result: profile, search, conclusion."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import optuna

from optuna_dsat.config.ds_config import TRAIN_BATCH
from optuna_dsat.guided.prior_knowledge import PriorKnowledge
from optuna_dsat.launch.follow import SlotWait
from optuna_dsat.launch.protocol import Launcher
from optuna_dsat.store import Store
from optuna_dsat.study.conclusion import Conclusion
from optuna_dsat.study.context import SearchContext, StudyContext
from optuna_dsat.study.end_reason import BUDGETS, EndReason, headroom_in_words
from optuna_dsat.study.folder import held_folder
from optuna_dsat.study.profile.fingerprint import fingerprint
from optuna_dsat.study.profile.host import check_nvme
from optuna_dsat.study.profile.permission import refused_in_words, refused_knobs
from optuna_dsat.study.profile.profiled import Profiled
from optuna_dsat.study.profile.script import enqueue_user_config, stated_batch
from optuna_dsat.study.profile.turn import ProfileTurn
from optuna_dsat.study.progress import Message, Observer, Phase
from optuna_dsat.study.result import StudyResult
from optuna_dsat.study.search.methods import make_method
from optuna_dsat.study.search.tuner import Tuner
from optuna_dsat.study.search.warm_start import check_warm_start, prior_knowledge_of
from optuna_dsat.study.space import space_of
from optuna_dsat.study.spec import StudyRequest, StudySpec
from optuna_dsat.study.stored import is_spent, open_study
from optuna_dsat.trials import attributes


class Session:
    """Runs the study of a request.

    Raises:
        StudyConflictError: If a study of this name exists with other settings.
        UsageError: If ``--warm-start`` names a study that cannot be used.
    """

    def __init__(self, request: StudyRequest, *, store: Store, launcher: Launcher, observer: Observer) -> None:
        self._request = request
        self.interrupted = False
        """Whether Ctrl-C ended it."""
        check_warm_start(store, request.spec)
        record, spec = open_study(store, request.spec, relocated=request.relocated, devices=request.devices)
        wait = SlotWait(
            launcher.holders,
            slots=spec.slots_per_trial,
            limit_s=spec.wait_for_gpus,
            study=spec.name,
            on_notice=lambda text: observer(Message(text=text)),
            on_phase=lambda words: observer(Phase(words=words, said=True)),
        )
        self._context = StudyContext(
            spec=spec,
            study_uuid=record.uuid,
            store=store,
            launcher=launcher,
            observer=observer,
            wait=wait,
            callbacks=request.callbacks,
        )

    @property
    def spec(self) -> StudySpec:
        """The study's spec; after the profile launch it follows the script's trainer."""
        return self._context.spec

    def run(self) -> StudyResult | None:
        """Profile, search, confirm and export; None if nothing was measured or another worker concludes.

        Raises:
            ScriptFailedError: If the script fails with every configuration.
            NothingRunnableError: If no configuration runs.
            DeviceError: If others hold the devices for too long.
            StorageError: If the database failed for longer than the store's retries last.
            UsageError: If a tuner of another study writes to the study's folder.
        """
        with held_folder(self.spec.study_dir, self._context.study_uuid):
            if not self._request.conclude and is_spent(self._context.store, self.spec):
                return None
            context = self._profile()
            reason = self._search(context)
            if not self._request.conclude:
                return None
            conclusion = Conclusion(context, reason=reason, with_loss_check=self._request.check_loss)
            result = conclusion.run()
            self.interrupted = conclusion.interrupted
            return result

    def _profile(self) -> SearchContext:
        """Return the study with its profile; from then on the spec follows the script's trainer."""
        refused = refused_knobs(self.spec, None)
        if not self._request.is_retry:
            self._context.say(refused_in_words(refused))
        names = tuple(device.name for device in self._request.devices.devices)
        turn = ProfileTurn(
            self._context,
            fingerprint=fingerprint(self.spec, device_names=names),
            reuse=self._request.reuse_profile,
            compare_zero=self._request.check_loss,
        )
        profiled = turn.run()
        if profiled.trainer is not None:
            self._context.say(profiled.trainer.announcement())
        if profiled.batch is not None:
            configured = replace(profiled, batch=None).followed_by(self.spec)
            stated = stated_batch(configured, ranks=profiled.data_parallel_size)
            self._context.say(profiled.batch.announcement(stated=None if stated is None else stated.micro_batch))
        options = {
            "ZeRO stage": profiled.stage_option,
            "accumulation steps": profiled.accumulation_option,
            "global batch" if profiled.global_batch_counts == TRAIN_BATCH else "batch of a rank": (
                profiled.global_batch_option
            ),
        }
        for what, option in ((what, option.rstrip("=")) for what, option in options.items() if option):
            self._context.say(f"The script takes its {what} from {option}; it follows each configuration.")
        known = self._context = replace(self._context, spec=profiled.followed_by(self.spec))
        later = {name: why for name, why in refused_knobs(self.spec, profiled).items() if name not in refused}
        self._context.say(refused_in_words(later))
        space = space_of(self.spec, profiled)
        check_nvme(self.spec, profiled, space)
        known.launcher.prepare(profiled.preload, operators=profiled.operators(self.spec, space))
        prior_knowledge = self._prior_knowledge(profiled, turn.fingerprint)
        method = make_method(self.spec, profiled, space, prior_knowledge=prior_knowledge)
        study = optuna.load_study(
            study_name=self.spec.name, storage=known.store.storage, sampler=method.sampler, pruner=method.pruner
        )
        same = {field_.name: getattr(known, field_.name) for field_ in fields(StudyContext)}
        study.set_user_attr(attributes.FINGERPRINT, turn.fingerprint)
        context = SearchContext(**same, study=study, profiled=profiled, space=space, method=method)
        study.set_user_attr(attributes.METRIC, context.metric)
        return context

    def _search(self, context: SearchContext) -> EndReason:
        """Launch trials until the search ends; return why it does."""
        study, posterior = context.study, context.method.posterior
        enqueue_user_config(
            study,
            store=context.store,
            spec=context.spec,
            space=context.space,
            data_parallel_size=context.profiled.data_parallel_size,
        )
        reason = Tuner(context).run()
        self.interrupted = reason is EndReason.INTERRUPTED
        left = math.inf
        if posterior is not None and not self.interrupted:
            left = posterior.remaining(context.trials())
        study.set_user_attr(attributes.HEADROOM, left if math.isfinite(left) else None)
        if math.isfinite(left) and reason not in BUDGETS:  # the result says it otherwise
            context.say(headroom_in_words(left))
        return reason

    def _prior_knowledge(self, profiled: Profiled, mark: str) -> PriorKnowledge | None:
        """Return what earlier studies measured, if anything is used; it is announced when it is found first."""
        store = self._context.store
        study = optuna.load_study(study_name=self.spec.name, storage=store.storage)
        knowledge, new = prior_knowledge_of(study, store=store, spec=self.spec, profiled=profiled, fingerprint=mark)
        if knowledge is not None and new:
            self._context.say(knowledge.in_words())
        return knowledge
