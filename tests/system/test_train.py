"""``train STUDY`` trains with the configuration of the result, or of any other trial."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from optuna_dsat.launch.protocol import LaunchRequest
from optuna_dsat.tuning import resume
from tests.harness.commands import PLAIN_CONFIG, ROOT
from tests.harness.entry_points import Run, run_here, searching_in

__all__ = ["run_here"]

SCRIPTS = ROOT / "tests" / "scripts"
OPTIONS = (
    *("--study", "s", "--max-trials", "2", "--zero-stages", "1", "--zero-stages", "2", "--confirm", "0", "--quiet"),
    *("--metric", "throughput", "--start-profile-step", "2", "--end-profile-step", "3"),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "made"
    shutil.copytree(SCRIPTS / "printed", made, ignore=shutil.ignore_patterns("__pycache__"))
    (made / "ds.json").write_text(json.dumps(PLAIN_CONFIG))
    return made


def configured(row: dict[str, Any]) -> dict[str, int]:
    config = row["config"]
    return {"stage": config["zero_optimization"]["stage"], "batch": config["train_micro_batch_size_per_gpu"]}


def test_a_study_trains_with_its_result_with_another_trial_and_in_another_folder(
    folder: Path, run_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = ("torchrun", "--nproc_per_node", "1", "plain.py", f"--deepspeed_config={folder}/ds.json")
    with searching_in(folder, monkeypatch):
        (folder / "ds.json").write_text(json.dumps(PLAIN_CONFIG))
        assert run_here("random", *OPTIONS, *launch).returncode == 0
    rows = json.loads(run_here("trials", "s", "--json").stdout)
    (best,) = (row for row in rows if row["handed_over"])
    (other,) = (row for row in rows if row is not best)
    assert configured(best) != configured(other)

    (folder / "ds.json").unlink()  # the study has its config
    asked: list[LaunchRequest] = []
    folders: list[Path] = []

    def note(request: LaunchRequest, *, output_dir: Path, **_: Any) -> int:
        asked.append(request)
        folders.append(output_dir)
        return 0

    monkeypatch.setattr(resume, "run_full", note)
    ended = run_here("train", "s", "--", "--batch", "9")
    assert ended.returncode == 0
    assert asked[0].command.args[-2:] == ("--batch", "9"), "arguments are added"
    assert configured({"config": asked[0].ds_config}) == configured(best)
    assert ended.stderr.startswith(f"Training with trial {best['number']}: ")

    refused = run_here("train", "s", "--trial", "7")
    assert (refused.returncode, "has launched no trial of this number" in refused.stderr) == (2, True)
    moved = folder.rename(folder.with_name("moved"))
    monkeypatch.chdir(moved)
    refused = run_here("train", "s")
    assert (refused.returncode, "--workdir" in refused.stderr) == (2, True)
    shutil.rmtree(moved / "optuna-dsat-output")
    ended = run_here("train", "s", "--workdir", ".", "--trial", str(other["number"]))
    assert ended.returncode == 0, ended.stderr
    assert f"Training with trial {other['number']}: {other['configuration']}." in ended.stderr
    assert configured({"config": asked[1].ds_config}) == configured(other)
    assert (asked[1].command.cwd, folders[1]) == (str(moved), moved / "optuna-dsat-output" / "s")
    assert not folder.exists(), "nothing is written where the study was made"
