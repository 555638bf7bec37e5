"""Inputs that hypothesis invents: each ends in a documented exit code and, if refused, in one line.

The suite runs some eighty; ``make fuzz`` some thousand. No examples are kept.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import string
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from optuna_dsat.config.knobs import KNOBS
from tests.cli.test_bad_input import GOOD
from tests.harness.entry_points import leave
from tests.harness.waits import assert_within

DOCUMENTED = frozenset({0, 2, 3, 4, 5, 130})
LIMIT_S = 5.0
EXAMPLES = int(os.environ.get("OPTUNA_DSAT_FUZZ_EXAMPLES", "15"))
DRY = ("--dry-run", "--cpu-ranks", "2")

fuzzed = settings(
    max_examples=EXAMPLES,
    database=None,
    deadline=None,
    derandomize=EXAMPLES <= 15,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)

Check = Callable[..., int]


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise SystemExit('never run')\n")
    (tmp_path / "definition.py").write_text("class MyTrial:\n    raise SystemExit('never run')\n")
    (tmp_path / "ds.json").write_text(json.dumps(GOOD))

    def run(*arguments: str) -> int:
        out, err = io.StringIO(), io.StringIO()
        begun = time.process_time()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = leave(*arguments)
        lines = err.getvalue().strip().split("\n")
        assert_within(time.process_time() - begun, LIMIT_S)
        assert code in DOCUMENTED, err.getvalue()
        assert code == 0 or len(lines) == 1, err.getvalue()
        assert max(map(len, lines)) <= 1000
        assert "Traceback" not in err.getvalue()
        assert not (tmp_path / "optuna-dsat-output").exists()
        return code

    return run


def _split(text: str) -> list[str]:
    return text.split()


def names(text: str) -> st.SearchStrategy[str]:
    return st.sampled_from(_split(text))


numbers = st.one_of(
    st.integers(-3, 70),
    st.integers(),
    st.sampled_from([10**9, 2**31, 2**63, 10**30, 10**4000, 1e308, 5e-324, -0.0]),
    st.floats(allow_nan=True),
)
words = st.one_of(st.sampled_from(["", "auto", "all", "none", "cpu", "nvme", "0", "1e9", "true", "Adam"]), st.text())
values = st.recursive(
    st.none() | st.booleans() | numbers | words,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=4),
    max_leaves=8,
)
sections = names(
    """
    optimizer scheduler fp16 bf16 zero_optimization autotuning train_batch_size comet aio
    train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping
    activation_checkpointing
    """
)
inner_keys = names(
    """
    stage type params enabled device offload_optimizer offload_param reduce_bucket_size lr
    overlap_comm cpu_offload metric num_gpus arg_mappings tuner_type tuner_num_trials stage3
    max_train_micro_batch_size_per_gpu start_profile_step stage3_max_live_parameters pin_memory
    """
)
configs = st.dictionaries(
    sections | words, st.one_of(values, st.dictionaries(inner_keys | words, values, max_size=4)), max_size=5
)


@fuzzed
@given(config=configs)
def test_ds_configs(check: Check, config: Any) -> None:
    Path("fuzzed.json").write_text(json.dumps(config))
    check("random", "train.py", "fuzzed.json", *DRY)


OPTIONS = _split(
    """
    --metric --zero-stages --fix --no-tune --arg-mapping --env --nvme-path --max-trials
    --max-concurrent-trials --max-slots --timeout --trial-timeout --stall-timeout --max-retries
    --start-profile-step --end-profile-step --random-seed --gpus-per-trial
    --wait-for-gpus --device-memory --launcher --storage --output-dir
    --train-batch-size --batch --max-train-batch-size --divisible-by --dataset-size --tie --confirm
    --confirm-time --early-stopping --trials-per-random-config --options --hparams --module
    """
)
option_values = st.one_of(
    numbers.map(str),
    words,
    st.tuples(st.sampled_from([*(knob.name for knob in KNOBS), "x"]), values).map(
        lambda pair: f"{pair[0]}={json.dumps(pair[1])}"
    ),
    st.sampled_from(
        ["nan", "inf", "-inf", "1e999", "x" * 5000, "/", "..", "a\nb", "sqlite:///x", "postgresql://[", "%"]
    ),
)


@fuzzed
@given(given_options=st.lists(st.tuples(st.sampled_from(OPTIONS), option_values), min_size=1, max_size=3))
def test_options(check: Check, given_options: list[tuple[str, str]]) -> None:
    check("random", "train.py", "ds.json", *(f"{name}={value}" for name, value in given_options), *DRY)


@fuzzed
@given(name=st.text(alphabet=st.characters() | st.sampled_from(string.punctuation)))
def test_names_of_studies(check: Check, name: str) -> None:
    check("random", "train.py", "ds.json", f"--study={name}", *DRY)
