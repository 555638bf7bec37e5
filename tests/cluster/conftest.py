"""A SLURM of four nodes for the tests of this folder, where one can be started."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.harness.slurm import SlurmCluster, running_slurm, why_no_slurm


@pytest.fixture(scope="session")
def slurm_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Yield a running SLURM; skips where there is none."""
    if why := why_no_slurm():
        pytest.skip(why)
    root = tmp_path_factory.mktemp("slurm")
    for folder in (root, *root.parents[:2]):
        folder.chmod(0o755)  # munge refuses a socket that others cannot reach
    with running_slurm(root) as cluster:
        yield cluster


@pytest.fixture
def slurm(slurm_cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> SlurmCluster:
    """Return the running SLURM, which this process's environment names."""
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    for name, value in slurm_cluster.environ.items():
        monkeypatch.setenv(name, value)
    return slurm_cluster
