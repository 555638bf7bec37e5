from __future__ import annotations

import math
from functools import cache
from statistics import fmean, median, pstdev
from typing import Any

import pytest
from pydantic import ValidationError

from benchmarks import published_measurements
from benchmarks.published import PublishedTable, Row, published_tables
from benchmarks.published_measurements import (
    Comparison,
    compare,
    contrasts,
    deviations,
    distributions,
    needless_savings,
    right_order,
    slopes,
)
from benchmarks.random_machines.draw import PUBLISHED, draw
from optuna_dsat.guided import posterior

TABLES = published_tables()


@cache
def comparisons_of(name: str) -> tuple[list[Comparison], list[str]]:
    return compare(name, TABLES[name])


def test_four_of_at_least_fifteen_tables_are_set_aside() -> None:
    assert len(TABLES) >= 15
    assert sum(table.set_aside for table in TABLES.values()) == 4


@pytest.mark.parametrize("name", TABLES)
def test_a_table_has_rows_to_compare(name: str) -> None:
    table = TABLES[name]
    assert {row.config.get("zero_optimization", {}).get("stage") for row in table.rows} == {None}
    measured = [row for row in table.rows if row.outcome == "measured"]
    assert len(measured) >= 2
    assert (table.memory is None) == all(row.peak_bytes is None for row in table.rows)


@pytest.mark.parametrize(
    "changes",
    [{"step_s": 1.0, "run_s": 1.0}, {}, {"peak_gib": 1.0, "peak_gb": 1.0}, {"step_s": 1.0, "outcome": "out_of_memory"}],
)
def test_a_row_has_one_rate_and_one_peak_at_most(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="a measured row has one rate"):
        Row(stage=1, micro_batch=1, gpus=1, checkpointing=False, **changes)


def comparison(rate: float, predicted: float, **settings: Any) -> Comparison:
    values = {"stage": 2, "micro_batch": 1, "gpus": 8, "checkpointing": False, **settings}
    return Comparison(
        table="made up", row=Row(**values, samples_per_s=rate), absolute=True, predicted_rate=predicted,
        rate_range=(predicted / 2, 2 * predicted), measured_rate=rate, predicted_bytes=2**30, measured_bytes=None,
        fits=True,
    )  # fmt: skip


MADE_UP = [
    comparison(1, 2),
    comparison(4, 2, micro_batch=4),
    comparison(0.5, 4, stage=3),
    comparison(0.25, 4, stage=3, offload_optimizer="cpu"),
]


def test_deviations_of_a_made_up_table() -> None:
    assert [math.exp(value) for value in deviations(MADE_UP)] == pytest.approx([0.5, 0.125, 2, 4])
    assert {key: math.exp(value) for key, value in contrasts(MADE_UP, "stage").items()} == {(2, 3): pytest.approx(4)}
    assert contrasts(MADE_UP, "offload_optimizer") == {("none", "cpu"): pytest.approx(math.log(2))}
    assert slopes(MADE_UP, "micro_batch") == [pytest.approx(-math.log(2))]
    assert right_order(MADE_UP) == (0, 6)


def test_the_range_of_a_prediction_contains_nine_of_ten_published_rates() -> None:
    names = [name for name, table in TABLES.items() if not table.set_aside]
    known = [item.in_range for name in names for item in comparisons_of(name)[0] if item.in_range is not None]
    assert (sum(known), len(known)) == (76, 84)
    assert [item.in_range for item in MADE_UP] == [True, True, False, False]


def test_a_row_of_unknown_settings_is_left_out_with_a_reason() -> None:
    values = TABLES["gpt2-medium-tutorial"].model_dump(mode="json")
    values["rows"][0]["checkpointing"] = None
    results, left_out = compare("made up", PublishedTable.model_validate(values))
    assert len(results) == 1
    assert left_out == ["made up, row 0 is left out: checkpointing is unknown."]


def test_the_command_prints_every_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published_measurements, "compare", lambda name, _: comparisons_of(name))
    published_measurements.main([])
    printed = capsys.readouterr().out
    assert all((f"| {name} |" in printed) is not table.set_aside for name, table in TABLES.items())


def test_the_factor_on_needless_savings_is_their_share_in_the_tables() -> None:
    names = [name for name, table in TABLES.items() if not table.set_aside]
    of_tables = [ratios for name in names if (ratios := needless_savings(comparisons_of(name)[0]))]
    shares = [fmean(ratio > 1 for ratio in ratios) for ratios in of_tables]
    assert fmean(shares) == pytest.approx(posterior._SELDOM)
    assert (sum(map(len, of_tables)), len(of_tables)) == (47, 10)


def test_deviations_of_random_machines_are_drawn_from_published_measurements() -> None:
    tables = {name: table for name, table in TABLES.items() if not table.set_aside}
    results = [comparisons_of(name)[0] for name in tables]
    values = distributions(results, {name: table.memory for name, table in tables.items()})
    fitted = {name: (round(math.exp(median(values[name])), 2), round(pstdev(values[name]), 2)) for name in PUBLISHED}
    assert fitted == PUBLISHED
    seeds = range(200)
    realistic = [item for item in map(draw, seeds) if item.realistic]
    assert len(realistic) == 0.9 * len(seeds)
    for stage in range(3):
        slower = [
            item.structure_times[stage + 1, False, False] / item.structure_times[stage, False, False]
            for item in realistic
        ]
        assert min(slower) >= 1
        spread = PUBLISHED[f"rate: stage {stage + 1} against {stage}"][1]
        assert fmean(math.log(factor) ** 2 for factor in slower) == pytest.approx(spread**2, rel=0.25)
