"""A node's part of a launch on several nodes, and the ports of a launch on one."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from optuna_dsat.launch.agent.command import launch_environment, torchrun_command
from optuna_dsat.launch.launcher import TorchrunLauncher
from optuna_dsat.launch.machine.devices import cpu_devices
from optuna_dsat.launch.machine.processes import find_marked
from optuna_dsat.launch.protocol import Rendezvous
from optuna_dsat.launch.run_directory import RunDirectory
from tests.harness.launches import DS_CONFIG, request, updates_until_finished
from tests.harness.waits import wait_until


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


def listening(pid: int) -> set[str]:
    try:
        return {
            connection.laddr.ip
            for connection in psutil.Process(pid).net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        }
    except psutil.Error:
        return set()


@pytest.mark.torchrun
def test_every_port_of_a_launch_listens_on_loopback(warm_launcher: TorchrunLauncher, tmp_path: Path) -> None:
    (tmp_path / "user_config.json").write_text(json.dumps(DS_CONFIG), encoding="utf-8")
    before = {item.key for item in find_marked()}  # what a test that ran out of time may have left
    warm_launcher.start(request(tmp_path, launch_id="listens", args=("--end", "sleep", "--at", "2")))
    output = warm_launcher.run_directory("listens").stdout(1)
    try:
        wait_until(
            lambda: warm_launcher.poll(0.2) is not None and output.exists() and "training starts" in output.read_text(),
            what="they train",
        )
        marked = [item for item in find_marked() if item.key not in before]
        own = [item.key.pid for item in marked if str(item.mark).split(":")[1] == str(psutil.Process().pid)]
        seen = set().union(*map(listening, own))
        assert seen
        assert seen <= {"127.0.0.1", "::ffff:127.0.0.1"}
    finally:
        warm_launcher.stop("listens")
        updates_until_finished(warm_launcher)


def test_what_the_user_says_of_the_network_is_kept(tmp_path: Path) -> None:
    made = launch_environment(
        {"GLOO_SOCKET_IFNAME": "eth0"},
        request=request(tmp_path),
        directory=RunDirectory(tmp_path),
        devices=cpu_devices(2).devices,
        kind="cpu",
        total_slots=2,
        mark="mark",
    )
    assert (made["GLOO_SOCKET_IFNAME"], made["NCCL_SOCKET_IFNAME"]) == ("eth0", "lo")
