"""``optuna_dsat.tune`` with what Python code has at hand: a dictionary as the config, one stage, NumPy's numbers."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import optuna_dsat
from optuna_dsat.errors import ConfigError, UsageError
from tests.harness.entry_points import DS_CONFIG, EntryPointBench, Run, bench, run_here
from tests.harness.landscapes import GIB, Hill

__all__ = ["bench", "run_here"]

pytestmark = pytest.mark.usefixtures("bench")

QUICK: dict[str, Any] = {"metric": "throughput", "cpu_ranks": 2, "max_trials": 2, "quiet": True, "confirm": 0}


def test_a_dictionary_is_the_config_and_the_script_finds_it_in_a_file_that_arguments_may_name(
    bench: EntryPointBench, run_here: Run
) -> None:
    bench.landscape = hill = Hill()
    result = optuna_dsat.tune("train.py", DS_CONFIG, method="random", **QUICK)
    assert all(config["optimizer"] == DS_CONFIG["optimizer"] for config in hill.configs)
    assert result.user_train_batch_size == 4
    (written,) = Path("optuna-dsat-output").glob("ds_config-*.json")
    assert json.loads(written.read_text()) == DS_CONFIG
    assert stat.S_IMODE(written.stat().st_mode) == 0o600
    launches = len(hill.configs)
    again = optuna_dsat.tune("train.py", dict(reversed(DS_CONFIG.items())), method="random", **QUICK)
    assert again.trial == result.trial
    assert len(hill.configs) == launches  # nothing was left to launch
    done = run_here("resume", result.study, "--max-trials", "3", "--quiet", "--json")
    assert done.returncode == 0, done.stderr
    assert sum(json.loads(done.stdout)["launches"].values()) == 3
    named = ["--deepspeed_config", str(written)]
    result = optuna_dsat.tune("train.py", DS_CONFIG, named, method="random", study="named", **QUICK)
    assert str(written) not in result.command
    assert result.config_path in result.command


def test_a_dictionary_is_checked_as_a_file_is_and_nothing_is_written() -> None:
    before = sorted(Path().iterdir())
    with pytest.raises(ConfigError, match="ds_config"):
        optuna_dsat.tune("train.py", {"train_batch_size": float("nan")}, **QUICK)
    with pytest.raises(UsageError, match="overlap_com"):
        optuna_dsat.tune("train.py", DS_CONFIG, fix={"overlap_com": True}, **QUICK)
    with pytest.raises(TypeError, match=r"ds_config\['fp16'\] must be a number, text"):
        optuna_dsat.tune("train.py", {"fp16": object()}, **QUICK)
    assert sorted(Path().iterdir()) == before


def test_one_stage_one_knob_and_numbers_of_numpy(bench: EntryPointBench) -> None:
    bench.landscape = hill = Hill()
    fixed = {"overlap_comm": np.bool_(True), "reduce_bucket_size": np.int64(50_000_000)}
    numbers = {"max_trials": np.int64(2), "random_seed": np.int32(3), "timeout": 600, "device_memory": 8 * GIB}
    words: dict[str, Any] = {"no_tune": "offload_optimizer", "arg_mapping": {"train_micro_batch_size_per_gpu": "--b"}}
    places: dict[str, Any] = {"output_dir": bench.folder / "o", "enqueue_user_config": False}
    optuna_dsat.tune(
        "train.py",
        Path("ds.json"),
        method="random",
        zero_stages=1,
        fix=fixed,
        **{**QUICK, **numbers},
        **words,
        **places,
    )
    tried = [config["zero_optimization"] for config in hill.configs[1:]]
    assert tried
    for zero in tried:
        assert (zero["stage"], zero["overlap_comm"], zero["reduce_bucket_size"]) == (1, True, 50_000_000)
        assert not zero.get("offload_optimizer")
    assert bench.arguments == [bench.folder / "o" / "train-random"]


@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        (TypeError, {"script": ["train.py"]}, "script must be a path; got list"),
        (TypeError, {"ds_config": 3}, r"ds_config must be a path or a dictionary; got 3 \(int\)"),
        (TypeError, {"timeout": "1h"}, r"timeout must be a number; got '1h' \(str\)"),
        (UsageError, {"slurm_arg": ["--partition=a100"]}, "slurm_arg is for launches by on slurm; these run here"),
        (UsageError, {"ray_node": ["n1"], "on": "slurm"}, "ray_node is for launches by on ray; these run by on slurm"),
        (UsageError, {"queue_timeout": 60}, "queue_timeout is for launches by on slurm or ray; these run here"),
        (UsageError, {"env": {"A=B": "x"}}, "env has a variable named 'A=B'"),
        (UsageError, {"env": {"A": "secret\0"}}, "env holds a NUL character: no system takes such a text"),
        (UsageError, {"study": ""}, "study is ''"),
    ],
)
def test_another_type_or_value_is_one_clear_error_and_nothing_is_written(
    kind: type[Exception], given: dict[str, Any], said: str
) -> None:
    before = sorted(Path().iterdir())
    with pytest.raises(kind, match=said) as raised:
        optuna_dsat.tune(**{"script": "train.py", "ds_config": "ds.json", **QUICK, **given})
    assert "secret" not in str(raised.value)
    assert sorted(Path().iterdir()) == before
