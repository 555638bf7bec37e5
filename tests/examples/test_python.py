"""The examples that use optuna-dsat from Python: a script, an objective of one's own, a notebook."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.entry_points import EntryPointBench, bench

from .conftest import ROOT, copy_example

__all__ = ["bench"]


def test_the_script_tunes_and_shows_what_it_found(
    bench: EntryPointBench, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["tune.py", "--script", "train.py", "--ds-config", "ds.json", "--max-trials", "6", "--cpu-ranks", "2"]
    monkeypatch.setattr(sys, "argv", given)
    runpy.run_path(str(ROOT / "examples" / "python_api" / "tune.py"), run_name="__main__")
    shown = capsys.readouterr().out
    best = bench.folder / "optuna-dsat-output" / "from-python" / "best_ds_config.json"
    assert f"train.py --deepspeed_config {best}" in shown
    assert sum(line.startswith(tuple("012345")) and " measured " in line for line in shown.splitlines()) >= 3


def test_an_objective_of_ones_own_finds_the_largest_batch_that_fits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["objective.py", "--trials", "12", "--memory-mib", "4"])
    runpy.run_path(str(ROOT / "examples" / "own_objective" / "objective.py"), run_name="__main__")
    shown = capsys.readouterr().out
    assert "out_of_memory" in shown
    assert "complete" in shown
    assert shown.splitlines()[-1].startswith("Best: {")


def test_the_notebook_is_stored_without_outputs() -> None:
    notebook = json.loads((ROOT / "examples" / "notebook" / "tune.ipynb").read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(code) > 3
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code)


EXECUTE = """
import sys, nbclient, nbformat
notebook = nbformat.read("tune.ipynb", as_version=4)
nbclient.NotebookClient(notebook, kernel_name="python3", timeout=None).execute()
nbformat.write(notebook, "done.ipynb")
"""


@pytest.mark.torchrun
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path) -> None:
    folder = copy_example("notebook", tmp_path)
    copy_example("plain", tmp_path)
    extensions = os.environ.get("TORCH_EXTENSIONS_DIR", str(ROOT / ".cache" / "torch_extensions"))
    done = subprocess.run(
        [sys.executable, "-c", EXECUTE],
        cwd=folder,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TORCH_EXTENSIONS_DIR": extensions,
            "JUPYTER_PLATFORM_DIRS": "1",
            "IPYTHONDIR": str(tmp_path / "ipython"),
            "JUPYTER_RUNTIME_DIR": str(tmp_path / "jupyter"),
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    cells = json.loads((folder / "done.ipynb").read_text())["cells"]
    shown = ["".join("".join(o.get("text", "")) for o in cell["outputs"]) for cell in cells if "outputs" in cell]
    live = [o for cell in cells for o in cell.get("outputs", ()) if "samples/s, your config" in str(o)]
    assert [o["output_type"] for o in live] == ["display_data"], "one output, updated in place"
    assert "Trial 1: " in str(live)
    assert "x as fast as the present configuration" in shown[1]
    assert (folder / "optuna-dsat-output" / "notebook" / "best_ds_config.json").is_file()
    assert "measured" in shown[2]
