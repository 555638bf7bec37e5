"""What the batch size follows by, decided from a profile launch's record; data and batches that are fed."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from optuna_dsat.config.ds_config import GRADIENT_ACCUMULATION, MICRO_BATCH, TRAIN_BATCH, batch_overlay
from optuna_dsat.errors import UsageError
from optuna_dsat.launch.protocol import LaunchRequest
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.events import BatchSourcesFound, TrainerFound
from optuna_dsat.script.arg_mapping import STAGE, map_arguments
from optuna_dsat.script.batch_rule import BatchRule
from optuna_dsat.study.profile import batch_search, turn
from optuna_dsat.study.profile.profiled import Profiled
from optuna_dsat.study.search import recorder
from optuna_dsat.study.space import dataset_size, epoch_samples, largest_global_batch
from optuna_dsat.study.spec import StudySpec
from tests.harness.studies import StudyBench, spec_of

MAPPED = {"script": "/x/train.py", "cwd": "/x", "config_path": "/x/ds.json", "arg_mappings": {MICRO_BATCH: "--bs"}}


def spec_with(**changes: Any) -> StudySpec:
    return spec_of(Path("/x"), **changes)


class Record:
    """A profile launch that fed the engine batches of one size, and noted nothing of where it comes from."""

    batch_sources = trainer = None
    events: Any = ()
    sizes: tuple[int, ...] = ()

    class engine:  # noqa: N801 - stands in for an event
        pipeline = False
        data_parallel_size = 1

    def __init__(self, fed: int | None) -> None:
        self.observed_micro_batch = fed

    def differing_micro_batches(self, **_: int | None) -> tuple[int, ...]:
        return self.sizes


@pytest.mark.parametrize(("fed", "kept"), [(16, None), (4, 4), (None, 16)])
def test_a_fixed_micro_batch_is_compared_with_what_was_fed(fed: int | None, kept: int | None) -> None:
    spec = spec_with(fix={MICRO_BATCH: 16})
    record: Any = Record(fed)
    launcher: Any = None  # nothing is launched where nothing can be guessed
    rule = batch_search.find_batch_rule(spec, launcher, record, overlay={MICRO_BATCH: 16}, present=16)
    assert (None if rule is None else (rule.kind, rule.own)) == (None if kept is None else ("held", kept))


@pytest.mark.parametrize(("fed", "kept"), [(16, None), (4, 4), (None, None)])
def test_a_pipeline_that_is_fed_by_the_scripts_own_iterator_is_compared_too(
    fed: int | None, kept: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Record.engine, "pipeline", True)
    record: Any = Record(fed)
    launcher: Any = None
    rule = batch_search.find_batch_rule(spec_with(), launcher, record, overlay={MICRO_BATCH: 16}, present=16)
    assert (None if rule is None else rule.own) == kept


def test_a_mapped_option_is_followed_where_no_inputs_are_seen() -> None:
    """The message that no option was found recommends to map one."""
    record: Any = Record(None)
    launcher: Any = None
    spec = spec_with(script=MAPPED)
    assert batch_search.find_batch_rule(spec, launcher, record, overlay={MICRO_BATCH: 1}, present=8) is None


def test_batches_that_differ_in_size_are_the_scripts_own_at_the_users_micro_batch() -> None:
    record: Any = Record(9)
    record.sizes = (9, 8, 25)
    launcher: Any = None  # no guess is launched: none can be proven
    rule = batch_search.find_batch_rule(spec_with(), launcher, record, overlay={MICRO_BATCH: 1}, present=8)
    assert rule is not None
    assert (rule.kind, rule.own, rule.sizes) == ("held", 8, (8, 25))
    assert BatchRule.from_json(json.loads(json.dumps(rule.to_json()))) == rule
    assert "differ in size from step to step (8 to 25 samples" in rule.announcement()
    assert "in samples/s of the measured steps" in rule.announcement()


@dataclass
class Trains:
    """A launch of a script that computes its trainer's micro-batch and accumulation steps from options."""

    micro_batch: int
    steps: int
    options: dict[str, int]
    missing: bool = False
    engine = Record.engine

    @property
    def outcome(self) -> Outcome:
        return Outcome.OUT_OF_MEMORY if self.missing else Outcome.MEASURED

    @property
    def trainer(self) -> TrainerFound:
        return TrainerFound(
            rank=0, time=1.0, framework="transformers", micro_batch=self.micro_batch,
            gradient_accumulation_steps=self.steps, options={},
        )  # fmt: skip

    @property
    def batch_sources(self) -> BatchSourcesFound:
        return BatchSourcesFound(rank=0, time=1.0, options=self.options)


def of_own_names(options: dict[str, int]) -> tuple[int, int]:
    return options["--train-batch"], options.get("--accumulate", 4)


def of_both(options: dict[str, int]) -> tuple[int, int]:
    return options["--mbs"], options["--batch_size"] // options["--mbs"]


@pytest.mark.parametrize(
    ("sizes", "options", "expected"),
    [
        (of_own_names, {"--eval-batch": 3, "--rank": 3, "--train-batch": 3}, {MICRO_BATCH: "--train-batch"}),
        (
            of_own_names,
            {"--train-batch": 3, "--accumulate": 1},
            {MICRO_BATCH: "--train-batch", GRADIENT_ACCUMULATION: "--accumulate"},
        ),
        (of_own_names, {"--train-batch": 3, "--max-batches": 12}, {MICRO_BATCH: "--train-batch"}),
        (of_both, {"--mbs": 4, "--batch_size": 32}, {MICRO_BATCH: "--mbs", TRAIN_BATCH: "--batch_size"}),
        (lambda _: (8, 1), {"--batch-size": 8}, {}),
    ],
    ids=["alone", "with accumulation", "beside one that means nothing", "with the global batch", "a constant"],
)
@pytest.mark.parametrize("room", [100, 5])
def test_options_of_any_name_that_set_a_trainers_batch_sizes_are_proven(
    sizes: Any, options: dict[str, int], expected: dict[str, str],
    room: int,
) -> None:  # fmt: skip
    launched: list[str] = []

    def launch(request: LaunchRequest) -> Any:
        launched.append(request.launch_id)
        words = map_arguments((), request.command.arg_mappings, request.overlay, world_size=1)
        given = {name: int(value) for name, value in zip(words[::2], words[1::2], strict=True)}
        micro_batch, steps = sizes({**options, **given})
        ran = Trains(micro_batch, steps, options, missing=request.overlay[MICRO_BATCH] > room)
        return ran, ran

    micro_batch, steps = sizes(options)
    profile: Any = Trains(micro_batch, steps, options)
    asked: dict[str, Any] = {"overlay": batch_overlay(1)}
    trainer = batch_search.find_trainer(spec_with(), launch, profile, **asked)
    assert trainer is not None
    assert trainer.options == expected
    assert len(set(launched)) == len(launched) > 0
    for spec in (spec_with(follow_batch=False), spec_with(script=MAPPED)):
        launched.clear()
        trainer = batch_search.find_trainer(spec, launch, profile, **asked)
        assert (trainer and trainer.options, launched) == ({}, [])
    assert trainer is not None
    assert "(now" not in trainer.announcement().partition(" and ")[0], "it was given the launch's by the mapped option"


def test_a_settings_file_that_sets_a_trainers_size_is_proven() -> None:
    keys = {"eval_batch_size": 3, "layers": 3, "batch_of_another": 3, "train_batch_size": 3}
    noted = [{"file": "/x/run.yaml", "key": key, "value": value} for key, value in keys.items()]

    @dataclass
    class ReadsAFile(Trains):
        @property
        def batch_sources(self) -> BatchSourcesFound:
            return BatchSourcesFound(rank=0, time=1.0, options={}, settings=noted)

    def launch(request: LaunchRequest) -> Any:
        source = request.command.batch_source
        follows = source["key"] == "train_batch_size"
        ran = ReadsAFile(request.overlay[MICRO_BATCH] if follows else 3, 1, {})
        return ran, ran

    profile: Any = ReadsAFile(3, 1, {})
    trainer = batch_search.find_trainer(spec_with(), launch, profile, overlay=batch_overlay(1))
    assert trainer is not None
    assert trainer.options == {}
    assert trainer.source == {
        "kind": "setting", "file": "/x/run.yaml", "key": "train_batch_size", "own": 3, "scale": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fed", "mapped", "expected"),
    [
        (lambda options, _: 2 * options["--bs"], False, ("option", 4, (2, 1))),
        (lambda _, config: 2 * config, False, ("config", 4, (2, 1))),
        (lambda options, config: options["--frames"] * config, False, ("config", 4, (8, 1))),
        (lambda _, config: 20 if config == 1 else config, False, ("config", 4, (1, 1))),
        (lambda options, _: {4: 4, 8: 32}[options["--bs"]], False, ("held", 4, (1, 1))),
        (lambda options, _: 2 * options["--bs"], True, ("config", 4, (2, 1))),
        (lambda options, _: options["--bs"] ** 2 + 3, True, ("held", 4, (1, 1))),
        (lambda options, _: 2 * options["--bs"] + 5, False, ("held", 4, (13, 4))),
        (lambda *_: 8, True, None),
    ],
    ids=[
        "option",
        "config",
        "frames",
        "time first",
        "nodes",
        "mapped",
        "mapped, no proportion",
        "no proportion",
        "mapped in vain",
    ],
)
def test_rows_per_sample_are_proven_by_a_second_size(
    fed: Any, mapped: bool,
    expected: tuple[str, int, tuple[int, int]] | None,
) -> None:  # fmt: skip
    class Fed(Record):
        outcome = Outcome.MEASURED
        batch_sources: Any = BatchSourcesFound(rank=0, time=1.0, options={"--bs": 4, "--frames": 8})

    def ran(request: LaunchRequest | None, size: int, mappings: Any) -> Any:
        words = map_arguments((), mappings, {MICRO_BATCH: size}, world_size=1)
        given = {"--frames": 8} | {name: int(value) for name, value in zip(words[::2], words[1::2], strict=True)}
        rows = (1, 1) if request is None else request.command.batch_source.get("rows", (1, 1))
        return Fed(-(-fed({"--bs": 4, **given}, size) * rows[1] // rows[0]))

    def launch(request: LaunchRequest) -> Any:
        proof = ran(request, request.overlay[MICRO_BATCH], request.command.arg_mappings)
        return proof, proof

    spec = spec_with(script=MAPPED) if mapped else spec_with()

    def found() -> BatchRule | None:
        return batch_search.find_batch_rule(
            spec, launch, ran(None, 1, spec.script.arg_mappings), overlay=batch_overlay(1), present=4,
        )  # fmt: skip

    if expected is None:
        with pytest.raises(UsageError, match=r"--bs does not set .* fed 8 rows at a micro-batch of 1 and of 2"):
            found()
        return
    rule = found()
    assert (None if rule is None else (rule.kind, rule.own, rule.rows)) == expected


@pytest.mark.parametrize(
    ("fed", "rows", "tokens"),
    [(1, (1, 4), True), (4, None, True), (1, None, False)],
    ids=["packed", "follows the config", "no tokens"],
)
def test_a_row_of_tokens_without_a_data_loader_is_proven_to_be_a_sample(
    bench: StudyBench, fed: int, rows: tuple[int, int] | None, tokens: bool
) -> None:
    class Fed(Record):
        outcome = Outcome.MEASURED
        batch_sources: Any = BatchSourcesFound(rank=0, time=1.0, options={}, fed_at=[{"file": "x.py", "line": 1}])
        events = (SimpleNamespace(elements_are_tokens=tokens),)

    def launch(request: LaunchRequest) -> Any:
        assert request.overlay[MICRO_BATCH] == 4  # as in the first trial, which continues this launch
        return Fed(fed), Fed(fed)

    record: Any = Fed(1)
    rule = batch_search.find_batch_rule(bench.spec(), launch, record, overlay=batch_overlay(1), present=4)
    assert (None if rule is None else (rule.own, rule.rows)) == (rows and (4, rows))


@pytest.mark.parametrize("follows", [True, False])
def test_a_script_that_requires_its_number_in_the_config_file_is_proven_with_it(follows: bool) -> None:
    """WeNet requires a micro-batch of 1 there, and takes its batch size from a YAML file."""
    launched: list[str] = []

    def launch(request: LaunchRequest) -> Any:
        launched.append(request.launch_id)
        size = {**request.ds_config, **request.in_file}[MICRO_BATCH]
        proof = Record(int(request.overlay[MICRO_BATCH]) if follows else 8)
        return proof, SimpleNamespace(outcome=Outcome.MEASURED if size == 1 else Outcome.SCRIPT_ERROR)

    record: Any = Record(8)
    record.batch_sources = BatchSourcesFound(rank=0, time=1.0, options={"--batch-size": 8})
    spec = spec_with(ds_config={MICRO_BATCH: 1})
    rule = batch_search.find_batch_rule(spec, launch, record, overlay=batch_overlay(1), present=1)
    assert rule is not None
    assert (rule.kind, rule.own, rule.keeps_file) == ("option" if follows else "held", 8, True)
    assert launched[:2] == ["profile-batch-0-16", "profile-batch-0-kept-16"]


@pytest.mark.parametrize(("packs", "expected"), [(True, ("held", 1)), (False, ("loader", 1))])
def test_a_data_loader_of_which_a_single_pack_is_used_is_not_followed(packs: bool, expected: tuple[str, int]) -> None:
    """``collate_fn=lambda packs: packs[0]`` drops the others: twice the samples/s were reported for the same work."""

    class Fed(Record):
        outcome = Outcome.MEASURED
        batch_sources: Any = BatchSourcesFound(
            rank=0,
            time=1.0,
            options={},
            loaders=[{"file": "x", "line": 3, "batch_size": 1, "samples": 9, "trains": True}],
        )

        def __init__(self, fed: int) -> None:
            super().__init__(fed)
            self.events = [SimpleNamespace(elements_are_tokens=True, elements=512 * (1 if packs else fed))]

    def launch(request: LaunchRequest) -> Any:
        proof = Fed(request.overlay[MICRO_BATCH] if request.command.batch_source.get("kind") == "loader" else 1)
        return proof, proof

    record: Any = Fed(1)
    rule = batch_search.find_batch_rule(spec_with(), launch, record, overlay=batch_overlay(1), present=1)
    assert rule is not None
    assert (rule.kind, rule.own) == expected


@pytest.mark.parametrize("constant", [2, 3])
def test_a_constant_batch_size_is_not_taken_for_one_that_follows_the_config(constant: int) -> None:
    class Fed(Record):
        batch_sources: Any = BatchSourcesFound(rank=0, time=1.0, options={})
        outcome = Outcome.MEASURED

    record: Any = Fed(constant)
    launch: Any = lambda _: (record, record)  # noqa: E731 - whatever is asked
    rule = batch_search.find_batch_rule(spec_with(), launch, record, overlay=batch_overlay(1), present=constant)
    assert rule is not None
    assert (rule.kind, rule.own) == ("held", constant)


@pytest.mark.parametrize("own", [1, 4])
@pytest.mark.parametrize(
    ("fed", "room", "expected", "launches"),
    [
        (lambda options, _: options["--bs"], 99, "--bs", 1),
        (lambda options, _: options["--bs"], 0, "--bs", 1),
        (lambda options, _: options["--size"], 99, "--size", 3),
        (lambda _, config: config, 99, None, 1),
        (lambda _, config: config, 0, None, 1),
    ],
    ids=["option", "option, out of memory", "option of another name", "config", "config, out of memory"],
)
def test_a_size_that_coincides_with_the_config_is_proven_at_another(
    own: int, fed: Any, room: int, expected: str | None, launches: int
) -> None:
    options = {"--bs": own} if expected == "--bs" else {"--size": own}
    loader = {"file": "/x/train.py", "line": 3, "batch_size": own, "samples": 99, "trains": True}
    launched: list[str] = []

    class Fed(Record):
        batch_sources: Any = BatchSourcesFound(rank=0, time=1.0, options=options, loaders=[loader])
        outcome = Outcome.MEASURED

    def launch(request: LaunchRequest) -> Any:
        launched.append(request.launch_id)
        size = request.overlay[MICRO_BATCH]
        words = map_arguments((), request.command.arg_mappings, {MICRO_BATCH: size}, world_size=1)
        given = {name: int(value) for name, value in zip(words[::2], words[1::2], strict=True)}
        proof = Fed(fed({**options, **given}, size))
        if size > room:
            proof.outcome = Outcome.OUT_OF_MEMORY
        return proof, proof

    record: Any = Fed(own)
    rule = batch_search.find_batch_rule(spec_with(), launch, record, overlay=batch_overlay(own), present=own)
    assert (None if rule is None else rule.option) == expected
    assert len(launched) == (2 if room == 0 and own == 4 else launches)
    record.batch_sources = BatchSourcesFound(
        rank=0, time=1.0, options={}, settings=[{"file": "/x/ds.json", "key": MICRO_BATCH, "value": own}]
    )
    launched.clear()
    assert batch_search.find_batch_rule(spec_with(), launch, record, overlay=batch_overlay(own), present=own) is None
    assert not launched, "the script reads a DeepSpeed config"
    kept = spec_with(no_tune=[MICRO_BATCH])
    assert batch_search.find_batch_rule(kept, launch, record, overlay=batch_overlay(own), present=own) is None


@dataclass
class Passes:
    """A launch of a script that passes a config of its own; it fails before that where there is none."""

    stage: int | None
    options: dict[str, int]
    accepted: dict[str, list[int]]
    outcome = Outcome.SCRIPT_ERROR
    engine = None

    @property
    def config_differences(self) -> dict[str, list[Any]]:
        if self.stage is None:
            return {}
        stage = {STAGE: [self.stage, None]} if self.stage else {}  # 0 is DeepSpeed's default
        return {"optimizer.type": ["Lion", "Adam"], **stage}

    @property
    def batch_sources(self) -> BatchSourcesFound:
        return BatchSourcesFound(rank=0, time=1.0, options=self.options, choices=self.accepted)


@pytest.mark.parametrize(
    ("sets", "options", "accepted", "expected", "launches"),
    [
        (lambda given: given["--zero_stage"], {"--zero_stage": 1}, {}, "--zero_stage", [("--zero_stage", "2")]),
        (lambda given: given["--zero_stage"], {"--zero_stage": 1}, {"--zero_stage": [0, 1]}, "--zero_stage",
         [("--zero_stage", "0")]),
        (lambda given: given["stage="], {"stage=": 3, "--epochs": 3}, {}, "stage=", [("stage=2",)]),
        (lambda given: given["--ds.zero_stage"], {"--stage": 0, "--ds.zero_stage": 0}, {}, "--ds.zero_stage",
         [("--stage", "1"), ("--ds.zero_stage", "1")]),
        (lambda given: None if given["--stage"] == 2 else given["--stage"], {"--stage": 1}, {}, "--stage",
         [("--stage", "2"), ("--stage", "3")]),
        (lambda _: 1, {"--stage": 1, "--zero_stage": 2}, {}, "", [("--stage", "2")]),
    ],
    ids=["option", "choices", "override", "second of two", "fails at a stage", "sets nothing"],
)  # fmt: skip
def test_an_option_that_sets_the_stage_is_proven(
    sets: Any, options: dict[str, int],
    accepted: dict[str, list[int]], expected: str, launches: list[tuple[str, ...]],
) -> None:  # fmt: skip
    given: list[tuple[str, ...]] = []

    def launch(request: LaunchRequest) -> Any:
        assert "zero_optimization" not in request.overlay, "the script sets the stage"
        given.append(request.command.args)
        name, value = request.command.args[-1].partition("=")[::2]
        changed = {f"{name}=": int(value)} if value else {request.command.args[-2]: int(name)}
        ran = Passes(sets({**options, **changed}), options, accepted)
        return ran, ran

    profile: Any = Passes(sets(options), options, accepted)
    script = {"script": "/x/train.py", "cwd": "/x", "config_path": ""}
    asked: dict[str, Any] = {
        "overlay": {**batch_overlay(1), "zero_optimization": {"stage": 3}},
        "differences": profile.config_differences,
    }
    spec = spec_with(script=script, ds_config={})
    assert batch_search.find_stage_option(spec, launch, profile, **asked) == expected
    assert given == launches
    given.clear()
    mapped = spec_with(script={**script, "arg_mappings": {STAGE: "--level"}}, ds_config={})
    for other in (mapped, spec_with(script=script, ds_config={}, follow_batch=False)):
        assert batch_search.find_stage_option(other, launch, profile, **asked) == ""
    assert given == []


@pytest.mark.parametrize(
    ("own", "expected"), [(2, "--accum"), (3, "--steps-accumulated"), (4, "--update_freq"), (None, "")]
)
def test_an_option_that_sets_the_accumulation_steps_is_proven(own: int | None, expected: str) -> None:
    options = {"--accum": 2, "--epochs": 3, "--steps-accumulated": 3, "--batch-size": 3, "--update_freq": 4}
    launched: list[Any] = []

    def launch(request: LaunchRequest) -> Any:
        launched.append(request.command.args)
        found = SimpleNamespace(config_differences={GRADIENT_ACCUMULATION: [int(request.command.args[-1]), 1]})
        return found, found

    record: Any = SimpleNamespace(batch_sources=BatchSourcesFound(rank=0, time=1.0, options=options), trainer=None)
    differences = {} if own is None else {GRADIENT_ACCUMULATION: [own, own]}
    asked: dict[str, Any] = {"overlay": batch_overlay(1), "differences": differences}
    assert batch_search.find_accumulation_option(spec_with(), launch, record, **asked) == expected
    assert [args[-2:] for args in launched] == ([] if own is None else [(expected, str(2 * own))])


@pytest.mark.parametrize(("loads_all", "given", "expected"), [
    (False, None, (8000, 8000, 800)),
    (True, None, (4000, 8000, 400)),
    (True, 6000, (6000, 6000, 600)),
    (False, 20, (20, 20, 8)),
])  # fmt: skip
def test_data_that_each_rank_loads_as_a_whole_count_once(
    profiled: Profiled, loads_all: bool, given: int | None, expected: tuple[int, int, int]
) -> None:
    profiled = Profiled.from_json(replace(profiled, samples_per_rank=4000, loads_all=loads_all).to_json())
    spec = spec_with(dataset_size=given)
    sizes = (
        dataset_size(spec, profiled),
        epoch_samples(spec, profiled),
        largest_global_batch(spec, profiled, user_batch=8),
    )
    assert sizes == expected


def test_data_of_less_than_the_users_micro_batch_are_told(bench: StudyBench, profiled: Profiled) -> None:
    few = Profiled.from_json(replace(profiled, samples_per_rank=5).to_json())
    spec = bench.spec(ds_config={"train_micro_batch_size_per_gpu": 8}, train_batch_size=None)
    assert turn._data_in_words(spec, few) == (
        "The training data give a rank 5 samples in an epoch: no larger micro-batch is tried. Your own, 8, is not "
        "reached and cannot be compared with."
    )


@pytest.mark.parametrize(("fed", "limit"), [(16, 32), (64, 127), (None, 127)])
def test_a_script_that_feeds_less_than_its_micro_batch_is_asked_for_no_more(fed: int | None, limit: int) -> None:
    config = {"train_micro_batch_size_per_gpu": 64, "gradient_accumulation_steps": 2}
    record = SimpleNamespace(observed_micro_batch=fed, data_seen=lambda batch: 5 * batch)
    flight: Any = SimpleNamespace(request=SimpleNamespace(ds_config=config, end_profile_step=3), record=record)
    assert recorder._data_limit(flight) == limit


def test_the_global_batch_follows_in_a_script_with_an_option_for_it(profiled: Profiled) -> None:
    followed = replace(profiled, global_batch_option="--global").followed_by(spec_with())
    assert followed.script.arg_mappings == {TRAIN_BATCH: "--global"}
