"""What is said of the options before a search starts."""

from __future__ import annotations

import json

from optuna_dsat.tuning.options.given import Given
from optuna_dsat.tuning.options.tune_options import RandomOptions
from optuna_dsat.tuning.prepare import prepare
from tests.harness.entry_points import DS_CONFIG, EntryPointBench, bench

__all__ = ["bench"]


def test_misspelt_keys_of_the_config_are_named(bench: EntryPointBench) -> None:
    (bench.folder / "ds.json").write_text(json.dumps({**DS_CONFIG, "zero_optimisation": {"stage": 3}}))
    given = Given(options=RandomOptions(script="train.py", ds_config="ds.json", cpu_ranks=2), origins={})
    assert "DeepSpeed ignores the key 'zero_optimisation' of the config; 'zero_optimization' is probably meant." in (
        prepare("random", given).notes
    )
