"""The launch description, the rank's environment, the command line, and the event file."""

from __future__ import annotations

import errno
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from optuna_dsat.runtime.adapt.config import parse_command, replace_config_paths
from optuna_dsat.runtime.adapt.side_effects import silent_loggers
from optuna_dsat.runtime.adapt.trainers import HuggingFaceHook, LightningHook
from optuna_dsat.runtime.events import EventWriteError, EventWriter, RankFinished, decode_event
from optuna_dsat.runtime.measure.engine import MOST_SKIPPED_STEPS
from optuna_dsat.runtime.rank import LAUNCH_ENV, LaunchPlan, Rank
from tests.harness.ranks import plan_of, rank_of

PLAN = plan_of(overlay={"zero_optimization": {"stage": 3, "offload_param": None}})
FINISHED = RankFinished(rank=0, time=1.0, reason="script_end", steps=3)


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "launch.json"
    path.write_text(json.dumps(asdict(PLAN)), encoding="utf-8")
    assert LaunchPlan.load(path) == PLAN


def test_only_a_full_run_is_not_measured() -> None:
    assert [plan_of(purpose=p).measures for p in ("profile", "trial", "confirm", "full")] == [True, True, True, False]


def test_a_rank_is_what_torchrun_says(tmp_path: Path) -> None:
    env = {
        LAUNCH_ENV: "/run/launch.json",
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "4",
        "PATH": str(tmp_path),
    }
    rank = Rank.from_environment(env)
    assert (rank.rank, rank.local_rank, rank.world_size) == (5, 1, 8)
    assert rank.local_ranks == range(4, 8)
    assert not rank.can_compile
    for tool in ("ninja", "my-c++"):
        (tmp_path / tool).write_text("#!/bin/sh\n", encoding="ascii")
        (tmp_path / tool).chmod(0o755)
    assert not Rank.from_environment(env).can_compile
    assert Rank.from_environment({**env, "CXX": "my-c++ -O2"}).can_compile


@pytest.mark.parametrize(
    ("env", "message"), [({}, LAUNCH_ENV), ({LAUNCH_ENV: "x", "RANK": "one"}, "invalid literal.*'one'")]
)
def test_an_environment_that_torchrun_did_not_make_is_refused(env: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rank.from_environment(env)


def test_the_command_is_a_script_or_a_module() -> None:
    script = parse_command(["train.py", "--module", "x"])
    assert (script.name, script.is_module, script.args) == ("train.py", False, ("--module", "x"))
    module = parse_command(["--module", "pkg.train", "-x"])
    assert (module.name, module.is_module, module.args) == ("pkg.train", True, ("-x",))
    for nothing in ([], ["--module"], ["--help"]):
        with pytest.raises(ValueError, match="takes SCRIPT"):
            parse_command(nothing)


def test_arguments_that_name_the_config_are_pointed_to_the_trials_own(tmp_path: Path) -> None:
    user = tmp_path / "ds.json"
    user.write_text("{}", encoding="utf-8")
    (tmp_path / "link.json").symlink_to(user)
    roundabout = f"{tmp_path}/../{tmp_path.name}/ds.json"
    args = ["--deepspeed", str(user), f"--config={roundabout}", str(tmp_path / "link.json"), "ds.json=x", ""]
    args += ["other.json", "--a=b=c", "x\0y"]
    assert replace_config_paths(args, user_config=str(user), config="/t/own.json") == (
        "--deepspeed",
        "/t/own.json",
        "--config=/t/own.json",
        "/t/own.json",
        "ds.json=x",
        "",
        "other.json",
        "--a=b=c",
        "x\0y",
    )
    user.unlink()
    gone = [str(user), f"--config={roundabout}", "other.json", "x\0y"]
    assert replace_config_paths(gone, user_config=str(user), config="own") == ("own", "--config=own", *gone[2:])


def test_events_are_appended_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    for _ in range(2):
        EventWriter(path).write(FINISHED)
    assert [decode_event(line) for line in path.read_text(encoding="utf-8").splitlines()] == [FINISHED] * 2


def test_a_missing_folder_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(EventWriteError, match=r"cannot record.*--output-dir.*gone"):
        EventWriter(tmp_path / "gone" / "rank0.jsonl")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_full_disk_is_a_clear_error() -> None:
    writer = EventWriter(Path("/dev/full"))
    with pytest.raises(EventWriteError, match="No space left on device") as caught:
        writer.write(FINISHED)
    assert caught.value.errno == errno.ENOSPC


def test_a_file_of_events_that_a_script_closes_is_opened_again(tmp_path: Path) -> None:
    path, own = tmp_path / "rank0.jsonl", tmp_path / "own"
    writer = EventWriter(path)
    os.close(writer._fd)
    writer.write(FINISHED)
    os.close(writer._fd)
    with own.open("wb") as file:  # gets the number of the closed descriptor
        assert file.fileno() == writer._fd
        writer.write(FINISHED)
        assert own.read_bytes() == b""
    assert [decode_event(line) for line in path.read_text(encoding="utf-8").splitlines()] == [FINISHED] * 2


def test_a_line_cut_short_does_not_spoil_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rank0.jsonl"
    writer = EventWriter(path)
    write, room = os.write, [10, 0]

    def short(fd: int, data: memoryview) -> int:
        if not room:
            return write(fd, data)
        size = room.pop(0)
        if not size:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data[:size])

    monkeypatch.setattr(os, "write", short)
    with pytest.raises(EventWriteError):
        writer.write(FINISHED)
    writer.write(FINISHED)
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [decode_event(line) for line in lines] == [None, FINISHED]


@pytest.mark.parametrize(("own", "allowed"), [(2, 5 + MOST_SKIPPED_STEPS), (1000, 1000)])
def test_trainers_may_run_on_for_steps_that_are_skipped(own: int, allowed: int) -> None:
    described = plan_of(end_profile_step=5)
    arguments = SimpleNamespace(lr_scheduler_type="linear", max_steps=own, num_train_epochs=1.0)
    HuggingFaceHook(plan=described, rank=rank_of(), write=print)._disable_evaluation_and_saving(arguments)
    assert arguments.max_steps == allowed
    loop = SimpleNamespace(max_epochs=own, epoch_loop=SimpleNamespace(max_steps=own))
    trainer = SimpleNamespace(callbacks=[], fit_loop=loop, loggers=[])
    LightningHook(plan=described, rank=rank_of(), write=print)._disable_evaluation_and_saving(trainer)
    assert (loop.max_epochs, loop.epoch_loop.max_steps) == (allowed, allowed)


@pytest.mark.parametrize(
    ("members", "folder"), [({"save_dir": "a"}, "a"), ({"save_dir": "a", "log_dir": "a/v"}, "a/v")]
)
def test_a_logger_of_lightning_that_code_may_call_logs_nothing_into_its_folder(
    monkeypatch: pytest.MonkeyPatch, members: dict[str, str], folder: str
) -> None:
    """LightningCLI took its own config.yaml for that of an earlier run, as no logger gave it a folder."""
    logger = type("Logger", (), {})
    module = SimpleNamespace(Logger=logger, DummyLogger=type("DummyLogger", (logger,), {"save_dir": None}))
    monkeypatch.setitem(sys.modules, "pytorch_lightning.loggers.logger", module)
    (silent,) = silent_loggers([type("Own", (logger,), members)(), "another"])
    assert isinstance(silent, module.DummyLogger)
    assert (silent.save_dir, silent.log_dir) == (folder, folder)
    assert silent_loggers([]) == []
