"""The finalists of a search: which trials the rounds measure, and which follow where none is any better."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from optuna.trial import FrozenTrial

from optuna_dsat.guided.joint_estimate import JointEstimate
from optuna_dsat.study.confirm.finalists import choose_finalists, refuted, with_next_best
from optuna_dsat.study.confirm.rounds import Rounds
from optuna_dsat.study.confirm.words import full_memory_in_words
from optuna_dsat.trials import attributes
from tests.study.test_verdict import OWN, rounds_of, searched, spec, trial


def finalists(trials: Sequence[FrozenTrial], estimate: JointEstimate, **asked: Any) -> list[int]:
    """Return the finalists of a method that ranks these trials by its estimate."""
    means, noise = dict(zip(estimate.numbers, estimate.means, strict=True)), asked.pop("noise", None)
    ranked = sorted(trials, key=lambda each: means[each.number], reverse=True)
    return choose_finalists(trials, ranked, spec=spec(**asked), noise=noise, estimate=estimate)


def test_finalists_are_the_best_an_equal_of_a_smaller_batch_and_the_best_at_the_users_batch() -> None:
    trials = [
        trial(OWN, 73.0), trial(1, 147.0, micro_batch=112), trial(2, 146.9, micro_batch=110),
        trial(3, 143.0, micro_batch=16), trial(4, 80.0, overlap_comm=True), trial(5, 146.8, micro_batch=111),
    ]  # fmt: skip
    ranked = attributes.best_trials(trials, maximize=True)
    both = spec(batch="both")
    assert choose_finalists(trials, ranked, spec=both, noise=None) == [1, 3, 2, 4, OWN]
    assert choose_finalists(trials, ranked, spec=both, noise=0.001) == [1, 2, 5, 4, OWN], "3% is more than the noise"
    assert choose_finalists(trials, ranked, spec=spec(batch="free"), noise=None) == [1, 3, 2, OWN], "one question"
    assert choose_finalists(trials, ranked, spec=spec(confirm=1), noise=None) == [1, OWN]
    assert choose_finalists(trials, ranked, spec=spec(confirm=0), noise=None) == []
    assert choose_finalists(trials[:1], trials[:1], spec=spec(), noise=None) == [OWN]


def test_what_the_search_is_sure_of_takes_no_place_among_the_finalists() -> None:
    values = {OWN: 10.0, 1: 20.0, 2: 19.9, 3: 19.2, 4: 15.0}
    batches = {OWN: 2, 1: 64, 2: 16, 3: 4, 4: 8}
    trials = [trial(number, value, micro_batch=batches[number]) for number, value in values.items()]

    def chosen(sd: float) -> list[int]:
        return finalists(trials, searched({number: (value, sd) for number, value in values.items()}))

    assert chosen(0.001) == [1, 2, OWN]
    assert chosen(0.015) == [1, 2, OWN], "4% behind is no tie"
    assert chosen(0.03) == [1, 3, OWN], "that of the smallest batch may be as good"


def test_finalists_that_rounds_would_not_tell_apart_take_no_launches() -> None:
    """Three launches of each were made to tell configs apart that differ in a setting without effect."""
    trials = [trial(OWN, 10.0), *(trial(number, 20.0, micro_batch=64 - number) for number in (1, 2, 3))]
    estimate = searched({OWN: (10.0, 0.01), 1: (20.0, 0.0), 2: (19.98, 0.0), 3: (19.97, 0.02)})
    assert finalists(trials, estimate, noise=0.001) == [1, OWN]


def test_the_best_measurement_is_a_finalist_only_if_noise_does_not_explain_it() -> None:
    """A lucky launch took three rounds, though the posterior knew better."""
    trials = [trial(OWN, 10.0), trial(1, 20.6, micro_batch=64), trial(2, 20.0, micro_batch=64)]
    estimate = searched({OWN: (10.0, 0.01), 1: (18.5, 0.01), 2: (20.0, 0.01)})
    assert finalists(trials, estimate, noise=0.04) == [2, OWN]
    assert finalists(trials, estimate, noise=0.01) == [2, 1, OWN], "3 % is more than two launches differ by"


def test_where_no_finalist_is_any_good_the_next_best_is_heard_within_the_limits() -> None:
    trials = [trial(OWN, 10.0), trial(1, 16.0), trial(2, 15.0), trial(3, 12.0), trial(4, 10.05), trial(5, 9.0)]
    ranked = attributes.best_trials(trials, maximize=True)
    false = rounds_of({OWN: [10.0, 10.01, 9.99], 1: [9.9, 9.95, 9.9]})

    def chosen(rounds: Rounds, **changes: Any) -> tuple[int, ...]:
        return with_next_best(rounds, trials, ranked, spec=spec(**changes)).chosen

    assert refuted(false, trials, spec=spec()) == {1}
    assert chosen(false, confirm=1) == (OWN, 2)
    assert chosen(false, confirm=1, confirm_time_s=61.0) == (OWN, 2), "six launches of ten seconds"
    assert chosen(false, confirm=1, confirm_time_s=60.0) == false.chosen
    again = rounds_of({OWN: [10.0, 10.01, 9.99], 1: [9.9, 9.95, 9.9], 2: [9.9, 9.95, 9.9]})
    assert chosen(again, confirm=1) == again.chosen, "twice as many finalists, no more"
    assert chosen(again, confirm=2) == (OWN, 3)
    last = rounds_of({OWN: [10.0, 10.01, 9.99], **{number: [9.9, 9.95, 9.9] for number in (1, 2, 3)}})
    assert chosen(last, confirm=9) == last.chosen, "no other was faster in the search by more than a tie"
    for good in ([16.0, 16.1, 15.9], [10.5, 9.9, 11.2]):  # one is better, one may be: it is not refuted
        better = rounds_of({OWN: [10.0, 10.01, 9.99], 1: good})
        assert chosen(better, confirm=1) == better.chosen
        assert not refuted(better, trials, spec=spec())


def test_an_answer_that_fills_a_gpu_is_named_with_the_next_best_that_leaves_memory() -> None:
    trials = [trial(number, value, micro_batch=size) for number, value, size in (
        (5, 100.0, 40), (4, 99.0, 30), (3, 90.0, 20), (2, 60.0, 2), (1, 50.0, 2), (OWN, 40.0, 2),
    )]  # fmt: skip
    for each, share in zip(trials, (99.7, 96.0, 90.0, 95.1, 40.0, 30.0), strict=True):
        each.user_attrs[attributes.PEAK_BYTES] = round(share * 1000)
    fastest, second, third, at_user_batch = trials[:4]
    assert full_memory_in_words([fastest, at_user_batch], trials, memory=100_000, spec=spec()) == (
        "Trial 5 takes up to 99.7% of a GPU's memory: in a long training, fragmentation or a longer sample may exceed "
        "it. Trial 3, 10.0% slower, leaves 10%. "
        "Trial 2 takes up to 95.1% of a GPU's memory: in a long training, fragmentation or a longer sample may exceed "
        "it. Trial 1, 16.7% slower, leaves 60%."
    )
    assert full_memory_in_words([second], [second], memory=100_000, spec=spec()).endswith("may exceed it.")
    assert not full_memory_in_words([third], trials, memory=100_000, spec=spec())
    assert not full_memory_in_words([fastest], trials, memory=100_000, spec=spec(device="cpu"))
    assert not full_memory_in_words([fastest], trials, memory=0, spec=spec())
