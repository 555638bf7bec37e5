"""Places in a real Ray cluster of three nodes: granted, queued, refused, lost, and gone with whoever held them."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from optuna_dsat.launch.machine.nvml import DeviceError
from optuna_dsat.launch.places import ray_engine
from optuna_dsat.launch.places.engine import ClusterError, PlaceState
from optuna_dsat.launch.places.ray_engine import ControlWatch, RayEngine
from optuna_dsat.launch.places.ray_nodes import fitting_nodes, named_nodes
from optuna_dsat.launch.places.ray_place import cause_of, node_environment
from optuna_dsat.launch.places.ray_train import torchrun_words
from tests.harness.commands import PLAIN_CONFIG, SCRIPT, Command
from tests.harness.ray_cluster import LOOPBACK, ROOT, RayCluster, running_ray, why_no_ray
from tests.harness.waits import assert_within, ended, wait_until

with_ray = pytest.mark.skipif(bool(why_no_ray()), reason=why_no_ray() or "Ray is there")


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with running_ray() as running:
        yield running


def holder(cluster: RayCluster, scenarios: str, *numbers: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.harness.ray_places", cluster.address, scenarios, *map(str, numbers)],
        cwd=ROOT,
        env={**os.environ, **LOOPBACK},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def seen(cluster: RayCluster, scenarios: str, *numbers: int) -> dict[str, Any]:
    process = holder(cluster, scenarios, *numbers)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    result: dict[str, Any] = json.loads(output)  # Ray itself writes nothing there
    return result


@pytest.fixture(scope="module")
def places(cluster: RayCluster) -> dict[str, Any]:
    """Run scenarios that leave the cluster as it was in one process, the one that shortens its patience last."""
    return seen(cluster, "refused,queued,pinned")


def test_nodes_are_counted_that_could_ever_hold_what_is_asked_for() -> None:
    resources = [{"CPU": 8.0, "GPU": 4.0}, {"CPU": 8.0}, {"CPU": 0.0, "GPU": 8.0}, {"GPU": 8.0}]
    assert [fitting_nodes(resources, slots=slots) for slots in (0, 4, 5)] == [2, 1, 0]


def test_nodes_are_known_by_every_name_that_a_hostfile_may_have() -> None:
    def node(number: int, name: str) -> dict[str, object]:
        address = f"127.0.0.{number}"
        host = {"NodeManagerHostname": f"{name}.cluster", "NodeManagerAddress": address, "NodeManagerPort": 6000}
        return {"NodeName": f"ray-{name}", **host}

    alive = [node(1, "a"), node(2, "b"), node(3, "c")]
    names = ["ray-c", "a.cluster", "b", "127.0.0.3", "127.0.0.2:6000", "localhost"]
    assert [alive.index(dict(item)) for item in named_nodes(alive, names)] == [2, 0, 1, 2, 1, 0]
    assert named_nodes(alive, ()) == alive
    with pytest.raises(ClusterError, match=r"called d \(--ray-node\); its nodes: ray-a, ray-b, ray-c"):
        named_nodes(alive, ["a", "d"])


def test_an_agent_has_the_heads_environment_but_for_what_its_node_knows() -> None:
    node = {"CUDA_VISIBLE_DEVICES": "2,3", "RAY_NODE": "b", "LD_LIBRARY_PATH": "/b", "HOSTNAME": "b"}
    worker = {**node, "OMP_NUM_THREADS": "1"}
    head = {"CUDA_VISIBLE_DEVICES": "", "PATH": "/head", "RAY_NODE": "a", "HF_TOKEN": "t", "HOSTNAME": "a"}
    assert node_environment(head, worker) == {**node, "PATH": "/head", "HF_TOKEN": "t"}
    assert node_environment({**head, "OMP_NUM_THREADS": "8"}, worker)["OMP_NUM_THREADS"] == "8"


def test_why_a_node_cannot_start_is_the_error_that_was_raised_there() -> None:
    text = (
        "The actor died because of an error raised in its creation task, ray::NodeRelay.__init__() (pid=7)\n"
        "RuntimeError: The actor failed to import on the worker.\n\nTraceback (most recent call last):\n"
        "  File \"x.py\", line 1, in f\nModuleNotFoundError: No module named 'optuna_dsat'\n"
    )
    assert cause_of(RuntimeError(text)) == "ModuleNotFoundError: No module named 'optuna_dsat'"
    assert cause_of(RuntimeError("It is gone.\nMore.")) == "It is gone"
    assert cause_of(RuntimeError()) == "RuntimeError"


@with_ray
@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("127.0.0.1:1", "where no Ray cluster answers"),
        ("nowhere", "where no Ray cluster answers"),
        ("ray://127.0.0.1:10001", "give HOST:PORT"),
    ],
)
def test_an_address_without_a_cluster_is_refused_at_once(address: str, words: str) -> None:
    with pytest.raises(ClusterError, match=words) as refused:
        RayEngine(address).check(nodes=1, slots=1)
    assert refused.value.exit_code == 2
    assert "\n" not in str(refused.value)


@with_ray
def test_an_address_that_takes_calls_and_answers_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_engine, "_ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        address = f"127.0.0.1:{stopped.getsockname()[1]}"
        with pytest.raises(ClusterError, match="where no Ray cluster answers: timed out"):
            RayEngine(address).check(nodes=1, slots=1)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ClusterError, match=r"pip install 'optuna-dsat\[ray\]'"):
        RayEngine("127.0.0.1:6379").request(nodes=1, slots=0)


def test_when_ray_fails_its_places_are_lost_and_no_more_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: RayEngine) -> bool:
        raise ConnectionError("GCS is gone.\nMore of it.")

    monkeypatch.setattr(ray_engine, "join_cluster", lambda _: False)
    monkeypatch.setattr(ray_engine, "control_address", lambda: "127.0.0.1:1")
    go = threading.Event()
    monkeypatch.setattr(RayEngine, "_turn", lambda item: go.wait(30) and fail(item))
    engine = RayEngine("127.0.0.1:6379")
    place = engine.request(nodes=2, slots=0)
    go.set()
    wait_until(lambda: place.state is PlaceState.LOST, what="the place is lost")
    assert place.why == "Ray cannot be used any more: GCS is gone"
    with pytest.raises(DeviceError, match=r"GCS is gone\. Nothing is lost: resume continues\."):
        engine.request(nodes=2, slots=0)
    engine.close()


@pytest.mark.parametrize("answers", [True, False])
def test_a_control_service_that_answers_nothing_counts_as_gone(monkeypatch: pytest.MonkeyPatch, answers: bool) -> None:
    now = [100.0]
    monkeypatch.setattr(ray_engine, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for name, value in {"_LOOK_S": 0.02, "_ANSWER_S": 0.1}.items():
        monkeypatch.setattr(ray_engine, name, value)
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as unanswered:
        watch = ControlWatch(f"127.0.0.1:{server.getsockname()[1]}")
        assert watch.failure == ""
        now[0] += 31.0
        for _ in range(2):  # what is asked first has been given up by then
            asked = unanswered.enter_context(server.accept()[0])
            if answers:
                asked.close()
        if answers:
            wait_until(lambda: not watch.failure, what="an answer is known")
        else:
            assert watch.failure == "Ray's control service (GCS) has given no answer for 30 s"
        watch.close()


@with_ray
def test_what_can_never_be_granted_is_refused_with_the_numbers(places: dict[str, Any]) -> None:
    result = places["refused"]
    (too_many, first_s), (too_large, second_s), (possible, _) = result["answers"]
    assert "takes 3 nodes with 2 GPUs each" in too_many
    assert "has 2 such among its 3 nodes" in too_many
    assert "takes 1 node with 4 GPUs" in too_large
    assert "of up to 2 GPUs" in too_large
    assert possible == ""
    assert_within(second_s, 5.0)
    assert_within(first_s, 30.0)  # with Ray's own start, on a busy machine
    assert result["same_handler"]


@with_ray
def test_a_place_without_room_waits_for_the_first_to_be_given_back(places: dict[str, Any]) -> None:
    result = places["queued"]
    assert (result["state"], result["why"]) == ("queued", "no resources: others hold them")
    assert result["name"] == "Ray placement group 2"
    assert result["first"] == "lost"
    assert result["left"] == []


@with_ray
def test_places_are_on_the_nodes_that_are_named_in_their_order(places: dict[str, Any]) -> None:
    result = places["pinned"]
    assert result["on"] == result["asked"]
    assert "is called elsewhere (--ray-node)" in result["refused"]


@with_ray
def test_with_an_agent_its_place_and_the_agents_of_other_nodes_go(places: dict[str, Any]) -> None:
    result = places["queued"]["killed"]
    assert "ended with -9" in result["why"]
    assert_within(result["lost_s"], 20.0)


@with_ray
def test_a_node_whose_agent_stands_still_is_lost_and_rid_of_it(places: dict[str, Any]) -> None:
    result = places["pinned"]["frozen"]
    assert "said nothing for 4 s" in result["why"]
    assert_within(result["lost_s"], 20.0)
    assert_within(result["gone_s"], 4.0)  # an agent that is stopped cannot end at SIGTERM, for which others have 5 s


@with_ray
def test_without_rays_control_service_all_places_are_given_up(cluster: RayCluster) -> None:
    control = psutil.Process(cluster.control())
    try:
        result = seen(cluster, "control_frozen", control.pid)["control_frozen"]
    finally:
        control.resume()
    assert result["why"] == "Ray's control service (GCS) has given no answer for 4 s"
    assert result["refused"] == f"{result['why']}. Nothing is lost: resume continues."
    assert_within(result["lost_s"] + result["gone_s"], 30.0)
    assert_within(result["closed_s"], 7.0)  # Ray takes five of them: a service that is gone is not greeted again


@with_ray
def test_agents_go_with_the_process_that_held_their_place(cluster: RayCluster) -> None:
    process = holder(cluster, "held")
    assert process.stdout is not None
    pids = json.loads(process.stdout.readline())["pids"]
    assert len(pids) == 2
    assert not any(map(ended, pids))
    process.kill()
    process.communicate()
    wait_until(lambda: all(map(ended, pids)), what="the agents are gone")


WHO = """import os, sys
from pathlib import Path
Path(f"rank{os.environ['RANK']}").write_text(" ".join([os.environ["WORLD_SIZE"], *sys.argv[1:]]))
"""


@with_ray
@pytest.mark.torchrun
def test_a_study_runs_on_two_nodes_from_a_head_without_a_core(cluster: RayCluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"{SCRIPT.read_text().rstrip()}\n    print('stepped', file=sys.stderr)\n")
    (tmp_path / "ds.json").write_text(json.dumps(PLAIN_CONFIG))
    where = ("--on", "ray", "--ray-address", cluster.address, "--nodes-per-trial", "2", "--cpu-ranks", "1")
    how = ("--zero-stages", "1", "--no-tune", "offload_optimizer", "--max-trials", "1", "--confirm", "0", "--quiet")
    size = ("--fix", "train_micro_batch_size_per_gpu=2", "--no-enqueue-user-config")
    steps = ("--start-profile-step", "2", "--end-profile-step", "3", "--metric", "throughput")
    words = ("guided", "train.py", "ds.json", *where, *how, *size, *steps, "--", "ds.json", "0.01")
    shown, _ = Command(tmp_path, *words, environ=LOOPBACK).finish()
    (best,) = tmp_path.rglob("best_ds_config.json")
    assert json.loads(best.read_text())["train_micro_batch_size_per_gpu"] == 2
    (trial,) = tmp_path.rglob("trial-0000")
    assert len(list(trial.glob("logs/rank*.stderr.log"))) == 2
    assert json.loads((trial / "report.json").read_text())["root"] == "profile", "the profile launch is continued"
    lines = [json.loads(line) for log in trial.glob("events/rank*") for line in log.read_text().splitlines()]
    sizes = {(step["rank"], step["observed_micro_batch"]) for step in lines if step["kind"] == "step_measured"}
    assert sizes == {(0, 2), (1, 2)}, "with the size of the trial on both nodes"
    (printed,) = (line for line in shown.splitlines() if "optuna_dsat.launch.places.ray_train" in line)
    assert f"--nodes 2 --ranks 1 -- {tmp_path / 'train.py'}" in printed
    (tmp_path / "train.py").write_text(WHO)  # the search has trained the real script
    environ = {**os.environ, **LOOPBACK, "PYTHONPATH": str(ROOT)}
    trained = subprocess.run(printed, shell=True, cwd=tmp_path, env=environ, check=False)
    assert trained.returncode == 0
    assert {(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)} == {f"2 {best} 0.01"}


def relay_above(rank: int) -> psutil.Process:
    """Return Ray's worker on the node of a rank."""
    return next(parent for parent in psutil.Process(rank).parents() if parent.cmdline()[0].startswith("ray::"))


TRAIN = """import sys
from optuna_dsat.launch.places import ray_train
ray_train.LOST_S = 4.0
sys.exit(ray_train.main(sys.argv[1:]))
"""


@with_ray
@pytest.mark.torchrun
def test_a_training_that_loses_a_node_leaves_no_rank(cluster: RayCluster, tmp_path: Path) -> None:
    script, noted = tmp_path / "train.py", tmp_path / "pids"
    script.write_text(
        "import os, subprocess, time\n"
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"with open({str(noted)!r}, 'a') as file:\n"
        "    file.write(f'{os.getpid()} {child.pid}\\n')\n"
        "time.sleep(600)\n"
    )
    words = ["-c", TRAIN, "--address", cluster.address, "--nodes", "2", "--ranks", "1", "--", str(script)]
    environ = {**os.environ, **LOOPBACK}
    process = subprocess.Popen([sys.executable, *words], cwd=ROOT, env=environ, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: noted.exists() and noted.read_text().count("\n") == 2, what="both ranks run")
        relay_above(int(noted.read_text().split()[0])).suspend()
        suspended = time.monotonic()
        _, errors = process.communicate()
        assert_within(time.monotonic() - suspended, 12.0)  # the node that is gone is not waited for at the end, 10 s
        assert process.returncode == 1
        assert re.search(r"^optuna-dsat: Node [01] of the training has given no answer for 4 s\.$", errors, re.M)
    finally:
        process.kill()
        process.wait()
    pids = [int(word) for word in noted.read_text().split()]
    wait_until(lambda: all(map(ended, pids)), what="ranks and their children are gone")


def test_each_node_runs_torchrun_with_its_own_number_and_the_address_of_the_first() -> None:
    words = torchrun_words(["-m", "pkg.train", "--lr", "3"], nodes=2, node=1, ranks=4, address="10.0.0.1", port=29)
    assert words == [
        *("-m", "optuna_dsat.launch.places.guarded", ""),
        *("-m", "torch.distributed.run", "--nnodes", "2", "--node_rank", "1", "--nproc_per_node", "4"),
        *("--rdzv_backend", "static", "--master_addr", "10.0.0.1", "--master_port", "29"),
        *("-m", "pkg.train", "--lr", "3"),
    ]
