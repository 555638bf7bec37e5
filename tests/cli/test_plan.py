from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.harness.entry_points import Run, run_here

__all__ = ["run_here"]

SCRIPT = "raise SystemExit('never run')\n"


def test_a_plan_without_a_launch(tmp_path: Path, run_here: Run) -> None:
    done = run_here("plan", "--params", "7e9", "--hidden", "4096", "--layers", "32", "--gpu", "a100-80g", "--gpus", "8")
    assert done.returncode == 0, done.stderr
    for words in ("ZeRO 3 + parameter offload", "does not fit", "Begin with ZeRO ", "tokens/s", "MFU", "data sheets"):
        assert words in done.stdout
    assert not list(tmp_path.iterdir())


def complexity(row: dict[str, Any]) -> tuple[int, int, int]:
    """Return offloads, whether ZeRO 3 keeps a copy in each node, and the stage."""
    zero = row["zero_optimization"]
    return row["name"].count("offload"), "copy" in row["name"], zero["stage"]


def test_what_is_assumed_of_the_host_is_stated(run_here: Run) -> None:
    shape = ("plan", "--params", "1.3B", "--gpu", "a100-80g", "--gpus", "4")
    item = " ".join(run_here(*shape).stdout.split())
    assert "Host: 512.00 GiB of memory (assumed; --host-memory), 32 GB/s to each GPU and back (data sheet)." in item
    assert "network of" not in item
    assert "tokens/s/GPU" in item
    two = " ".join(run_here(*shape, "--nodes", "2", "--host-memory", "1TiB").stdout.split())
    assert "Host: 1.00 TiB of memory, 32 GB/s" in two
    assert "network of 100 Gbit/s (assumed; --network)." in two
    given = json.loads(run_here(*shape, "--host-memory", "1TiB", "--json").stdout)
    assert (given["assumed"], given["expected_network_bytes_per_s"]) == ([], None)


def test_a_plan_as_json_follows_the_config(tmp_path: Path, run_here: Run) -> None:
    config = {"fp16": {"enabled": True}, "zero_optimization": {"reduce_bucket_size": 5_000_000}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    shape = shlex.split("--params 1.3B --gpu v100-32g --gpus 4 --nodes 2 --host-memory 256GiB --json")
    own, other = (json.loads(run_here("plan", *args, *shape).stdout) for args in (("ds.json",), ()))
    assert own["world_size"] == 8
    assert own["host_memory_bytes"] == 256 * 2**30
    for record in (own, other):
        rows = {row["name"]: row for row in record["rows"]}
        assert rows["ZeRO 2"]["largest_micro_batch"] >= rows["ZeRO 2"]["micro_batch"] >= 1
        low, high = rows["ZeRO 2"]["step_s_90"]
        assert low < rows["ZeRO 2"]["step_s"] < high
        assert sum(rows["ZeRO 2"]["shares"].values()) == pytest.approx(1)
        # Predictions within 10% count as equal: not the fastest of them is recommended, but the simplest.
        fastest = max(row["samples_per_s"] or 0 for row in record["rows"])
        close = [row for row in record["rows"] if 1.1 * (row["samples_per_s"] or 0) >= fastest]
        assert record["recommended"] == min(close, key=complexity)["name"]
        assert rows["ZeRO 2"]["tokens_per_s"] == pytest.approx(2048 * rows["ZeRO 2"]["samples_per_s"])
        assert rows["ZeRO 2"]["tokens_per_s_per_gpu"] == pytest.approx(rows["ZeRO 2"]["tokens_per_s"] / 8)
        assert record["assumed"] == ["--network"]
        # Data sheets: PCIe 3.0 x16 with 16 GB/s a direction, a network of 100 Gbit/s; 60% of the former is reached.
        assert record["expected_host_bytes_per_s_per_gpu"] == pytest.approx(0.6 * 16e9)
        assert 0 < record["expected_network_bytes_per_s"] < 12.5e9
    assert 0 < rows["ZeRO 2"]["mfu"] < 1
    bucket = [record["rows"][3]["parts"]["reduce_buckets"] for record in (own, other)]
    assert bucket == [5_000_000 * 2, 500_000_000 * 2]


def test_seven_billions_on_a_gpu_of_24_gib(run_here: Run) -> None:
    done = run_here("plan", "--params", "7e9", "--gpu", "rtx4090", "--gpus", "8", "--nvme-path", "/nvme")
    assert "- Begin with ZeRO 3 + optimizer offload (micro-batch 1)" in done.stdout
    assert "offload to NVMe" in done.stdout


LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


def test_a_plan_of_a_hugging_face_config(tmp_path: Path, run_here: Run) -> None:
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps(LLAMA))
    machine = ("--hf-config", "llama", "--gpu", "h100", "--recompute", "full")
    done = run_here("plan", *machine)
    assert "llama, 8.03 B parameters: 32 layers" in done.stdout
    assert "How many GPUs are worth it" in done.stdout
    fewer = " ".join(run_here("plan", *machine, "--gpus", "4").stdout.split())
    assert "`--gpus-per-trial 1 2 4` with any search" in fewer
    whole, adapted = (
        json.loads(run_here("plan", *machine, "--json", *more).stdout) for more in ((), ("--trainable-share", "0.5%"))
    )
    assert [item["devices"] for item in whole["scaling"]] == [1, 2, 4, 8]
    rows, lora = ({row["name"]: row for row in item["rows"]} for item in (whole, adapted))
    assert rows["ZeRO 0"]["largest_micro_batch"] == 0
    assert lora["ZeRO 0"]["largest_micro_batch"] > 1  # gradients and states of 0.5% of the parameters alone
    last = whole["scaling"][-1]
    assert (last["name"], last["samples_per_s"]) == (whole["recommended"], rows[last["name"]]["samples_per_s"])


def test_the_page_shows_what_its_command_prints(run_here: Run) -> None:
    """The table was one of half as many tokens a sample than the command beside it said."""
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "how-many-gpus.md").read_text(encoding="utf-8")
    command = next(line for line in page.splitlines() if line.startswith("optuna-dsat plan --model"))
    printed = run_here(*command.split()[1:]).stdout.partition("How many GPUs")[2]
    shown, words = (
        [line.split() for line in text.splitlines() if line.lstrip()[:1] in tuple("1248") and "%" in line]
        for text in (page, printed)
    )
    assert len(shown) == 4
    assert shown == words


def test_the_margin_of_memory_may_be_per_cent(run_here: Run) -> None:
    machine = ("plan", "--params", "1e9", "--gpu", "t4", "--json", "--memory-margin")
    item, same = (json.loads(run_here(*machine, margin).stdout) for margin in ("10%", "0.1"))
    assert item == same
    assert "at least 0 and below 1" in run_here(*machine, "100%").stderr


CASES = {
    "nothing-given": ([], "plan takes SCRIPT and DS_CONFIG, or --params"),
    "no-gpu": (["--params", "7e9"], "With --params, give --gpu; known are t4"),
    "hf-and-shape": (["--model", ".", "--vocab", "9", "--gpu", "t4"], "says the shape: leave out --vocab"),
    "hf-and-script": (["train.py", "--model", ".", "--gpu", "t4"], "With a model nothing is launched"),
    "share": (["--params", "7e9", "--gpu", "t4", "--trainable-share", "0"], "--trainable-share is 0; it must be above"),
    "hf-no-gpu": (["--model", "."], "The model . is a folder without config.json"),
    "other-name": (["--hf-config", "nope.json"], "The model nope.json is neither there nor known"),
    "share-of-a-launch": (["train.py", "ds.json", "--trainable-share", "1%"], "is for plans without a launch"),
    "gpu-of-a-launch": (["train.py", "ds.json", "--gpu", "h100"], "--gpu is for plans without a launch"),
    "ranks-without-launch": (
        ["--params", "7e9", "--gpu", "t4", "--device-memory", "2GiB"],
        "--device-memory is for plans with a launch",
    ),
    "a-script-too": (["train.py", "--params", "7e9", "--gpu", "t4"], "give no script"),
    "no-number": (["--params", "seven", "--gpu", "t4"], "--params is 'seven'"),
    "no-such-gpu": (["--params", "7e9", "--gpu", "a100"], "--gpu is 'a100'; known are"),
    "margin": (["--params", "7e9", "--gpu", "t4", "--memory-margin", "1"], "--memory-margin is 1; it must"),
    "heads": (["--params", "7e9", "--gpu", "t4", "--hidden", "4096", "--heads", "7"], "no multiple of the 7 heads"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_planned_is_refused_in_one_line(tmp_path: Path, run_here: Run, case: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "ds.json").write_text("{}")
    args, words = CASES[case]
    done = run_here("plan", *args)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
