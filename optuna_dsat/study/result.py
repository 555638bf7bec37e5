"""Result of a study: ``best_ds_config.json``, ``best_ds_metrics.json`` and the command that trains with them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optuna_dsat.config import ds_config
from optuna_dsat.config.conditions import BF16
from optuna_dsat.cost.gpus import precision_advice
from optuna_dsat.errors import StorageUrlError
from optuna_dsat.launch.isolation import describe_isolation, weakest_isolation
from optuna_dsat.metrics import speed_up
from optuna_dsat.runtime.files import write_text_atomic
from optuna_dsat.runtime.overlay import BIND_CORES, checkpoint_every, is_compiled, without_model
from optuna_dsat.script.settings_file import SettingsCopy
from optuna_dsat.secrecy.references import names_in, resolved
from optuna_dsat.secrecy.shapes import find_secrets, hidden_data
from optuna_dsat.store import StoredLaunch
from optuna_dsat.study.command import BEST_CONFIG, SAME_BATCH_CONFIG, best_settings, command_to_train
from optuna_dsat.study.config_changes import (
    Change,
    config_changes,
    core_binding_in_words,
    model_change_in_words,
    scaled_steps,
    trainable_config,
)
from optuna_dsat.study.confirm.measured import Measured, lossy_in_words, lossy_of, rejected_in_words
from optuna_dsat.study.confirm.verdict import Verdict
from optuna_dsat.study.confirm.words import full_memory_in_words, running_engines_in_words
from optuna_dsat.study.end_reason import describe_structure_failures
from optuna_dsat.study.profile.profiled import Profiled
from optuna_dsat.study.profile.script import own_train_batch_size, user_config
from optuna_dsat.study.space import dataset_size, epoch_samples
from optuna_dsat.study.stored import StoredStudy
from optuna_dsat.trials import attributes
from optuna_dsat.words import count_in_words, metric_in_words, steps_in_words, things_in_words, times_in_words

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial


BEST_METRICS = "best_ds_metrics.json"


@dataclass(frozen=True, kw_only=True)
class SameBatch:
    """The fastest config at the global batch of the user's config: that config, if nothing is surely faster."""

    trial: int
    """Number of its trial."""
    is_user_config: bool
    """Whether it is the user's config."""
    speed_up: float | None
    """Ratio to the user's config; None if that could not be measured."""
    speed_up_low: float | None
    """Lower end of the 95% confidence interval of ``speed_up``; None if it was not confirmed."""
    speed_up_high: float | None
    """Upper end of the interval."""
    config: Mapping[str, Any]
    """The DeepSpeed config, ready to train with."""
    config_path: str
    """Path of the file with ``config``."""
    command: str
    """Shell command that trains with it."""
    checkpoint_every: int = 0
    """Activation checkpointing of every so many repeated blocks, which no DeepSpeed config sets; 0 for none."""
    compiled: bool = False
    """Whether the model is compiled, which no DeepSpeed config sets."""
    model_change: str = ""
    """As of ``StudyResult``."""


@dataclass(frozen=True, kw_only=True)
class StudyResult:
    """Result of a study. Metrics are in samples/s, FLOP/s per GPU, or seconds, by their name."""

    study: str
    """Name of the study."""
    storage: str = ""
    """URL of its database, without a password; the path of an SQLite file is absolute."""
    reason: str
    """Why the search ended."""
    metric: str
    """The optimised metric: ``FLOPS_per_gpu`` (FLOP/s), ``throughput`` (samples/s over all ranks), or a
    time in seconds (``latency``, ``forward``, ``backward``, ``step``)."""
    verdict: Verdict
    """Outcome of the study: certainty of the result, ties, noise, warnings, and measurements in rounds."""
    trial: int
    """Number of the selected trial: the winner, or the user's config if nothing is surely better."""
    value: float
    """Its metric, by the rounds of the confirmation if there were at least two."""
    low: float | None
    """Lower end of the 95% confidence interval of ``value`` between launches; None if it was not confirmed."""
    high: float | None
    """Upper end of the interval of ``value``."""
    user_value: float | None
    """Metric of the user's config in the same rounds; None if it could not be measured."""
    speed_up: float | None
    """Ratio to the user's config (above 1 is better), paired in rounds; None if it could not be measured."""
    speed_up_low: float | None
    """Lower end of the 95% confidence interval of ``speed_up``; None if it was not confirmed."""
    speed_up_high: float | None
    """Upper end of the interval of ``speed_up``."""
    speed_up_confirmed: bool
    """Whether rounds measured ``speed_up``; otherwise it compares values of the search."""
    config: Mapping[str, Any]
    """The selected DeepSpeed config, ready to train with."""
    metrics: Mapping[str, float]
    """All metrics of the winner by name: the values of ``metric``; ``engine_throughput`` (as DeepSpeed's timers report
    it); ``tokens_per_s`` if inputs are tokens; ``elements_per_s`` if other inputs vary in size; ``MFU`` (a share
    of the device's peak) if the peak is known; ``power_w`` (of all GPUs) and ``samples_per_joule`` if the driver counts
    energy; and ``peak_allocated_bytes``, ``peak_reserved_bytes`` and ``rss_bytes``
    of the rank that used most."""
    config_path: str
    """Path of the file with ``config``."""
    metrics_path: str
    """Path of the file with ``metrics``, the interval and the finalists."""
    command: str
    """Shell command that trains with it: the script's command if that is enough, else ``optuna-dsat train``."""
    checkpoint_every: int = 0
    """Activation checkpointing of every so many repeated blocks; 0 for none. No key of ``config``: ``command`` does it,
    or ``optuna_dsat.checkpoint_blocks`` in the script.
    """
    compiled: bool = False
    """Whether the model is compiled. No key of ``config``: ``command`` does it, or ``engine.compile()`` in the script.
    """
    model_change: str = ""
    """Sentence on the change of the model that the result needs, and where to write it; empty without any."""
    train_batch_size: int
    """Global batch of ``config``, in samples."""
    user_train_batch_size: int
    """Global batch of the original user config, in samples."""
    same_batch: SameBatch | None = None
    """The fastest config at this global batch with ``--batch both``; None if it is the result, or was not searched."""
    dataset_size: int | None
    """Samples of the training data; None if unknown. Data that each rank loads as a whole are counted once."""
    learning_rate_advice: str | None
    """Advice on learning rate and steps for the changed global batch; None if it did not change."""
    loss_check: Mapping[str, Any] | None
    """A ``optuna_dsat.study.confirm.loss_check.LossCheck`` as a dictionary; None if it was not requested."""
    numbers: str = ""
    """Settings of the answers that change numbers (``--allow lossy``), with the comparison of their losses; empty
    without any."""
    rejected: str = ""
    """Settings that are not in the result because their losses differ from those of the user's config; empty without
    any."""
    headroom: float | None = None
    """Upper bound (90% probability) of the relative improvement of the space's best config over the best measured
    config; None if the method has no posterior, or the search was interrupted."""
    measurement: str = ""
    """Notes on the measured steps: skipped steps, inputs that vary in size; empty without any."""
    changes: Sequence[Change] = ()
    """Every key whose value in ``config`` differs from the user's config: changed, added, dropped."""
    advice: str = ""
    """Suggested changes to the script; empty without any."""
    failures: str = ""
    """Structures without a successful launch, and finalists that failed in the rounds, with their errors."""
    launches: Mapping[str, int]
    """Outcome -> number of trial launches; the launch that simplifies the best trial is one beyond ``--max-trials``."""
    continued: int = 0
    """Number of launches that continued another: they measured in a running engine, without a start."""
    slot_minutes: float
    """GPU minutes (CPU-rank minutes without a GPU) of all launches, profile and finalists included."""
    device: str = "cuda"
    """Device of the launches: ``cuda`` or ``cpu``."""
    isolation: str = ""
    """How the user's files were protected from the launches; the weakest of several ways."""
    by_gpus: Mapping[int, StudyResult] = field(default_factory=dict)
    """Number of GPUs -> result of the search with this number, if ``autotuning.num_gpus`` lists several; this result
    then has the most samples per second. Empty otherwise."""

    def metrics_file(self, finalists: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the content of ``best_ds_metrics.json``."""
        return {
            "study": self.study,
            "trial": self.trial,
            "metric": self.metric,
            "value": self.value,
            "confidence_interval_95": None if self.low is None else [self.low, self.high],
            "user_config_value": self.user_value,
            "speed_up": self.speed_up,
            "metrics": self.metrics,
            "checkpoint_every": self.checkpoint_every,
            "compiled": self.compiled,
            "verdict": self.verdict.to_json(),
            "finalists": finalists,
            "loss_check": self.loss_check,
        }

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain values, as ``--json`` prints it."""
        plain = {field_.name: getattr(self, field_.name) for field_ in fields(self)}
        plain["same_batch"] = None if self.same_batch is None else asdict(self.same_batch)
        by_gpus = {count: item.to_json() for count, item in self.by_gpus.items()}
        changes = [asdict(change) for change in self.changes]
        return {**plain, "verdict": self.verdict.to_json(), "changes": changes, "by_gpus": by_gpus}

    def optuna_study(self, storage: str | None = None) -> optuna.Study:
        """Return the Optuna study, for ``optuna.visualization``, ``optuna.importance`` and other Optuna functions.

        Args:
            storage: URL of the database; None for ``self.storage``, which never contains a password.

        Raises:
            StorageUrlError: If the database cannot be opened, or ``storage`` is needed for its password.
            StorageError: If the database fails.
            KeyError: If the study was deleted.
        """
        from optuna_dsat.store import load_study

        if storage is None and "***" in self.storage:
            raise StorageUrlError(f"The result does not keep the password of {self.storage}: give the URL again.")
        return load_study(storage or self.storage, self.study)

    def trials(self, storage: str | None = None) -> list[dict[str, Any]]:
        """Return all trials as flat rows; ``pandas.DataFrame(result.trials())`` is a table of them.

        Args:
            storage: As of ``optuna_study``.

        Returns:
            A dictionary per trial: ``number``, ``state``, ``outcome``, ``value`` (of the search, in units of the
            metric), ``confirmed_value`` with ``confirmed_low`` and ``confirmed_high`` (of the confirmation, None
            if not confirmed), ``rounds``, ``speed_up`` (in the rounds), ``handed_over`` (whether it is the result),
            ``configuration`` (in words), ``reason`` (why it was launched), ``attempts``, ``peak_memory_bytes``,
            ``message``, ``skipped_steps`` (by the loss scaler), ``steps_completed`` (batches of the training, as
            Determined counts them), ``params``, ``metrics``, ``config``.

        Raises:
            StorageUrlError: As ``optuna_study``.
            StorageError: As ``optuna_study``.
        """
        from optuna_dsat.study.stored import trial_row

        return [trial_row(trial, self.verdict) for trial in self.optuna_study(storage).get_trials(deepcopy=False)]


def result_of(
    study: StoredStudy,
    launches: Sequence[StoredLaunch],
    *,
    storage: str,
    reason: str,
    loss_check: Mapping[str, Any] | None = None,
) -> StudyResult | None:
    """Return the result of a study as stored, for all views of it; None if nothing was measured."""
    verdict, spec, profiled = study.verdict, study.spec, study.profiled
    if verdict is None:
        return None
    best, speed_up = verdict.result, verdict.speed_up
    trial, folder = best.trial, spec.study_dir
    ranks = attributes.data_parallel_size(trial, slots=spec.slots_per_trial)
    answer, complete = _answer(study, best, storage=storage), study.complete_config(trial)
    config = answer["config"]
    batch, own_batch = complete[ds_config.TRAIN_BATCH], own_train_batch_size(spec, ranks=ranks)
    user = trainable_config(user_config(spec, data_parallel_size=ranks)[0], world_size=ranks)
    user, changed = (study.as_in_file(without_model(each), complete) for each in (user, {**complete, **config}))
    user = user if verdict.baseline is None else study.at_batch(user, verdict.baseline.number)
    settings, rounds = best_settings(spec, config, folder), study.rounds
    same_batch = _same_batch(study, storage=storage)
    checked = rounds.checked(lossy_of(trial, spec))
    answers = [trial, *([] if same_batch is None else [study.trials[same_batch.trial]])]
    writes_batch = settings is not None and settings.sets_batch
    return StudyResult(
        **answer,
        study=spec.name,
        storage=storage,
        reason=reason,
        metric=study.metric,
        verdict=verdict,
        value=best.value,
        low=best.interval.low,
        high=best.interval.high,
        user_value=None if verdict.baseline is None else verdict.baseline.value,
        speed_up_confirmed=speed_up is not None and speed_up.rounds > 0,
        changes=config_changes(hidden_data(user), hidden_data(changed)),
        metrics=dict(best.metrics),
        config_path=str(folder / BEST_CONFIG),
        metrics_path=str(folder / BEST_METRICS),
        train_batch_size=batch,
        user_train_batch_size=own_batch,
        same_batch=same_batch,
        dataset_size=dataset_size(spec, profiled),
        learning_rate_advice=learning_rate_advice(
            config,
            batch=batch,
            user_batch=own_batch,
            samples=epoch_samples(spec, profiled),
            measured_with="" if profiled is None else profiled.profile.optimizer,
            is_chosen=batch == spec.train_batch_size,
            args=spec.script.args,
            computed=[{} if each is None else study.script_values(each.number) for each in (verdict.baseline, best)],
        ),
        loss_check=loss_check if checked is None else checked.check,
        numbers=lossy_in_words(answers, rounds, spec),
        rejected=rejected_in_words(rounds),
        headroom=study.attributes.get(attributes.HEADROOM),
        measurement=" ".join(
            (
                measurement_in_words(trial, metrics=best.metrics, user=verdict.baseline),
                running_engines_in_words(study.trials, rounds),
            )
        ).strip(),
        advice="" if profiled is None else _advice(study, profiled, answers, launches, settings_written=writes_batch),
        failures=" ".join(filter(None, (describe_structure_failures(study.trials), rounds.failures_in_words()))),
        continued=sum(bool(row.report.root) for row in launches if _is_of_trial(row)),
        launches=dict(Counter(row.report.outcome.value for row in launches if _is_of_trial(row))),
        slot_minutes=sum(row.report.held_s * len(row.report.devices) for row in launches) / 60,
        device=spec.device,
        isolation=describe_isolation(weakest_isolation(row.report.conditions for row in launches)),
    )


def _answer(study: StoredStudy, measured: Measured, *, storage: str, same_batch: int | None = None) -> dict[str, Any]:
    """Return the fields that ``StudyResult`` and ``SameBatch`` have in common, of a measured config."""
    ratio, complete = measured.speed_up, study.complete_config(measured.trial)
    return {
        "trial": measured.number,
        "speed_up": None if ratio is None else ratio.value,
        "speed_up_low": None if ratio is None else ratio.low,
        "speed_up_high": None if ratio is None else ratio.high,
        "config": study.ready_config(measured.trial),
        "command": command_to_train(
            study.spec,
            complete,
            profiled=study.profiled,
            host_threads=measured.trial.user_attrs.get(attributes.HOST_THREADS),
            storage=storage,
            same_batch=same_batch,
        ),
        "checkpoint_every": checkpoint_every(complete),
        "compiled": is_compiled(complete),
        "model_change": model_change_in_words(complete, study.spec.ds_config),
    }


def _same_batch(study: StoredStudy, *, storage: str) -> SameBatch | None:
    verdict, spec = study.verdict, study.spec
    if verdict is None or spec.batch != "both":
        return None
    measured = verdict.same_batch
    if measured is None or measured.number == verdict.result.number:
        return None
    return SameBatch(
        **_answer(study, measured, storage=storage, same_batch=measured.number),
        is_user_config=measured.is_user_config,
        config_path=str(spec.study_dir / SAME_BATCH_CONFIG),
    )


def _advice(
    study: StoredStudy,
    profiled: Profiled,
    answers: Sequence[FrozenTrial],
    launches: Sequence[StoredLaunch],
    *,
    settings_written: bool,
) -> str:
    """Return what to change in the script, what fills the GPUs' memory, and what another precision brings."""
    config, *others = map(study.complete_config, answers)
    device, size = profiled.profile.device_name, profiled.profile.param_bytes
    configured = profiled.precision_of(study.spec.ds_config)
    trained = "bf16" if ds_config.precision_of(config) == "bf16" else configured
    gain = _bf16_in_words(study, configured) or precision_advice(trained, device_name=device, param_bytes=size)
    compared = any(BIND_CORES in trial.params for trial in study.trials)
    binding = "" if compared else core_binding_in_words(config, ranks=study.spec.slots_per_trial)
    script = profiled.advice(config, settings_written=settings_written)
    full = full_memory_in_words(answers, study.measured, memory=profiled.profile.device_memory_bytes, spec=study.spec)
    loaded, saved = profiled.checkpoint_advice(study.spec, [config, *others]), _lone_save_in_words(launches)
    return " ".join(filter(None, (script, loaded, saved, full, gain, binding)))


def _lone_save_in_words(launches: Sequence[StoredLaunch]) -> str:
    """Return a warning if some ranks saved a checkpoint without the others; empty if none did."""
    ranks = [row.report.conditions.lone_save for row in launches]
    if (rank := next((rank for rank in ranks if rank is not None), None)) is None:
        return ""
    return (
        f"Rank {rank} called engine.save_checkpoint without the other ranks; trials skip it, but DeepSpeed waits there "
        "for all ranks: call it on every rank, or training may hang."
    )


def _bf16_in_words(study: StoredStudy, precision: str) -> str:
    """Return how fast trials in bf16 were, where the config has another ``precision``; empty if none was measured."""
    fastest: dict[bool, FrozenTrial] = {}
    for trial in study.measured:
        if BF16 in trial.params:
            fastest.setdefault(trial.params[BF16], trial)
    if len(fastest) < 2:
        return ""
    half, other = fastest[True].values[0], fastest[False].values[0]
    ratio = speed_up(half, other, maximize=study.spec.maximize)
    words = "" if ratio is None else f", {times_in_words(ratio)}x as fast as the fastest in {precision}"
    return f"The fastest trial in bf16 measured {metric_in_words(study.metric, half, device=study.spec.device)}{words}."


def measurement_in_words(trial: FrozenTrial, *, metrics: Mapping[str, float], user: Measured | None) -> str:
    """Return a sentence on the steps of a trial's launch; empty if every step counts and all are alike."""
    facts = {**attributes.step_facts(trial), "metrics": metrics}
    if user is not None:
        facts |= {"user_metrics": user.metrics, "user_left_out": attributes.step_facts(user.trial)["left_out"]}
    words = steps_in_words(**facts)
    if facts["variation"]:
        words += (
            "; only launches of their own at one batch size were measured on the same data, and the intervals include "
            "the variation of the data: a larger --end-profile-step makes them narrower"
        )
    return f"Steps: {words}." if words else ""


def _is_of_trial(launch: StoredLaunch) -> bool:
    """Return whether a launch shows the outcome of a trial: one that failed only by continuing another does not."""
    return launch.purpose == "trial" and not launch.report.afresh


def write_config(path: Path, config: Mapping[str, Any]) -> None:
    """Write a config ready to train with; with resolved references only its owner may read it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ds_config.write_json_atomic(path, resolved(config), private=bool(names_in(config)))


def write_settings(copy: SettingsCopy, config: Mapping[str, Any]) -> None:
    """Write the copy of a settings file; readable only by its owner if it contains resolved references."""
    private = bool(names_in(config) or find_secrets(copy.text))
    write_text_atomic(copy.path, copy.text, mode=0o600 if private else None)


_ADAPTIVE = frozenset({"adam", "adamw", "lamb", "lion", "adagrad", "onebitadam", "zerooneadam", "onebitlamb"})


def learning_rate_advice(
    config: Mapping[str, Any],
    *,
    batch: int,
    user_batch: int,
    samples: int | None = None,
    measured_with: str = "",
    is_chosen: bool = False,
    args: Sequence[str] = (),
    computed: Sequence[Mapping[str, Any]] = ({}, {}),
) -> str | None:
    """Return advice on learning rate and steps for a changed global batch; None if it did not change.

    A batch that the user chose needs no advice on keeping the previous one. ``measured_with`` is the optimizer's class.
    ``computed`` are settings that the script sets with the user's config and with ``config``: those that differ follow.

    The square root of the ratio for Adam and its variants (Malladi et al. 2022, arXiv:2205.10287), the ratio for SGD
    (Goyal et al. 2017, arXiv:1706.02677). Both are rules of thumb, valid up to a task-dependent batch size.
    """
    if batch == user_batch:
        return None
    ratio = batch / user_batch
    root = f"{ratio**0.5:.3g} (the square root of the ratio, for Adam and similar optimizers: arXiv:2205.10287)"
    linear = f"{ratio:.3g} (the ratio, for SGD: arXiv:1706.02677)"
    rates = [each.get("optimizer.params.lr") for each in computed]
    follow = {key: ds_config.AUTO for key, value in computed[1].items() if computed[0].get(key, value) != value}
    config = ds_config.with_values(config, follow)
    optimizer = config.get("optimizer") or {}
    kind = str(optimizer.get("type") or measured_with).lower()
    factor = root if kind in _ADAPTIVE else linear if kind == "sgd" else f"{root}, or by {linear}"
    rate = (optimizer.get("params") or {}).get("lr")
    words = f" of {rate:g}" if isinstance(rate, int | float) else ""
    advice = f"consider multiplying your learning rate{words} by {factor}"
    if len(set(rates)) > 1 and all(isinstance(each, int | float) for each in rates):
        advice = f"the script's learning rate goes from {rates[0]:g} to {rates[1]:g}. Consider {factor} times the first"
    steps = ""
    if samples is not None:
        before, after = (math.ceil(samples / number) for number in (user_batch, batch))
        steps = f", an epoch from {count_in_words(before)} to {things_in_words(after, 'step')}"
    return (
        f"The global batch goes from {count_in_words(user_batch)} to {things_in_words(batch, 'sample')}{steps}: "
        f"{advice}. That is a rule of thumb, to be checked by the loss of a longer run."
        f"{scaled_steps(config, ratio, args=args)}"
        f"{'' if is_chosen else f' Keep the batch with --train-batch-size {user_batch}.'}"
    )
