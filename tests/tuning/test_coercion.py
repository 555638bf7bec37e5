"""What Python code and texts of a command line may give for an argument, and what is said where they may not."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from optuna_dsat.errors import UsageError
from optuna_dsat.study.options.parse import split_fixed, split_pairs, split_stages
from optuna_dsat.tuning.options.keywords import coerced, plain_data

STAGES = Sequence[int] | int | None
COUNTS = int | Sequence[int] | None
TEXTS = Sequence[str] | None
PATH = str | os.PathLike[str]
MAPPINGS = partial(split_pairs, option="--arg-mapping", form="KEY=--OPTION")


@pytest.mark.parametrize(
    ("value", "kind", "taken"),
    [
        (1, STAGES, (1,)),
        (np.int64(2), STAGES, (2,)),
        ([1, 2], STAGES, (1, 2)),
        (np.array([1, 2]), STAGES, (1, 2)),
        (4, COUNTS, 4),
        ([1, 2], COUNTS, (1, 2)),
        ("overlap_comm", TEXTS, ("overlap_comm",)),
        (("--lr", 1e-4, 2, Path("a/b")), TEXTS, ("--lr", "0.0001", "2", "a/b")),
        (7.0, int, 7),
        (3, float, 3.0),
        (np.float32(0.5), float, 0.5),
        (True, bool, True),
        (Path("a"), PATH, Path("a")),
        ("2GiB", str | int | None, "2GiB"),
        (np.int64(5), str | int | None, 5),
        ("cold", Literal["warm", "torchrun"], "cold"),  # refused with the rules of values, not of types
        ({"a": 1, "b": np.bool_(True)}, Mapping[str, Any] | None, {"a": 1, "b": True}),
        (None, STAGES, None),
    ],
)
def test_a_value_is_taken_as_the_type_says(value: Any, kind: Any, taken: Any) -> None:
    result = coerced("it", value, kind)
    assert result == taken
    assert type(result) is type(taken)
    if isinstance(taken, tuple):
        assert [type(item) for item in result] == [type(item) for item in taken]


@pytest.mark.parametrize(
    ("value", "kind", "said"),
    [
        ("1,2", STAGES, r"it must be a list of whole numbers or a whole number, such as \[1, 2\]; got '1,2' \(str\)\."),
        ([1, "2"], STAGES, r"it\[1\] must be a whole number; got '2' \(str\)\."),
        (True, STAGES, r"it must be a list of whole numbers or a whole number; got True \(bool\)\."),
        (1.5, int, r"it must be a whole number; got 1\.5 \(float\)\."),
        ("no", bool, r"it must be True or False; got 'no' \(str\)\."),
        (3, PATH, r"it must be a path; got 3 \(int\)\."),
        ([1], PATH | Mapping[str, Any] | None, "it must be a path or a dictionary; got list"),
        (["a=1"], Mapping[str, Any] | None, "it must be a dictionary; got list"),
        ({1: 2}, Mapping[str, Any] | None, r"The keys of it must be text; got 1 \(int\)\."),
        ({"N": 1}, Mapping[str, str] | None, r"it\['N'\] must be text; got int\."),
        (
            {"a": {"b": [object()]}},
            Mapping[str, Any] | None,
            r"it\['a'\]\['b'\]\[0\] must be a number, text.*; got object",
        ),
        (0, Literal["warm", "torchrun"], r"it must be 'warm' or 'torchrun'; got 0 \(int\)\."),
    ],
)
def test_another_type_is_refused_with_the_name_what_is_expected_and_what_was_given(
    value: Any, kind: Any, said: str
) -> None:
    with pytest.raises(TypeError, match=said):
        coerced("it", value, kind)


def test_a_text_is_no_list_of_words_where_it_could_be_many() -> None:
    with pytest.raises(TypeError, match=r"such as \['--lr', '1'\]; got '--lr 1' \(str\)"):
        coerced("script_args", "--lr 1", TEXTS, alone=False)


def test_what_may_be_secret_is_not_shown() -> None:
    with pytest.raises(TypeError) as raised:
        coerced("env", {"TOKEN": b"hunter2"}, Mapping[str, str])
    assert "hunter2" not in str(raised.value)


def test_data_become_those_of_json() -> None:
    given = {"a": (1, np.float64(0.5)), "b": {"c": np.int16(3), "d": Path("x")}, "e": [None, "t", True]}
    assert plain_data(given, "it") == {"a": [1, 0.5], "b": {"c": 3, "d": "x"}, "e": [None, "t", True]}


@pytest.mark.parametrize(
    ("split", "texts", "value"),
    [
        (split_stages, ["3", "1,2 1"], (1, 2, 3)),
        (split_fixed, ["overlap_comm=true", "reduce_bucket_size=5e7", "name=a=b"],
         {"overlap_comm": True, "reduce_bucket_size": 5e7, "name": "a=b"}),
        (MAPPINGS, ["train_batch_size=--batch"], {"train_batch_size": "--batch"}),
    ],
)  # fmt: skip
def test_texts_become_values(split: Callable[[Any], Any], texts: list[str], value: Any) -> None:
    assert split(texts) == value
    assert split(None) is split([]) is None


@pytest.mark.parametrize(
    ("split", "text", "message"),
    [
        (split_stages, "4", "--zero-stages names '4'"),
        (split_fixed, "=1", "--fix is '=1'; write KEY=VALUE"),
        (split_fixed, "overlap_comm=", "write KEY=VALUE"),
        (MAPPINGS, "train_batch_size", "--arg-mapping is 'train_batch_size'; write KEY=--OPTION"),
    ],
)
def test_what_cannot_be_read_is_named(split: Callable[[Any], Any], text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        split([text])
