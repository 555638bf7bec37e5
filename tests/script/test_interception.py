"""Commands that are no launchers, and what they launch: nothing of it is begun."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import venv
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from optuna_dsat.errors import UsageError
from optuna_dsat.runtime.isolation.mounts import why_no_overlay
from optuna_dsat.runtime.isolation.prepared import REMOVED
from optuna_dsat.script.command.interception import _set_by_command, is_wrapper, ranks_of, starts_launcher
from optuna_dsat.script.command.launch_command import LaunchCommand, read_command
from tests.harness.interceptor import stand_in_for_torch

TORCHRUN = "torchrun --nproc_per_node 2 train.py --lr 3"
RANKS = "import deepspeed, os, subprocess, sys\nfor i in range(2):\n"
LAUNCH = LaunchCommand(script="train.py", args=("--lr", "3"), ranks=2, launcher="torchrun", is_wrapped=True)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "train.py").write_text("from pathlib import Path\nPath('begun').touch()\nprint('has begun')\n")
    stand_in_for_torch(tmp_path, monkeypatch)
    return tmp_path


@pytest.fixture(autouse=True)
def _nothing_begins(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Fail if a program of a test trains: what it writes to files is discarded."""
    yield
    assert "has begun" not in capfd.readouterr().err


def read(folder: Path, *words: str, notices: list[str] | None = None) -> LaunchCommand | None:
    result = read_command(words, cwd=folder, on_notice=([] if notices is None else notices).append)
    assert not (folder / "begun").exists()
    if result is None or result.python is None:
        return result
    assert Path(result.python).parent == Path(sys.executable).parent
    return replace(result, python=None)


def test_a_shell_script_comes_to_its_first_launch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = folder / "train.sh"
    script.write_text(
        "set -e\nread -p 'Start?' answer || true\npython -c 'print(1)' | tee log\n"
        f"export MODEL=tiny MASTER_PORT=29501 CUDA_VISIBLE_DEVICES=1\n{TORCHRUN} 2>&1 | tee log\ntouch afterwards\n"
        f"# {TORCHRUN}\necho torchrun train.py\ndeepspeed $GPUS \\\n  train.py --lr 4\n"
    )
    notices: list[str] = []
    with monkeypatch.context() as real:
        real.delenv("PYTHONPATH")
        result = read(folder, "bash", "train.sh", notices=notices)
    assert result == replace(LAUNCH, gpus="1", environment={"MODEL": "tiny"})
    assert notices[-1].startswith("The shell script contains other launches, which are not tuned")
    assert notices[:-1] == [
        "Running `bash train.sh` up to the launch of a training, which is read and not started. Trials see what it "
        "writes, your files do not change.",
        f"It launches `{TORCHRUN}`.",
    ]
    assert not (folder / "afterwards").exists()
    script.write_text(f"#!/bin/sh\n{script.read_text()}".replace("read -p", "echo"))
    script.chmod(0o755)
    assert read(folder, "train.sh") == result


@pytest.mark.skipif(bool(why_no_overlay(Path("/tmp"))), reason="overlays cannot be mounted here")
def test_what_a_shell_script_changes_is_kept_for_trials_and_the_users_files_stay(folder: Path) -> None:
    (folder / "runs").mkdir()
    for name in ("runs/model.pt", "train.log", "old.json", "same.json"):
        (folder / name).write_text("the user's")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    (folder / "train.sh").write_text(
        "touch $(mktemp -d)/log; rm -rf runs; mkdir -p runs new/data; echo x > new/data/part; echo x > list\n"
        "ln -s list link; echo '{}' > new/made.json; echo '{}' > old.json; export CONFIG=$PWD/old.json\n"
        "torchrun --nproc_per_node 2 train.py --out runs --config new/made.json --base=old.json --same same.json "
        "> train.log\n"
    )
    notices: list[str] = []
    result = read_command(["bash", "train.sh"], cwd=folder, on_notice=notices.append, into=lambda: folder / "out")
    assert result is not None
    assert notices[1].startswith("It has made, changed or removed link, list, new, old.json, runs/model.pt: trials see")
    copies = f"{result.prepared}{folder}"
    config = ("--config", f"{copies}/new/made.json", f"--base={copies}/old.json")
    assert result.args == ("--out", "runs", *config, "--same", "same.json")
    assert result.environment == {"CONFIG": f"{copies}/old.json"}
    kept = [Path(copies, name).read_text() for name in ("new/data/part", "list", "new/made.json", "old.json")]
    assert kept == ["x\n", "x\n", "{}\n", "{}\n"]
    assert [os.readlink(f"{copies}/{name}") for name in ("link", "runs/model.pt")] == [  # noqa: PTH115 - as stored
        "list",
        REMOVED,
    ]
    assert Path(result.prepared).parent == folder / "out"
    shutil.rmtree(folder / "out")
    (folder / "train.sh").unlink()
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    "line",
    [
        "cd inner\nPYTHONPATH=../stand_in nohup " + TORCHRUN,  # the interceptor is not on this path
        f"cd inner\nnohup {TORCHRUN} > log 2>&1 &",
        "cd inner\nPATH=" + os.path.dirname(sys.executable) + ":/usr/bin:/bin "  # noqa: PTH120 - nor on this one
        "python -u -m torch.distributed.run --nproc_per_node 2 train.py --lr 3",
    ],
)
def test_a_launch_is_seen_whatever_the_paths_and_in_which_folder(folder: Path, line: str) -> None:
    (folder / "inner").mkdir()
    (folder / "Makefile").write_text("train:\n\tbash train.sh\n")
    (folder / "train.sh").write_text(line + "\n")
    result = read(folder, "make", "train")
    assert result is not None
    assert (result.script, result.args, result.ranks) == ("train.py", ("--lr", "3"), 2)
    assert result.folder == str(folder / "inner")


def test_variables_in_front_of_a_command_are_its_own(folder: Path) -> None:
    result = read(folder, "CUDA_VISIBLE_DEVICES=0,2", "MODEL=a=b", *TORCHRUN.split())
    assert result == replace(LAUNCH, gpus="0,2", environment={"MODEL": "a=b"}, is_wrapped=False)
    assert read(folder, "MODEL=tiny", "python", "train.py") == LaunchCommand(
        script="train.py", environment={"MODEL": "tiny"}, without_launcher=True
    )


@pytest.mark.parametrize(
    "source",
    [
        "import subprocess\nsubprocess.run(['torchrun', '--nproc_per_node', '2', 'train.py'], check=True)\n",
        f"import os\nos.system('{TORCHRUN}')\n",
        "import subprocess\nimport sys\n"
        "subprocess.Popen([sys.executable, '-m', 'torch.distributed.run', '--nproc_per_node=2', 'train.py', '--lr=3'])"
        ".wait()\n",
        "from torch.distributed.run import main\nmain(['--nproc_per_node=2', 'train.py', '--lr', '3'])\n",
        "import os\nlr = 3\nos.system(f'bin/START train.py --lr {lr}')\n",
        "import subprocess\nsubprocess.run(['bash', 'bin/START', 'train.py'], check=True)\n",
        "import deepspeed, os, sys\nif 'RANK' not in os.environ:\n"
        "    os.execvp('torchrun', ['torchrun', '--nproc_per_node=2', *sys.argv])\ndeepspeed.initialize()\n",
        "import deepspeed\nimport submitit\ndeepspeed.initialize()\n",
        f"{RANKS}    subprocess.Popen([sys.executable, 'train.py'], env={{**os.environ, 'RANK': str(i)}})",
        f"{RANKS}    if os.fork() == 0:\n        os.environ['RANK'] = str(i)\n        deepspeed.initialize()\n",
    ],
)
def test_a_python_file_that_starts_a_launcher_comes_to_it(folder: Path, source: str) -> None:
    (folder / "bin").mkdir()
    (folder / "bin" / "START").write_text('#!/bin/bash\ntorchrun \\\n  --nproc_per_node=2 "$@"\n')
    (folder / "start.py").write_text(source)
    assert starts_launcher(folder / "start.py", cwd=folder)


@pytest.mark.parametrize(
    "calls",
    [
        "main(['--nproc_per_node', '2', 'train.py', *sys.argv[1:]])",
        "sys.argv[1:1] = ['--nproc_per_node', '2', 'train.py']\nmain()",
    ],
)
def test_a_python_file_that_calls_a_launcher_with_options_of_its_own_is_run(folder: Path, calls: str) -> None:
    (folder / "start.py").write_text(f"import sys\nfrom torch.distributed.run import main\n{calls}\n")
    assert read(folder, "python", "start.py", "--lr", "3") == LAUNCH


def test_a_training_in_a_job_of_submitit_is_refused(folder: Path) -> None:
    for package in ("submitit", "submitit/core"):
        (folder / package).mkdir()
        (folder / package / "__init__.py").touch()
    (folder / "submitit/core/_submit.py").write_text("import torch.distributed as d\nd.init_process_group()\n")
    start = "import submitit, subprocess, sys\nsubprocess.run([sys.executable, '-m', 'submitit.core._submit', 'job'])\n"
    (folder / "start.py").write_text(start)
    with pytest.raises(UsageError, match=r"`python start\.py` trains in a job of submitit, which is not measured\."):
        read(folder, "python", "start.py")


@pytest.mark.parametrize("program", [("start.py",), ("-m", "start")])
def test_what_deepspeed_sets_as_a_program_imports_it_is_not_its_users(
    folder: Path, monkeypatch: pytest.MonkeyPatch, program: tuple[str, ...]
) -> None:
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
    sets = "os.environ['PYTORCH_NVML_BASED_CUDA_CHECK'] = os.environ['MODEL'] = '1'"
    (folder / "start.py").write_text(f"import os\n{sets}\nos.system('{TORCHRUN}')\n")
    result = read(folder, "python", *program)
    assert result is not None
    assert (result.script, result.ranks, result.environment) == ("train.py", 2, {"MODEL": "1"})


def test_ranks_that_a_python_file_starts_by_pythons_command_are_the_launch(folder: Path) -> None:
    (folder / "own.py").write_text(
        "import os, subprocess, sys\nfrom torch import distributed\nif sys.argv[1:]:\n"
        "    distributed.init_process_group()\n"
        "for i in range(2):\n    env = {**os.environ, 'RANK': str(i), 'WORLD_SIZE': '2'}\n"
        "    subprocess.Popen([sys.executable, __file__, '--worker'], env=env)\n"
    )
    result = read(folder, "python", "own.py")
    assert result == LaunchCommand(script=f"{folder}/own.py", args=("--worker",), ranks=2, is_wrapped=True)


@pytest.mark.parametrize(
    "source",
    [
        "import deepspeed\nimport subprocess\nsubprocess.run(['deepspeed', '--version'])\ndeepspeed.initialize()\n",
        "import argparse\nargparse.ArgumentParser().add_argument('--backend', choices=['ddp', 'deepspeed'])\n",
        '"""Run by torchrun --nproc_per_node 2 train.py."""\nimport torch\n',
        "import subprocess\nsubprocess.run(['git', 'rev-parse', 'HEAD'])\n",
        "import os, subprocess, sys\nsubprocess.run([sys.executable, '-m', 'pip'])\n"
        "os.environ['RANK'] = os.environ['SLURM_PROCID']\n",
    ],
)
def test_a_python_file_that_trains_is_the_script(folder: Path, source: str) -> None:
    (folder / "own.py").write_text(source)
    assert read(folder, "python", "own.py") == LaunchCommand(script="own.py", without_launcher=True)


def test_a_script_that_trains_without_a_launcher_is_seen(folder: Path) -> None:
    (folder / "train.py").write_text(
        "import torch.distributed\ntorch.distributed.init_process_group('gloo')\nprint('has begun')\n"
    )
    (folder / "train.sh").write_text("python -c 'import torch.distributed'\npython train.py --lr 3\n")
    assert read(folder, "bash", "train.sh") == LaunchCommand(
        script="train.py", args=("--lr", "3"), without_launcher=True, is_wrapped=True
    )


def test_a_sitecustomize_that_runs_the_one_it_hides_is_run_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import importlib.machinery, importlib.util, os, sys\nfrom pathlib import Path\n"
        "os.environ['SET_IN_THE_LAUNCHER'] = '1'\n"
        "os.write(2, f'run for {sys.orig_argv[1]};'.encode())\n"
        "others = [one for one in sys.path if Path(one) != Path(__file__).parent]\n"
        "found = importlib.machinery.PathFinder.find_spec('sitecustomize', others)\n"
        "if found is not None: found.loader.exec_module(importlib.util.module_from_spec(found))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
    (folder / "train.sh").write_text("python -c 'print(1)'\n" + TORCHRUN + "\n")
    assert read(folder, "bash", "train.sh") == LAUNCH
    shown = capfd.readouterr().err
    assert shown.count("run for -c;") == 1
    assert shown.startswith("run for -c;1\n")


def test_what_launches_nothing_says_so(folder: Path) -> None:
    (folder / "prepare.sh").write_text("read -p 'Overwrite? ' answer || exit 3\n")
    ended = r"`bash prepare\.sh` ended with exit code 3 \(it is run without input: .*\) and launched no training"
    with pytest.raises(UsageError, match=ended):
        read(folder, "bash", "prepare.sh")


def test_a_command_that_would_write_to_the_users_files_says_so_before_it_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optuna_dsat.script.command.interception.why_no_overlay", lambda _: "not permitted")
    (folder / "train.sh").write_text("exit 1\n")
    notices: list[str] = []
    with pytest.raises(UsageError):
        read(folder, "bash", "train.sh", notices=notices)
    assert notices[0].endswith("No overlay can be mounted (not permitted): it writes to your files.")


def test_the_error_of_a_launcher_in_a_shell_script_is_shown(folder: Path) -> None:
    (folder / "train.sh").write_text("torchrun --nprocs 2 train.py\n")
    with pytest.raises(UsageError, match=r"refused its options: torchrun: .*--nprocs"):
        read(folder, "bash", "train.sh")


@pytest.mark.parametrize("words", [("sbatch", "job.sh"), ("bash", "submit.sh")])
def test_a_command_that_submits_a_job_submits_nothing(
    folder: Path, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "bin").mkdir()
    (folder / "bin/sbatch").write_text("#!/bin/sh\necho has begun >&2\n")
    (folder / "bin/sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}/bin{os.pathsep}{os.environ['PATH']}")
    (folder / "submit.sh").write_text("set -e\nsbatch --nodes=2 job.sh\n")
    with pytest.raises(UsageError, match=r"ended with exit code 1 .* and launched no training"):
        read(folder, *words)
    shown = capfd.readouterr().err
    assert "has begun" not in shown
    assert "sbatch: not submitted." in shown


def test_another_environment_is_named(folder: Path) -> None:
    venv.create(folder / "other", with_pip=False)
    command = read_command(["env", f"{folder}/other/bin/python", "train.py"], cwd=folder)
    assert command is not None
    assert command.python == f"{folder}/other/bin/python"


@pytest.mark.parametrize("rest", [("train.py", "--lr", "3"), ("-m", "train", "--lr", "3")])
def test_a_script_at_the_end_of_the_command_does_not_run_a_line(folder: Path, rest: tuple[str, ...]) -> None:
    result = read(folder, "env", "MODEL=tiny", "python", "-u", *rest)
    assert result is not None
    assert (result.is_module, result.args, result.environment) == (rest[0] == "-m", ("--lr", "3"), {"MODEL": "tiny"})
    assert result.without_launcher


def test_scripts_are_no_wrappers(folder: Path) -> None:
    (folder / "tool").write_text("#!/usr/bin/env python3\nimport torch\n")
    (folder / "plain").write_text("import torch\n")
    for word in ("train.py", "missing.py", "tool", "./tool", "plain", "no-such-program", "package/missing"):
        assert not is_wrapper(word, cwd=folder)


@pytest.mark.parametrize(
    ("variables", "ranks", "nodes"),
    [
        ("OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_RANK=1 OPAL_PREFIX=/x", 2, 1),
        ("OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=4", 4, 2),
        ("PMI_SIZE=4 PMI_RANK=2 PMI_FD=7 MPI_LOCALNRANKS=4 MPI_LOCALRANKID=2 HYDI_CONTROL_FD=4", 4, 1),
        ("MV2_COMM_WORLD_SIZE=2 MV2_COMM_WORLD_RANK=0 MV2_COMM_WORLD_LOCAL_SIZE=2", 2, 1),
        ("SLURM_NTASKS=2 SLURM_NPROCS=2 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_JOB_ID=5 SLURM_STEP_ID=0", 2, 1),
        ("SLURM_NTASKS=8 SLURM_PROCID=3 SLURM_STEP_ID=1 SLURM_STEP_NUM_NODES=2", 4, 2),
        ("SLURM_NTASKS=8 SLURM_PROCID=3 SLURM_STEP_ID=1 SLURM_NNODES=2 PMI_RANK=3 PMI_SIZE=8 SRUN_DEBUG=3", 4, 2),
        ("HOROVOD_SIZE=2 HOROVOD_RANK=0 HOROVOD_LOCAL_SIZE=2 HOROVOD_LOCAL_RANK=0 HOROVOD_CONTROLLER=gloo", 2, 1),
        ("WORLD_SIZE=4 RANK=1 LOCAL_WORLD_SIZE=2 LOCAL_RANK=1 MASTER_ADDR=a MASTER_PORT=29500", 2, 2),
        ("WORLD_SIZE=2 RANK=1 MASTER_ADDR=localhost MASTER_PORT=29500", 2, 1),
    ],
)
def test_ranks_that_other_programs_start_are_counted_and_have_no_variables_of_one_of_them(
    folder: Path, variables: str, ranks: int, nodes: int
) -> None:
    pairs = (word.split("=") for word in f"MODEL=tiny {variables}".split())
    rank = {**os.environ, **dict(pairs)}
    assert ranks_of(rank) == (ranks, nodes)
    assert _set_by_command(rank, folder=folder) == {"MODEL": "tiny"}


OMPI = "OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=4"
OF_OMPI = {
    "OMPI_COMM_WORLD_SIZE": "$WORLD_SIZE",
    "OMPI_COMM_WORLD_RANK": "$RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "$LOCAL_WORLD_SIZE",
}
SRUN = "SLURM_NTASKS=8 SLURM_PROCID=3 SLURM_JOB_ID=5 SLURM_STEP_ID=1 SLURM_NNODES=2 SLURM_NODEID=1 SLURM_NODELIST=n1"
OF_SRUN = {
    "SLURM_NTASKS": "$WORLD_SIZE",
    "SLURM_PROCID": "$RANK",
    "SLURM_NODEID": "$GROUP_RANK",
    "SLURM_NODELIST": "$MASTER_ADDR",
    "SLURM_JOB_ID": "$MASTER_PORT",
}


@pytest.mark.parametrize(
    ("variables", "code", "read_by_script"),
    [
        (OMPI, "", {}),
        (OMPI, "os.environ['SLURM_PROCID']", {}),
        (OMPI, "os.environ.get('OMPI_COMM_WORLD_RANK', 0)", OF_OMPI),
        (OMPI, "names = ('RANK', 'OMPI_COMM_WORLD_RANK')\n[os.getenv(name) for name in names]", OF_OMPI),
        (OMPI, "os.environ['OMPI_COMM_WORLD_RANK'] = '0'", {}),
        (SRUN, "os.environ['SLURM_PROCID']", {**OF_SRUN, "SLURM_NNODES": "$GROUP_WORLD_SIZE"}),
        (f"{SRUN} SLURM_CPUS_PER_TASK=3", "import places", {"SLURM_CPUS_PER_TASK": "3"}),
    ],
)
def test_ranks_that_another_program_starts_on_two_nodes_are_the_launch(
    folder: Path, monkeypatch: pytest.MonkeyPatch, variables: str, code: str, read_by_script: dict[str, str]
) -> None:
    sent = Mock(side_effect=os.killpg)
    monkeypatch.setattr(os, "killpg", sent)
    (folder / "ddp.py").write_text(f"import torch.distributed as dist, os\ndist.init_process_group()\n{code}\n")
    (folder / "run").write_text(f'#!/bin/sh\nexport MODEL=tiny {variables}\nshift 2\nexec "$@"\n')
    (folder / "run").chmod(0o755)
    assert read(folder, "./run", "-np", "8", "python", "ddp.py", "--lr", "3") == LaunchCommand(
        script="ddp.py",
        args=("--lr", "3"),
        ranks=4,
        nodes=2,
        elsewhere=("2 nodes",),
        environment={"MODEL": "tiny", **read_by_script},
        is_wrapped=True,
    )
    numbers = [call.args[1] for call in sent.mock_calls]
    assert (signal.SIGTERM in numbers) == ("SLURM" in variables), "srun ends its job, which a killed one does not"
    assert numbers[-1] == signal.SIGKILL


def test_ranks_of_a_program_whose_variables_are_unknown_are_counted_as_they_start(folder: Path) -> None:
    (folder / "ddp.py").write_text("import torch.distributed as dist\ndist.init_process_group()\n")
    (folder / "run").write_text('#!/bin/sh\nfor i in 0 1; do ODD_RANK=$i MODEL=tiny "$@" & done; wait\n')
    (folder / "run").chmod(0o755)
    result = read(folder, "./run", "python", "ddp.py")
    assert result == LaunchCommand(script="ddp.py", ranks=2, environment={"MODEL": "tiny"}, is_wrapped=True)


def test_ranks_that_a_script_spawns_are_not_counted(folder: Path) -> None:
    (folder / "spawns.py").write_text(
        "import multiprocessing\n\n\ndef train():\n    from torch import distributed\n"
        "    distributed.init_process_group()\n\n\nif __name__ == '__main__':\n"
        "    spawn = multiprocessing.get_context('spawn')\n"
        "    for rank in range(2):\n        spawn.Process(target=train).start()\n"
    )
    (folder / "run.sh").write_text("python spawns.py\n")
    result = read(folder, "bash", "run.sh")
    assert result == LaunchCommand(script="spawns.py", without_launcher=True, is_wrapped=True)


def test_a_step_around_the_search_is_no_launch_of_the_command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_STEP_ID": "1", "SLURM_JOB_ID": "5"}.items():
        monkeypatch.setenv(name, value)
    (folder / "ddp.py").write_text("import torch.distributed as dist\ndist.init_process_group()\n")
    (folder / "run.sh").write_text("python ddp.py\n")
    result = read(folder, "bash", "run.sh")
    assert result is not None
    assert (result.ranks, result.without_launcher, result.environment) == (None, True, {})
