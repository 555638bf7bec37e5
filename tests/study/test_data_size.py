"""How much training data there is, by what a rank's data loader gives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from optuna_dsat.study.profile.profiled import Profiled
from optuna_dsat.study.space import dataset_size, epoch_samples, largest_global_batch
from tests.harness.studies import StudyBench


@pytest.mark.parametrize(("loads_all", "given", "expected"), [
    (False, None, (8000, 8000, 800)),
    (True, None, (4000, 8000, 400)),
    (True, 6000, (6000, 6000, 600)),
])  # fmt: skip
def test_data_that_each_rank_loads_as_a_whole_count_once(
    bench: StudyBench, profiled: Profiled, loads_all: bool, given: int | None, expected: tuple[int, int, int]
) -> None:
    profiled = Profiled.from_json(replace(profiled, samples_per_rank=4000, loads_all=loads_all).to_json())
    spec = bench.spec(dataset_size=given)
    sizes = dataset_size(spec, profiled), epoch_samples(spec, profiled), largest_global_batch(spec, profiled, own=8)
    assert sizes == expected
