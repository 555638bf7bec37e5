"""Finds what sets a script's batch size and ZeRO stage: each guess is proven by a launch at another value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

from optuna_dsat.config import ds_config
from optuna_dsat.config.conditions import ZERO_STAGES
from optuna_dsat.errors import UsageError
from optuna_dsat.launch.measurement import LaunchRecord
from optuna_dsat.launch.protocol import LaunchReport, LaunchRequest
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.adapt.config import with_option
from optuna_dsat.runtime.adapt.parsers import means_accumulation, means_stage
from optuna_dsat.script.arg_mapping import PASS_BATCH, RANK_BATCH, STAGE
from optuna_dsat.script.batch_rule import BatchRule, guesses, held, samples_per_rank, varying
from optuna_dsat.script.trainer import ScriptTrainer, trainer_guesses
from optuna_dsat.study.profile.script import follow_batch, follow_trainer
from optuna_dsat.study.requests import launch_request
from optuna_dsat.study.spec import StudySpec

Launch = Callable[[LaunchRequest], tuple[LaunchRecord, LaunchReport]]
"""Runs a launch to its end and reports it."""

_BATCHES = (ds_config.MICRO_BATCH, ds_config.TRAIN_BATCH, RANK_BATCH, PASS_BATCH)
"""Keys of the config whose options set the batch size."""


def find_batch_rule(
    spec: StudySpec,
    launch: Launch,
    record: LaunchRecord,
    *,
    overlay: Mapping[str, Any],
    present: int,
    steps: int = 1,
) -> BatchRule | None:
    """Return the rule that sets the script's batch size; None if it already follows the DeepSpeed config, row by row.

    A launch at the script's own size does not show this: a launch at another size must. Two launches reveal rows per
    sample (views, pairs, groups): the engine's input rows have the same ratio to the micro-batch in both. For an option
    that the user mapped, only its rows per sample are detected.

    Raises:
        UsageError: If an option that the user mapped does not change the engine's inputs.
    """
    configured = int(overlay[ds_config.MICRO_BATCH])
    observed, sources, engine = record.observed_micro_batch, record.batch_sources, record.engine
    mapped = [spec.script.arg_mappings[key] for key in _BATCHES if key in spec.script.arg_mappings]
    is_settled = ds_config.MICRO_BATCH in (*(spec.fix or {}), *spec.kept_knobs) or bool(mapped)
    coincides = observed == configured == present and not is_settled and record.trainer is None
    """Whether the script's own size was launched, so that it is unknown whether it follows the config."""
    if engine is None or (observed is None and (engine.pipeline or mapped)):
        return None
    if observed == configured and not coincides:
        if present == 1 or is_settled or not _may_pack(record):
            return None
        # The first trial has the same sizes and continues this launch.
        user_sizes = {**overlay, ds_config.MICRO_BATCH: present, ds_config.GRADIENT_ACCUMULATION: steps}
        proof, _ = launch(_proof(spec, "profile-rows", overlay=user_sizes))
        return held(1, sources=sources, present=present) if proof.observed_micro_batch == 1 else None
    if observed is None:  # nothing was seen: what cannot be counted must not change
        return held(configured if ds_config.MICRO_BATCH in (spec.fix or {}) else present)
    samples = None if sources is None else samples_per_rank(sources, fed=observed)
    if sizes := record.differing_micro_batches(samples=samples):
        return varying(configured if ds_config.MICRO_BATCH in (spec.fix or {}) else present, sizes=sizes)
    ranks = engine.data_parallel_size
    if sources is None or not spec.follow_batch:
        return None if coincides else held(observed, sources=sources, present=present, ranks=ranks)
    fed: dict[int, int] = {configured: observed}
    """Micro-batch of a launch -> rows that its engine was fed."""

    def holds(proof: LaunchRecord, size: int, *, guess: BatchRule) -> bool:
        if _tokens(proof) == _tokens(record) != set():  # a pack is fed at any batch size
            fed[size] = observed
            return False
        if proof.observed_micro_batch is not None:
            fed[size] = proof.observed_micro_batch
        return proof.observed_micro_batch == Fraction(*guess.rows) * size

    failed = False

    def noted(request: LaunchRequest) -> tuple[LaunchRecord, LaunchReport]:
        nonlocal failed
        proof, report = launch(request)
        failed = failed or report.outcome is Outcome.SCRIPT_ERROR  # perhaps for another number in its file
        return proof, report

    known: dict[str, Any] = {
        "present": present,
        "configured": configured,
        "reads_launch": bool(spec.script.config_path),
    }
    possible = guesses(sources, fed=observed, ranks=ranks, steps=steps, **known)
    for index, guess in enumerate(possible):
        if mapped and guess.kind != "config":
            continue
        if guess.kind == "config" and len(fed) > 1:  # a guess that failed has shown it
            if observed != present and all(Fraction(*guess.rows) * size == rows for size, rows in fed.items()):
                return guess
            if set(fed.values()) == {observed}:
                continue
        for keeps_file in (True,) if failed else (False, True):
            guess = replace(guess, keeps_file=keeps_file and guess.kind != "config")
            proven = _is_proven(
                follow_batch(spec, replace(guess, rows=(1, 1)), ranks=ranks),  # a proof counts rows
                noted,
                name=f"profile-batch-{index}{'-kept' if keeps_file else ''}",
                overlay=overlay if guess.steps == 1 else {**overlay, ds_config.GRADIENT_ACCUMULATION: guess.steps},
                fed=configured if guess.kind == "config" else guess.own,
                holds=partial(holds, guess=guess),
            )
            if not failed or guess.kind == "config":
                break
        if proven or (proven is None and coincides):
            return None if coincides and guess.kind == "config" else guess
        if guess.kind == "config" and fed.get(2 * configured) == 2 * configured != observed:
            return replace(guess, rows=(1, 1))  # samples in the second dimension, known from a size of 2 on
    if coincides and len(fed) == 1:
        return None
    if mapped and len(set(fed.values())) == 1 < len(fed):
        raise UsageError(
            f"{' and '.join(mapped)} does not set the script's batch size: the engine was fed {observed} rows at a "
            f"micro-batch of {' and of '.join(str(size) for size in fed)}. Name the option that does with "
            "--arg-mapping, or name none."
        )
    return replace(held(observed, sources=sources, present=present, ranks=ranks), keeps_file=failed)


def _tokens(record: LaunchRecord) -> set[int]:
    """Return the tokens of steps, if the inputs are tokens: packs of a fixed length have the same in each step."""
    return {event.elements for event in record.events if event.elements_are_tokens}


def _may_pack(record: LaunchRecord) -> bool:
    """Whether a row of tokens may be many samples in one sequence, and no data loader is known to feed it."""
    sources, engine = record.batch_sources, record.engine
    if record.observed_micro_batch != 1 or sources is None or engine is None or engine.pipeline:
        return False
    if not any(event.elements_are_tokens for event in record.events):
        return False
    return record.trainer is None and not any(item["trains"] and item["batch_size"] for item in sources.loaders)


def find_trainer(
    spec: StudySpec,
    launch: Launch,
    record: LaunchRecord,
    *,
    overlay: Mapping[str, Any],
) -> ScriptTrainer | None:
    """Return the script's trainer, with the options or the settings file proven to set its batch sizes.

    The trainer follows each configuration as it is; these are for the command that trains with the best.
    """
    if record.trainer is None:
        return None
    trainer = ScriptTrainer.from_event(record.trainer)
    sources, engine = record.batch_sources, record.engine
    if ds_config.MICRO_BATCH in spec.script.arg_mappings:
        return replace(trainer, micro_batch=None)  # the launch's, by the mapped option
    if sources is None or engine is None or trainer.micro_batch is None or not spec.follow_batch:
        return trainer
    for index, guess in enumerate(trainer_guesses(trainer, sources, ranks=engine.data_parallel_size)):
        asked, expected = guess.proof_steps()
        proven = _is_proven(
            follow_trainer(spec, guess),
            launch,
            name=f"profile-trainer-{index}",
            overlay={**overlay, ds_config.GRADIENT_ACCUMULATION: asked},
            fed=trainer.micro_batch,
            holds=partial(_sets_itself, steps=expected),
        )
        if proven:
            return guess
    return trainer


def _sets_itself(proof: LaunchRecord, size: int, *, steps: int | None) -> bool:
    """Whether a script's trainer was made with a micro-batch and accumulation steps, before it was given any."""
    trainer = proof.trainer
    return trainer is not None and (trainer.micro_batch, trainer.gradient_accumulation_steps) == (size, steps)


def find_stage_option(
    spec: StudySpec,
    launch: Launch,
    record: LaunchRecord,
    *,
    overlay: Mapping[str, Any],
    differences: Mapping[str, Sequence[Any]],
) -> str:
    """Return the script's option that sets its ZeRO stage; empty if none does.

    It is proven by a launch with another value of the option, whose overlay leaves the stage to the script: the config
    that reaches ``deepspeed.initialize`` has that stage. An option that the user mapped is not searched for.
    """
    present = _scripts_stage(spec, differences)
    if STAGE in spec.script.arg_mappings or not spec.follow_batch:
        return ""
    if record.batch_sources is None or present not in ZERO_STAGES:
        return ""
    batch = {key: value for key, value in overlay.items() if key != ds_config.ZERO}
    options = [name for name, value in record.batch_sources.options.items() if value == present and means_stage(name)]
    for index, option in enumerate(options):
        # Higher stages first: they need less memory.
        accepted = record.batch_sources.choices.get(option) or ZERO_STAGES
        for stage in sorted(set(accepted) - {present}, key=lambda other: (other < present, abs(other - present))):
            proof, _ = launch(_proof(_given(spec, option, stage), f"profile-stage-{index}-{stage}", overlay=batch))
            if proof.engine is not None or proof.config_differences:  # it reached deepspeed.initialize
                if _scripts_stage(spec, proof.config_differences) == stage:
                    return option
                break
    return ""


def find_accumulation_option(
    spec: StudySpec,
    launch: Launch,
    record: LaunchRecord,
    *,
    overlay: Mapping[str, Any],
    differences: Mapping[str, Sequence[Any]],
) -> str:
    """Return the script's option that sets the accumulation steps of its config; empty if none does.

    It is proven by a launch with another value of the option. The script may use its value elsewhere, too: many divide
    the loss by it.
    """
    key = ds_config.GRADIENT_ACCUMULATION
    present, sources = differences.get(key, (None,))[0], record.batch_sources
    if present is None or sources is None or record.trainer is not None or key in spec.script.arg_mappings:
        return ""
    options = [name for name, value in sources.options.items() if value == present and means_accumulation(name)]
    for index, option in enumerate(options if spec.follow_batch else []):
        proof, _ = launch(_proof(_given(spec, option, 2 * present), f"profile-steps-{index}", overlay=overlay))
        if proof.config_differences.get(key, (None,))[0] == 2 * present:
            return option
    return ""


def _given(spec: StudySpec, option: str, value: int) -> StudySpec:
    """Return a spec whose script is given a value of an option."""
    return spec.with_script(args=tuple(with_option(spec.script.args, option, str(value))))


def _proof(spec: StudySpec, launch_id: str, *, overlay: Mapping[str, Any]) -> LaunchRequest:
    """Return the request of a launch of a single step."""
    return launch_request(
        spec, launch_id=launch_id, purpose="profile", overlay=overlay, start_profile_step=1, end_profile_step=1
    )


def _scripts_stage(spec: StudySpec, differences: Mapping[str, Sequence[Any]]) -> Any:
    """Return the ZeRO stage of the config that a script passes, as far as it is known."""
    passed = ds_config.with_values(spec.ds_config, {key: values[0] for key, values in differences.items()})
    return ds_config.zero_section(ds_config.effective(passed)).get("stage", 0)


def _is_proven(
    spec: StudySpec,
    launch: Launch,
    *,
    name: str,
    overlay: Mapping[str, Any],
    fed: int,
    holds: Callable[[LaunchRecord, int], bool],
) -> bool | None:
    """Whether a launch at another micro-batch than the script's (``fed`` rows) shows, by ``holds``, that it follows.

    None if no other micro-batch fits. ``spec`` has the candidate rules for the batch size; the ZeRO settings of
    ``overlay`` are known to fit.
    """
    for size in (2 * fed, fed // 2):  # half if twice as much does not fit
        if size == 0:
            continue
        proof, report = launch(_proof(spec, f"{name}-{size}", overlay={**overlay, ds_config.MICRO_BATCH: size}))
        if report.outcome is Outcome.MEASURED and holds(proof, size):
            return True
        if not report.outcome.infeasible:
            return False
    return None
