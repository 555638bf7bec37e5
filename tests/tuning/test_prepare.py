"""What is said of the options before a search starts."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import Mock

import pytest

from optuna_dsat.config import user_file
from optuna_dsat.tuning.options.given import Given
from optuna_dsat.tuning.options.tune_options import AutotuningOptions, RandomOptions
from optuna_dsat.tuning.prepare import prepare, prepare_each
from tests.harness.entry_points import DS_CONFIG, EntryPointBench, bench

__all__ = ["bench"]


def test_misspelt_keys_of_the_config_are_named(bench: EntryPointBench) -> None:
    (bench.folder / "ds.json").write_text(json.dumps({**DS_CONFIG, "zero_optimisation": {"stage": 3}}))
    given = Given(options=RandomOptions(script="train.py", ds_config="ds.json", cpu_ranks=2), origins={})
    assert "DeepSpeed ignores the key 'zero_optimisation' of the config; 'zero_optimization' is probably meant." in (
        prepare("random", given).notes
    )


@pytest.mark.usefixtures("bench")
def test_all_searches_of_a_start_read_the_config_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Mock(side_effect=user_file.read)
    monkeypatch.setattr(user_file, "read", read)
    given = Given(options=AutotuningOptions(script="train.py", ds_config="ds.json", cpu_ranks=(1, 2)))
    assert [item.request.spec.slots_per_trial for item in prepare_each(None, given)] == [1, 2]
    read.assert_called_once_with(Path("ds.json"))
