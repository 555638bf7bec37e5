"""The process of a rank: the user's code in it, its environment, its input and its clock."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from optuna_dsat.runtime import user_code
from optuna_dsat.runtime.events import Event, RankFailed, RankFinished, decode_event, events_path
from optuna_dsat.runtime.measure.engine import Clock
from optuna_dsat.runtime.process import _RankProcess
from optuna_dsat.runtime.user_code import is_installed, parsed_source, places_of
from tests.harness.ranks import plan_of, rank_of


def test_places_are_those_of_the_users_code_innermost_first() -> None:
    def inner() -> list[tuple[str, int]]:
        return places_of(sys._getframe())

    places = inner()
    assert [Path(file).name for file, _ in places[:2]] == [Path(__file__).name] * 2
    assert places[0][1] < places[1][1]
    assert not any(is_installed(file) for file, _ in places)


def test_a_file_is_read_once_though_it_is_no_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The interpreter would read the wrong line from the file again, which blocks for a kernel log."""
    file = tmp_path / "train.py"
    file.write_text("what\nthe file\nholds by now\n")
    monkeypatch.setattr(user_code, "read_regular", lambda _: b"import torch\n[ 0.0] no Python\n")
    with pytest.raises(SyntaxError) as caught:
        parsed_source(file)
    assert (caught.value.lineno, caught.value.text) == (2, "[ 0.0] no Python\n")


def test_warnings_on_the_text_of_a_script_are_its_own(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    file = tmp_path / "train.py"
    file.write_text('PATTERN = "\\d"\n')
    assert parsed_source(file).body
    assert not recwarn.list


def test_a_file_is_parsed_once_until_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("first")
    tree = parsed_source(file)
    assert parsed_source(file) is tree
    file.write_text("other")
    assert parsed_source(file) is not tree


CHANGES = """
import os
from optuna_dsat.runtime.imports import EnvironmentWatch
os.environ["KEPT"] = "1"
watch = EnvironmentWatch()
watch.install()
os.environb[b"IN_BYTES"] = b"1"
os.environ["IN_TEXT"] = "1"
os.environb[b"KEPT"] = b"1"
del os.environb[b"KEPT"]
print(watch.changed())
"""


def test_changes_in_bytes_are_changes() -> None:
    """``os.environb`` has the class of ``os.environ`` and shares its variables."""
    done = subprocess.run([sys.executable, "-c", CHANGES], capture_output=True, text=True, check=False)
    assert done.stdout == "['IN_BYTES', 'IN_TEXT', 'KEPT']\n", done.stderr


SCRIPT = """
import asyncio, multiprocessing, selectors, sys, threading
from pathlib import Path
from optuna_dsat.runtime.process import redirect_output, silence_input
{before}
silence_input()
redirect_output(Path(sys.argv[1]), 0)
keyboard = selectors.EpollSelector()
keyboard.register(sys.stdin, selectors.EVENT_READ)
print([key.fileobj.readline() for key, _ in keyboard.select(timeout=0)])
listener = threading.Thread(target=lambda: print("the input has ended", list(sys.stdin)), daemon=True)
listener.start()
listener.join(0.2)
worker = multiprocessing.get_context("fork").Process(target=print)  # closes its input
worker.start()
worker.join(20)
print(worker.exitcode)
print(sys.stdin.read(), list(sys.stdin), flush=True)
input("Overwrite? ")
"""


@pytest.mark.parametrize("before", ["", "sys.stdin.close()", "sys.stdin = None"])
def test_a_script_may_poll_its_input_which_ends_for_the_main_thread_alone(tmp_path: Path, before: str) -> None:
    command = [sys.executable, "-c", SCRIPT.format(before=before), str(tmp_path)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "EOFError: EOF when reading a line" in (tmp_path / "rank0.stderr.log").read_text()
    assert (tmp_path / "rank0.stdout.log").read_text() == "[]\n\n0\n []\nOverwrite? "


def exit_in_handler(folder: Path, code: int, handled: Exception) -> Event | None:
    """Return the last event of a rank whose script exits where it handles an error, as Hydra, click and argparse do."""
    process = _RankProcess(plan_of(events_dir=str(folder), purpose="full"), rank_of(), forked=False)
    leaving = SystemExit(code)
    leaving.__context__ = handled
    with pytest.raises(SystemExit):
        process._end(leaving)
    return decode_event(events_path(folder, 0).read_text(encoding="utf-8"))


def test_a_script_that_exits_where_it_handles_an_error_leaves_that_error(tmp_path: Path) -> None:
    end = exit_in_handler(tmp_path, 1, ValueError("at most 60 samples"))
    assert isinstance(end, RankFailed)
    assert (end.error_type, end.message) == ("ValueError", "at most 60 samples")


def test_a_script_that_caught_out_of_memory_and_exits_at_once_leaves_a_record(tmp_path: Path) -> None:
    process = _RankProcess(plan_of(events_dir=str(tmp_path)), rank_of(), forked=False)
    process._state.device = "cpu"
    if not (pid := os.fork()):
        process._record_exit_at_once()
        try:
            raise MemoryError
        except MemoryError:
            os._exit(status=3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    end = decode_event(events_path(tmp_path, 0).read_text(encoding="utf-8"))
    assert isinstance(end, RankFinished)
    assert (end.reason, end.allocation_failures) == ("exit_code_3", 1)


def test_a_script_that_exits_where_it_handles_an_allocators_error_is_out_of_memory(tmp_path: Path) -> None:
    lack = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.")
    end = exit_in_handler(tmp_path, 0, lack)
    assert isinstance(end, RankFinished)
    assert (end.reason, end.allocation_failures, end.host_allocation_failures) == ("script_end", 0, 1)


def test_a_script_that_stops_the_clock_is_timed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: 5.0)
    clock = Clock()
    begun, start = clock.now(), clock.mark()
    sum(range(1000))
    assert clock.now() > begun
    assert clock.seconds(start, clock.mark()) > 0


def test_the_runtime_is_written_in_the_oldest_python_of_scripts() -> None:
    for path in (Path(user_code.__file__).parent).rglob("*.py"):
        ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 9))
        assert "kw_only=" not in path.read_text(encoding="utf-8"), path
