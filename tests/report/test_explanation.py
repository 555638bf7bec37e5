"""Why a winner wins: what was measured is said to be measured; intervals of its effects cover the truth."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState

from optuna_dsat.cli.report import _show
from optuna_dsat.errors import UsageError
from optuna_dsat.metrics import Interval
from optuna_dsat.report.explain.explanation import Contribution, Explanation, explain, explain_study
from optuna_dsat.report.explain.pairs import Effect, Pairs
from optuna_dsat.report.explain.why import factor_rows, told_of
from optuna_dsat.study.confirm.measured import Measured
from optuna_dsat.study.confirm.rounds import RoundLaunch, Rounds
from optuna_dsat.study.stored import read_stored
from optuna_dsat.trials import attributes
from optuna_dsat.trials.lineage import MICRO_BATCH
from optuna_dsat.words import times_in_words
from tests.harness import present
from tests.harness.entry_points import leave
from tests.harness.landscapes import Hill
from tests.harness.small_model import Machine, small_planner, small_space
from tests.harness.studies import StudyBench

OWN = {"zero_stage": 2, "offload_optimizer": "none", "overlap_comm": False, "reduce_bucket_size": 500_000_000}


def study_of(machine: Machine, *configs: dict[str, Any]) -> optuna.Study:
    """Run configurations, given as changes of the user's own, which comes first."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(seed=0))
    for changes in ({}, *configs):
        attrs = {} if changes else {attributes.PURPOSE: attributes.USER_CONFIG}
        wanted = {**OWN, MICRO_BATCH: 4, **changes}
        params = {**small_space().completed(wanted), MICRO_BATCH: wanted[MICRO_BATCH]}
        study.enqueue_trial(params, user_attrs=attrs)
        machine.run(study, 1)
    return study


def why(trials: Sequence[FrozenTrial], winner: FrozenTrial, *, confirmed: float | None = None) -> Explanation:
    user = attributes.user_config_trial(trials)
    baseline = None if user is None else measured(user, value_of(user))
    ratio = None if user is None else Interval(value=value_of(winner) / value_of(user))
    best = measured(winner, value_of(winner) if confirmed is None else confirmed, ratio)
    return explain(trials, planner=small_planner(), winner=best, baseline=baseline)


def measured(trial: FrozenTrial, value: float, speed_up: Interval | None = None) -> Measured:
    metrics = trial.user_attrs.get(attributes.METRICS) or {}
    return Measured(trial=trial, train_batch_size=1, interval=Interval(value=value), metrics=metrics, speed_up=speed_up)


def explained(study: optuna.Study) -> Explanation:
    result = why(study.trials, study.best_trial)
    assert sum(result.bounds.values()) == pytest.approx(1)
    assert product(result) == pytest.approx(result.speed_up)
    return result


def product(explanation: Explanation) -> float:
    return math.prod(factor.factor for factor in explanation.factors if factor.factor is not None)


def shown(found: Explanation, capsys: pytest.CaptureFixture[str]) -> str:
    _show(found, "words")
    return capsys.readouterr().out


def value_of(trial: FrozenTrial) -> float:
    return present(trial.value)


def by_knob(explanation: Explanation) -> dict[str, Contribution]:
    return {contribution.knob: contribution for contribution in explanation.contributions}


def test_what_pairs_of_launches_show_is_said_as_measured() -> None:
    machine = Machine()
    study = study_of(
        machine,
        {MICRO_BATCH: 8},
        {MICRO_BATCH: 8, "overlap_comm": True},
        {MICRO_BATCH: 6, "overlap_comm": True},
        {MICRO_BATCH: 6},
    )
    result = explained(study)
    parts = by_knob(result)
    assert result.speed_up == pytest.approx(study.best_value / value_of(study.trials[0]))
    assert parts.keys() == {MICRO_BATCH, "overlap_comm"}
    overlap = parts["overlap_comm"]
    assert (overlap.source, overlap.pairs, overlap.user, overlap.winner) == ("measured", 2, False, True)
    values = [value_of(trial) for trial in study.trials]
    ratios = [values[2] / values[1], values[3] / values[4]]
    assert ratios[0] < present(overlap.factor) < (ratios[0] * ratios[1]) ** 0.5, "the pair with the winner counts more"
    sizes = parts[MICRO_BATCH]  # of 4 and 8 only the runs without overlap are a pair
    assert (sizes.source, sizes.pairs) == ("measured", 1)
    assert result.contributions[0].knob == MICRO_BATCH


def test_what_was_not_measured_is_said_by_the_model_with_its_doubt() -> None:
    machine = Machine()
    study = study_of(machine, {MICRO_BATCH: 12, "overlap_comm": True}, {MICRO_BATCH: 9})
    parts = by_knob(explained(study))
    with_overlap = {**OWN, "overlap_comm": True}
    true = machine.rate({**with_overlap, MICRO_BATCH: 12}) / machine.rate({**with_overlap, MICRO_BATCH: 4})
    sizes = parts[MICRO_BATCH]
    assert (sizes.source, sizes.pairs) == ("model", 0)
    assert sizes.factor is not None
    assert sizes.factor == pytest.approx(true, rel=0.15)
    assert present(sizes.low) < min(true, sizes.factor) < max(true, sizes.factor) < present(sizes.high)


def test_a_stage_brings_its_own_knobs_and_still_counts_as_one() -> None:
    study = study_of(Machine(), {"zero_stage": 1, MICRO_BATCH: 8}, {MICRO_BATCH: 8}, {"zero_stage": 3, MICRO_BATCH: 8})
    winner = study.trials[3]
    result = why(study.trials, winner, confirmed=50.0)
    assert result.value == 50.0
    assert result.speed_up == pytest.approx(value_of(winner) / value_of(study.trials[0])), "like is compared with like"
    stage = by_knob(result)["zero_stage"]
    assert stage.source == "measured"
    assert stage.factor == pytest.approx(value_of(winner) / value_of(study.trials[2]))
    switched = small_space().completed({"zero_stage": 3}).keys() ^ small_space().completed(OWN).keys()
    assert stage.brings == tuple(sorted(switched)) != ()
    (row,) = (item for item in factor_rows(result) if item.setting == "zero_stage")
    assert all(name in row.by for name in switched)
    assert by_knob(result)[MICRO_BATCH].brings == ()


def test_what_would_not_fit_is_said_so() -> None:
    machine = Machine()
    third = small_space().completed({**OWN, "zero_stage": 3, "offload_optimizer": "cpu"})
    most = next(size for size in range(64, 0, -1) if machine.fits({**third, MICRO_BATCH: size}))
    study = study_of(machine, {**third, MICRO_BATCH: most}, {MICRO_BATCH: 20})
    large = study.trials[1]
    assert large.value is not None
    result = why(study.trials, large)
    stage = by_knob(result)["offload_optimizer"]
    assert stage.factor is None
    assert "not expected to fit" in stage.note


def test_all_factors_multiply_to_the_measured_ratio() -> None:
    draw = random.Random(0)
    configs: list[dict[str, Any]] = [
        {
            "zero_stage": draw.choice([1, 2, 3]),
            "overlap_comm": draw.choice([False, True]),
            "offload_optimizer": draw.choice(["none", "none", "cpu"]),
            "reduce_bucket_size": draw.choice([5 * 10**7, 5 * 10**8]),
            MICRO_BATCH: draw.randint(1, 18),
        }
        for _ in range(6)
    ]
    study = study_of(Machine(), *configs)
    for winner in study.trials[1:]:
        if winner.value is None:
            continue
        for confirmed in (None, draw.uniform(0.2, 5) * winner.value):
            result = why(study.trials, winner, confirmed=confirmed)
            assert product(result) == pytest.approx(result.speed_up)
            assert present(present(result.explained).factor) * (present(result.remainder).factor or 0) == pytest.approx(
                result.speed_up
            )


def test_what_knobs_do_together_is_a_factor_of_its_own_and_contradicts_nothing() -> None:
    machine = Machine()
    both = {MICRO_BATCH: 8, "overlap_comm": True}
    study = study_of(machine, both, {MICRO_BATCH: 8}, {"overlap_comm": True}, {MICRO_BATCH: 16}, {MICRO_BATCH: 2})
    result = why(study.trials, study.trials[1])
    values = [value_of(trial) for trial in study.trials]
    true = values[2] * values[3] / (values[1] * values[0])
    assert true > 1.05
    assert present(result.together).factor == pytest.approx(true, rel=0.05)
    assert present(result.remainder).factor == pytest.approx(1, rel=0.05)
    assert not result.contradicted


def test_a_ratio_that_its_factors_contradict_is_not_claimed(capsys: pytest.CaptureFixture[str]) -> None:
    study = study_of(Machine(), {MICRO_BATCH: 6}, {MICRO_BATCH: 6, "overlap_comm": True}, {MICRO_BATCH: 3})
    own, winner = study.trials[0], study.trials[2]
    honest = why(study.trials, winner)
    assert not honest.contradicted
    assert f"{times_in_words(present(honest.speed_up))}x as fast" in shown(honest, capsys)
    slow = 0.4 * value_of(own)  # the machine had become busy when the user's config was confirmed
    value = 0.98 * value_of(winner)
    ratio = Interval(value=value / slow, low=0.99 * value / slow, high=1.01 * value / slow, rounds=3)
    best = measured(winner, value, ratio)
    result = explain(study.trials, planner=small_planner(), winner=best, baseline=measured(own, slow))
    assert result.speed_up == pytest.approx(0.98 * value_of(winner) / slow)
    assert result.remainder is not None
    assert result.remainder.factor == pytest.approx(0.98 / 0.4, rel=0.05)
    assert result.contradicted
    assert result.to_json()["contradicted"] is True
    text = shown(result, capsys)
    assert result.speed_up is not None
    assert "x as fast" not in text
    assert f"a ratio of {times_in_words(result.speed_up)}." in text
    assert times_in_words(present(present(result.remainder).factor)) in text
    assert times_in_words(result.speed_up) in text.split("all together")[1].splitlines()[0]


def test_offload_that_is_dear_bounds_the_step() -> None:
    study = study_of(
        Machine(offload_s=5.0),
        {"offload_optimizer": "cpu", MICRO_BATCH: 8},
        {"offload_optimizer": "cpu", MICRO_BATCH: 16},
    )
    result = why(study.trials, study.trials[1])
    assert result.bound == "host"
    plain = why(study.trials, study.trials[0])
    assert plain.bound != "host"
    assert (plain.contributions, plain.together, plain.remainder, plain.explained) == ((), None, None, None)


def test_a_users_config_outside_the_searched_space_contradicts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Its trial has no parameters that a factor could be given to: the whole ratio was called unexplained."""
    study = study_of(Machine(), {MICRO_BATCH: 8})
    own, winner = study.trials
    own.params, own.distributions = {}, {}
    result = why([own, winner], winner)
    assert (result.contributions, result.remainder, result.contradicted) == ((), None, False)
    assert f"{times_in_words(present(result.speed_up))}x as fast" in shown(result, capsys)


def test_without_the_users_config_there_is_no_comparison() -> None:
    study = study_of(Machine(), {MICRO_BATCH: 8})
    trials = study.trials[1:]
    result = why(trials, trials[0])
    assert (result.user_value, result.speed_up, result.contributions) == (None, None, ())


SEEDS = 100
TRUE_FACTORS = {"zero_stage": math.log(1.2), "overlap_comm": math.log(1.05), MICRO_BATCH: math.log(1.5)}
OTHER = {"zero_stage": 2, "overlap_comm": False, MICRO_BATCH: 4}
WINNER = {"zero_stage": 1, "overlap_comm": True, MICRO_BATCH: 8}


def trial_of(number: int, params: dict[str, Any], value: float, *, purpose: str | None = None) -> FrozenTrial:
    trial = optuna.trial.create_trial(
        state=TrialState.COMPLETE,
        value=value,
        params=params,
        distributions={name: optuna.distributions.CategoricalDistribution([item]) for name, item in params.items()},
        user_attrs={} if purpose is None else {attributes.PURPOSE: purpose},
    )
    trial.number = number
    return trial


def pairs_of(rng: random.Random, noise: float, *, rounds: int) -> Pairs:
    """Return a study whose winner is the one of each pair, and whose machine drifts between rounds."""
    configs = [OTHER, WINNER, *({**WINNER, name: OTHER[name]} for name in WINNER)]
    levels = [sum(TRUE_FACTORS[name] for name in WINNER if config[name] == WINNER[name]) for config in configs]
    values = [math.exp(level + rng.gauss(0, noise)) for level in levels]
    trials = [
        trial_of(number, config, value, purpose=None if number else attributes.USER_CONFIG)
        for number, (config, value) in enumerate(zip(configs, values, strict=True))
    ]
    launches = []
    for item in range(1, rounds + 1):
        drift = rng.gauss(0, 0.1)
        for number in (0, 1):
            value = math.exp(levels[number] + drift + rng.gauss(0, noise))
            times: dict[str, Any] = dict.fromkeys(("value", "low", "high"), value)
            ended: dict[str, Any] = {"steps": 10, "outcome": "measured", "message": "", "metrics": {}}
            launches.append(RoundLaunch(round=item, number=number, **times, **ended))
    return Pairs(trials, Rounds(launches=tuple(launches)), maximize=True, assumed_noise=0.02)


def effect_of(pairs: Pairs, name: str) -> Effect:
    return present(pairs.effect(WINNER, {**WINNER, name: OTHER[name]}))


@pytest.mark.parametrize("noise", [0.01, 0.15])
def test_intervals_of_effects_cover_the_truth(noise: float) -> None:
    covered = 0
    for seed in range(SEEDS):
        pairs = pairs_of(random.Random(seed), noise, rounds=4)
        assert pairs.is_noise_measured
        effects = {name: effect_of(pairs, name) for name in WINNER}
        covered += sum(abs(item.mean - TRUE_FACTORS[name]) <= item.half_width for name, item in effects.items())
    assert covered >= 0.9 * SEEDS * len(WINNER)


def test_without_repeated_launches_the_noise_is_assumed_and_the_interval_wide() -> None:
    pairs = pairs_of(random.Random(0), 0.01, rounds=0)
    assert not pairs.is_noise_measured
    assert pairs.noise == 0.02
    assert effect_of(pairs, "zero_stage").half_width > 1.96 * 0.02 * math.sqrt(2)


def test_settings_that_no_two_configurations_differ_in_alone_have_no_effect() -> None:
    trials = [trial_of(0, OTHER, 1.0, purpose=attributes.USER_CONFIG), trial_of(1, WINNER, 2.0)]
    pairs = Pairs(trials, Rounds(), maximize=True, assumed_noise=0.02)
    assert all(pairs.effect(WINNER, {**WINNER, name: OTHER[name]}) is None for name in WINNER)


def test_a_stored_study_is_explained(bench: StudyBench, capsys: pytest.CaptureFixture[str]) -> None:
    result = bench.run(bench.spec(method="asha", confirm=2, max_trials=8), Hill())
    matches, words = explain_study(read_stored(bench.store, "s"))
    assert matches.winner == result.trial
    assert matches.speed_up == pytest.approx(result.speed_up)
    assert math.prod(factor.factor for factor in matches.factors if factor.factor is not None) == pytest.approx(
        result.speed_up
    )
    assert matches.remainder is not None
    assert matches.contributions[0].knob == "train_micro_batch_size_per_gpu"
    assert matches.bound == "compute"
    storage = f"sqlite:///{bench.folder / 'study.db'}"
    for options, shown in (([], f"The result is trial {result.trial}, "), (["--json"], '"bound": "compute"')):
        assert leave("explain", "s", "--storage", storage, *options) == 0
        printed = capsys.readouterr().out
        assert shown in printed
    assert json.loads(printed)["configuration"] == words


def test_a_study_that_measured_nothing_has_nothing_to_explain(bench: StudyBench) -> None:
    bench.store.create_study("s", bench.spec().model_dump(mode="json"), direction="maximize")
    with pytest.raises(UsageError, match="nothing to explain"):
        explain_study(read_stored(bench.store, "s"))


def test_a_winner_outside_the_search_space_is_read_explained_and_reported(bench: StudyBench) -> None:
    bench.run(bench.spec(zero_stages=(1,), max_trials=1, confirm=0), Hill())
    result, words = explain_study(read_stored(bench.store, "s"))
    assert result.is_own
    assert words == "ZeRO 2, micro-batch 2"
    assert not result.contributions
    assert result.bound is None, "the fitted model does not reach there"
    assert not any("bound by" in line for line in told_of(result))
    storage = f"sqlite:///{bench.folder / 'study.db'}"
    for command in (["show"], ["trials"], ["best"], ["explain"], ["report", "-o", str(bench.folder / "page.html")]):
        assert leave(command[0], "s", "--storage", storage, *command[1:]) == 0, command


@pytest.mark.parametrize(
    ("device", "utilisation", "shown"),
    [
        ("cuda", 0.2, "look at the model itself"),
        ("cuda", 0.5, "faster or more GPUs do"),
        ("cpu", None, "or a GPU"),
    ],
)
def test_a_step_bound_by_computation_says_what_shortens_it(device: str, utilisation: float | None, shown: str) -> None:
    study = study_of(Machine(), {MICRO_BATCH: 8}, {MICRO_BATCH: 16})
    result = replace(why(study.trials, study.trials[1]), device=device, utilisation=utilisation)
    assert shown in told_of(replace(result, bounds={"compute": 0.8, "link": 0.2}))[-1]
    assert not any(shown in line for line in told_of(replace(result, bounds={"compute": 0.6, "link": 0.4})))
