"""What the guided sampler plans."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.pruners import NopPruner
from optuna.trial import FrozenTrial, TrialState, create_trial

from optuna_dsat.guided import order
from optuna_dsat.guided import planner as planner_module
from optuna_dsat.guided.acquisition import Prospects
from optuna_dsat.guided.candidates import CandidateTable
from optuna_dsat.guided.planner import GuidedPlanner
from optuna_dsat.guided.posterior import Posterior
from optuna_dsat.guided.sizes import LEAST_GAIN
from optuna_dsat.outcome import Outcome
from optuna_dsat.samplers import GuidedSampler
from optuna_dsat.trials import attributes
from optuna_dsat.trials.lineage import MICRO_BATCH, lineage_key
from tests.harness.small_model import CONFIG, GIB, HARDWARE, KEPT, Machine, small_planner, small_problem, small_space


def guided(kit: SimpleNamespace, planner: GuidedPlanner | None = None, **options: object) -> optuna.Study:
    sampler = GuidedSampler(planner=planner or small_planner(), seed=1)
    study: optuna.Study = kit.create(sampler, NopPruner(), **options)
    return study


def outcomes(study: optuna.Study) -> list[str]:
    return [trial.user_attrs[attributes.OUTCOME] for trial in study.trials]


def test_the_best_configuration_is_found_in_ten_launches(kit: SimpleNamespace) -> None:
    study, machine = guided(kit), Machine()
    machine.run(study, 10)
    assert study.best_value >= 0.99 * machine.best(small_planner())
    assert outcomes(study).count("out_of_memory") <= 1


def test_problems_of_one_model_machine_and_space_share_their_table_and_others_do_not() -> None:
    def table(**changes: Any) -> CandidateTable:
        return small_problem(**changes).table

    assert table() is table(metric="latency", config=dict(CONFIG))
    less = replace(HARDWARE, device_memory_bytes=6 * GIB)
    others = [table(hardware=less), table(config={**CONFIG, "fp16": {}}), table(space=small_space(samples=8))]
    assert not any(other is table() for other in others)


def test_a_row_is_found_by_its_knobs_whatever_the_micro_batch() -> None:
    table = small_problem().table
    assert table.row_index({**table.lineages[7], MICRO_BATCH: 3}) == 7
    assert table.row_index({**table.lineages[7], "zero_stage": True}) is None, "1 is a stage"
    assert table.row_index({**table.lineages[7], "zero_stage": [1]}) is None


@pytest.mark.parametrize(("ranks", "rate"), [(None, 12.0), (2, 6.0)])
def test_a_rate_counts_the_ranks_that_train_different_samples(ranks: int | None, rate: float) -> None:
    """Three samples of a rank in a second: the stages of a pipeline share theirs."""
    problem = small_problem(data_parallel_size=ranks)
    log_objective = problem.log_objective(np.full((4, 1), 0.25), np.array([3.0]))
    assert problem.metric_of(float(log_objective[0])) == pytest.approx(rate)


def test_where_little_fits_it_climbs_to_what_does(kit: SimpleNamespace) -> None:
    hardware = replace(HARDWARE, device_memory_bytes=40 * GIB)
    planner = GuidedPlanner(small_problem(hardware=hardware))
    study, machine = guided(kit, planner), Machine(device_gib=5.0)
    machine.run(study, 10)
    runs = [params for params in planner.problem.table.lineages if machine.fits({**params, MICRO_BATCH: 1})]
    assert 0 < len(runs) < len(planner.problem.table.lineages) / 2
    assert "measured" in outcomes(study)


def test_a_launch_is_expected_to_leave_the_margin_free(kit: SimpleNamespace) -> None:
    study, machine = guided(kit, small_planner(margin=0.3)), Machine()
    machine.run(study, 12)
    later = study.trials[3:]
    assert (
        max(machine.peak(trial.params) for trial in later) <= 0.73 * HARDWARE.device_memory_bytes
    )  # as learnt, not to the byte


def test_a_resumed_study_goes_on_as_if_never_stopped(kit: SimpleNamespace) -> None:
    machine, whole = Machine(), guided(kit)
    machine.run(whole, 6)
    halves = guided(kit)
    machine.run(halves, 3)
    halves.sampler = GuidedSampler(planner=small_planner(), seed=99)
    machine.run(halves, 3)
    assert kit.sequence(whole) == kit.sequence(halves)


def test_launches_in_flight_are_of_different_lineages(kit: SimpleNamespace) -> None:
    study, machine = guided(kit), Machine()
    machine.run(study, 3)
    flying = []
    for _ in range(4):
        trial = study.ask()
        machine.space.suggest(trial)
        flying.append(lineage_key(trial.params))
    assert len(set(flying)) == 4


def test_failures_and_foreign_trials_neither_break_nor_stop_it(kit: SimpleNamespace) -> None:
    study, machine = guided(kit), Machine()
    odd = {"lr": FloatDistribution(1e-5, 1.0), MICRO_BATCH: IntDistribution(1, 64)}
    study.add_trial(create_trial(params={"lr": 0.1}, distributions={"lr": odd["lr"]}, value=9.0))
    study.add_trial(create_trial(params={"lr": 0.1, MICRO_BATCH: 3}, distributions=odd, value=9.0))
    study.add_trial(create_trial(state=TrialState.FAIL))
    for outcome in [Outcome.SCRIPT_ERROR, Outcome.INVALID_CONFIG, Outcome.TIMEOUT, Outcome.COMMUNICATION_ERROR]:
        trial = study.ask()
        machine.space.suggest(trial)
        trial.set_user_attr(attributes.OUTCOME, outcome.value)
        study.tell(trial, state=TrialState.FAIL)
    trial = study.ask()
    machine.space.suggest(trial)
    with pytest.warns(UserWarning, match="nan is not acceptable"):
        study.tell(trial, float("nan"))
    machine.run(study, 12)
    rates = [trial.value for trial in study.trials[-12:] if trial.value is not None]
    assert max(rates) >= 0.98 * machine.best(small_planner())


def test_values_alone_are_enough_to_go_on(kit: SimpleNamespace) -> None:
    study, machine = guided(kit), Machine()
    for _ in range(15):
        trial = study.ask()
        params = machine.space.suggest(trial)
        if machine.fits(params):
            study.tell(trial, machine.rate(params))
        else:
            study.tell(trial, state=TrialState.PRUNED)
    assert study.best_value >= 0.95 * machine.best(small_planner())


def test_a_set_of_micro_batches_is_kept(kit: SimpleNamespace) -> None:
    space = small_space(samples=24)
    planner = GuidedPlanner(small_problem(space=space))
    study, machine = guided(kit, planner), Machine(space=space)
    machine.run(study, 10)
    assert {trial.params[MICRO_BATCH] for trial in study.trials} <= {1, 2, 3, 4, 6, 8, 12, 24}
    assert isinstance(study.trials[0].distributions[MICRO_BATCH], CategoricalDistribution)


def test_a_duration_is_made_short(kit: SimpleNamespace) -> None:
    study, machine = guided(kit, small_planner("latency"), direction="minimize"), Machine()
    for _ in range(8):
        trial = study.ask()
        params = machine.space.suggest(trial)
        study.tell(trial, sum(machine.seconds(params)))
    best = study.best_trial.params
    assert best[MICRO_BATCH] == 1
    assert best["offload_optimizer"] == "none"


def test_a_search_ends_where_nothing_can_win_any_more(kit: SimpleNamespace) -> None:
    space = small_space(no_tune=(*[knob.name for knob in small_space().knobs[1:]],), samples=4)
    planner = GuidedPlanner(small_problem(space=space))
    study, machine = guided(kit, planner), Machine(space=space)
    sampler = study.sampler
    assert isinstance(sampler, GuidedSampler)
    launches = 0
    while not sampler.exhausted(study):
        machine.run(study, 1)
        launches += 1
        assert launches <= 9
    assert len(set(kit.sequence(study))) == launches
    assert study.best_value == pytest.approx(machine.best(planner))


def test_a_search_ends_where_little_is_expected_to_be_gained(kit: SimpleNamespace) -> None:
    """Long before the space is exhausted, and with launches in flight counted as predicted."""
    planner = GuidedPlanner(small_problem(), min_gain=0.03)
    study, machine = guided(kit, planner), Machine()
    while planner.next(study.trials) is not None:
        machine.run(study, 1)
        assert len(study.trials) <= 60
    assert len(study.trials) > 3
    assert study.best_value >= 0.98 * machine.best(planner)
    assert GuidedPlanner(planner.problem, min_gain=0.001).next(study.trials) is not None, "less is left to gain"


class Noisy(Machine):
    """Its launches differ by five per cent."""

    def __init__(self) -> None:
        super().__init__()
        self._dice = np.random.default_rng(0)

    def seconds(self, params: Mapping[str, Any]) -> tuple[float, float, float, float]:
        factor = math.exp(0.05 * self._dice.standard_normal())
        forward, backward, step, other = super().seconds(params)
        return factor * forward, factor * backward, factor * step, factor * other


def test_where_one_launch_teaches_little_a_search_goes_on_while_many_together_gain(
    kit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    least = 0.005
    planner = GuidedPlanner(small_problem(), min_gain=least)
    study, machine = guided(kit, planner), Noisy()
    monkeypatch.setattr(Prospects, "worth_of_launches", lambda *_: 0.0)
    while planner.next(study.trials) is not None:
        machine.run(study, 1)
        assert len(study.trials) <= 30
    assert planner.remaining(study.trials) > least
    monkeypatch.setattr(Prospects, "remaining", lambda _: math.inf)
    for each, goes_on in ((1.1 * least, True), (0.9 * least, False)):
        monkeypatch.setattr(Prospects, "worth_of_launches", lambda _, launches, each=each: each * launches)
        again = GuidedPlanner(planner.problem, min_gain=least)
        assert (again.next(study.trials) is not None) == goes_on


@pytest.mark.parametrize(
    ("gain", "cost", "slower", "goes_on"),
    [(0.02, 1.0, 0, True), (0.02, 3.0, 0, False), (0.009, 0.1, 0, True), (0.009, 0.1, 1, False), (0.02, 0.1, 1, True)],
)
def test_a_launch_has_to_gain_by_its_cost_and_no_less_where_it_is_short_and_slow(
    kit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, gain: float, cost: float, slower: float, goes_on: bool
) -> None:
    """Short launches of slow configurations kept a search going, in which others were launched that gained nothing."""
    planner = GuidedPlanner(problem := small_problem(), min_gain=0.01)
    study, machine = guided(kit, planner), Machine()
    machine.run(study, 3)
    posterior, observations = planner._searched(study.trials)
    open_rows = planner._open_rows(observations, {}, ())
    rows, sizes, acquisition = planner._evaluated(posterior, open_rows)
    monkeypatch.setattr(Posterior, "relative_costs", lambda _self, given: np.full(len(given.gain), cost))
    monkeypatch.setattr(Posterior, "paying_sizes", lambda _self, rows: np.full(len(rows), np.inf))
    monkeypatch.setattr(Prospects, "worth_of_launches", lambda *_: 0.0)
    known = np.isin(problem.table.structure[rows], posterior.known_structures)
    rows, sizes, acquisition = rows[known], sizes[known], acquisition.take(known)
    means = np.full(len(rows), acquisition.over - slower)
    acquisition = replace(acquisition, gain=np.full(len(rows), gain), log_objective=means)
    left, *_ = planner._worth_launching(posterior, rows, sizes, acquisition)
    assert bool(len(left)) is goes_on
    means[1:] = acquisition.over - 1
    only = replace(acquisition, gain=np.r_[0.0, 0.02, np.full(len(rows) - 2, 0.009)], log_objective=means)
    monkeypatch.setattr(Posterior, "relative_costs", lambda _self, given: np.ones(len(given.gain)))
    assert planner._worth_launching(posterior, rows, sizes, only)[0].tolist() == [rows[1]], "others gain nothing first"


def test_where_no_launch_pays_by_itself_no_long_one_is_made(
    kit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search went on for what may be left in all, and launched thirteen times the best's micro-batch."""
    for name in ("remaining", "worth_of_launches"):
        monkeypatch.setattr(Prospects, name, lambda *_: math.inf)
    problem = small_problem()
    study = guided(kit, GuidedPlanner(problem))
    Machine(overhead_s=0.01).run(study, 10)
    posterior = Posterior(problem, problem.table.observations_of_trials(study.trials), samples_limit=None)

    def relative_cost(limit: float) -> float:
        monkeypatch.setattr(planner_module, "_LONG", limit)
        result = GuidedPlanner(problem, min_gain=1e9).next(study.trials)
        assert result is not None
        row = problem.table.row_index(result.params)
        acquisition = posterior.acquisition(np.array([row]), np.array([result.micro_batch]))
        return float(posterior.relative_costs(acquisition)[0])

    usual = relative_cost(math.inf)
    assert relative_cost(0.5 * usual) <= 0.5 * usual
    acquisition = posterior.acquisition(posterior.measured.row, posterior.measured.micro_batch)
    quiet = posterior.relative_costs(acquisition)
    monkeypatch.setattr(type(posterior.residuals), "noise_variance", property(lambda _: 1.0))
    assert (posterior.relative_costs(acquisition) > quiet).all(), "a shorter launch may be as fast"


class Flat(Machine):
    """As many samples a second at any micro-batch."""

    def seconds(self, params: Mapping[str, Any]) -> tuple[float, float, float, float]:
        part = 0.02 * params[MICRO_BATCH]
        return part, 2 * part, 0.0, 0.0


def test_beyond_a_doubling_that_gained_nothing_no_long_launch_is_made(
    kit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search on a machine of equal throughput launched eight times the micro-batch that had gained nothing."""
    problem = small_problem()
    rising, flat = (guided(kit, GuidedPlanner(problem)) for _ in range(2))
    Machine().run(rising, 6)
    Flat().run(flat, 6)

    def paying(study: optuna.Study) -> Any:
        posterior = Posterior(problem, problem.table.observations_of_trials(study.trials), samples_limit=None)
        return posterior.paying_sizes(posterior.measured.row)

    sizes = [trial.params[MICRO_BATCH] for trial in flat.trials]
    assert paying(rising).max() == math.inf
    assert paying(flat).max() <= 2 * max(sizes), "those measured once are doubled"
    assert paying(flat).min() <= max(sizes)

    def launched() -> int:
        result = GuidedPlanner(problem).next(rising.trials)
        assert result is not None
        return result.micro_batch

    monkeypatch.setattr(planner_module, "_LONG", 0.0)
    assert launched() > 2
    monkeypatch.setattr(Posterior, "paying_sizes", lambda _, rows: np.full(len(rows), 2.0))
    assert launched() <= 2


def test_a_launch_of_many_times_the_users_own_seconds_has_to_gain_as_much(kit: SimpleNamespace) -> None:
    """The user's own launch took 2 s, and one of 105 s was made that was expected to gain 3 per cent."""
    problem = small_problem()
    study = guided(kit, GuidedPlanner(problem))
    Machine(overhead_s=0.01).run(study, 4)
    posterior = Posterior(problem, problem.table.observations_of_trials(study.trials), samples_limit=None)
    known = posterior.acquisition(posterior.measured.row, posterior.measured.micro_batch.astype(np.int64))
    own_s = known.cost_s.min()

    def is_dear(times: float, gain: float) -> bool:
        item = np.ones(1)
        asked = replace(known.take(np.array([0])), cost_s=times * own_s * item, gain=gain * item)
        return bool(posterior.is_dear(asked)[0])

    assert not is_dear(9.0, 0.0)
    assert is_dear(11.0, 0.001)
    assert not is_dear(19.0, math.log1p(2 * LEAST_GAIN))
    assert is_dear(52.0, 0.03)


def test_a_structure_never_measured_is_expected_to_be_as_fast_as_a_measured_one_that_is_less_simple(
    kit: SimpleNamespace,
) -> None:
    problem = small_planner().problem
    table, study = problem.table, guided(kit)
    study.enqueue_trial({**small_space().completed({"zero_stage": 3}), MICRO_BATCH: 4})
    Machine().run(study, 1)
    posterior = Posterior(problem, table.observations_of_trials(study.trials), samples_limit=None)
    stage, offloads = table.columns.stage, table.columns.offload + table.columns.offload_param
    rows = np.concatenate([np.flatnonzero((stage == 1) & (offloads == 0))[:2], np.flatnonzero(offloads > 0)[-1:]])
    rows, sizes = np.concatenate([rows, posterior.measured.row]), np.full(4, 4)
    measured = posterior.predict(posterior.measured.row, np.array([4]))[0].value
    slow = np.array([-9.0, -8.0, -9.0, -9.0])
    raised = posterior._at_least_as_fast(rows, sizes, slow)
    assert raised == pytest.approx([math.log(measured) - 1, math.log(measured), -9, -9])
    fast = math.log(measured) + np.array([-1.0, 0.1, -9.0, -9.0])
    assert posterior._at_least_as_fast(rows, sizes, fast) == pytest.approx(fast), "it is expected to be faster anyway"


def test_a_search_ends_with_checks_around_the_best(kit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = small_planner().problem
    params, study = small_space().completed({"zero_stage": 2}), guided(kit)
    row, rows = problem.table.row_index(params), np.arange(len(problem.table.lineages))

    def check(*measured: int, **knobs: Any) -> tuple[int, str] | None:
        for size in measured:
            study.enqueue_trial({**params, **knobs, MICRO_BATCH: size})
            Machine(device_gib=80).run(study, 1)
        posterior = Posterior(problem, problem.table.observations_of_trials(study.trials), samples_limit=None)
        result = order.last_check(problem.table, posterior, rows)
        assert result is None or (result[0] == row) == ("peak" in result[3])
        return result and (int(result[1][0]), result[3])

    assert check(2, 5) == (5, "untested with ZeRO 2"), "overlap_comm"
    assert check(1, overlap_comm=not params["overlap_comm"]) is None, "5 is small"
    assert check(20) == check(19) == (12, "checks for a peak below it"), "its distance is limited; 19 is close"
    assert check(12) is None
    assert check(27) == (23, "checks for a peak below it")
    assert check(23) is None
    monkeypatch.setattr(Machine, "rate", lambda *_: 50.0)
    assert check(35) == (30, "checks for a peak above it")
    monkeypatch.setattr(order, "_MUCH_SLOWER", 0.0)
    assert check() is None, "it is predicted to be slower"


def test_nothing_is_launched_beside_what_flies_where_nothing_else_promises_a_gain(kit: SimpleNamespace) -> None:
    planner = GuidedPlanner(small_problem(), min_gain=10.0)
    study, machine = guided(kit, planner), Machine()
    sampler = study.sampler
    assert isinstance(sampler, GuidedSampler)
    machine.space.suggest(study.ask())
    assert not sampler.exhausted(study), "before anything was measured there is nothing to improve on"
    machine.run(study, 1)
    assert sampler.exhausted(study)


def test_where_a_start_is_cheap_small_micro_batches_go_first(kit: SimpleNamespace) -> None:
    sizes = {}
    for overhead_s in (0.1, 600.0):
        study, machine = guided(kit), Machine(overhead_s=overhead_s)
        machine.run(study, 5)
        sizes[overhead_s] = [trial.params[MICRO_BATCH] for trial in study.trials]
    assert sizes[0.1][0] == sizes[600.0][0], "nothing is known of a start yet"
    assert sum(sizes[0.1]) < sum(sizes[600.0])


def test_an_ask_of_a_long_history_in_a_large_space_looks_at_few_of_both(kit: SimpleNamespace) -> None:
    """So that its time does not grow with them."""
    space = small_space(no_tune=())
    planner = GuidedPlanner(small_problem(space=space))
    machine = Machine(space=space)
    helper: optuna.Study = kit.create(optuna.samplers.RandomSampler(seed=0), NopPruner())
    machine.run(helper, 250)
    posterior = planner._posterior(helper.get_trials(deepcopy=False))
    assert len(planner.problem.table.lineages) > 10_000
    assert len(posterior.residuals.points.row) <= 140
    rows, _ = posterior.shortlist(np.arange(len(planner.problem.table.lineages)))
    assert len(set(rows.tolist())) < 300


class Eights(Machine):
    """Kernels for multiples of 8 are faster, as on tensor cores."""

    def seconds(self, params: Mapping[str, Any]) -> tuple[float, float, float, float]:
        forward, backward, step, other = super().seconds(params)
        slow = 1.0 if params[MICRO_BATCH] % 8 == 0 else 1.08
        return slow * forward, slow * backward, step, other


class Contrary(Machine):
    """Overlapped communication takes more time than it hides, whatever theory says."""

    def seconds(self, params: Mapping[str, Any]) -> tuple[float, float, float, float]:
        forward, backward, step, other = super().seconds(params)
        return forward, backward + (0.05 if params.get("overlap_comm") else -0.1), step, other


def test_a_flag_that_the_formula_is_sure_of_is_tried_all_the_same(kit: SimpleNamespace) -> None:
    study, machine = guided(kit), Contrary()
    machine.run(study, 7)
    assert {trial.params["overlap_comm"] for trial in study.trials if "overlap_comm" in trial.params} == {True, False}
    machine.run(study, 10)
    assert study.best_trial.params["overlap_comm"] is False


def test_a_multiple_of_8_near_the_edge_is_tried_and_wins(kit: SimpleNamespace) -> None:
    hardware = replace(HARDWARE, device_memory_bytes=35 * GIB)
    planner = GuidedPlanner(small_problem(hardware=hardware))
    study, machine = guided(kit, planner), Eights(device_gib=33.5)
    machine.run(study, 18)
    largest = max(trial.params[MICRO_BATCH] for trial in study.trials if trial.value)
    assert largest > 24
    assert study.best_params[MICRO_BATCH] == 24
    assert study.best_value >= 0.98 * machine.best(planner)


def test_a_launch_that_ran_out_of_memory_keeps_its_like_away_from_the_edge(kit: SimpleNamespace) -> None:
    """The device holds a tenth less than it says: one or two launches find that out, and no more are lost to it."""
    study, machine = guided(kit), Machine(device_gib=34.0)
    machine.run(study, 20)
    assert outcomes(study)[:6].count("out_of_memory") >= 1
    assert outcomes(study)[6:].count("out_of_memory") <= 2


class Buckets(Machine):
    """Its buckets take memory that the formulas know nothing of: with gradients that are not contiguous, too."""

    def peak(self, params: Mapping[str, Any]) -> int:
        contiguous = params.get("contiguous_gradients", True)
        return super().peak(params) + (0 if contiguous else 4 * int(params["reduce_bucket_size"]))


def test_what_failed_again_and_again_is_left_alone(kit: SimpleNamespace) -> None:
    space = small_space(no_tune=KEPT[1:])
    planner = GuidedPlanner(small_problem(space=space))
    study, machine = guided(kit, planner), Buckets(space=space)
    machine.run(study, 20)
    assert outcomes(study)[10:].count("out_of_memory") <= 2
    assert study.best_value >= 0.97 * machine.best(planner)


class Single(Machine):
    """Its script fails at more than three samples, whatever the knobs."""

    def answer(self, study: optuna.Study, trial: optuna.Trial) -> FrozenTrial:
        if trial.params[MICRO_BATCH] <= 3:
            return super().answer(study, trial)
        trial.set_user_attr(attributes.OUTCOME, Outcome.SCRIPT_ERROR.value)
        return study.tell(trial, state=TrialState.FAIL)


def test_a_script_that_fails_above_a_micro_batch_is_launched_below_it(kit: SimpleNamespace) -> None:
    study, machine = guided(kit), Single()
    study.enqueue_trial({**(machine.space.params_of(CONFIG) or {}), MICRO_BATCH: 3})
    machine.run(study, 12)
    failed = [trial.number for trial in study.trials if trial.params[MICRO_BATCH] > 3]
    assert 0 < len(failed) <= 7
    assert max(failed) < 9
    assert "edge of memory" not in str([trial.system_attrs for trial in study.get_trials()]), "24 samples need 24 GiB"


def test_another_name_of_the_micro_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="with a planner it must be"):
        GuidedSampler(planner=small_planner(), micro_batch="m")
