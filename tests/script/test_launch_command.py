from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from optuna_dsat.errors import UsageError
from optuna_dsat.script.command.launch_command import LaunchCommand, read_command
from tests.harness.interceptor import launched, stand_in_for_torch

ACCELERATE_CONFIG = """
compute_environment: LOCAL_MACHINE
deepspeed_config:
  gradient_accumulation_steps: 2
  offload_optimizer_device: cpu
  zero_stage: 2
distributed_type: DEEPSPEED
mixed_precision: bf16
num_machines: 1
num_processes: 2
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import deepspeed\n")
    (tmp_path / "ds.json").write_text("{}")
    return tmp_path


def read(folder: Path, command: str) -> LaunchCommand | None:
    """Return the command; its interpreter is that of these tests, and left out."""
    result = read_command(command.split(), cwd=folder)
    if result is None or result.python is None:
        return result
    assert Path(result.python).parent == Path(sys.executable).parent
    return replace(result, python=None)


def test_a_script_is_no_launcher_even_if_it_bears_the_name_of_one(folder: Path) -> None:
    assert read(folder, "train.py --lr 1") is None
    assert read(folder, "missing.py") is None
    for name in ("deepspeed", "torchrun", "accelerate", "torchrun.py"):
        (folder / name).write_text("import torch\nfor step in range(3):\n    print(step)\n")
        assert read(folder, f"{name} --lr 1") is None


def test_a_launcher_under_another_name_is_a_launcher_and_no_folder_of_the_user_hides_its_packages(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in_for_torch(folder, monkeypatch)
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text("raise ImportError('the wrong torch')\n")
    own = folder / "start-it"
    own.write_text(f"#!{sys.executable}\nimport sys\nfrom torch.distributed.run import main\nsys.exit(main())\n")
    assert read(folder, "./start-it --nproc_per_node 2 train.py") == LaunchCommand(
        script="train.py", ranks=2, launcher="torchrun"
    )


def test_python_runs_a_script_or_a_module(folder: Path) -> None:
    for python in ("python3", sys.executable):
        assert read(folder, f"{python} train.py --lr 1") == LaunchCommand(
            script="train.py", args=("--lr", "1"), without_launcher=True
        )
    module = read(folder, "python -m package.train a")
    assert module == LaunchCommand(script="package.train", is_module=True, args=("a",), without_launcher=True)
    assert read(folder, "python -mpackage.train a") == module


def test_options_of_the_interpreter_are_named_and_what_runs_no_file_is_refused(folder: Path) -> None:
    result = read(folder, "python -u -W ignore train.py")
    assert result is not None
    assert result.notes == ("-u -W ignore of python has no effect on the ranks.",)
    for command in ("python -c print(1)", "python", "python -m"):
        with pytest.raises(UsageError):
            read(folder, command)


def test_console_scripts_come_to_the_module_that_trains(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = folder / "llamafactory-cli"
    tool.write_text(f"#!{sys.executable}\nimport sys\nfrom llamafactory.cli import main\nsys.exit(main())\n")
    declare_console_script(folder, "llamafactory-cli", "llamafactory.cli:main", monkeypatch)
    result = read(folder, "./llamafactory-cli train run.yaml")
    assert result == LaunchCommand(script="llamafactory.launcher", is_module=True, args=("run.yaml",))


def declare_console_script(folder: Path, name: str, runs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the interpreter find an installed package in a folder that declares a console script."""
    metadata = folder / "tool-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: tool\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[console_scripts]\n{name} = {runs}\n")
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)


@pytest.fixture
def tool(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed console script ``./tool-cli``; returns the module that it runs, still to be written."""
    (folder / "installed").mkdir()
    (folder / "tool-cli").write_text(f"#!{sys.executable}\nimport sys\nfrom tool import main\nsys.exit(main())\n")
    (folder / "tool-cli").chmod(0o755)
    declare_console_script(folder / "installed", "tool-cli", "tool:main", monkeypatch)
    monkeypatch.syspath_prepend(str(folder / "installed"))
    return folder / "installed" / "tool.py"


def test_a_console_script_that_launches_by_itself_comes_to_what_it_launches(folder: Path, tool: Path) -> None:
    tool.write_text(
        "import sys\n\n\ndef main():\n    from accelerate.commands import launch\n"
        "    words = ['--use_deepspeed', '--zero_stage', '2', 'train.py', *sys.argv[2:]]\n"
        "    launch.launch_command(launch.launch_command_parser().parse_args(words))\n"
        "    raise RuntimeError('launched')\n"
    )
    result = read(folder, "./tool-cli train --lr 3")
    assert result is not None
    assert (result.script, result.args) == ("train.py", ("--lr", "3"))
    assert result.environment["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "2"
    assert "ACCELERATE_CONFIG_DS_FIELDS" not in result.environment, "a trial has a config file in place of the fields"


def test_a_console_script_that_starts_ranks_by_pythons_command_is_their_launcher(folder: Path, tool: Path) -> None:
    """Composer's launcher ran in each rank, which trained outside the measurement."""
    (folder / "train.py").write_text("open('begun', 'w')\n")
    tool.write_text(
        "import os, subprocess, sys\n\n\ndef main():\n    for rank in range(2):\n        cmd = []\n"
        "        cmd.append(sys.executable)\n        environ = dict(os.environ, RANK=str(rank), WORLD_SIZE='2')\n"
        "        running = subprocess.Popen([*cmd, *sys.argv[3:]], env=environ)\n    running.wait()\n"
    )
    expected = LaunchCommand(script="train.py", args=("--lr", "3"), ranks=2, is_wrapped=True)
    assert read(folder, "./tool-cli -n 2 train.py --lr 3") == expected
    assert not (folder / "begun").exists()


def test_axolotl_launches_by_its_options(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module that trains was given the options for the launcher, and a rank for each GPU."""
    stand_in_for_torch(folder, monkeypatch)
    installed = folder / "installed"
    (installed / "axolotl" / "cli").mkdir(parents=True)
    (installed / "axolotl" / "cli" / "main.py").write_text(
        "import os, sys\n\nLAUNCHERS = ['torchrun']\n\n\ndef main():\n"
        "    config, _, launcher, _, *options = sys.argv[2:]\n"
        "    os.execvpe(launcher, [launcher, *options, 'train.py', config], os.environ)\n"
    )
    (folder / "axolotl").write_text(f"#!{sys.executable}\nimport sys\nfrom axolotl.cli.main import main\nmain()\n")
    (folder / "axolotl").chmod(0o755)
    declare_console_script(installed, "axolotl", "axolotl.cli.main:main", monkeypatch)
    monkeypatch.syspath_prepend(str(installed))
    result = read(folder, "./axolotl train run.yml --launcher torchrun -- --nproc_per_node=2")
    assert result is not None
    assert (result.script, result.args, result.ranks) == ("train.py", ("run.yml",), 2)


def test_a_console_script_that_trains_by_itself_is_the_module_that_it_runs(
    folder: Path, tool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in_for_torch(folder, monkeypatch)
    expected = LaunchCommand(script="tool", is_module=True, args=("train",))
    tool.write_text("import torch\n\n\ndef main():\n    open('begun', 'w')\n")
    assert read(folder, "./tool-cli train") == expected
    assert not (folder / "begun").exists(), "without a launcher in its sources it is not run"
    tool.write_text(
        "import subprocess\n\nLAUNCHERS = ['torchrun']\n\n\ndef main():\n    subprocess.run(['true'], check=True)\n"
        "    import torch.distributed\n    torch.distributed.init_process_group('gloo')\n    open('begun', 'w')\n"
    )
    assert read(folder, "./tool-cli train") == replace(expected, is_wrapped=True)
    assert not (folder / "begun").exists()
    tool.write_text("LAUNCHERS = ['torchrun']\n\n\ndef main():\n    raise SystemExit(2)\n")
    with pytest.raises(UsageError, match="exit code 2"):
        read(folder, "./tool-cli --unknown")


@pytest.mark.parametrize(
    ("command", "args", "ranks", "launcher"),
    [
        ("deepspeed --include localhost:0,1 --no_local_rank train.py --lr 3", ("--lr", "3"), 2, "deepspeed"),
        ("accelerate launch --num_processes 1 train.py", (), 1, None),
        (f"{sys.executable} -m torch.distributed.launch --nproc_per_node 2 train.py", (), 2, None),
    ],
)
def test_a_launcher_is_run_until_its_first_rank(
    folder: Path, command: str, args: tuple[str, ...], ranks: int | None, launcher: str | None
) -> None:
    (folder / "train.py").write_text("open('begun', 'w')\n")
    result = read(folder, command)
    assert result is not None
    assert (result.script, result.args, result.ranks, result.launcher) == ("train.py", args, ranks, launcher)
    assert (result.without_launcher, result.environment) == (False, {})
    assert {path.name for path in folder.iterdir()} == {"train.py", "ds.json"}


def test_deepspeeds_options_are_read() -> None:
    result = launched("deepspeed", ["--num_gpus", "8", "train.py", "--deepspeed_config", "ds.json", "--lr", "1e-4"])
    assert result == LaunchCommand(
        script="train.py", args=("--deepspeed_config", "ds.json", "--lr", "1e-4"), ranks=8, launcher="deepspeed"
    )
    result = launched("deepspeed", ["--include", "localhost:0,2,3", "--module", "pkg.train"])
    assert (result.script, result.is_module, result.gpus) == ("pkg.train", True, "0,2,3")
    assert launched("deepspeed", ["--exclude", "localhost:1", "train.py"]).without_gpus == "1"
    result = launched("deepspeed", ["--no_python", "python", "train.py"])
    assert (result.script, result.ranks, result.launcher) == ("train.py", None, "deepspeed")


def test_what_names_other_machines_is_named() -> None:
    result = launched("deepspeed", ["--num_nodes", "2", "--master_addr", "10.0.0.1", "train.py"])
    assert (result.nodes, result.elsewhere, result.rendezvous) == (2, ("--num_nodes 2",), ("--master_addr 10.0.0.1",))
    result = launched("torchrun", ["--nnodes", "1:2", "--nproc_per_node", "4", "train.py"])
    assert (result.nodes, result.ranks, result.elsewhere) == (2, 4, ("--nnodes 1:2",))
    with pytest.raises(ValueError, match="worker-0"):
        launched("deepspeed", ["--include", "worker-0:1@worker-1:2", "train.py"])


HOSTS = "# the cluster\nw0 slots=8\nw1 slots=8\n\nw2 slots=4\n"


@pytest.mark.parametrize(
    ("options", "hosts", "ranks"),
    [
        ("", ("w0", "w1", "w2"), 4),
        ("--num_nodes 2", ("w0", "w1"), 8),
        ("--num_nodes 2 --num_gpus 3", ("w0", "w1"), 3),
        ("--include w0:1,2@w2:0,3", ("w0", "w2"), 2),
        ("--exclude w2", ("w0", "w1"), 8),
        ("--num_nodes 1", (), 8),
    ],
)
def test_a_hostfile_means_what_it_means_to_deepspeed(
    folder: Path, options: str, hosts: tuple[str, ...], ranks: int
) -> None:
    (folder / "hosts").write_text(HOSTS)
    result = launched("deepspeed", ["--hostfile", "hosts", *options.split(), "train.py"])
    assert (result.hosts, result.ranks, result.nodes) == (hosts, ranks, max(1, len(hosts)))
    assert "--hostfile hosts" in result.elsewhere
    assert bool(result.notes) == (options == "")
    if not options:
        assert "8, 8, 4 slots: 4 of each are used" in result.notes[0]


def test_a_hostfile_that_is_none_is_refused_and_a_missing_one_means_this_machine(folder: Path) -> None:
    (folder / "hosts").write_text("w0 8\n")
    with pytest.raises(ValueError, match="bad entry: w0 8"):
        launched("deepspeed", ["--hostfile", "hosts", "train.py"])
    result = launched("deepspeed", ["--hostfile", "missing", "--num_gpus", "2", "train.py"])
    assert (result.nodes, result.ranks, result.hosts) == (1, 2, ())


def test_processes_of_accelerate_are_counted_on_each_machine(folder: Path) -> None:
    (folder / "acc.yaml").write_text(
        ACCELERATE_CONFIG.replace("num_machines: 1", "num_machines: 2").replace("num_processes: 2", "num_processes: 8")
    )
    result = launched(
        "accelerate",
        ["launch", "--config_file", "acc.yaml", "--machine_rank", "0", "--main_process_ip", "10.0.0.1", "train.py"],
    )
    assert (result.nodes, result.ranks, result.elsewhere) == (2, 4, ("--num_machines 2",))


def test_torchruns_options_are_read() -> None:
    expected = LaunchCommand(script="pkg.train", is_module=True, args=("x",), launcher="torchrun")
    for asked, ranks in (("4", 4), ("gpu", None)):
        result = launched("torchrun", ["--standalone", "--nproc-per-node", asked, "-m", "pkg.train", "x"])
        assert result == replace(expected, ranks=ranks)


def test_ranks_of_variables(folder: Path) -> None:
    for variables, ranks, environment in (
        ("A=1 WORLD_SIZE=2 RANK=0 MASTER_ADDR=localhost MASTER_PORT=29500", 2, {"A": "1"}),
        ("MASTER_PORT=29500", None, {"MASTER_PORT": "29500"}),
    ):
        result = read(folder, f"{variables} python train.py")
        assert result is not None
        assert (result.ranks, result.environment) == (ranks, environment)


def test_accelerates_plugin_comes_as_its_environment(folder: Path) -> None:
    (folder / "acc.yaml").write_text(ACCELERATE_CONFIG)
    result = launched("accelerate", ["launch", "--config_file", "acc.yaml", "train.py", "--lr", "3"])
    assert (result.script, result.args, result.ranks, result.config) == ("train.py", ("--lr", "3"), 2, None)
    assert result.environment["ACCELERATE_USE_DEEPSPEED"] == "true"
    assert result.environment["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "2"
    assert result.environment["ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE"] == "cpu"
    config = ["launch", "--use_deepspeed", "--deepspeed_config_file", "ds.json", "--num_processes", "4", "train.py"]
    result = launched("accelerate", config)
    assert (result.config, result.ranks) == ("ds.json", 4)


def test_options_of_accelerate_that_a_config_file_overrules_are_reported(folder: Path) -> None:
    options = "--zero_stage 3 --gradient_accumulation_steps 1 --gradient_clipping 1.0 --offload_param_device none"
    words = f"launch --use_deepspeed --deepspeed_config_file ds.json {options} train.py".split()
    (folder / "ds.json").write_text('{"zero_optimization": {"stage": 1}}')
    [note] = launched("accelerate", words).notes
    assert note.startswith("Without effect: --gradient_clipping 1.0, --zero_stage 3. accelerate takes these where")
    (folder / "ds.json").write_text('{"zero_optimization": {"stage": "auto"}, "gradient_clipping": 1}')
    assert launched("accelerate", words).notes == ()


def test_settings_of_accelerates_yaml_that_a_config_file_replaces_are_reported_as_dropped(folder: Path) -> None:
    words = ["launch", "--config_file", "acc.yaml", "train.py"]
    (folder / "acc.yaml").write_text(ACCELERATE_CONFIG)
    assert launched("accelerate", words).notes == ()
    named = "  deepspeed_config_file: ds.json\n  gradient_clipping: 0.5\n  zero3_init_flag: false\n"
    named += "  offload_param_device: none\n"
    (folder / "acc.yaml").write_text(ACCELERATE_CONFIG.replace("deepspeed_config:\n", "deepspeed_config:\n" + named))
    result = launched("accelerate", words)
    assert result.config == "ds.json"
    (note,) = result.notes
    assert "gradient_clipping 0.5" in note
    assert "gradient_accumulation_steps 2" in note
    assert "zero_stage 2" in note
    assert "zero3_init_flag" not in note
    assert "offload_param_device" not in note, "no loss"
    assert "ds.json counts alone" in note
    (folder / "acc.yaml").write_text(ACCELERATE_CONFIG.replace("zero_stage", "zero_stge"))
    assert launched("accelerate", words).notes == (
        "accelerate ignores 'zero_stge' of its deepspeed_config; 'zero_stage' is probably meant.",
    )
    unknown = "deepspeed_config:\n  path: ds.json\n  speed: 1\n"
    (folder / "acc.yaml").write_text(ACCELERATE_CONFIG.replace("deepspeed_config:\n", unknown))
    assert launched("accelerate", words).notes == (
        "accelerate ignores 'path' of its deepspeed_config; 'deepspeed_config_file' is probably meant.",
        "accelerate ignores 'speed' of its deepspeed_config; it has no such setting.",
    )


def test_a_launcher_in_a_process_of_its_own_says_what_it_refuses(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(command: str, message: str) -> None:
        with pytest.raises(UsageError, match=message) as refused:
            read(folder, command)
        assert "\n" not in str(refused.value)

    refused("accelerate config", "accelerate launch")
    (folder / "broken.yaml").write_text("distributed_type: {a: 1\nb: 2\n")
    message = "while parsing a flow mapping in .*broken.yaml.*line 1"
    refused("accelerate launch --config_file broken.yaml x.py", message)
    (folder / "acc.yaml").write_text("distributed_type: DEEPSPEED\ndeepspeed_config: ds.json\n")
    with pytest.raises(SystemExit, match=r"^acc\.yaml: deepspeed_config is 'ds.json'; it must be a sec"):
        launched("accelerate", ["launch", "--config_file", "acc.yaml", "x.py"])
    stand_in_for_torch(folder, monkeypatch)
    refused("torchrun --standalone", r"^torchrun started no rank here: .*training_script.*SCRIPT CONFIG")


def test_a_launcher_of_an_environment_that_is_not_activated_is_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(folder))
    assert read(folder, "PET_NPROC_PER_NODE=2 torchrun train.py") == LaunchCommand(
        script="train.py", ranks=2, launcher="torchrun", environment={"PET_NPROC_PER_NODE": "2"}
    )
