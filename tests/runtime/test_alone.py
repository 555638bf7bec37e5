"""The runtime with scripts that import stubs instead of torch and DeepSpeed."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import pytest

from optuna_dsat.launch.machine.journal import remove_noted
from optuna_dsat.runtime.events import CheckpointLoaded, RankFailed, RankFinished
from optuna_dsat.runtime.isolation.world import World, WorldPlan
from tests.harness.ranks import ROOT, SCRIPTS, Starter, script

SEEN = str(SCRIPTS / "seen.py")


@pytest.mark.parametrize("command", [[SEEN, "a", "--b=c"], ["--module", "seen", "x"]], ids=["script", "module"])
def test_a_script_sees_what_it_would_without_the_runtime(start: Starter, command: list[str]) -> None:
    (start.folder / "seen.py").write_text(Path(SEEN).read_text(encoding="utf-8"), encoding="utf-8")
    plain = [sys.executable, "-m", *command[1:]] if command[0] == "--module" else [sys.executable, *command]
    without = subprocess.run(plain, cwd=start.folder, capture_output=True, check=True)
    launch = start.alone(*command)
    assert launch.exit_code == 0, launch.output
    assert (start.folder / "rank0.stdout.log").read_bytes() == without.stdout
    assert launch.log("stderr") == "imported: []\n"
    assert launch.output == ""
    assert [event.kind for event in launch.events()] == ["rank_started", "rank_finished"]


@pytest.mark.parametrize(
    ("end", "code", "reason", "stderr"),
    [
        ("", 0, "script_end", ""),
        ("silent", 0, "script_end", ""),
        ("exit7", 7, "exit_code_7", ""),
        ("text", 1, "exit_code_1", "that is all\n"),
    ],
)
def test_a_scripts_end_is_recorded_and_passed_on(start: Starter, end: str, code: int, reason: str, stderr: str) -> None:
    launch = start.alone(SEEN, end)
    assert launch.exit_code == code
    assert launch.log("stderr") == "imported: []\n" + stderr
    assert [(event.reason, event.steps) for event in launch.of(RankFinished)] == [(reason, 0)]


@pytest.mark.parametrize("purpose", ["trial", "full"])
def test_an_exception_is_recorded_and_shown_as_python_shows_it(start: Starter, purpose: str) -> None:
    without = subprocess.run([sys.executable, SEEN, "raise"], capture_output=True, text=True, check=False)
    launch = start.alone(SEEN, "raise", purpose=purpose)
    assert launch.exit_code == without.returncode == 1
    assert launch.log("stderr") == without.stderr
    [failure] = launch.of(RankFailed)
    assert (failure.outcome, failure.phase, failure.error_type) == ("script_error", "script", "KeyError")
    assert failure.traceback == without.stderr.removeprefix("imported: []\n")
    assert launch.events()[-1] == failure


AGAIN = """
import os, subprocess, sys
if "FLAG" in os.environ:
    print(sys.argv[1:], "optuna_dsat.runtime.hook" in sys.modules)
    sys.exit(3)
os.environ["FLAG"] = "1"
command = [sys.executable, "-u", *sys.argv] if sys.argv[1] == "by argv" else [sys.executable, *sys.orig_argv[1:]]
{start}
"""


TWICE = ["rank_started", "rank_started", "rank_finished"]


@pytest.mark.parametrize(
    ("how", "starts", "records"),
    [
        ("by argv", "os.execv(command[0], command)", TWICE),
        ("by orig_argv", "os.execlpe('env', 'env', *command, {'FLAG': '1'})", TWICE),
        ("by orig_argv", "sys.exit(subprocess.run(command).returncode)", ["rank_started", "rank_finished"]),
    ],
)
def test_a_script_that_starts_itself_again_is_measured(
    start: Starter, how: str, starts: str, records: list[str]
) -> None:
    launch = start.alone(script(start, AGAIN.format(start=starts)), how)
    assert launch.log("stdout") == f"{[how]} True\n", launch.log("stderr")
    assert [event.kind for event in launch.events()] == records
    assert [(launch.exit_code, event.reason) for event in launch.of(RankFinished)] == [(3, "exit_code_3")]


@pytest.mark.parametrize(
    "starts",
    [
        "os.system('NCCL_DEBUG=info deepspeed --num_gpus 2 other.py')",
        "subprocess.Popen('cd . ; deepspeed --num_gpus 2 other.py', shell=True)",
        "os.execvp('deepspeed', ['deepspeed', '--num_gpus', '2', 'other.py'])",
    ],
)
def test_a_script_that_starts_a_launcher_is_told_to_tune_its_command(start: Starter, starts: str) -> None:
    harmless = "subprocess.run('true; echo install deepspeed -q; echo deepspeed --version', shell=True)"
    launch = start.alone(script(start, f"import os, subprocess\n{harmless}\n{starts}\n"))
    [failure] = launch.of(RankFailed)
    assert failure.message.startswith("the script launches its training itself: tune that command instead, `")
    assert failure.message.endswith("deepspeed --num_gpus 2 other.py`")


@pytest.mark.parametrize(
    ("text", "refused"),
    [("import torch", False), ("import DeepSpeed", True), ("from .library.part import run", True)],
)
def test_a_launcher_of_a_script_without_deepspeed_is_started(start: Starter, text: str, refused: bool) -> None:
    (start.folder / "library").mkdir()
    (start.folder / "library" / "part.py").write_text("import prepare\nimport deepspeed\n", encoding="utf-8")
    launcher, prepares = start.folder / "torchrun", start.folder / "prepare.py"
    launcher.write_text("#!/bin/sh\necho starts $3\n", encoding="utf-8")
    launcher.chmod(0o755)
    prepares.write_text(text, encoding="utf-8")
    launch = start.alone(script(start, f"import os\nos.system('{launcher} -n 2 {prepares}')\n"))
    assert launch.log("stdout") == ("" if refused else f"starts {prepares}\n")
    assert len(launch.of(RankFailed)) == refused


def test_a_missing_script_is_a_failure_of_the_script(start: Starter) -> None:
    launch = start.alone("nowhere.py")
    assert launch.exit_code == 1
    assert launch.of(RankFailed)[0].error_type == "FileNotFoundError"


def test_what_is_raised_beside_exceptions_is_recorded_too(start: Starter, tmp_path: Path) -> None:
    script = tmp_path / "bails.py"
    script.write_text("class Bail(BaseException):\n    pass\n\n\nraise Bail('enough')\n")
    launch = start.alone(str(script))
    [failure] = launch.of(RankFailed)
    assert (launch.exit_code, failure.error_type, failure.message) == (1, "Bail", "enough")
    assert "raise Bail('enough')" in launch.log("stderr")


OVERLAY = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 1}}


CALLS = (
    "deepspeed.initialize(config=CONFIG)",
    "deepspeed.initialize(None, 'model', None, CONFIG)",
    "deepspeed.initialize(config=PATH)",
    "deepspeed.initialize(config_params=CONFIG)",
    "deepspeed.initialize(ARGS)",
    "deepspeed.initialize(Properties(other=1))",
    "initialize(ARGS, config_params=None)",
    "deepspeed.DeepSpeedEngine(None, 'model', config_class=deepspeed.DeepSpeedConfig(CONFIG))",
)


def test_the_overlay_reaches_deepspeed_however_the_config_is_passed(start: Starter, stubs: Path) -> None:
    text = f"""
import argparse, copy, json, sys
import deepspeed
from deepspeed import initialize
PATH = sys.argv[1]
CONFIG = json.load(open(PATH))
ARGS = argparse.Namespace(deepspeed_config=PATH, other=1)
class Properties(argparse.Namespace):
    deepspeed_config = property(lambda self: CONFIG)
before = copy.deepcopy(CONFIG)
for call in {CALLS}:
    exec(call)
    print(CONFIG == before, ARGS.deepspeed_config == PATH, PATH)
"""
    launch = start.alone(script(start, text), str(start.user_config), overlay=OVERLAY, stubs=stubs, purpose="full")
    assert launch.exit_code == 0, launch.log("stderr")
    shown = launch.log("stdout").splitlines()
    assert shown[1::2] == [f"True True {start.config}"] * len(CALLS)
    for call, given in zip(CALLS, shown[::2], strict=True):
        config, config_params, args = json.loads(given)
        assert config["train_micro_batch_size_per_gpu"] == 8, call
        assert config["zero_optimization"]["stage"] == 1, call
        assert config["optimizer"]["type"] == "AdamW", call
        assert config_params is None, call
        assert args in (None, {"other": 1}, {"deepspeed_config": None, "other": 1}), call
    assert [event.kind for event in launch.events()] == ["rank_started", "rank_finished"]


def test_the_overlay_reaches_zero_init(start: Starter, stubs: Path) -> None:
    text = """
import json, sys, deepspeed
PATH = sys.argv[1]
deepspeed.zero.Init(config_dict_or_path=PATH, enabled=False)
deepspeed.zero.Init(None, json.load(open(PATH)), enabled=False)
deepspeed.zero.Init(config=PATH, enabled=False)
deepspeed.zero.Init(config_dict_or_path='not used', config=PATH, enabled=False)
deepspeed.zero.Init()
"""
    overlay = {**OVERLAY, "zero_optimization": {"stage": 3}}
    launch = start.alone(script(start, text), str(start.user_config), overlay=overlay, stubs=stubs, purpose="full")
    assert launch.exit_code == 0, launch.log("stderr")
    *changed, left_alone = map(json.loads, launch.log("stdout").splitlines())
    for arguments, seen in zip(changed, (0, 0, 1, 1), strict=True):
        assert arguments[seen]["train_micro_batch_size_per_gpu"] == 8
        assert arguments[seen]["zero_optimization"]["stage"] == 3
        assert arguments[2] is False
    assert left_alone == [None, None, True]


SAVE = """
import deepspeed
engine = object.__new__(deepspeed.DeepSpeedEngine)
print(engine.save_checkpoint("kept", tag="one"), engine.save_checkpoint("kept"), engine.save_16bit_model("kept"))
engine.gathers = False
print(engine.save_16bit_model("kept", "file"))
try:
    engine.save_checkpoint("")
except ValueError as error:
    print(error)
"""


def test_a_trial_writes_no_checkpoint_and_says_so_once(start: Starter, stubs: Path) -> None:
    launch = start.alone(script(start, SAVE), stubs=stubs)
    assert launch.exit_code == 0, launch.log("stderr")
    assert launch.log("stdout").splitlines() == [
        "True True True",
        "False",
        "save_dir must be a non-empty string, got ''",
    ]
    [line] = launch.log("stderr").splitlines()
    assert line.startswith("optuna-dsat: no checkpoint is written during a trial; save_checkpoint to kept was skipped")
    assert [end.saves for end in launch.of(RankFinished)] == [2]


LOOK = """
import deepspeed, json, os
engine = object.__new__(deepspeed.DeepSpeedEngine)
engine.save_checkpoint("runs/kept", tag=7, client_state={"epoch": 2})
json.dump({}, open("runs/kept/7/meta.json", "w"))
engine.save_checkpoint("runs/kept", client_state={"epoch": 4})
print(open("runs/kept/latest").read(), os.listdir("runs/kept/global_step3"), engine.load_checkpoint("runs/kept"))
"""


def test_a_script_finds_the_folder_of_a_checkpoint_that_was_not_written(start: Starter, stubs: Path) -> None:
    runs = start.folder / "runs"
    runs.mkdir()
    plan = WorldPlan(isolation="python", folder=str(start.folder / "world"))
    plan.record.write_text(json.dumps(asdict(World(mode="python", redirected=(str(runs),)))), encoding="utf-8")
    launch = start.alone(script(start, LOOK), stubs=stubs, world=plan)
    assert launch.exit_code == 0, launch.log("stderr")
    assert launch.log("stdout") == "global_step3 [] ('runs/kept/global_step3', {'epoch': 4})\n"
    assert not list(runs.iterdir())


def test_a_full_run_writes_its_checkpoints(start: Starter, stubs: Path) -> None:
    launch = start.alone(script(start, SAVE), stubs=stubs, purpose="full")
    assert launch.log("stdout").count("saved to kept") == 4


WRITER = """
class SummaryWriter:
    def __init__(self, log_dir=None, comment=""):
        print(log_dir, comment)
"""


@pytest.mark.parametrize("redirected", [True, False])
def test_summaries_go_to_the_trials_folder(start: Starter, redirected: bool) -> None:
    package = "from .writer import SummaryWriter\n"
    cuda = "class cuda:\n    class OutOfMemoryError(Exception): ...\n    empty_cache = print\n"
    files = {"": cuda, "utils/": "", "utils/tensorboard/": package, "utils/tensorboard/writer.py": WRITER}
    for name, text in files.items():  # torch itself requires TensorBoard
        path = start.folder / "stubs" / "torch" / (name if name.endswith(".py") else f"{name}__init__.py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    text = (
        "from torch.utils.tensorboard import SummaryWriter\n"
        "SummaryWriter('/data/logs/run-1/', comment='x')\nSummaryWriter()\n"
    )
    trackers = "/trial/trackers" if redirected else ""
    launch = start.alone(script(start, text), stubs=start.folder / "stubs", trackers_dir=trackers)
    assert launch.exit_code == 0, launch.log("stderr")
    folder = "/trial/trackers/tensorboard"
    expected = [f"{folder}/run-1 x", f"{folder} "] if redirected else ["/data/logs/run-1/ x", "None "]
    assert launch.log("stdout").splitlines() == expected


def test_summaries_of_tensorboardx_go_to_the_trials_folder(start: Starter) -> None:
    package = start.folder / "stubs" / "tensorboardX"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from .writer import SummaryWriter\n", encoding="utf-8")
    writer = WRITER.replace("log_dir=None, comment=", "logdir=None, comment='', log_dir=None, other=")
    (package / "writer.py").write_text(writer.replace("print(log_dir,", "print(logdir or log_dir,"), encoding="utf-8")
    text = (
        "from tensorboardX import SummaryWriter\n"
        "SummaryWriter('/data/logs/run-1/', 'x')\nSummaryWriter(log_dir='/data/logs/run-2')\nSummaryWriter()\n"
    )
    launch = start.alone(script(start, text), stubs=start.folder / "stubs", trackers_dir="/trial/trackers")
    assert launch.exit_code == 0, launch.log("stderr")
    folder = "/trial/trackers/tensorboard"
    assert launch.log("stdout").splitlines() == [f"{folder}/run-1 x", f"{folder}/run-2 ", f"{folder} "]


LOAD = """
from pathlib import Path
import torch, deepspeed
engine = object.__new__(deepspeed.DeepSpeedEngine)
for tag in ("other", "memory"):
    folder = Path("saved", tag)
    folder.mkdir(parents=True)
    torch.save({"module": {}, "global_steps": 3, "ds_version": "1", "epoch": 7}, folder / "mp_rank_00_model_states.pt")
print(engine.load_checkpoint("saved", tag="fits"))
open("saved/latest", "w").write("other")
for tag in ("other", None, "memory", "gone"):
    try:
        print(engine.load_checkpoint("saved", tag=tag))
    except (AssertionError, MemoryError) as error:
        print(type(error).__name__)
Path("saved/latest").rename("saved/latest_universal")
engine.universal = True
print(engine.load_checkpoint("saved"))
"""


def test_a_checkpoint_of_another_configuration_does_not_end_a_trial(start: Starter, stubs: Path) -> None:
    launch = start.alone(script(start, LOAD), stubs=stubs)
    assert launch.exit_code == 0, launch.log("stderr")
    went_on = "('saved/other/mp_rank_00_model_states.pt', {'epoch': 7})"
    shown = ["('saved', {})", went_on, went_on, "MemoryError", "AssertionError", went_on]
    assert launch.log("stdout").splitlines() == shown
    assert launch.log("stderr").count("saved/other was saved with another configuration than this trial's") == 3
    loaded = [Path(event.folder).name for event in launch.of(CheckpointLoaded)]
    assert loaded == ["other", "other", "memory", "other"]


def test_two_configs_are_left_for_deepspeed_to_refuse(start: Starter, stubs: Path) -> None:
    text = "import argparse, deepspeed\ndeepspeed.initialize(argparse.Namespace(deepspeed_config='a'), config={})\n"
    launch = start.alone(script(start, text), stubs=stubs)
    [failure] = launch.of(RankFailed)
    assert (failure.outcome, failure.phase, failure.message) == ("invalid_config", "initialize", "given two")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_events_that_cannot_be_written_end_the_rank_with_a_reason(start: Starter) -> None:
    (start.folder / "rank0.jsonl").symlink_to("/dev/full")
    launch = start.alone(SEEN)
    assert launch.exit_code == 74
    assert "No space left on device" in launch.log("stderr")
    assert "--output-dir" in launch.log("stderr")
    assert launch.log("stdout") == ""


def test_without_a_log_folder_the_output_goes_where_it_went(start: Starter) -> None:
    launch = start.alone(SEEN, log_dir="")
    assert launch.output.startswith('{"name": "__main__"')


def test_a_wrong_start_says_how_it_is_done() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "optuna_dsat.runtime", "train.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("OPTUNA_DSAT_LAUNCH names no launch description.")


def test_a_rank_leaves_no_temporary_folder_behind(start: Starter, stubs: Path) -> None:
    text = (
        "import multiprocessing.util, pathlib, tempfile\n"
        "kept = tempfile.TemporaryDirectory()\n"
        "pathlib.Path(kept.name, 'file').touch()\n"
        "print(kept.name, multiprocessing.util.get_temp_dir(), flush=True)\n"
        "raise ValueError('ends early')\n"
    )
    launch = start.alone(script(start, text), stubs=stubs)
    assert launch.exit_code == 1
    folders = launch.log("stdout").split()
    assert len(folders) == 2
    assert not any(Path(folder).exists() for folder in folders)


def test_processes_meet_by_sockets_where_writes_are_redirected(start: Starter, stubs: Path) -> None:
    world = World(mode="python", redirected=(tempfile.gettempdir(),), passed=(str(start.folder),))
    plan = WorldPlan(isolation="python", folder=str(start.folder / "world"))
    plan.record.write_text(json.dumps(asdict(world)), encoding="utf-8")
    text = "import multiprocessing\nwith multiprocessing.Manager() as manager:\n    print(manager.list([7]))\n"
    leavings = start.folder / "leavings.jsonl"
    launch = start.alone(script(start, text), stubs=stubs, world=plan, leavings=str(leavings))
    assert launch.log("stdout") == "[7]\n", launch.log("stderr")
    assert remove_noted(leavings)["folders"] == 1


def test_a_reference_becomes_its_value_which_no_event_holds(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTUNA_DSAT_SECRET_TOKEN", "geheim-7f3a")
    monkeypatch.setenv("MY_PASSWORD", "rosenkohl")
    text = (
        "import os, sys\n"
        "assert not [name for name in os.environ if name.startswith('OPTUNA_DSAT_SECRET_')]\n"
        "raise ValueError(f'{sys.argv[1][3:]} and {os.environ[\"MY_PASSWORD\"]} are refused, as is hf_abcDEF123456')\n"
    )
    launch = start.alone(script(start, text), "at ${OPTUNA_DSAT_SECRET_TOKEN}")
    [failure] = launch.of(RankFailed)
    assert failure.message == "*** and *** are refused, as is ***"
    assert "geheim" not in failure.traceback
    assert "geheim-7f3a and rosenkohl" in launch.log("stderr")  # the script's output is unchanged
