"""The workflow of ``examples/ci``: its step, run as a runner does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

EXAMPLE = Path(__file__).parents[2] / "examples" / "ci"


def step() -> str:
    workflow = yaml.safe_load((EXAMPLE / "training-speed.yml").read_text())
    script: str = workflow["jobs"]["compare"]["steps"][-1]["run"]
    return script


@pytest.mark.parametrize(
    ("metric", "head", "code"),
    [("throughput", 90.0, 1), ("throughput", 97.0, 0), ("throughput", 120.0, 0), ("latency", 120.0, 1)],
)
def test_the_step_fails_if_the_pull_request_is_slower_by_more_than_the_interval(
    tmp_path: Path, metric: str, head: float, code: int
) -> None:
    """A program that prints a result takes the place of the search, which other tests run."""
    for side, value in (("base", 100.0), ("head", head)):
        (tmp_path / side / ".github").mkdir(parents=True)
        result = {"metric": metric, "value": value, "low": value * 0.97, "high": value * 1.03}
        (tmp_path / side / "result").write_text(json.dumps(result))
    (tmp_path / "head/.github/slower.py").write_text((EXAMPLE / "slower.py").read_text())
    program = tmp_path / "bin" / "optuna-dsat"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho "$@" >> ../calls\ncat result\n')
    program.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{program.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "RUNNER_TEMP": str(tmp_path),
        "GITHUB_WORKSPACE": str(tmp_path),
        "GITHUB_RUN_ID": "1",
        "GITHUB_RUN_ATTEMPT": "1",
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
    }
    command = ["bash", "-eo", "pipefail", "-c", step()]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert (tmp_path / "summary.md").read_text() == done.stdout
    assert f"{head:g} now" in done.stdout
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call.split("--study ")[1].split()[0] for call in calls] == ["base", "head"]
