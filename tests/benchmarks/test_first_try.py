"""The runner of ``benchmarks/first_try`` on a repository made here; what it says of the tool is the benchmark's own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.first_try import __main__ as command
from benchmarks.first_try.entry import Entry, EntryError, read_entries, read_entry
from benchmarks.first_try.hugging_face import absent_modules, prepare_hub
from benchmarks.first_try.judge import (
    judged,
    plain,
    searched,
    tuned_by_deepspeed,
)
from benchmarks.first_try.page import page
from benchmarks.first_try.sandbox import Ran, Sandbox
from benchmarks.first_try.sources import SourceError, check_out
from tests.harness.commands import PLAIN_CONFIG

SCRIPT = """\
import argparse
import deepspeed
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=4)
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()
model = torch.nn.Linear(8, 1).cuda()
engine, _, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
samples = torch.utils.data.TensorDataset(torch.randn(64, 8))
for (batch,) in torch.utils.data.DataLoader(samples, batch_size=args.batch):
    loss = engine(batch.to("cuda:0")).mean()
    engine.backward(loss)
    engine.step()
"""
CONFIG = {**PLAIN_CONFIG, "train_micro_batch_size_per_gpu": 4}


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Return a folder with one repository."""
    repository = tmp_path / "sources" / "someone+thing" / "repo"
    (repository / "train").mkdir(parents=True)
    (repository / "train" / "train.py").write_text(SCRIPT)
    (repository / "train" / "ds.json").write_text(json.dumps(CONFIG))
    for arguments in (
        ["init", "--quiet"],
        ["add", "."],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", "A script"],
    ):
        subprocess.run(["git", *arguments], cwd=repository, check=True)
    return tmp_path / "sources"


def write_entry(sources: Path, **more: Any) -> Path:
    git = ["git", "-C", str(sources / "someone+thing" / "repo"), "rev-parse", "HEAD"]
    commit = subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()
    folder = sources.parent / "scripts"
    folder.mkdir(exist_ok=True)
    data = {
        "style": "own loop",
        "repository": "someone/thing",
        "commit": commit,
        "folder": "train",
        "command": "torchrun --nproc_per_node 1 train.py --deepspeed_config ds.json",
        "config": "ds.json",
        **more,
    }
    path = folder / "thing.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def ran(
    *rows: Mapping[str, Any], code: int | None = 0, output: str = "", errors: str = "it says why", seconds: float = 9.0
) -> Ran:
    return Ran(command=("x",), exit_code=code, output=output, errors=errors, seconds=seconds, witnessed=rows)


def launch(name: str, *, micro_batch: int, fed: int | None, stage: int = 1, steps: int = 5) -> list[dict[str, Any]]:
    common = {"launch": name, "pid": hash(name), "rank": 0}
    rows = [{**common, "event": "engine", "micro_batch": micro_batch, "stage": stage, "accumulation": 1}]
    rows += [{**common, "event": "fed", "engine": 0, "size": fed}] if fed is not None else []
    return [*rows, {**common, "event": "step", "engine": 0, "steps": steps}]


def test_every_entry_of_the_list_can_be_read_and_no_two_are_one() -> None:
    entries = read_entries()
    assert len({(entry.repository, entry.commit, entry.folder, entry.command) for entry in entries}) == len(entries)
    assert all(len(entry.commit) == 40 for entry in entries)


def test_an_entry_with_an_unknown_word_or_an_untold_edit_is_refused(sources: Path) -> None:
    with pytest.raises(EntryError, match="unknown: colour"):
        read_entry(write_entry(sources, colour="red"))
    with pytest.raises(EntryError, match="altered"):
        read_entry(write_entry(sources, edits=[{"path": "train/ds.json", "old": "a", "new": "b"}]))


def test_a_commit_is_checked_out_from_a_folder_and_edits_apply_exactly(sources: Path, tmp_path: Path) -> None:
    edit = {"path": "train/ds.json", "old": '"lr": 0.001', "new": '"lr": 0.5'}
    entry = read_entry(write_entry(sources, edits=[edit], altered=["The learning rate."], files={"data/x.json": [1]}))
    sandbox = Sandbox(entry, tmp_path / "box", sources=sources)
    assert json.loads((sandbox.cwd / "ds.json").read_text())["optimizer"]["params"]["lr"] == 0.5
    assert (sandbox.checkout / "data" / "x.json").read_text() == "[1]"
    twice = read_entry(write_entry(sources, edits=[{**edit, "old": "e"}], altered=["x"]))
    with pytest.raises(EntryError, match="stands"):
        Sandbox(twice, tmp_path / "other", sources=sources)
    with pytest.raises(SourceError):
        check_out(entry, tmp_path / "third", tmp_path / "nowhere")


def test_a_sandbox_applies_the_stand_ins_and_keeps_another_sitecustomize(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text("import builtins\nbuiltins.hidden_one = 'kept'\n")
    monkeypatch.setenv("PYTHONPATH", str(hidden))
    sandbox = Sandbox(read_entry(write_entry(sources)), tmp_path / "box", sources=sources)
    text = (
        "import torch\nprint(torch.zeros(2, device='cuda:1').cuda().device, torch.cuda.is_available(), hidden_one)\n"
        "with torch.device('meta'): print(torch.arange(2).device)"
    )
    done = sandbox.run("look", [sys.executable, "-c", text], limit_s=600.0)
    assert done.output.split() == ["cpu", "False", "kept", "meta"], done.errors


@pytest.mark.parametrize(("size", "samples"), [(8, 4), (7, 3.5), (None, None)])
def test_rows_that_a_module_was_fed_are_samples(sources: Path, tmp_path: Path, size: Any, samples: Any) -> None:
    sandbox = Sandbox(read_entry(write_entry(sources, rows=2)), tmp_path / "box", sources=sources)
    row = json.dumps({"event": "fed", "size": size})
    done = sandbox.run("fed", ["sh", "-c", f"echo '{row}' > $FIRST_TRY_WITNESS/0.jsonl"], limit_s=600.0)
    assert done.witnessed[0]["size"] == samples


def test_a_search_is_judged_by_what_was_witnessed() -> None:
    result = json.dumps({"trial": 2, "config": {"train_micro_batch_size_per_gpu": 8}, "speed_up": 2.0})
    good = [*launch("trial-0001", micro_batch=4, fed=4, stage=2), *launch("trial-0002", micro_batch=8, fed=8)]
    verdict, _ = searched(ran(*good, output=f"said\n{result}\n"))
    assert (verdict.verdict, verdict.micro_batches, verdict.stages) == ("worked", (4, 8), (1, 2))
    wrong = launch("trial-0002", micro_batch=8, fed=4)
    assert searched(ran(*wrong, output=result))[0].verdict == "wrong"
    repeated = launch("trial-0002-retry-1", micro_batch=8, fed=8)
    assert searched(ran(*wrong, *repeated, output=result))[0].verdict == "worked"
    on = launch("trial-0002", micro_batch=8, fed=8, steps=500)
    assert "trained on" in searched(ran(*on, output=result))[0].message
    assert judged(ran(), None, "").verdict == "wrong"
    assert judged(ran(code=4), None, "").message == "it says why"
    assert judged(ran(code=4), None, "").verdict == "refused"
    ended = "optuna-dsat: The profile launch ended with timeout: longer than the limit"
    assert judged(ran(code=4, errors=f"said\n{ended}\n\nINFO: a log\n"), None, "").message == ended
    assert judged(ran(code=None), None, "").verdict == "lost"
    assert judged(ran(code=1, errors="Traceback (most recent call last)\nKeyError"), None, "").verdict == "lost"


def test_a_script_that_does_not_train_by_itself_is_not_judged() -> None:
    assert plain(ran(*launch("", micro_batch=4, fed=4), code=None)).verdict == "worked"
    assert plain(ran(code=1, errors="No module named x")).verdict == "not judged"
    assert plain(ran(*launch("", micro_batch=4, fed=4, steps=1), code=1)).verdict == "not judged", (
        "it fails after a step"
    )


def test_deepspeeds_autotuner_without_a_config_says_what_its_profile_launch_died_of(tmp_path: Path) -> None:
    verdict = tuned_by_deepspeed(ran(), tmp_path)
    assert verdict == judged(ran(), None, "")
    (tmp_path / "profile_model_info").mkdir()
    (tmp_path / "profile_model_info" / "stderr.log").write_text("warning\nKeyError: 'data'\n\n")
    verdict = tuned_by_deepspeed(ran(), tmp_path)
    assert verdict.verdict == "wrong"
    assert verdict.message == "exit code 0 and no config; its profile launch said: KeyError: 'data'"
    assert tuned_by_deepspeed(ran(code=4), tmp_path).message == "it says why"


def test_the_table_counts_what_is_judged() -> None:
    def record(name: str, verdict: str, why: str = "") -> dict[str, Any]:
        way = {"verdict": verdict, "message": "a | b", "micro_batches": [1, 2], "stages": [1]}
        days = {"plain": 1, "prefix": 2, "second": 2, "autotuning": 1}
        ways = {name: {**way, "date": f"2026-11-0{day}"} for name, day in days.items()}
        return {"name": name, "style": "own loop", "not_judged": why, "ways": ways}

    text = page([record("one", "worked"), record("two", "refused"), record("three", "worked", "too old")])
    assert "first try: 1 worked, 1 refused" in text
    worked = "worked (2 micro-batches, 1 stages)"
    assert f"| `one` | own loop | {worked} | worked | {worked}, 2026-11-01 | 2026-11-02 |" in text
    assert "`three`: not judged: too old" in text
    assert "a \\| b" in text


def test_what_the_pages_say_is_what_the_table_counts() -> None:
    root = Path(__file__).parents[2]
    table = (root / "benchmarks" / "first_try" / "table.md").read_text()
    counts = {}
    for way in ("first try", "`deepspeed --autotuning`"):
        [line] = re.findall(f"^- {way}: (.*)$", table, re.MULTILINE)
        by_verdict = {verdict: int(count) for count, verdict in re.findall(r"(\d+) ([a-z ]+)", line)}
        counts[way] = f"{by_verdict.get('worked', 0)} of {sum(by_verdict.values())}"
    first, autotuner = counts.values()
    assert f"| {first} | DeepSpeed's autotuner: {autotuner} |" in (root / "README.md").read_text()
    for page_of in ("benchmarks/README.md", "benchmarks/first_try/README.md"):
        text = " ".join((root / page_of).read_text().split())
        assert f"{first} worked at first try" in text, page_of
        assert f"autotuner: {autotuner}" in text, page_of


@pytest.mark.torchrun
def test_a_script_is_run_alone_and_tuned_and_leaves_the_repository_as_it_was(sources: Path, tmp_path: Path) -> None:
    write_entry(sources)
    options = ["--sources", str(sources), "--scripts", str(tmp_path / "scripts"), "--output", str(tmp_path / "out")]
    assert command.main([*options, "--ways", "plain,prefix", "--max-trials", "1", "--search-s", "200"]) == 0
    result = json.loads((tmp_path / "out" / "thing.json").read_text())["ways"]
    assert result["plain"]["verdict"] == "worked"
    assert result["prefix"]["verdict"] == "worked", result["prefix"]
    assert result["prefix"]["printed"] == "trains with it"
    assert "`thing`" in (tmp_path / "out" / "table.md").read_text()
    assert sorted(path.name for path in (sources / "someone+thing" / "repo").iterdir()) == [".git", "train"]
    assert command.main([*options, "--only", "nothing"]) == command.EX_USAGE


LOADS = """
import json, sys
from transformers import AutoModelForCausalLM, AutoTokenizer
from benchmarks.first_try.stand_ins import install
install()
from datasets import load_dataset, load_from_disk
model, tokenizer = (cls.from_pretrained("someone/tiny") for cls in (AutoModelForCausalLM, AutoTokenizer))
ids = tokenizer("hé", return_tensors="pt")
rows = load_dataset("someone/rows", split="train_sft[:10]")
print(json.dumps([type(model).__name__, list(model(**ids).logits.shape), rows.num_rows, rows.column_names,
    load_dataset("someone/rows").num_rows, load_from_disk("disk")["eval"].num_rows]))
"""


def entry(**fields: Any) -> Entry:
    return Entry(name="one", style="", repository="a/b", commit="c", command="python x.py", **fields)


def test_models_and_data_sets_of_the_hub_are_found(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    wanted = entry(models={"someone/tiny": "llama"}, datasets={"someone/rows": "dolly", "./disk": "tokens"})
    variables = prepare_hub(wanted, python=sys.executable, folder=tmp_path / "stand_ins", cwd=tmp_path)
    environment = {**os.environ, **variables, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", LOADS], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    model, logits, rows, columns, splits, on_disk = json.loads(done.stdout.splitlines()[-1])
    assert (model, rows, sorted(columns)) == (
        "LlamaForCausalLM",
        10,
        ["category", "context", "instruction", "response"],
    )
    assert logits == [1, 4, 320]  # a token before, one for h, two for é
    assert (splits, on_disk) == ({"train": 512, "validation": 64, "test": 64}, 64)


def test_what_a_script_needs_is_looked_for_in_its_own_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    venv.create(tmp_path / "old", with_pip=False)
    monkeypatch.setenv("FIRST_TRY_PYTHON_OLD", str(tmp_path / "old" / "bin" / "python"))
    assert absent_modules(entry(needs=("json", "torch", "no_such_thing"))) == ["no_such_thing"]
    assert absent_modules(entry(needs=("json", "torch", "no_such_thing"), python="old")) == ["torch", "no_such_thing"]
    monkeypatch.setenv("FIRST_TRY_PYTHON_OLD", str(tmp_path / "none"))
    with pytest.raises(EntryError, match="does not run"):
        absent_modules(entry(needs=("json",), python="old"))
