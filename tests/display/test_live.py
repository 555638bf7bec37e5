from __future__ import annotations

import html
import io
import json
import re
import shlex
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import optuna
import pytest
from optuna.trial import TrialState
from rich.console import Console

from optuna_dsat.display.lines import LineView
from optuna_dsat.display.live import NotebookView, make_observer, render
from optuna_dsat.display.stopping import STOP_MESSAGE, Stopping, stopping_on_signals
from optuna_dsat.outcome import Outcome
from optuna_dsat.signals import ENDING
from optuna_dsat.store import Store
from optuna_dsat.study import progress
from optuna_dsat.study.confirm.speeds import Speed
from optuna_dsat.study.live_state import LiveState
from tests.harness.small_model import profiled_of
from tests.harness.terminal import terminal
from tests.harness.waits import wait_until

GIB = 2**30
PROFILE = replace(profiled_of().profile, device_memory_bytes=8 * GIB)
COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-9]m|\x1b\[[0-9;]*9[0-7]m")


def search(**changes: object) -> progress.SearchStarted:
    values = {"study": "s", "metric": "throughput", "max_trials": 10, "launched": 0}
    return progress.SearchStarted(**{**values, **changes})  # type: ignore[arg-type]


def started(number: int, attempt: int = 0) -> progress.TrialStarted:
    words = f"ZeRO 3 + parameter offload and optimizer offload, micro-batch {number}"
    return progress.TrialStarted(number=number, words=words, attempt=attempt, end_profile_step=5)


def stepped(number: int, step: int = 1, peak_gib: int = 4) -> progress.TrialStepped:
    return progress.TrialStepped(number=number, step=step, samples_per_s=90.0, peak_bytes=peak_gib * GIB)


def finished(number: int, value: float | None, *, best: bool = False, own: bool = False) -> progress.TrialFinished:
    outcome, words = Outcome.OUT_OF_MEMORY if value is None else Outcome.MEASURED, f"micro-batch {number}"
    speed = None if value is None else Speed(metric="throughput", value=value, samples_per_s=value)
    leader = None if speed is None or not best else progress.BestSoFar(number=number, words=words, speed=speed)
    return progress.TrialFinished(
        number=number, words=words, outcome=outcome, value=value, speed_up=None, best=best, message="",
        launched=number + 1, own=own, best_so_far=leader, speed=speed, user_value=value if own else None,
    )  # fmt: skip


def shown(state: LiveState, now: float, *, width: int = 120, height: int = 24, ascii_only: bool = False) -> str:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    console.print(render(state, now, width=width, height=height, ascii_only=ascii_only))
    file = console.file
    assert isinstance(file, io.StringIO)
    return re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue())


@pytest.fixture
def state() -> LiveState:
    """Two launches in flight of a search whose user's own config was measured, and then a better one."""
    state = LiveState()
    state.apply(
        progress.ProfileFinished(profile=PROFILE, measured_with="", reused=False, largest_micro_batches={}), 0.0
    )
    state.apply(search(side_by_side=2, finalists=2, finalist_steps=3.0), 0.0)
    state.apply(started(0), 0.0)
    state.apply(stepped(0), 6.0)
    state.apply(finished(0, 50.0, best=True, own=True), 10.0)
    state.apply(started(1), 10.0)
    state.apply(stepped(1), 16.0)
    state.apply(finished(1, 100.0, best=True), 20.0)
    state.apply(started(2), 20.0)
    state.apply(started(3), 20.0)
    state.apply(stepped(2), 24.0)
    return state


def test_a_launch_in_flight_is_a_row_with_its_speed_against_the_best_and_its_memory(state: LiveState) -> None:
    text = shown(state, 25.0, width=160)
    (row,) = [line for line in text.splitlines() if line.startswith("    2 ")]
    assert re.search(r"2 +ZeRO 3 .*step 2 of 5 +90 +-10% +█████░░░░░ 4.00 GiB of 8.00 GiB +5 s", row)
    assert "starting" in next(line for line in text.splitlines() if line.startswith("    3 "))
    assert "#####-----" in shown(state, 25.0, width=160, ascii_only=True)


def test_best_own_config_and_budget_are_told(state: LiveState) -> None:
    text = shown(state, 25.0)
    assert "Best in the search: 100 samples/s, 2.00x your config (trial 1: micro-batch 1)" in text
    assert "Your config in the search: 50 samples/s" in text
    assert "2 of 10 done, 2 running, then some 2 launches to compare the finalists" in text
    state.apply(replace(finished(2, 60.0), launched=6, running=3), 26.0)
    assert "3 of 10 done, 1 running, 2 in other workers" in shown(state, 26.0), "what others run is not done"


def test_finalists_are_counted_with_those_of_earlier_runs(state: LiveState) -> None:
    """Rounds of one finalist and the user's config were announced as those of all that --confirm allows."""
    done = 6
    state.apply(progress.FinalistStarted(number=1, words="ZeRO 1", end_profile_step=9, launches=7, done=done), 26.0)
    assert f"Finalists measured again: {done} of at least 7 done, 3 running" in shown(state, 26.0)


def test_the_time_left_counts_what_runs_side_by_side_and_the_finalists(state: LiveState) -> None:
    # Launches took 10 s, 6 of them to the first step. Six are to start, two are half done, two at a time; then two
    # finalists of 6 + 4 * 3 s.
    assert state.left_s(25.0) == pytest.approx((8 * 10 - 2 * 5) / 2 + 2 * 18)
    assert "at most about 2 min left" in shown(state, 25.0)
    state.search, state.finalists = search(side_by_side=8), 0
    assert state.left_s(25.0) == pytest.approx(10.0)  # no launch is shared by slots
    state.launched = 10
    assert state.left_s(28.0) == pytest.approx(2.0)
    state.launched = 4
    state.search = search(side_by_side=2, timeout_s=30.0)
    assert state.left_s(25.0) == pytest.approx(5.0)
    assert "less than a minute left" in shown(state, 25.0)
    state = LiveState()
    state.apply(search(), 0.0)
    state.apply(started(0), 0.0)
    state.apply(finished(0, 50.0), 10.0)
    assert state.left_s(10.0) is None
    assert "the time left is not known yet" in shown(state, 10.0)


def test_a_resumed_search_begins_with_what_is_known_in_the_unit_of_its_metric() -> None:
    state = LiveState()
    best = progress.BestSoFar(
        number=4, words="ZeRO 1, micro-batch 8", speed=Speed(metric="throughput", value=80.0, samples_per_s=80.0)
    )
    state.apply(search(launched=6, best=best, user_value=40.0), 0.0)
    text = shown(state, 0.0)
    assert "80 samples/s, 2.00x your config (trial 4: ZeRO 1, micro-batch 8)" in text
    assert "6 of 10 done, 0 running" in text
    state = LiveState()
    speed = Speed(metric="FLOPS_per_gpu", value=2e9, samples_per_s=80.0, device="cpu")
    best = progress.BestSoFar(number=4, words="ZeRO 1", speed=speed)
    state.apply(search(metric="FLOPS_per_gpu", device="cpu", best=best, user_value=1e9), 0.0)
    text = shown(state, 0.0)
    assert "80 samples/s, 2 GFLOP/s per CPU rank, 2.00x your config" in text
    assert "Your config in the search: 40 samples/s, 1 GFLOP/s per CPU rank" in text


def test_a_retry_is_no_further_launch_and_a_dropped_trial_leaves() -> None:
    state = LiveState()
    state.apply(search(), 0.0)
    state.apply(started(0), 0.0)
    state.apply(started(0, attempt=1), 5.0)
    assert state.launched == 1
    state.apply(progress.TrialDropped(number=0), 6.0)
    assert state.in_flight == ()


@pytest.mark.parametrize("width", [20, 50, 80, 200])
def test_no_line_is_wider_than_the_terminal(state: LiveState, width: int) -> None:
    lines = shown(state, 25.0, width=width).splitlines()
    assert max(len(line) for line in lines) <= width
    rows = [line for line in lines if re.match(r" *[23]  \S", line)]
    assert len(rows) == 2
    words = " ".join(lines).split()
    assert width < 60 or all(words.count(item) == 2 for item in ("parameter", "and", "optimizer"))  # none is cut
    assert width < 46 or words.count("s") == 2, "both have a running clock"


@pytest.mark.parametrize("width", [60, 120])
def test_nothing_is_cut_in_the_middle_of_a_word(state: LiveState, width: int) -> None:
    words = "ZeRO 3 + parameter offload and optimizer offload, micro-batch 128; stage3_max_live_parameters=5e8"
    speed = Speed(metric="throughput", value=100.0, samples_per_s=100.0)
    best = progress.BestSoFar(number=1, words=words, speed=speed)
    state.apply(search(side_by_side=2, best=best, user_value=50.0), 30.0)
    state.apply(replace(started(4), words=words), 30.0)
    state.apply(progress.Phase(words="building cpu_adam (first use only, may take minutes)"), 31.0)
    tokens = shown(state, 103.0, width=width).split()
    table, summary = tokens[: tokens.index("Building")], tokens[tokens.index("Building") :]
    whole = {"parameter", "offload", "optimizer", "micro-batch", "stage3_max_live_parameters=5e8"}
    assert whole - {"stage3_max_live_parameters=5e8"} <= set(table)
    assert whole <= {item.rstrip(",;)") for item in summary}
    assert " ".join(summary).startswith("Building cpu_adam, 1 min 12 s (first use only, may take minutes)")


def test_each_phase_of_a_launch_is_told(state: LiveState) -> None:
    def now() -> str:
        (row,) = [line for line in shown(state, 25.0).splitlines() if line.startswith("    3 ")]
        return row

    assert "starting" in now()
    state.apply(progress.TrialPhase(number=3, words="importing"), 25.0)
    assert "importing" in now()
    state.apply(progress.TrialPhase(number=3, words="first step"), 25.0)
    assert "first step" in now()
    for step, words in ((1, "step 2 of 5"), (4, "step 5 of 5"), (5, "ending")):
        state.apply(stepped(3, step=step), 25.0)
        assert words in now()
    state.apply(progress.TrialPhase(number=None, words="importing"), 25.0)  # of no profile that is in flight


def test_more_launches_than_lines_are_counted(state: LiveState) -> None:
    for number in range(4, 34):
        state.apply(started(number), 30.0)
    text = shown(state, 31.0, height=16)
    assert len(text.splitlines()) <= 16
    shown_rows = sum(re.match(r" *\d+  ZeRO", line) is not None for line in text.splitlines())
    assert shown_rows >= 2
    assert f"and {32 - shown_rows} more" in text


def test_a_pipe_gets_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with make_observer(quiet=False, stopping=Stopping()) as observer:
        assert isinstance(observer, LineView)
        for event in (search(launched=3), started(3), stepped(3), finished(3, None)):
            observer(event)
    assert capsys.readouterr().err.splitlines() == [
        "Study s: up to 10 trials, 3 made before; metric: throughput.",
        f"Trial 3: {started(3).words} ...",
        "Trial 3: micro-batch 3: out of memory; 4 of 10 done",
    ]


class Cell:
    """The output of a notebook's cell, as ``IPython.display`` writes it."""

    def __init__(self) -> None:
        self.outputs: list[list[str]] = []

    def HTML(self, text: str) -> str:  # noqa: N802 - IPython's name
        return text

    def display(self, html: str, *, display_id: bool) -> SimpleNamespace:
        assert display_id
        output = [html]
        self.outputs.append(output)
        return SimpleNamespace(update=output.append)


def test_a_notebook_gets_one_output_that_is_updated_in_place(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    cell = Cell()
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "IPython.display", cell)
    monkeypatch.setattr(NotebookView, "_refresh_s", 0.01)
    with make_observer(quiet=False, stopping=Stopping()) as observer:
        for event in (search(), started(0), finished(0, 40.0, best=True, own=True), started(1)):
            observer(event)
        observer(finished(1, 60.0, best=True))
        observer(progress.Message(text="<script>alert(1)</script>"))
        observer(started(2))
        wait_until(lambda: "1 running" in cell.outputs[0][-1], what="it is drawn")
        assert "2 of 10 done" in cell.outputs[0][-1]
    (output,) = cell.outputs
    assert len(output) >= 3
    text = html.unescape(re.sub(r"<[^>]+>", "", output[-1]))
    assert "Best in the search: 60 samples/s, 1.50x your config (trial 1: micro-batch 1)" in text
    assert "Your config in the search: 40 samples/s" in text
    assert "Trial 0: micro-batch 0: 40 samples/s" in text
    assert "&lt;script&gt;" in output[-1]
    assert "left" not in text, "the search is over"
    assert capfd.readouterr() == ("", "")


def test_a_shell_of_ipython_is_no_notebook_and_ipython_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=SimpleNamespace))
    with make_observer(quiet=False) as observer:
        assert isinstance(observer, LineView)
    monkeypatch.delitem(sys.modules, "IPython")
    with make_observer(quiet=False) as observer:
        assert isinstance(observer, LineView)
    assert "IPython" not in sys.modules


def test_the_second_signal_leaves_at_once_and_says_how_to_go_on(capfd: pytest.CaptureFixture[str]) -> None:
    left: list[int] = []
    stopping = Stopping(leave=left.append, remedy="optuna-dsat resume s")
    with pytest.raises(KeyboardInterrupt):
        stopping(2, None)
    assert left == []
    assert capfd.readouterr().err == f"{STOP_MESSAGE}\n"
    stopping(2, None)
    assert left == [130]
    assert "Continue with: optuna-dsat resume s" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("first", "second", "leaves"),
    [
        (signal.SIGTERM, signal.SIGTERM, False),
        (signal.SIGTERM, signal.SIGHUP, False),
        (signal.SIGINT, signal.SIGHUP, False),
        (signal.SIGINT, signal.SIGTERM, True),
    ],
)
def test_what_is_told_again_is_no_second_request_but_what_a_person_sends_after_ctrl_c_is(
    first: signal.Signals, second: signal.Signals, leaves: bool
) -> None:
    left: list[int] = []
    stopping = Stopping(leave=left.append)
    with pytest.raises(KeyboardInterrupt):
        stopping(first, None)
    stopping(second, None)
    assert left == ([130] if leaves else [])
    stopping(signal.SIGINT, None)
    assert 130 in left


def test_what_else_ends_a_process_asks_for_a_stop_as_ctrl_c_does(capfd: pytest.CaptureFixture[str]) -> None:
    number = signal.SIGXCPU
    assert {signal.SIGQUIT, signal.SIGUSR1, number} <= set(ENDING)
    with stopping_on_signals() as stopping:
        assert all(signal.getsignal(item) is stopping for item in ENDING)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        signal.raise_signal(number)
    assert stopping.by == number
    assert capfd.readouterr().err == f"{number.name} came.\n{STOP_MESSAGE}\n"


def command(folder: Path, *, pause_s: float, stop_s: float = 0.0, trials: int = 40) -> list[str]:
    (folder / "train.py").write_text("")
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}
    (folder / "ds.json").write_text(json.dumps(config))
    return [
        sys.executable, "-m", "tests.scripts.watched", str(pause_s), str(stop_s), "random", str(folder / "train.py"),
        str(folder / "ds.json"), "--cpu-ranks", "2", "--storage", f"sqlite:///{folder}/study.db", "--study", "s",
        "--output-dir", str(folder / "out"), "--max-trials", str(trials), "--confirm", "0", "--metric", "throughput",
    ]  # fmt: skip


def states(folder: Path) -> list[TrialState]:
    with Store.open(f"sqlite:///{folder}/study.db", create=False) as store:
        study = optuna.load_study(study_name="s", storage=store.storage)
        return [trial.state for trial in study.get_trials(deepcopy=False)]


def test_on_a_terminal_launches_are_rows_that_follow_its_width_and_all_is_drawn_anew(tmp_path: Path) -> None:
    with terminal(command(tmp_path, pause_s=0.06), width=130) as screen:
        screen.wait_for("to best")
        screen.wait_for("\u2588")
        screen.wait_for("of 60.00 GiB")
        screen.wait_for("Trial 0: ZeRO 2, micro-batch 2: ")
        screen.wait_for("Best in the search")
        place = screen.resize(60)
        place = screen.wait_for("\x1b[2J", after=place)
        place = screen.wait_for("running", after=place)
        place = screen.wait_for("running", after=place)
        screen.press_ctrl_c()
        assert screen.wait() == 130
    after = screen.plain(place)
    frames = after[: after.index(STOP_MESSAGE[:40])]
    assert max(len(line) for line in frames.replace("\r", "\n").splitlines()) <= 60
    assert COLOUR.search(screen.written)
    assert screen.written.rindex("\x1b[?25h") > screen.written.rindex("\x1b[?25l")
    again = screen.plain(screen.written.rindex("\x1b[2J"))
    words = again[: again.index("running")]
    assert "Study s: up to 40 trials" in words, "what scrolled by is shown again"
    assert "Trial 0: ZeRO 2, micro-batch 2: " in words
    assert "Best in the search" in words


def test_ctrl_c_once_returns_what_is_in_flight_and_says_how_to_go_on(tmp_path: Path) -> None:
    with terminal(command(tmp_path, pause_s=0.1), width=130, NO_COLOR="1") as screen:
        screen.wait_for("2 running")
        screen.press_ctrl_c()
        assert screen.wait() == 130
    text = screen.plain()
    assert re.search(r"Returned to the study, to run again after a resume: trial \d+", text)
    assert "Continue with: optuna-dsat resume s --storage" in text
    assert "Traceback" not in text
    assert not COLOUR.search(screen.written)
    result = states(tmp_path)
    assert TrialState.RUNNING not in result
    assert TrialState.WAITING in result


def test_ctrl_c_twice_stops_at_once(tmp_path: Path) -> None:
    with terminal(command(tmp_path, pause_s=0.1, stop_s=600.0), width=130) as screen:
        screen.wait_for("2 running")
        screen.press_ctrl_c()
        screen.wait_for(STOP_MESSAGE)
        screen.press_ctrl_c()
        assert screen.wait() == 130
    assert "Stopped at once." in screen.plain()
    assert "Continue with: optuna-dsat resume s --storage" in screen.plain()
    assert screen.written.rindex("\x1b[?25h") > screen.written.rindex("\x1b[?25l")
    assert TrialState.RUNNING in states(tmp_path)  # until someone goes on: tests/store/test_reclaim.py


def test_a_search_whose_terminal_is_closed_returns_what_is_in_flight(tmp_path: Path) -> None:
    with terminal(command(tmp_path, pause_s=0.1), width=130) as screen:
        screen.wait_for("2 running")
        assert screen.hang_up() == 130
    result = states(tmp_path)
    assert TrialState.RUNNING not in result
    assert TrialState.WAITING in result


def test_a_search_that_is_not_told_outlives_its_terminal(tmp_path: Path) -> None:
    with terminal(
        ["bash", "-c", f"trap '' HUP; exec {shlex.join(command(tmp_path, pause_s=0.1, trials=2))}"], width=130
    ) as screen:
        screen.wait_for("2 running")
        assert screen.hang_up() == 0
    assert states(tmp_path).count(TrialState.COMPLETE) in (2, 3)  # the best may be repeated with fewer settings
