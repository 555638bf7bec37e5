"""Scripts that say too much, or what cannot be encoded, in real launches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness.commands import DS_CONFIG, OPTIONS, Command

pytestmark = pytest.mark.torchrun

SCRIPT = """
import json, os, pathlib

plan = json.loads(pathlib.Path(os.environ["OPTUNA_DSAT_LAUNCH"]).read_text())
with open(pathlib.Path(plan["events_dir"], "rank0.jsonl"), "a") as file:
    file.write('{"kind": "step_measured", "rank": 0, "time": "b", "step": []}\\n')

class MyError(RuntimeError):
    pass

raise MyError("\\ud800\\x00\\x1b[2J list[int] [/usr/lib]" + "x" * 20_000_000)
"""


def test_an_error_of_20_mb_is_a_few_kb_everywhere_but_in_the_log(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "ds.json").write_text(json.dumps(DS_CONFIG))
    options = ("--max-trials", "1", "--study", "s", "--storage", "sqlite:///study.db", *OPTIONS)
    ended = Command(tmp_path, "random", "train.py", "ds.json", *options)
    output, errors = ended.finish(code=4)
    assert output == ""
    assert "Traceback (most recent call last)" in errors, "the script's own"
    assert "optuna_dsat/" not in errors, "and no other"
    assert "list[int] [/usr/lib]" in errors
    assert "\\x1b[2J" in errors
    assert "\x1b" not in errors
    assert "1 line of events could not be read" in errors
    assert len(errors) < 15_000
    assert (tmp_path / "study.db").stat().st_size < 2_000_000
    logs = set(tmp_path.rglob("rank0.stderr.log"))
    assert logs
    assert all(log.stat().st_size > 20_000_000 for log in logs)
    others = [path for path in (tmp_path / "optuna-dsat-output").rglob("*") if path.is_file() and path not in logs]
    assert sum(path.stat().st_size for path in others) < 200_000 * len(logs)
