"""The search space: choices, conditions, and the way between params and DeepSpeed configs."""

from __future__ import annotations

import itertools
from typing import Any

import optuna
import pytest
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from optuna_dsat.config import ds_config
from optuna_dsat.config.ds_config import MICRO_BATCH
from optuna_dsat.config.knobs import KNOBS
from optuna_dsat.config.search_space import Role, SearchSpace
from optuna_dsat.config.space_builder import SpaceRequest, build_space
from optuna_dsat.errors import ConfigError

PARAMS = 1_313_280
BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}
SPACES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "unknown size": ({}, {"params": None}),
    "all stages and nvme": ({}, {"zero_stages": (0, 1, 2, 3), "nvme_path": "/nvme", "device": "cuda"}),
    "user offloads": (
        {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "ratio": 0.9, "buffer_count": 6},
            "offload_param": {"device": "cpu"},
        },
        {"device": "cuda"},
    ),
    "user on nvme": ({"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/disk"}}, {}),
    "lists": ({"stage": [2, 3], "reduce_bucket_size": [5e5, 2e5], "allgather_bucket_size": [2e8, 5e8]}, {}),
    "fixed": ({}, {"fix": {"contiguous_gradients": False, "offload_optimizer": "cpu", "sub_group_size": "1e6"}}),
    "fixed nvme": ({}, {"fix": {"offload_optimizer": "nvme"}, "nvme_path": "/nvme"}),
    "kept": (
        {"stage": 1, "contiguous_gradients": False, "offload_optimizer": {"device": "cpu"}},
        {"no_tune": ("contiguous_gradients", "offload_optimizer", "stage3_max_live_parameters")},
    ),
    "old spelling": (
        {"stage": 2, "cpu_offload": True, "prefetch_bucket_size": 7, "cpu_offload_use_pin_memory": False},
        {},
    ),
    "sequential": ({"stage": 3, "stage3_allgather_sequential": True}, {}),
    "pipeline": ({"stage": 1}, {"pipeline": True, "zero_stages": (0, 1, 2, 3)}),
    "several nodes": ({"stage": 3}, {"nodes": 2, "ranks_per_node": 4, "nvme_path": "/nvme"}),
}  # fmt: skip


def make(zero: dict[str, Any] | None = None, /, *, config: dict[str, Any] | None = None, **options: Any) -> SearchSpace:
    options = {"params": PARAMS, "micro_batch_cap": 64, "device": "cpu", "ranks_per_node": 2, **options}
    return build_space(
        SpaceRequest(ds_config={**BASE, **({"zero_optimization": zero} if zero else {}), **(config or {})}, **options)
    )


def choices_of(space: SearchSpace) -> dict[str, tuple[Any, ...]]:
    return {tuned.name: tuned.choices for tuned in space.knobs}


def draw(space: SearchSpace, count: int, seed: int = 0) -> list[dict[str, Any]]:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
    drawn = []
    for _ in range(count):
        trial = study.ask()
        drawn.append(space.suggest(trial))
        assert trial.params == drawn[-1]
        study.tell(trial, 0.0)
    return drawn


@pytest.mark.parametrize("name", SPACES)
def test_every_drawn_configuration_is_valid_conditional_and_read_back(name: str) -> None:
    zero, options = SPACES[name]
    space = make(zero, **options)
    base = ds_config.effective({**BASE, "zero_optimization": zero})
    for params in draw(space, 120):
        overlay = space.overlay(params)
        config = ds_config.merge(base, overlay)
        section = config["zero_optimization"]
        parsed = DeepSpeedZeroConfig(**section)
        stage = params["zero_stage"]
        assert int(parsed.stage) == section["stage"] == stage
        assert space.params_of(config) == params
        assert config[MICRO_BATCH] == params[MICRO_BATCH]
        assert config["gradient_accumulation_steps"] == 2
        assert "train_batch_size" not in config
        assert not {"cpu_offload", "cpu_offload_param", "prefetch_bucket_size"} & section.keys()
        if stage < 3:
            assert not [key for key in section if key.startswith("stage3_") and key != "stage3_allgather_sequential"]
            assert "offload_param" not in section
            assert (parsed.offload_optimizer is None) or parsed.offload_optimizer.device == "cpu"
        if stage == 0:
            assert section.keys() <= {"stage", "stage3_allgather_sequential"}
        for key in ("offload_optimizer", "offload_param"):
            offload = section.get(key, {})
            assert (offload.get("device") == "nvme") == ("nvme_path" in offload)


@pytest.mark.parametrize("name", ["all stages and nvme", "user offloads", "fixed", "pipeline", "several nodes"])
def test_the_number_of_classes_is_what_an_enumeration_finds(name: str) -> None:
    zero, options = SPACES[name]
    space = make(zero, **{**options, "params": 600_000})
    seen = set()
    for combination in itertools.product(*(tuned.choices for tuned in space.knobs)):
        fixed = dict(zip((tuned.name for tuned in space.knobs), combination, strict=True))
        params = space.suggest(optuna.trial.FixedTrial({**fixed, MICRO_BATCH: 4}))
        seen.add(tuple(sorted(params.items())))
    assert space.classes() == len(seen)


@pytest.mark.parametrize(
    ("stage", "without"),
    [
        ({"zero_stage": 0}, {knob.name for knob in KNOBS} - {"zero_stage"}),
        (
            {"zero_stage": 2, "offload_optimizer": "none", "contiguous_gradients": True},
            {"offload_param", "sub_group_size", "allgather_bucket_size", "allgather_partitions"},
        ),
        ({"zero_stage": 1, "offload_optimizer": "cpu"}, {"contiguous_gradients"}),
        ({"zero_stage": 3, "offload_optimizer": "cpu", "contiguous_gradients": False}, {"reduce_scatter"}),
    ],
)
def test_knobs_that_do_nothing_are_not_drawn(stage: dict[str, Any], without: set[str]) -> None:
    space = make(zero_stages=(0, 1, 2, 3), device="cuda")
    every = {tuned.name: tuned.choices[-1] for tuned in space.knobs}
    params = space.suggest(optuna.trial.FixedTrial({**every, **stage, MICRO_BATCH: 1}))
    assert not without & params.keys()
    assert next(iter(params)) == "zero_stage"
    assert list(params)[-1] == MICRO_BATCH


def test_pipelines_never_overlap_and_stay_below_stage_2() -> None:
    space = make(pipeline=True, zero_stages=(0, 1, 2, 3))
    assert space.stages == (0, 1)
    assert all("overlap_comm" not in params for params in draw(space, 50))
    with pytest.raises(ConfigError, match="pipeline parallelism runs with ZeRO 0 and 1 only"):
        make(pipeline=True, zero_stages=(2, 3))


def test_zero_1_with_the_bf16_optimizer_has_no_buckets() -> None:
    bf16 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    for params in draw(make(config=bf16, zero_stages=(1,)), 40):
        buckets = params["offload_optimizer"] == "cpu"
        assert ("reduce_bucket_size" in params) == ("overlap_comm" in params) == buckets


def test_zero_0_is_left_out_where_deepspeed_refuses_its_gradient_type() -> None:
    mixed = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    assert make(config=mixed, zero_stages=(0, 1)).stages == (1,)
    assert make(config={**mixed, "data_types": {"grad_accum_dtype": "bfloat16"}}, zero_stages=(0, 1)).stages == (0, 1)
    low = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}
    assert make(config=low, zero_stages=(0, 1)).stages == (1,)
    with pytest.raises(ConfigError, match="ZeRO 0 cannot accumulate"):
        make(config=mixed, zero_stages=(0,))


def test_prescaled_gradients_turn_reduce_scatter_off_where_deepspeed_refuses_it() -> None:
    for extra in ({"prescale_gradients": True}, {"gradient_predivide_factor": 2.0}):
        space = make(config=extra)
        for params in draw(space, 60):
            if params["zero_stage"] >= 2:
                assert "reduce_scatter" not in params
                assert space.overlay(params)["zero_optimization"]["reduce_scatter"] is False


def test_a_mixture_of_experts_keeps_what_deepspeed_requires_of_it() -> None:
    """Trials without were launched twice, to be refused by DeepSpeed's assertions."""
    drawn = draw(make(leaf_classes=("Experts",), zero_stages=(1, 2)), 60)
    assert not any("reduce_scatter" in params for params in drawn)
    assert {params["zero_stage"] for params in drawn if "contiguous_gradients" in params} == {1}


def test_sizes_beyond_the_model_become_one_choice() -> None:
    choices = choices_of(make())
    assert choices["reduce_bucket_size"] == (1_000_000, 1_400_000)
    assert choices["stage3_prefetch_bucket_size"] == (1_400_000,)
    assert choices["stage3_max_reuse_distance"] == (2_700_000,)
    assert choices["stage3_param_persistence_threshold"] == (10_000, 100_000, 1_000_000)
    assert choices_of(make(params=7))["reduce_bucket_size"] == (8,)
    assert choices_of(make(params=None))["reduce_bucket_size"][-1] == 5 * 10**9


def test_a_list_narrows_and_all_does_not() -> None:
    zero = {"stage": "all", "reduce_bucket_size": [3e5, 5e5], "overlap_comm": [True], "contiguous_gradients": "all"}
    choices = choices_of(make(zero, zero_stages=(1, 2)))
    assert choices["zero_stage"] == (1, 2)
    assert choices["reduce_bucket_size"] == (300_000, 500_000)
    assert choices["overlap_comm"] == (True,)
    assert choices["contiguous_gradients"] == (False, True)


def test_stages_of_the_config_and_of_the_command_meet() -> None:
    assert make({"stage": [1, 2]}, zero_stages=(2, 3)).stages == (2,)
    with pytest.raises(ConfigError, match="No ZeRO stage is left"):
        make({"stage": [1]}, zero_stages=(2, 3))
    assert make(fix={"zero_stage": "2"}).stages == (2,)
    assert make({"stage": 3}, no_tune=("zero_stage",)).stages == (3,)


def test_a_knob_without_effect_is_drawn_only_when_values_are_listed() -> None:
    assert not {"allgather_bucket_size", "allgather_partitions"} & choices_of(make()).keys()
    listed = make({"allgather_partitions": [True, False]}, zero_stages=(2,))
    assert "allgather_partitions" in choices_of(listed)
    rows = {row.knob: row for row in make().describe()}
    assert rows["allgather_bucket_size"].role == "without effect"


def test_fixed_knobs_are_laid_over_but_are_no_parameters() -> None:
    space = make({"stage": 2, "reduce_bucket_size": 7}, fix={"reduce_bucket_size": "5e5", "offload_param": "cpu"})
    for params in draw(space, 60):
        zero = space.overlay(params)["zero_optimization"]
        assert "reduce_bucket_size" not in params
        assert zero["reduce_bucket_size"] == 500_000
        assert (zero["offload_param"] is not None) == (params["zero_stage"] == 3)
    assert {tuned.name for tuned in space.knobs if tuned.role is Role.FIXED} == {"reduce_bucket_size", "offload_param"}


def test_defaults_that_only_the_search_wrote_are_left_out_of_what_is_handed_over() -> None:
    space = make({"stage": 2, "reduce_scatter": True}, fix={"contiguous_gradients": True})
    config = {
        "zero_optimization": {
            "stage": 2, "reduce_scatter": True, "contiguous_gradients": True, "overlap_comm": False,
            "reduce_bucket_size": 500_000_000, "allgather_bucket_size": 7,
        },
        "train_batch_size": 8,
    }  # fmt: skip
    assert space.without_idle(config) == {
        "zero_optimization": {"stage": 2, "reduce_scatter": True, "contiguous_gradients": True},
        "train_batch_size": 8,
    }
    other = {"zero_optimization": {"stage": 3, "overlap_comm": False, "reduce_bucket_size": 499}}
    assert space.without_idle(other) == other, "at ZeRO 3 DeepSpeed overlaps"


def test_parameters_on_nvme_are_not_kept_for_reuse_unless_the_user_does() -> None:
    own = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/disk"}, "stage3_max_reuse_distance": 7}
    for zero, kept in (
        ({"stage3_max_reuse_distance": 7}, 0),
        (own, 7),
        ({**own, "stage3_max_reuse_distance": None}, None),
    ):
        space = make(zero, nvme_path="/nvme", zero_stages=(3,))
        for params in draw(space, 50):
            section = space.overlay(params)["zero_optimization"]
            on_nvme = params["offload_param"] == "nvme"
            assert ("stage3_max_reuse_distance" in params) != on_nvme
            assert ("stage3_prefetch_bucket_size" in params) != on_nvme
            if on_nvme:
                assert section["stage3_max_reuse_distance"] == kept
                assert section["stage3_prefetch_bucket_size"] == (None if "offload_param" in zero else 0)


def test_ranks_on_the_cpu_have_parameters_on_nvme_in_bf16_only() -> None:
    half = {"bf16": {"enabled": True}}
    for config, device, searched in (({}, "cpu", False), (half, "cpu", True), ({}, "cuda", True)):
        request: dict[str, Any] = {"zero_stages": (3,), "nvme_path": "/nvme", "device": device}
        choices = choices_of(build_space(SpaceRequest(ds_config=config, **request)))
        assert ("nvme" in choices["offload_param"]) == searched
        assert True in choices["offload_optimizer_nvme"]
    with pytest.raises(ConfigError, match=r"in bf16 only: set bf16\.enabled"):
        build_space(SpaceRequest(ds_config={}, fix={"offload_param": "nvme"}, nvme_path="/nvme", device="cpu"))


def test_an_nvme_only_optimizer_is_not_offloaded_below_stage_3() -> None:
    space = make({"offload_optimizer": {"device": ["none", "nvme"]}}, nvme_path="/nvme")
    devices = {
        (params["zero_stage"], (space.overlay(params)["zero_optimization"]["offload_optimizer"] or {}).get("device"))
        for params in draw(space, 200)
    }
    assert devices == {(1, None), (2, None), (3, None), (3, "nvme")}


def test_the_users_own_subkeys_survive_offload() -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": False, "buffer_count": 6, "ratio": 0.5}}
    space = make(zero, device="cuda", fix={"offload_optimizer": "cpu"})
    base = {"zero_optimization": zero}
    for params in draw(space, 30):
        section = ds_config.merge(base, space.overlay(params))["zero_optimization"]["offload_optimizer"]
        expected = {"device": "cpu", "pin_memory": False, "buffer_count": 6}
        assert section == (expected | {"ratio": 0.5} if params["zero_stage"] == 3 else expected)


def test_memory_is_pinned_on_cuda() -> None:
    for device, section in (("cuda", {"device": "cpu", "pin_memory": True}), ("cpu", {"device": "cpu"})):
        space = make(device=device, fix={"offload_optimizer": "cpu"}, zero_stages=(2,))
        overlay = space.overlay(draw(space, 1)[0])
        assert ds_config.merge({}, overlay)["zero_optimization"]["offload_optimizer"] == section


def test_the_present_configuration_is_always_inside() -> None:
    zero = {"stage": 2, "reduce_bucket_size": 123_456, "overlap_comm": True}
    space = make(zero)
    config = {**BASE, "zero_optimization": zero}
    params = space.params_of(config)
    assert params is not None
    assert (params["reduce_bucket_size"], params["overlap_comm"], params[MICRO_BATCH]) == (123_456, True, 4)
    assert space.suggest(optuna.trial.FixedTrial(params)) == params
    run = ds_config.merge(config, space.overlay(params))
    assert ds_config.canonical_key(run, params_count=PARAMS) == ds_config.canonical_key(config, params_count=PARAMS)


def test_a_configuration_outside_has_no_params() -> None:
    space = make({"reduce_bucket_size": [1e6]})
    for zero in ({"stage": 0}, {"stage": 2, "reduce_bucket_size": 77}, {"stage": 2, "reduce_bucket_size": "many"}):
        assert space.params_of({**BASE, "zero_optimization": zero}) is None
    for batch in ({**BASE, MICRO_BATCH: 65}, {}):
        assert space.params_of({**batch, "zero_optimization": {"stage": 2}}) is None


@pytest.mark.parametrize(
    ("config", "options", "expected"),
    [
        ({}, {}, (1, 64)),
        ({MICRO_BATCH: [2, 8, 4]}, {}, (2, 8)),
        ({MICRO_BATCH: [8]}, {"micro_batch_cap": 4}, (8, 8)),
        ({MICRO_BATCH: "auto", "autotuning": {"max_train_micro_batch_size_per_gpu": 16}}, {}, (1, 16)),
        ({}, {"fix": {MICRO_BATCH: "3"}}, (3, 3)),
        ({}, {"no_tune": (MICRO_BATCH,)}, (4, 4)),
    ],
)
def test_bounds_of_the_micro_batch(config: dict[str, Any], options: dict[str, Any], expected: tuple[int, int]) -> None:
    assert make(config=config, **options).micro_batches == expected


@pytest.mark.parametrize(
    ("zero", "options", "message"),
    [
        ({}, {"no_tune": ("overlap_comm",), "fix": {"overlap_comm": True}}, "both --fix and --no-tune"),
        ({}, {"fix": {"overlap_comm": "maybe"}}, "overlap_comm is 'maybe'; it must be true or false"),
        ({}, {"fix": {"overlap_comm": None}}, "overlap_comm is null; it must be true or false"),
        ({}, {"fix": {"reduce_bucket_size": True}}, "reduce_bucket_size is true; it must be a whole number"),
        ({"stage": 7}, {}, "zero_optimization.stage is 7"),
        ({"stage": 2, "reduce_bucket_size": "large"}, {}, "zero_optimization.reduce_bucket_size is 'large'"),
        (
            {"stage": 2, "offload_optimizer": {"device": "gpu"}},
            {},
            "zero_optimization.offload_optimizer.device is 'gpu'",
        ),
        ({"stage": 2, "overlap_comm": "maybe"}, {}, "overlap_comm is 'maybe'"),
        ({}, {"fix": {"reduce_bucket_size": 0}}, "must be at least 1"),
        ({}, {"fix": {"reduce_bucket_size": 1.5}}, "must be a whole number"),
        ({}, {"fix": {"allgather_bucket_size": 3}}, "even numbers only"),
        ({}, {"fix": {"offload_param": "disk"}}, "none, cpu or nvme"),
        ({}, {"fix": {"offload_param": "nvme"}}, "give --nvme-path"),
        ({}, {"zero_stages": (4,)}, "ZeRO stages are 0, 1, 2 and 3"),
        ({"reduce_bucket_size": [5e7, "x"]}, {}, "reduce_bucket_size is 'x'"),
        ({"ignore_unused_parameters": [True]}, {}, "ignore_unused_parameters is a list, but not a knob"),
        ({}, {"fix": {"offload_optimizer_ratio": 2}}, "offload_optimizer_ratio is 2; it must be a number from 0 to 1"),
        ({"zero_hpz_partition_size": [3]}, {"nodes": 2, "ranks_per_node": 4}, "3, which does not divide the 8 ranks"),
        ({}, {"fix": {"zero_hpz_partition_size": -1}}, "must be at least 1"),
    ],
)
def test_what_cannot_be_meant_is_refused(zero: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(zero, **options)


def test_the_guard_against_untested_optimizers_stays_on_and_a_stage_that_it_excludes_is_explained() -> None:
    space = build_space(SpaceRequest(ds_config={"optimizer": {"type": "SGD"}}, zero_stages=(0, 1, 2, 3), params=PARAMS))
    assert all("zero_allow_untested_optimizer" not in space.overlay(params) for params in draw(space, 20))
    with pytest.raises(ConfigError, match=r"DeepSpeed does not list RowNorm as tested.*zero_allow_untested_optimizer"):
        make({"stage": [1, 2]}, zero_stages=(0,), untested_optimizer="RowNorm")


def test_a_missing_param_is_named() -> None:
    with pytest.raises(ConfigError, match="overlap_comm is missing"):
        make().overlay({"zero_stage": 1, "offload_optimizer": "cpu", MICRO_BATCH: 1})


def communication(params: dict[str, Any]) -> set[str]:
    return {name for name in ("overlap_comm", "reduce_scatter") if name in params}


def test_one_rank_tunes_no_communication_but_the_overlap_of_copies() -> None:
    alone = make(ranks_per_node=1)
    for params in alone.lineages():
        overlaps = params["zero_stage"] == 3 or params["offload_optimizer"] == "cpu"
        assert communication(params) == ({"overlap_comm"} if overlaps else set()), params
    several = make(ranks_per_node=1, nodes=2)
    assert {"overlap_comm", "reduce_scatter"} in [communication(params) for params in several.lineages()]


def test_on_one_rank_a_users_own_way_to_reduce_stays_and_listed_ones_are_searched() -> None:
    zero = {"stage": 3, "reduce_scatter": False}
    space = make(zero, ranks_per_node=1, zero_stages=(3,))
    merged = ds_config.merge({"zero_optimization": zero}, space.overlay(draw(space, 1)[0]))
    assert merged["zero_optimization"]["reduce_scatter"] is False
    listed = make({"stage": 3, "reduce_scatter": [False, True]}, ranks_per_node=1, zero_stages=(3,))
    assert {params.get("reduce_scatter") for params in listed.lineages()} == {False, True, None}


COPY = "zero_hpz_partition_size"


def copies(zero: dict[str, Any] | None = None, /, **options: Any) -> tuple[int, ...] | None:
    return choices_of(make(zero, **options)).get(COPY)


def test_a_second_copy_of_parameters_is_searched_where_a_launch_has_several_nodes_of_several_ranks() -> None:
    assert copies(nodes=2, ranks_per_node=4) == (1, 4)
    assert copies(nodes=1, ranks_per_node=4) is None
    assert copies(nodes=4, ranks_per_node=1) is None
    assert copies({COPY: 2}, nodes=2, ranks_per_node=4) == (1, 2, 4)
    assert copies({COPY: "all"}, nodes=2, ranks_per_node=4) == (1, 4)
    assert copies({COPY: [1, 2]}, nodes=1, ranks_per_node=4) == (1, 2)
    assert copies(fix={COPY: 2}, nodes=1, ranks_per_node=4) == (2,)
    assert copies({COPY: 0}, nodes=2, ranks_per_node=4) == (1, 4)
    assert copies(no_tune=(COPY,), nodes=2, ranks_per_node=4) == (1,)


def test_a_second_copy_is_drawn_at_stage_3_alone_and_not_beside_parameters_on_nvme() -> None:
    drawn = draw(make(nodes=2, ranks_per_node=4, nvme_path="/nvme", zero_stages=(0, 1, 2, 3)), 300)
    for params in drawn:
        assert (COPY in params) == (params["zero_stage"] == 3 and params["offload_param"] != "nvme")
    assert {params[COPY] for params in drawn if COPY in params} == {1, 4}


def test_offload_to_the_cpu_is_not_searched_where_it_is_the_device() -> None:
    both = ("none", "cpu")
    for zero, device, choices in (
        ({}, "cpu", ("none",)),
        ({}, "cuda", both),
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, "cpu", both),
        ({"offload_optimizer": {"device": [*both]}}, "cpu", both),
    ):
        assert choices_of(make(zero, device=device))["offload_optimizer"] == choices


def test_accumulation_that_the_script_holds_bounds_the_micro_batches_and_leaves_one_at_a_global_batch() -> None:
    space = make(holds_accumulation=True, max_samples_per_rank=33)
    assert space.micro_batches == (1, 16)
    assert {space.accumulation(size) for size in range(1, 17)} == {2}
    of_batch = space.at_batch(8)
    assert of_batch is not None
    assert of_batch.micro_batch_values == (4,)
    assert space.at_batch(9) is None
    assert make(holds_accumulation=True, samples_per_rank=12).micro_batch_values == (6,)
    with pytest.raises(ConfigError, match="divides them into the 2 accumulation steps of the script"):
        make(holds_accumulation=True, samples_per_rank=9)
