"""``--only``: one thing is tuned, the rest stays as the user's config has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import optuna_dsat
from optuna_dsat.config.ds_config import MICRO_BATCH
from optuna_dsat.errors import UsageError
from optuna_dsat.study.space import space_of
from optuna_dsat.study.spec import StudySpec
from optuna_dsat.tuning.options.given import Given
from optuna_dsat.tuning.options.tune_options import AutotuningOptions
from optuna_dsat.tuning.prepare import prepare
from tests.harness.entry_points import DS_CONFIG, EntryPointBench, bench
from tests.harness.landscapes import Hill
from tests.harness.studies import USER_CONFIG, spec_of

__all__ = ["bench"]

ZERO = {"stage": 2, "reduce_bucket_size": 3_000_000, "overlap_comm": False}


def spec(*only: str, **changes: Any) -> StudySpec:
    return spec_of(Path("/w"), **{"ds_config": {**USER_CONFIG, "zero_optimization": ZERO}, **changes, "only": only})


def varied(*only: str, **changes: Any) -> dict[str, set[Any]]:
    """Return the values of each parameter over all configurations of a space, without the micro-batch."""
    values: dict[str, set[Any]] = {}
    for lineage in space_of(spec(*only, **changes), None).lineages():
        for name, value in lineage.items():
            values.setdefault(name, set()).add(value)
    return values


@pytest.mark.parametrize("method", ["random", "guided"])
def test_only_the_batch_is_searched_at_the_users_stage(method: str) -> None:
    for stage in (0, 2):
        config = {**USER_CONFIG, "zero_optimization": {**ZERO, "stage": stage}}
        space = space_of(spec("batch", method=method, ds_config=config), None)
        assert list(space.lineages()) == [{"zero_stage": stage}]
        assert space.micro_batches[0] < space.micro_batches[1]
        zero = space.overlay({"zero_stage": stage, MICRO_BATCH: 4})["zero_optimization"]
        assert {key for key, value in zero.items() if value is not None} == {"stage"}


def test_only_the_stage_is_searched_at_the_users_micro_batch() -> None:
    batch_only = {key: value for key, value in USER_CONFIG.items() if key != MICRO_BATCH} | {"train_batch_size": 12}
    assert varied("stage") == {"zero_stage": {1, 2, 3}}
    assert varied("zero_optimization.stage", method="guided") == {"zero_stage": {0, 1, 2, 3}}
    assert varied("stage", zero_stages=(2, 3)) == {"zero_stage": {2, 3}}
    assert space_of(spec("stage"), None).micro_batches == (2, 2)
    assert space_of(spec("stage", ds_config=batch_only), None).micro_batches == (6, 6)


def test_only_a_knob_is_searched_and_fixed_ones_are_fixed() -> None:
    assert varied("overlap_comm") == {"zero_stage": {2}, "overlap_comm": {False, True}}
    fixed = space_of(spec("batch", fix={"zero_stage": 3, "stage3_prefetch_bucket_size": 5e6}), None)
    assert fixed.stages == (3,)
    zero = fixed.overlay({"zero_stage": 3, MICRO_BATCH: 2})["zero_optimization"]
    assert zero["stage3_prefetch_bucket_size"] == 5_000_000
    assert "reduce_bucket_size" not in zero


@pytest.mark.parametrize(
    ("only", "changes", "message"),
    [
        (("stgae",), {}, "--only names 'stgae', which is not a knob; stage is probably meant"),
        (("reduce_bucket",), {}, "reduce_bucket_size is probably meant"),
        (("learning",), {}, "the knobs are zero_stage, "),
        ((), {"fix": {"overlap_com": 1}}, "--fix names 'overlap_com', which is not a knob; overlap_comm is probably"),
        ((), {"no_tune": ("offload_optimizer_nvme",)}, "--no-tune names 'offload_optimizer_nvme', which is not a knob"),
        (("stage",), {"no_tune": ("zero_stage",)}, "zero_stage is given to both --only and --no-tune"),
        (("batch",), {"fix": {MICRO_BATCH: 4}}, f"{MICRO_BATCH} is given to both --only and --fix"),
        (("stage",), {"divisible_by": 4}, "--divisible-by is about the micro-batch"),
        (("batch",), {"nvme_path": "/tmp"}, "--nvme-path is for offloads"),
        (("sub_group_size",), {}, "sub_group_size, which has no effect in any configuration of this search"),
        (("allgather_partitions",), {}, "allgather_partitions, which has no effect"),
        (("stage",), {"zero_stages": (2,)}, "--only leaves nothing to search: zero_stage can only be 2"),
        (
            ("batch",),
            {"ds_config": {**USER_CONFIG, "zero_optimization": {"stage": 2, "reduce_bucket_size": [1e6, 5e6]}}},
            "The config lists values of reduce_bucket_size, which --only excludes",
        ),
        (
            ("stage",),
            {"ds_config": {**USER_CONFIG, MICRO_BATCH: [2, 4]}},
            f"The config lists values of {MICRO_BATCH}, which --only excludes",
        ),
    ],
)
def test_what_contradicts_it_is_refused(only: tuple[str, ...], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        space_of(spec(*only, **changes), None)
    assert message in str(caught.value)


def test_other_options_name_knobs_in_the_same_ways() -> None:
    named = spec(fix={"zero_optimization.overlap_comm": True, "stage": 3}, no_tune=("batch",))
    assert (named.fix, named.no_tune) == ({"overlap_comm": True, "zero_stage": 3}, (MICRO_BATCH,))


def test_it_identifies_the_study_and_short_names_do_not() -> None:
    assert spec("batch").identity() == spec(MICRO_BATCH).identity() != spec().identity()
    assert spec("batch").identity() != spec("stage").identity()
    assert StudySpec.model_validate(spec("batch", "stage").stored()) == spec("batch", "stage")


@pytest.mark.usefixtures("bench")
def test_stages_to_search_contradict_a_stage_that_stays() -> None:
    with pytest.raises(UsageError, match="zero_stages is about the ZeRO stage, which only leaves"):
        optuna_dsat.tune("train.py", "ds.json", zero_stages=[3], only="batch")


def test_a_search_changes_nothing_else(bench: EntryPointBench) -> None:
    hill = Hill()
    bench.landscape = hill
    optuna_dsat.tune("train.py", "ds.json", only=["batch"], method="binary", max_trials=6, confirm=0, cpu_ranks=2)
    sections = [dict(config["zero_optimization"]) for config in hill.configs]
    assert sections == [sections[0]] * len(sections)
    assert len({config[MICRO_BATCH] for config in hill.configs}) > 2


def test_a_config_for_deepspeeds_autotuner_keeps_no_knob_that_it_names(bench: EntryPointBench) -> None:
    autotuning = {"enabled": True, "fast": True}
    (bench.folder / "ds.json").write_text(json.dumps({**DS_CONFIG, "autotuning": autotuning}))
    options = AutotuningOptions(script="train.py", ds_config="ds.json", cpu_ranks=2, only=("stage",))
    spec = prepare(None, Given(options=options, origins={"only": "argument"})).request.spec
    assert space_of(spec, None).stages == (0, 1, 2, 3)
