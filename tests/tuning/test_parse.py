"""What texts of a command line mean as values of options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from optuna_dsat.errors import UsageError
from optuna_dsat.study.options.parse import split_fixed, split_mappings, split_stages


@pytest.mark.parametrize(
    ("split", "texts", "value"),
    [
        (split_stages, ["3", "1,2 1"], (1, 2, 3)),
        (split_fixed, ["overlap_comm=true", "reduce_bucket_size=5e7", "name=a=b"],
         {"overlap_comm": True, "reduce_bucket_size": 5e7, "name": "a=b"}),
        (split_mappings, ["train_batch_size=--batch"], {"train_batch_size": "--batch"}),
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
        (split_mappings, "train_batch_size", "--arg-mapping is 'train_batch_size'; write KEY=--OPTION"),
    ],
)
def test_what_cannot_be_read_is_named(split: Callable[[Any], Any], text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        split([text])
