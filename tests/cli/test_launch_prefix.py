"""The command that trains today, behind a search: what becomes of its ranks where there is no GPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from optuna_dsat.cli import app
from optuna_dsat.cli.parsing.launch_prefix import kept_places, unfold_command
from optuna_dsat.errors import UsageError
from optuna_dsat.launch.machine.devices import Device, Devices
from tests.harness.entry_points import leave
from tests.harness.interceptor import intercept_here, stand_in_for_torch

TRAINS = "import torch.distributed\ntorch.distributed.init_process_group()\n"


def unfolded(folder: Path, *words: str) -> list[str]:
    folder.joinpath("train.py").write_text("")
    group: Any = typer.main.get_command(app)
    result = unfold_command(["random", *words], group, cwd=folder)
    return list(result.arguments)


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})


@pytest.fixture(autouse=True)
def launchers_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optuna_dsat.script.command.launch_command.intercept", intercept_here)


def test_a_dry_run_names_the_training_command_as_origin_of_its_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    stand_in_for_torch(tmp_path, monkeypatch)
    tmp_path.joinpath("train.py").write_text(TRAINS)
    words = ["random", "--dry-run", "--max-trials", "3", "torchrun", "--nproc_per_node", "2", "train.py"]
    assert leave(*words) == 0
    rows = [line.split(" │ ") for line in capsys.readouterr().out.partition("left at their defaults")[2].splitlines()]
    origins = {row[0].strip(" │"): row[-1].strip(" │") for row in rows if len(row) == 3}
    of_command = dict.fromkeys(("cpu-ranks", "train-launcher", "python"), "training command")
    assert origins == {"max-trials": "command line", **of_command}


def test_doctor_reads_a_command_as_a_search_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    tmp_path.joinpath("train.py").write_text("")
    tmp_path.joinpath("ds.json").write_text('{"train_micro_batch_size_per_gpu": 4}')
    group: Any = typer.main.get_command(app)
    words = ["deepspeed", "--num_gpus", "2", "train.py", "--deepspeed_config", "ds.json"]
    result = list(unfold_command(["doctor", "--python", sys.executable, *words], group, cwd=tmp_path).arguments)
    named = ["--python", sys.executable, "train.py", "ds.json"]
    assert result == ["doctor", *named, "--", "--deepspeed_config", "ds.json"]
    module = list(unfold_command(["doctor", "python", "-m", "json.tool", "ds.json"], group, cwd=tmp_path).arguments)
    assert module[-5:] == ["--module", "json.tool", "ds.json", "--", "ds.json"]
    tmp_path.joinpath("run.sh").write_text("cd sub\npython train.py\n")
    tmp_path.joinpath("sub").mkdir()
    tmp_path.joinpath("sub", "train.py").write_text(TRAINS)
    stand_in_for_torch(tmp_path, monkeypatch)
    moved = unfold_command(["doctor", "--output-dir", "o", "bash", "run.sh"], group, cwd=tmp_path)
    assert moved.folder == tmp_path / "sub"
    assert ["--output-dir", str(tmp_path / "o"), "--storage"] == list(moved.arguments)[3:6]
    for unchanged in (["doctor", "train.py", "ds.json", "--", "--lr", "0"], ["doctor", "-m", "pkg.module", "ds.json"]):
        assert list(unfold_command(unchanged, group, cwd=tmp_path).arguments) == unchanged


def test_the_launcher_and_its_ranks_are_those_on_the_cpu_unless_there_are_too_few_cores_or_an_option_wins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = unfolded(tmp_path, "torchrun", "--nproc_per_node", "2", "train.py")
    assert result[result.index("--cpu-ranks") + 1] == "2"
    assert result[result.index("--train-launcher") + 1] == "torchrun"
    assert "on the CPU, with 2 rank" in capsys.readouterr().err
    result = unfolded(tmp_path, "torchrun", "--nproc_per_node", "8", "train.py")
    assert "--cpu-ranks" not in result
    assert "fewer ranks than 8, as there are 2 cores" in capsys.readouterr().err
    result = unfolded(tmp_path, "--cpu-ranks", "2", "torchrun", "--nproc_per_node", "1", "train.py")
    assert result.count("--cpu-ranks") == 1
    assert result[result.index("--cpu-ranks") + 1] == "2"
    assert capsys.readouterr().err == ""
    result = unfolded(tmp_path, "deepspeed", "--bind_cores_to_rank", "train.py")
    assert result[result.index("--train-launcher") + 1] == "deepspeed"
    assert result[result.index("--fix") + 1] == "bind_cores=true"


def test_nodes_of_the_launcher_become_those_of_a_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hosts").write_text("w0 slots=4\nw1 slots=4\n")
    command = ("deepspeed", "--hostfile", "hosts", "--master_addr", "w0", "train.py")
    result = unfolded(tmp_path, "--on", "slurm", *command)
    assert result[result.index("--nodes-per-trial") + 1] == "2"
    assert result[result.index("--gpus-per-node") + 1] == "4"
    assert "--slurm-arg=--nodelist=w0,w1" in result
    assert capsys.readouterr().err == "--master_addr w0: each launch chooses its own rendezvous.\n"
    result = unfolded(tmp_path, "--on=ray", "--nodes-per-trial", "1", *command)
    assert result.count("--nodes-per-trial") == 1
    assert not any(word.startswith("--slurm-arg") for word in result)
    assert [result[place + 1] for place, word in enumerate(result) if word == "--ray-node"] == ["w0", "w1"]
    assert "w0" not in unfolded(tmp_path, "--on=ray", "--ray-node", "other", *command)


@pytest.mark.parametrize(
    ("text", "words", "on_nodes"),
    [
        ('on = "slurm"', (), True),
        ('[tool.optuna-dsat.random]\non = "ray"', (), True),
        ('[tool.optuna-dsat.asha]\non = "slurm"', (), False),
        ('on = "slurm"', ("--on", "here", "--cpu-ranks", "2"), False),
        ('on = "slurm"\ncpu_ranks = "2"', (), False),
    ],
)
def test_a_file_of_options_says_as_well_where_the_ranks_of_the_launcher_run(
    tmp_path: Path, text: str, words: tuple[str, ...], on_nodes: bool
) -> None:
    (tmp_path / "pyproject.toml").write_text(f"[tool.optuna-dsat]\n{text}\n")
    result = unfolded(tmp_path, *words, "deepspeed", "--num_gpus", "4", "train.py")
    assert ("--gpus-per-node" in result) is on_nodes
    assert "--gpus-per-trial" not in result
    named = tmp_path / "mine.toml"
    named.write_text('on = "here"\n')
    group: Any = typer.main.get_command(app)
    other = unfold_command(
        ["--options", str(named), "random", "deepspeed", "--num_gpus", "4", "train.py"], group, cwd=tmp_path
    ).arguments
    assert "--gpus-per-node" not in other


def test_nodes_are_named_where_trials_run_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = unfolded(tmp_path, "--cpu-ranks", "2", "torchrun", "--nnodes", "3", "--nproc_per_node", "2", "train.py")
    assert "--nodes-per-trial" not in result
    text = capsys.readouterr().err
    assert "--nnodes 3: tuned on this machine alone" in text
    assert "With --on slurm or --on ray it is tuned on 3 nodes." in text


def test_what_no_launcher_takes_ends_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "torchrun --nproc_per_node abc train.py"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    code = leave("guided", *command.split())
    text = capsys.readouterr().err
    assert code == 2, text
    assert text.startswith(f"optuna-dsat: {command.split()[0]}")
    assert text.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.parametrize(
    "command",
    [
        "deepspeed --num_gpus 2 train.py --lr 1 --dry-run --timeout=5",
        "accelerate launch --num_processes 1 train.py --dry-run",
        "python -m train --dry-run",
        "LEVEL=1 python train.py --dry-run",
    ],
)
def test_an_option_of_the_search_behind_the_script_is_refused_unless_two_dashes_give_it_to_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    words = command.split()
    with pytest.raises(
        UsageError, match=rf"^--dry-run.*: options within the command.*random --dry-run \.\.\. {words[0]}"
    ):
        unfolded(tmp_path, *words)
    unfolded(tmp_path, "--", *words)
    assert "passed to the script" not in capsys.readouterr().err
    plain = [word for word in words if not word.startswith(("--dry-run", "--timeout"))]
    assert unfolded(tmp_path, "--dry-run", *plain)[1] == "--dry-run"
    assert unfolded(tmp_path, *plain, "--", "--dry-run")[-1] == "--dry-run", "or two behind the script"


@pytest.mark.parametrize(
    "source",
    [
        'import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument("-d", "--dry-run")\n',
        "from options import parser\n",
        "from transformers import HfArgumentParser\nclass Arguments:\n    dry_run: bool = False\n",
    ],
)
def test_an_option_that_the_script_declares_is_given_to_it_with_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str
) -> None:
    (tmp_path / "options.py").write_text('parser.add_argument("--dry-run")\n')
    (tmp_path / "own.py").write_text(source)
    assert unfolded(tmp_path, "torchrun", "own.py", "--dry-run", "--lr", "1")[-3:] == ["--dry-run", "--lr", "1"]
    note = " ".join(capsys.readouterr().err.split())
    assert "--dry-run: passed to the script, which declares it." in note
    assert "optuna-dsat random --dry-run ..." in note
    with pytest.raises(UsageError, match=r"^--timeout: options within the command.* own\.py does not declare it"):
        unfolded(tmp_path, "torchrun", "own.py", "--dry-run", "--timeout", "5")


@pytest.fixture
def eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = tuple(Device(index=n, visible_id=str(n), name="A100", memory_bytes=2**36) for n in range(8))
    monkeypatch.setattr(
        "optuna_dsat.launch.machine.devices.detect_devices",
        lambda **_: Devices(kind="cuda", devices=gpus, host_memory_bytes=2**38),
    )


@pytest.mark.usefixtures("eight_gpus")
def test_a_command_without_a_launcher_is_tuned_in_one_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = unfolded(tmp_path, "python", "train.py", "--lr", "1")
    assert result[result.index("--gpus-per-trial") + 1] == "1"
    words = " ".join(capsys.readouterr().err.split())
    assert words == (
        "The command has no launcher and trains in one process: each trial takes 1 of 8 GPUs. --gpus-per-trial 8 "
        "tunes for 8."
    )
    result = unfolded(tmp_path, "--gpus-per-trial", "4", "python", "train.py")
    assert result.count("--gpus-per-trial") == 1
    assert "--gpus-per-trial" not in unfolded(tmp_path, "train.py", "ds_config.json")
    assert not capsys.readouterr().err


@pytest.mark.usefixtures("eight_gpus")
@pytest.mark.parametrize(
    "source",
    [
        "import lightning as L\n",
        "from pytorch_lightning.cli import LightningCLI\n",
        "import torch.multiprocessing as mp\nmp.spawn(print, nprocs=8)\n",
        "import torch\ntorch.multiprocessing.spawn(print, nprocs=8)\n",
        "import multiprocessing as mp\nfor i in range(8):\n    mp.Process(target=print, args=({'RANK': i},))",
        "from package import start\n",
    ],
)
def test_a_script_that_starts_its_ranks_by_itself_gets_all_gpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str
) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "start.py").write_text("import torchrunx\n")
    (tmp_path / "own.py").write_text(source)
    assert "--gpus-per-trial" not in unfolded(tmp_path, "python", "own.py")
    assert not capsys.readouterr().err


@pytest.fixture
def wrapper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a shell script that trains in another folder, where nothing heavy is loaded."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    stand_in_for_torch(tmp_path, monkeypatch)
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "own.py").write_text(TRAINS)
    file = tmp_path / "train.sh"
    file.write_text("cd inner\nexport MODEL=tiny\npython own.py --lr 3\n")
    return file


@pytest.mark.usefixtures("wrapper")
def test_places_are_those_of_the_folder_in_which_a_command_is_typed_that_goes_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = unfolded(tmp_path, "bash", "train.sh")
    assert result[result.index("--output-dir") + 1] == str(tmp_path / "optuna-dsat-output")
    assert result[result.index("--storage") + 1].endswith(f"{tmp_path}/optuna-dsat.db")
    assert result[result.index("--env") + 1] == "MODEL=tiny"
    assert result[-3:] == ["--", "--lr", "3"]
    assert Path.cwd() == tmp_path
    assert "where the command goes" in " ".join(capsys.readouterr().err.split())
    monkeypatch.setenv("OPTUNA_DSAT_STORAGE", "sqlite:///kept/my.db")
    assert kept_places(tmp_path, tmp_path / "inner", given=["--output-dir=there"]) == [
        *("--output-dir", str(tmp_path / "there"), "--storage", f"sqlite:///{tmp_path}/kept/my.db")
    ]


def test_options_of_the_search_that_a_wrapper_would_lose_are_refused(tmp_path: Path, wrapper: Path) -> None:
    """64 launches were searched where five were asked for: nothing that the wrapper launches has the option."""
    (tmp_path / "passes.sh").write_text(wrapper.read_text().replace("--lr 3", '"$@"'))
    with pytest.raises(
        UsageError, match=r"^--max-trials: options within the command.*optuna-dsat random --max-trials \.\.\. bash"
    ):
        unfolded(tmp_path, "bash", "train.sh", "--max-trials", "5", "--lr=1")
    meant = unfolded(tmp_path, "--max-trials", "5", "--", "bash", "train.sh", "--max-trials=9")
    assert meant[meant.index("--max-trials") + 1] == "5"
    assert meant[-3:] == ["--", "--lr", "3"], "the command's own option, which the script is not given"
    given = unfolded(tmp_path, "--", "bash", "passes.sh", "--max-trials", "5")
    assert given[-3:] == ["--", "--max-trials", "5"]
    (tmp_path / "mpirun").write_text('#!/bin/sh\nshift 2\nexec "$@"\n')
    (tmp_path / "mpirun").chmod(0o755)
    run = ("./mpirun", "--timeout", "9", "python", "inner/own.py", "--lr", "1")
    assert unfolded(tmp_path, *run)[-2:] == ["--lr", "1"]


@pytest.mark.parametrize("first", [(), ("--",)])
def test_a_program_that_is_not_there_is_named(tmp_path: Path, first: tuple[str, ...]) -> None:
    """It was 'No such option: -n', as what follows the program was taken for options of the search."""
    with pytest.raises(UsageError, match=r"^no-mpirun: no file in .* and no program"):
        unfolded(tmp_path, *first, "no-mpirun", "-n", "2", "python", "train.py")
    with pytest.raises(UsageError, match=r"^no-uv: no file in .* and no program"):
        unfolded(tmp_path, *first, "no-uv", "run", "torchrun", "--nproc_per_node", "2", "train.py")
    assert unfolded(tmp_path, "train.py", "--max-trials", "3") == ["random", "train.py", "--max-trials", "3"]


@pytest.mark.usefixtures("eight_gpus")
def test_what_a_command_selects_is_returned_and_changes_the_process_when_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrapper: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    wrapper.write_text(wrapper.read_text().replace("python", "CUDA_VISIBLE_DEVICES=2,3 python"))
    group: Any = typer.main.get_command(app)
    result = unfold_command(["random", "bash", "train.sh"], group, cwd=tmp_path)
    assert (result.folder, result.gpus) == (tmp_path / "inner", "2,3")
    assert (Path.cwd(), os.environ["CUDA_VISIBLE_DEVICES"]) == (tmp_path, "0,1,2,3,4,5,6,7")
    assert result.apply() == list(result.arguments)
    assert (Path.cwd(), os.environ["CUDA_VISIBLE_DEVICES"]) == (tmp_path / "inner", "2,3")


def test_arguments_behind_the_config_are_named_unless_two_dashes_precede_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unfolded(tmp_path, "train.py", *["ds.json", "extra", "--timeout", "5", "2"])
    assert capsys.readouterr().err == "Passed to train.py: extra 2. Write -- before arguments of the script.\n"
    for words in ("ds.json -- extra", "--timeout 5 ds.json"):
        unfolded(tmp_path, "train.py", *words.split())
        assert capsys.readouterr().err == ""
