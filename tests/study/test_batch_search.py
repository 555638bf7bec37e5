"""What the batch size follows by, decided from a profile launch's record."""

from __future__ import annotations

from typing import Any

import pytest

from optuna_dsat.config.ds_config import MICRO_BATCH
from optuna_dsat.study import batch_search
from tests.harness.studies import StudyBench


class Record:
    """A profile launch that fed the engine batches of one size, and noted nothing of where it comes from."""

    batch_sources = None

    class engine:  # noqa: N801 - stands in for an event
        pipeline = False
        data_parallel_size = 1

    def __init__(self, fed: int | None) -> None:
        self.observed_micro_batch = fed


@pytest.mark.parametrize(("fed", "kept"), [(16, None), (4, 4), (None, 16)])
def test_a_fixed_micro_batch_is_compared_with_what_was_fed(
    bench: StudyBench, fed: int | None, kept: int | None
) -> None:
    spec = bench.spec(fix={MICRO_BATCH: 16})
    record: Any = Record(fed)
    launcher: Any = None  # nothing is launched where nothing can be guessed
    rule = batch_search.find_batch_rule(
        spec, launcher, record, overlay={MICRO_BATCH: 16}, on_report=lambda _report, _record: None
    )
    assert (None if rule is None else (rule.kind, rule.own)) == (None if kept is None else ("held", kept))
