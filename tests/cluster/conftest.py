"""A SLURM of four nodes for the tests of this folder, where one can be started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.harness.slurm import SlurmCluster, running_slurm, why_no_slurm


@pytest.fixture(scope="session")
def slurm_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Yield a running SLURM; skips where there is none."""
    with _started(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@contextmanager
def _started(root: Path, *, kill_wait_s: int = 2) -> Iterator[SlurmCluster]:
    if why := why_no_slurm():
        pytest.skip(why)
    for folder in (root, *root.parents[:2]):
        folder.chmod(0o755)  # munge refuses a socket that others cannot reach
    with running_slurm(root, kill_wait_s=kill_wait_s) as cluster:
        yield cluster


@pytest.fixture
def slurm(slurm_cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> SlurmCluster:
    """Return the running SLURM, which this process's environment names."""
    _name(slurm_cluster, monkeypatch)
    return slurm_cluster


@pytest.fixture
def breakable_slurm(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SlurmCluster]:
    """Yield a SLURM for one test alone, which this process's environment names."""
    with _started(tmp_path_factory.mktemp("slurm")) as cluster:
        _name(cluster, monkeypatch)
        yield cluster


@pytest.fixture
def patient_slurm(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmCluster]:
    """Yield a SLURM that gives jobs the time to end that it gives them elsewhere, named by this environment."""
    with _started(tmp_path_factory.mktemp("slurm"), kill_wait_s=30) as cluster:
        _name(cluster, monkeypatch)
        yield cluster


def _name(cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    for name, value in cluster.environ.items():
        monkeypatch.setenv(name, value)
