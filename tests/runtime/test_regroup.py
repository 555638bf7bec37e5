"""Batches of another size than a loader's, and the number of samples in a model's inputs."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass, replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from optuna_dsat.runtime.adapt.regroup import RegroupedBatches, RegroupedIndices, RepeatedInputs
from optuna_dsat.runtime.measure import inputs
from optuna_dsat.runtime.measure.inputs import BatchNumbers, InputSize, micro_batches, sample_counter
from optuna_dsat.runtime.measure.live import NotLiveError
from tests.harness import present
from tests.harness.meter import Engine, MeterBench


class Pair(NamedTuple):
    x: torch.Tensor
    y: list[str]


@dataclass(frozen=True)
class Fields:
    x: torch.Tensor
    names: tuple[str, ...]


def test_indices_follow_each_change_in_order() -> None:
    scale = Fraction(1)
    prepared: list[int] = []
    own = [[n, n + 1, n + 2, n + 3] for n in range(0, 40, 4)]
    lists = iter(RegroupedIndices(own, scale=lambda: scale, taken=prepared.append))
    taken = [next(lists)]
    for numerator, size in ((9, 9), (1, 1), (4, 4), (8, 8)):
        scale = Fraction(numerator, 4)
        taken.append(next(lists))
        assert len(taken[-1]) == size
    assert [index for batch in taken for index in batch] == list(range(4 + 9 + 1 + 4 + 8))
    assert prepared == [*map(len, taken)]


def test_the_loaders_own_size_keeps_the_last_batch_and_another_leaves_the_rest_out() -> None:
    batches = [[0, 1], [2, 3], [4]]
    assert list(RegroupedIndices(batches, scale=lambda: Fraction(1), taken=id)) == batches
    assert list(RegroupedIndices(batches, scale=lambda: Fraction(2), taken=id)) == [[0, 1, 2, 3]]


def batches(size: int) -> Iterator[Any]:
    for start in range(0, 10**6, size):
        numbers = torch.arange(start, start + size)
        yield {
            "x": numbers[:, None],
            "pair": Pair(numbers, [str(n) for n in numbers.tolist()]),
            "fields": Fields(numbers, (str(size),) * size),
            "epoch": 1,
        }


def test_batches_are_joined_and_cut_at_any_depth() -> None:
    scale = Fraction(1)
    regrouped = RegroupedBatches(batches(4), scale=lambda: scale)
    seen = [next(regrouped)]
    for numerator in (9, 1, 4, 8):
        scale = Fraction(numerator, 4)
        seen.append(next(regrouped))
        assert len(seen[-1]["x"]) == numerator
        assert isinstance(seen[-1]["pair"], Pair)
        assert len(seen[-1]["fields"].x) == len(seen[-1]["fields"].names) == numerator
        assert seen[-1]["epoch"] == 1
    assert torch.cat([batch["x"][:, 0] for batch in seen]).tolist() == list(range(26))
    assert [name for batch in seen for name in batch["pair"].y] == [str(n) for n in range(26)]


def test_what_cannot_be_joined_is_refused() -> None:
    padded = iter([torch.zeros(2, 3), torch.zeros(2, 4)])
    with pytest.raises(NotLiveError, match="different lengths"):
        next(RegroupedBatches(padded, scale=lambda: Fraction(2)))
    for shape in ((2, 4, 3), (1, 1, 3), (3, 3, 8, 8)):  # lengths, a sample of one channel, images of three
        joined = next(RegroupedBatches(iter([torch.zeros(shape)] * 2), scale=lambda: Fraction(2)))
        assert joined.shape == (2 * shape[0], *shape[1:])
    with pytest.raises(NotLiveError, match="no tensors"):
        next(RegroupedBatches(iter([["text"]]), scale=lambda: Fraction(2)))


def test_inputs_that_are_the_same_in_every_pass_are_repeated() -> None:
    scale = Fraction(1)
    repeated = RepeatedInputs(scale=lambda: scale)
    x, step = torch.arange(4)[:, None], torch.tensor(7)
    batch = {"x": x, "pair": Pair(x, list("abcd")), "mask": None}
    assert repeated((batch,), {"y": x})[0][0] is batch
    for numerator in (9, 1, 8, 4):
        scale = Fraction(numerator, 4)
        (fed,), others = repeated((batch,), {"y": x})
        assert fed["x"][:, 0].tolist() == others["y"][:, 0].tolist() == [n % 4 for n in range(numerator)]
        assert fed["pair"].y == ["abcd"[n % 4] for n in range(numerator)]
        assert fed["mask"] is None
    scale = Fraction(2)
    mask = torch.ones(1, 4)
    repeated((mask, x, step), {})
    (broadcast, fed, same), _ = repeated((mask, x, step), {})
    assert len(fed) == 8
    assert broadcast is mask
    assert same is step


def test_inputs_that_the_script_makes_in_every_pass_stay_as_they_are() -> None:
    repeated = RepeatedInputs(scale=lambda: Fraction(2))
    mask = torch.ones(4, 1)
    for _ in range(3):
        made = torch.zeros(4, 1)
        (fed,), others = repeated((made,), {"mask": mask})
        assert fed is made
        assert others["mask"] is mask
    assert repeated((), {}) == ((), {})


TOKENS = torch.zeros(12, 6, dtype=torch.long)


def samples(
    batch: Any, *, configured: Set[int], named: Set[int] = frozenset(), loaded: int | None = None
) -> int | None:
    numbers = BatchNumbers(configured=configured, named=named, loaded=loaded)
    size = sample_counter(lambda: numbers)(batch)
    return None if size is None else size.samples


@pytest.mark.parametrize(
    ("batch", "named", "expected"),
    [
        (TOKENS, {6}, 6),
        (torch.zeros(12, 6, 32), {6}, 6),
        (TOKENS, {6, 12}, 12),  # an option has the value of the leading dimension
        (TOKENS, {24}, 12),
        (TOKENS.float(), {6}, 12),  # vectors of six features
        (torch.zeros(12, 6, 8, 8), {6}, 12),  # images of six channels
        (torch.zeros(12, 1, dtype=torch.long), {1}, 12),
    ],
)
def test_time_may_come_first(batch: torch.Tensor, named: set[int], expected: int) -> None:
    assert samples(((batch,), {}), configured={1}, named=named) == expected


@pytest.mark.parametrize(
    ("shape", "loaded", "expected"),
    [
        ((8, 16, 3), None, True),  # the script's size is 8, the launch's 16: time or samples come first
        ((8, 8, 3), None, True),
        ((8, 8, 3), 8, False),
        ((8, 5, 3), None, False),
        ((5, 8, 3), None, False),
        ((8, 8, 3, 3), None, False),  # images of eight channels
        ((1, 1, 3), None, False),  # a sample of one channel
    ],
)
def test_both_dimensions_may_be_that_of_samples(shape: tuple[int, ...], loaded: int | None, expected: bool) -> None:
    numbers = BatchNumbers(configured={1, 8, 16}, named=set(), loaded=loaded)
    assert present(sample_counter(lambda: numbers)(torch.zeros(shape))).is_ambiguous is expected


def test_a_loaders_batch_size_tells_which_dimension_samples_are() -> None:
    assert samples(TOKENS, configured={6}, loaded=12) == 12
    assert samples(TOKENS, configured={1}, loaded=6) == 6


@pytest.mark.parametrize("loaded", [None, 32])
@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ((torch.zeros(32, 8, dtype=torch.long),), InputSize(samples=32, elements=32 * 8, are_tokens=True)),
        ((torch.zeros(32), torch.zeros(32, 3, 16, 16)), InputSize(samples=32, elements=32 * 3 * 256)),  # with prompts
    ],
)
def test_positions_as_many_as_samples_of_another_config_are_not_samples(
    others: tuple[torch.Tensor, ...], loaded: int | None, expected: InputSize
) -> None:
    """The 8 prompts of 32 images were taken for 8 samples, and for the tokens of all."""
    numbers = BatchNumbers(configured={8, 32}, named=set(), loaded=loaded)
    size = sample_counter(lambda: numbers)((torch.arange(8)[None], *others))
    assert size == replace(expected, loaded=loaded)


ONE_ROW = torch.zeros(1, 6)


@pytest.mark.parametrize(
    ("batch", "loaded", "expected"),
    [
        ((torch.zeros(12, 6, 3, 8, 8),), 6, 6),  # videos, time first
        ((torch.zeros(12, 1, dtype=torch.long),), 1, 1),  # a text, time first
        ((torch.zeros(12, 1, 3),), 1, 1),  # a series
        ((torch.zeros(12, 6),), 6, 12),  # two views of six features
        ((ONE_ROW, torch.zeros(8, 6)), 8, 8),  # positions or a mask of all samples
        ((ONE_ROW, torch.zeros(8, 6)), None, 8),
        ((ONE_ROW, torch.zeros(4096, 6)), None, 1),  # patches of an image
        ((torch.arange(8), torch.zeros(32, 8, 3)), 32, 32),  # positions, as many as samples in the script's config
        ((torch.ones(6, 6), torch.zeros(8, 6, 3)), None, 8),  # a mask
        ((torch.ones(8, 8), torch.zeros(1, 8, 3)), 1, 1),
        ((torch.zeros(32, 32), torch.zeros(8, 32)), None, 32),  # as many features, and those of eight classes
        ((ONE_ROW, torch.zeros(8, 6)), 32, 8),  # a part of the loader's batch
        ((torch.zeros(8, 8), torch.zeros(1, 8)), None, 8),  # features of eight samples, and a weight for each
        ((ONE_ROW, torch.zeros(8)), None, 1),  # bounds of seven texts in a row
        ((torch.zeros(30, 30), torch.zeros(8, 12, 30)), 8, 8),  # a graph, and series at its nodes
        ((torch.zeros(24, 6), torch.zeros(8)), 8, 8),  # three rows for each sample, and its label
        ((torch.zeros(8, 6), torch.zeros(32)), 32, 8),  # a part of the loader's batch
    ],
)
def test_the_first_tensor_may_not_have_the_samples_in_its_rows(
    batch: tuple[torch.Tensor, ...], loaded: int | None, expected: int
) -> None:
    assert samples((batch, {}), configured={1, 8}, loaded=loaded) == expected


def test_several_rows_of_each_sample_are_all_counted() -> None:
    assert samples(torch.zeros(16, 3), configured={1, 8}, loaded=8) == 16


IMAGES = [torch.zeros(3, 8, width) for width in (8, 9, 10, 11)]


@pytest.mark.parametrize(
    ("images", "named", "expected"),
    [
        (IMAGES, None, (4, 3 * 8 * 38)),
        (IMAGES[:1], None, (1, 3 * 8 * 8)),
        ([{"image": image, "id": 1} for image in IMAGES], None, (4, 3 * 8 * 38)),
        ([torch.zeros(4, 5)] * 4, None, (4, 20)),  # features of four samples
        ([torch.zeros(length) for length in (7, 3, 4, 9)], 4, (4, 23)),  # texts that no loader yields
        ([torch.zeros(6, 5)] * 4, 6, (6, 30)),
        ([{"text": torch.zeros(4, 5)}] * 2, 2, (4, 20)),
    ],
)
def test_lists_of_images_are_samples(images: list[Any], named: int | None, expected: tuple[int, int]) -> None:
    """Detection's images of different sizes were counted by their channels: its batch size was held."""
    loaded = None if named else len(images)
    numbers = BatchNumbers(configured={1, 4}, named={named or 1}, loaded=loaded)
    size = sample_counter(lambda: numbers)(((images, [{"labels": torch.zeros(2)}] * len(images)), {}))
    assert size is not None
    assert (size.samples, size.elements) == expected


@pytest.mark.parametrize(
    ("sizes", "drawn", "expected"),
    [
        ([8, 8, 8], 24, [8, 8, 8]),  # three tasks, each with its loader
        ([8, 24], 32, [8, 24]),
        ([8, 8, 8], 8, [8]),  # triplets
        ([8, 8, 8], 16, [8]),
        ([4, 4], 8, [4, 4]),  # parts of a batch
        ([], 8, []),
    ],
)
def test_the_batches_of_several_loaders_all_count(sizes: list[int], drawn: int, expected: list[int]) -> None:
    """Losses of three tasks with one backward pass: a third of the samples was counted."""
    fed = [InputSize(samples=size, loaded=8, drawn=100 + drawn) for size in sizes]
    assert [size.samples for size in micro_batches(fed, drawn_before=100)] == expected


def test_a_batch_that_a_method_of_the_module_gets_has_the_loaders_size() -> None:
    """Nothing was observed of scripts that call ``engine.module.loss(batch)``, and their batch size was held."""
    bench, drawn = MeterBench(Engine), 0
    bench.meter._size_of = sample_counter(lambda: BatchNumbers(configured={1}, named=set(), loaded=8, drawn=drawn))
    for _ in range(2):
        drawn += 8
        for _ in range(2):  # two losses of a batch
            bench.engine.backward(torch.tensor(0.5))
        bench.engine.step()
    assert [(step.observed_micro_batch, step.samples) for step in bench.steps] == [(8, 8)] * 2
    bench.engine.module.eval()
    drawn += 8
    bench.engine(torch.ones(4, 2))  # a model that the script trains in eval mode
    bench.engine.backward(torch.tensor(0.5))
    bench.engine.step()
    assert (bench.steps[2].observed_micro_batch, bench.steps[2].samples) == (4, 4)


def test_the_tensors_of_a_dataclass_are_counted_though_the_loaders_batches_are_larger() -> None:
    """A short last batch of a dataset without a length counted as a full one."""
    assert samples(((Fields(torch.zeros(5, 3), ()),), {}), configured={8}, loaded=8) == 5


def test_an_object_of_the_scripts_has_the_loaders_size_or_else_that_of_its_attributes() -> None:
    inputs = SimpleNamespace(graph={"x": torch.zeros(5, 3)})
    model = torch.nn.Linear(3, 3)
    assert samples(((model, inputs), {}), configured={8}) == 5
    assert samples(((), {"batch": inputs}), configured={8}) == 5
    assert samples(((inputs,), {}), configured={8}, loaded=2) == 2
    assert samples(((model,), {}), configured={8}) is None


def test_what_has_no_tensor_has_no_size() -> None:
    assert samples({"text": "a"}, configured={1}) is None


def test_lists_of_numbers_are_not_searched_for_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number of a loader's features took 3 us of the step: a twentieth of the speed was measured."""
    searched: list[Any] = []
    monkeypatch.setattr(inputs, "_has_shape", lambda value: searched.append(type(value)) or hasattr(value, "shape"))  # type: ignore[func-returns-value]
    features = [{"input_ids": [1] * 99, "text": "a"}] * 4
    assert inputs.shaped_tensors(features) == []
    assert int not in searched
    assert [len(tensor) for tensor in inputs.shaped_tensors([0.5, torch.zeros(4, 2)])] == [4]


def test_where_rows_are_samples_in_a_known_proportion_no_other_dimension_is() -> None:
    """Views of as many frames as the batch had samples were counted by their frames."""
    size = sample_counter(lambda: BatchNumbers(configured={6}, named=set(), loaded=6), rows=(2, 1))(
        torch.zeros(12, 6, 5)
    )
    assert size is not None
    assert size.samples == 6


@pytest.mark.parametrize(("fed", "rows", "expected"), [(8, (2, 1), 4), (7, (2, 1), 4), (6, (3, 2), 4), (8, (1, 1), 8)])
def test_rows_that_are_not_samples_are_counted_as_samples(fed: int, rows: tuple[int, int], expected: int) -> None:
    size = sample_counter(lambda: BatchNumbers(configured={4}, named=set(), loaded=None), rows=rows)(
        torch.zeros(fed, 3)
    )
    assert size is not None
    assert size.samples == expected
