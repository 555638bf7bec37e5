"""A node's part of a launch on several nodes: its command, its environment, its port."""

from __future__ import annotations

from pathlib import Path

import pytest

from optuna_dsat.launch.agent.command import launch_environment, torchrun_command
from optuna_dsat.launch.machine.devices import cpu_devices
from optuna_dsat.launch.protocol import Rendezvous
from optuna_dsat.launch.run_directory import RunDirectory
from tests.harness.launches import request


def part(**changes: object) -> Rendezvous:
    values = {"nodes": 2, "node_rank": 1, "address": "10.0.0.1", "port": 4711, "interface": "ib0", **changes}
    return Rendezvous.from_json(values)


def test_a_node_starts_its_share_of_the_ranks_and_meets_the_others(tmp_path: Path) -> None:
    launch = request(tmp_path, slots=8, launch_id="trial-0007")
    command = torchrun_command(launch, directory=RunDirectory(tmp_path), rendezvous=part())
    options = dict(zip(command[3:19:2], command[4:20:2], strict=True))
    assert options == {
        "--nnodes": "2",
        "--node_rank": "1",
        "--nproc_per_node": "4",
        "--rdzv_backend": "static",
        "--master_addr": "10.0.0.1",
        "--master_port": "4711",
        "--rdzv_id": "trial-0007",
        "--max_restarts": "0",
    }


@pytest.mark.parametrize(
    ("base", "changes", "gloo", "nccl"),
    [
        ({}, {}, "ib0", None),
        ({"GLOO_SOCKET_IFNAME": "eth1"}, {}, "eth1", None),
        ({}, {"interface": ""}, None, None),
        ({}, {"address": "127.0.0.1"}, "lo", "lo"),
    ],
)
def test_ranks_are_told_the_interface_on_which_nodes_reach_each_other(
    tmp_path: Path, base: dict[str, str], changes: dict[str, str], gloo: str | None, nccl: str | None
) -> None:
    made = launch_environment(
        base,
        request=request(tmp_path, slots=4),
        directory=RunDirectory(tmp_path),
        devices=cpu_devices(2).devices,
        kind="cpu",
        total_slots=2,
        mark="mark",
        rendezvous=part(**changes),
    )
    assert (made.get("GLOO_SOCKET_IFNAME"), made.get("NCCL_SOCKET_IFNAME")) == (gloo, nccl)
    assert made["LOCAL_SIZE"] == "2"


def test_it_comes_back_from_json_as_it_was() -> None:
    assert Rendezvous.from_json(part().to_json()) == part()
