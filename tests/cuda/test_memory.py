"""Memory that ends, on a GPU and on the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.cuda.machine import Machine
from tests.cuda.tuning import GPT, QUICK, SMALL_GPT, Search, copy_gpt, left_nothing, ran_as_they_should

OFFLOAD: dict[str, Any] = {
    "zero_force_ds_cpu_optimizer": False,  # DeepSpeed's own Adam for the CPU would have to be compiled
    "zero_optimization": {
        "stage": 2,
        "reduce_bucket_size": 500000,
        "allgather_bucket_size": 500000,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    },
}


def test_a_real_out_of_memory_error_is_knowledge(machine: Machine, tmp_path: Path) -> None:
    machine.change_gpus(memory_mib=1200)
    folder = copy_gpt(tmp_path, train_micro_batch_size_per_gpu=20000)
    options = (*QUICK, "--max-trials", "2", "--json")
    search = Search(machine, folder, *GPT, *options, *SMALL_GPT, visible="0").finish()
    assert search.result["launches"] == {"out_of_memory": 1, "measured": 1}
    profile, too_large, other = search.launches
    assert too_large.report["outcome"] == "out_of_memory"
    assert too_large.report["missing_bytes"] > 0
    assert "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate" in too_large.report["error_excerpt"]
    assert profile.report["outcome"] == other.report["outcome"] == "measured"
    assert [call.code for call in machine.calls("cuMemAlloc") if call.pid == too_large.ranks[0]["pid"]][-1] == 2
    assert {rank["forked"] for launch in search.launches for rank in launch.ranks} == {True}
    left_nothing(machine)


def test_an_offloaded_optimizer_is_pinned_by_the_ranks(machine: Machine, tmp_path: Path) -> None:
    folder = copy_gpt(tmp_path, **OFFLOAD)
    search = Search(machine, folder, *GPT, *QUICK, "--max-trials", "1", "--json", *SMALL_GPT).finish()
    [trial] = search.trials
    pinned = {rank["pid"]: 0 for rank in trial.ranks}
    for call in machine.calls("cuMemHostAlloc"):
        pinned[call.pid] = pinned.get(call.pid, 0) + call.number
    parameters = search.launches[0].events("profile_measured")[0]["trainable_params"]
    assert all(pinned[rank["pid"]] > 4 * parameters // 2 for rank in trial.ranks)
    assert trial.report["outcome"] == "measured"
    ran_as_they_should(search, forked=True)


def test_pinned_memory_that_ends_is_the_hosts(machine: Machine, tmp_path: Path) -> None:
    folder = copy_gpt(tmp_path, **OFFLOAD)
    machine.say("pinned 4")
    wide = ("--", "--layers", "2", "--hidden", "512", "--seq", "16")
    options = (*QUICK, "--max-trials", "3", "--zero-stages", "2", "--json")
    search = Search(machine, folder, *GPT, *options, *wide, visible="0").finish()
    failed = [launch.report for launch in search.launches if launch.report["outcome"] == "host_out_of_memory"]
    assert failed, [launch.report["outcome"] for launch in search.launches]
    assert "out of memory" in failed[0]["error_excerpt"]
    left_nothing(machine)
