"""What stands in for models and data sets of the hub is found by the libraries as they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

from benchmarks.first_try.entry import Entry, EntryError
from benchmarks.first_try.hugging_face import absent_modules, prepare_hub

LOADS = """
import json, sys
from transformers import AutoModelForCausalLM, AutoTokenizer
from benchmarks.first_try.stand_ins import install
install()
from datasets import load_dataset, load_from_disk
model, tokenizer = (cls.from_pretrained("someone/tiny") for cls in (AutoModelForCausalLM, AutoTokenizer))
ids = tokenizer("hé", return_tensors="pt")
rows = load_dataset("someone/rows", split="train_sft[:10]")
print(json.dumps([type(model).__name__, list(model(**ids).logits.shape), rows.num_rows, rows.column_names,
    load_dataset("someone/rows").num_rows, load_from_disk("disk")["eval"].num_rows]))
"""


def entry(**fields: Any) -> Entry:
    return Entry(name="one", style="", repository="a/b", commit="c", command="python x.py", **fields)


def test_models_and_data_sets_of_the_hub_are_found(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    wanted = entry(models={"someone/tiny": "llama"}, datasets={"someone/rows": "alpaca", "./disk": "tokens"})
    variables = prepare_hub(wanted, python=sys.executable, folder=tmp_path / "stand_ins", cwd=tmp_path)
    environment = {**os.environ, **variables, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", LOADS], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    model, logits, rows, columns, splits, on_disk = json.loads(done.stdout.splitlines()[-1])
    assert (model, rows, sorted(columns)) == ("LlamaForCausalLM", 10, ["input", "instruction", "output"])
    assert logits == [1, 4, 320]  # a token before, one for h, two for é
    assert (splits, on_disk) == ({"train": 512, "validation": 64, "test": 64}, 64)


def test_what_a_script_needs_is_looked_for_in_its_own_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    venv.create(tmp_path / "old", with_pip=False)
    monkeypatch.setenv("FIRST_TRY_PYTHON_OLD", str(tmp_path / "old" / "bin" / "python"))
    assert absent_modules(entry(needs=("json", "torch", "no_such_thing"))) == ["no_such_thing"]
    assert absent_modules(entry(needs=("json", "torch", "no_such_thing"), python="old")) == ["torch", "no_such_thing"]
    monkeypatch.setenv("FIRST_TRY_PYTHON_OLD", str(tmp_path / "none"))
    with pytest.raises(EntryError, match="does not run"):
        absent_modules(entry(needs=("json",), python="old"))
