"""Process of a rank: redirects its output, runs the script, and always records how the rank ended."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import io
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, MutableMapping
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NoReturn

from optuna_dsat.runtime.adapt.config import (
    ScriptCommand,
    default_config_option,
    reads_redirected,
    replace_config_paths,
)
from optuna_dsat.runtime.adapt.journal import (
    guard_builds,
    note_created_files,
    note_shared_buffer,
    share_multiprocessing_folder,
)
from optuna_dsat.runtime.adapt.ranks import (
    LOCAL_RANK,
    RESTARTED_ENV,
    await_processes,
    default_local_rank,
    measure_restarts,
    with_local_rank,
)
from optuna_dsat.runtime.agent.processes import die_with_parent
from optuna_dsat.runtime.events import (
    STEPS_SKIPPED,
    Event,
    EventWriteError,
    EventWriter,
    ModulesImported,
    RankFailed,
    RankFinished,
    RankStarted,
    decode_event,
    events_path,
)
from optuna_dsat.runtime.failure import diagnose, format_traceback, message_with_cause, without_runtime_frames
from optuna_dsat.runtime.files import MESSAGE_CHARS, TEXT_CHARS, shortened
from optuna_dsat.runtime.hook import DeepSpeedHook
from optuna_dsat.runtime.imports import EnvironmentWatch, ImportWatch, imported_modules, loaded_operators, patch
from optuna_dsat.runtime.isolation.redirection import redirect_writes
from optuna_dsat.runtime.isolation.world import World, rename_across_layers
from optuna_dsat.runtime.measure.live import await_order
from optuna_dsat.runtime.measure.memory import process_limit_lifted, unlink_shared_buffers
from optuna_dsat.runtime.measure.meter import RankState
from optuna_dsat.runtime.rank import LAUNCH_ENV, LaunchPlan, Rank
from optuna_dsat.runtime.reporting import set_current_trial
from optuna_dsat.runtime.user_code import register_stacks
from optuna_dsat.secrecy.references import PREFIX, hidden_text, keep, names_in, resolved

EXIT_EVENTS_LOST = 74
"""Exit code of a rank whose events could not be written (``EX_IOERR`` of ``sysexits.h``)."""

SAFE_PATH_ENV, UNTIL_SCRIPT = "PYTHONSAFEPATH", "until the script runs"
"""Keeps the working directory off a rank's path while it imports ours, where it may have a ``random.py``."""
AGENT_ENV = "OPTUNA_DSAT_AGENT_PID"
"""Environment variable with the process number of torchrun, which starts the ranks; hidden from the script."""

EXIT_LIMIT_S = 5.0
"""Maximum duration of exit handlers (``finally``, ``with``, ``atexit``) after the last record of a rank."""

_EXIT_SIGNAL = signal.SIGRTMAX - 2
"""Signal that raises ``SystemExit`` in the main thread, even if it is waiting, after training in another thread."""

_HERE = str(Path(__file__).resolve().parent)

_LOCAL_RANKS_TIMEOUT_S = 2.0
"""Maximum wait for the other ranks of this host, which may still be communicating with this rank."""


def run_rank(plan: LaunchPlan, rank: Rank, command: ScriptCommand, *, safe_path: bool, forked: bool = False) -> int:
    """Run the script as this rank of the launch; return the rank's exit code.

    After the last profile step, ``SystemExit`` ends the script, as if it called ``sys.exit``.

    Raises:
        SystemExit: If the script calls ``sys.exit``; the caller exits with its code.
    """
    agent = os.environ.pop(AGENT_ENV, "")
    if os.environ.get(SAFE_PATH_ENV) == UNTIL_SCRIPT:
        del os.environ[SAFE_PATH_ENV]
        safe_path = False
    die_with_parent(int(agent) if agent.isdigit() else os.getppid())
    if plan.log_dir:
        silence_input()
        redirect_output(Path(plan.log_dir), rank.rank)
        register_stacks(Path(plan.log_dir), rank.rank)
    try:
        return _RankProcess(plan, rank, forked=forked).run(command, safe_path=safe_path)
    except EventWriteError as error:
        with contextlib.suppress(OSError, ValueError):  # may fail for the same reason as the event
            print(error, file=sys.stderr)
        end_process(EXIT_EVENTS_LOST)


class _RankProcess:
    def __init__(self, plan: LaunchPlan, rank: Rank, *, forked: bool) -> None:
        self._plan = plan
        self._rank = rank
        self._forked = forked
        self._environment = EnvironmentWatch()
        self._state = RankState()
        self._writer = EventWriter(events_path(plan.events_dir, rank.rank))
        self._world = World() if plan.world.isolation == "off" else World.load(plan.world.record)
        self._reports_imports = plan.purpose == "profile" and rank.rank == 0
        """Whether this rank records the script's imports on behalf of all ranks."""
        self._take_on_in_engine: Callable[[LaunchPlan], None] = lambda _: None
        self._is_second = RESTARTED_ENV in os.environ
        """Whether the script started this process itself, which then is recorded only if it trains."""
        self._is_done = False
        """Whether the last record is written. Exceptions of the script after it are not recorded."""

    def run(self, command: ScriptCommand, *, safe_path: bool) -> int:
        plan, facts = self._plan, self._state.script_facts
        if not self._is_second:
            self._write_start()
        self._keep_files_apart()
        self._install_hook()
        args = self._arguments(command)

        facts["config_in_code"] = bool(plan.user_config_path)  # until the script reads the launch's file

        def reads_config(by_its_name: bool) -> None:
            facts["config_in_code"] = facts["config_in_code"] and not by_its_name

        self._record_exit_at_once()
        measure_restarts(command.name)
        signal.signal(_EXIT_SIGNAL, lambda *_: sys.exit(0))
        try:
            with reads_redirected(user_config=plan.user_config_path, config=plan.config_path, on_read=reads_config):
                ScriptCommand(name=command.name, is_module=command.is_module, args=args).run(safe_path=safe_path)
                await_processes()
                threading._shutdown()  # type: ignore[attr-defined]  # a thread of the script may still train
        except BaseException as error:  # noqa: BLE001 - recorded and printed as Python prints it
            return self._end(error)
        if not self._is_done:
            self._finish("script_end")
            self._limit_exit(0)
        return 0

    def _keep_files_apart(self) -> None:
        """Redirect the writes of the script where there is no overlay, and record new entries for the clean-up."""
        plan, world = self._plan, self._world
        if plan.leavings and not world.covers_shared_memory:
            note_shared_buffer(Path(plan.leavings), os.environ, rank=self._rank.rank)
        is_partly_redirected = bool(world.redirected or not world.mounted)
        if plan.leavings and plan.measures and is_partly_redirected:  # a training may want its folders
            note_created_files(Path(plan.leavings))
            share_multiprocessing_folder()
        if world.redirected:
            redirect_writes(plan.world.redirected_files, folders=world.redirected, passed=world.passed)
        if world.unprivileged:
            rename_across_layers()

    def _install_hook(self) -> None:
        """Watch imports: DeepSpeed gets the trial's settings and is measured."""
        if self._reports_imports:
            self._environment.install()
        ImportWatch({"torch.utils.file_baton": guard_builds}).install()
        hook = DeepSpeedHook(
            plan=self._plan,
            rank=self._rank,
            writer=self._writer,
            state=self._state,
            exit_process=self._exit_after_last_step,
        )
        hook.install()
        self._take_on_in_engine = hook.take_on
        set_current_trial(hook)

    def _arguments(self, command: ScriptCommand) -> tuple[str, ...]:
        """Return the script's arguments with the trial's config, and have it get what its launcher would pass."""
        plan, rank, facts = self._plan, self._rank, self._state.script_facts
        default_local_rank(rank.local_rank, on_found=lambda option: facts.update(takes_local_rank=option))
        default_config_option(
            plan.config_path if plan.user_config_path else "",
            user_config=plan.user_config_path,
            on_found=lambda option: facts.update(config_option=option),
        )
        args = replace_config_paths(command.args, user_config=plan.user_config_path, config=plan.config_path)
        given = with_local_rank(args, rank.local_rank, script=None if command.is_module else Path(command.name))
        if given != args:
            facts["takes_local_rank"] = LOCAL_RANK
        return given

    def _record_exit_at_once(self) -> None:
        """Record the end of a script that caught out-of-memory errors and calls ``os._exit``."""
        pid = os.getpid()

        @patch(os, "_exit")
        def exit_at_once(original: Any, status: int) -> None:
            state = self._state
            if (handled := sys.exc_info()[1]) is not None:
                state.note_error(handled)
            if state.allocation_failures + state.host_allocation_failures and not self._is_done and os.getpid() == pid:
                with contextlib.suppress(EventWriteError):
                    self._finish(f"exit_code_{status}")
            original(status)

    def _write_start(self) -> None:
        rank = self._rank
        self._writer.write(
            RankStarted(
                rank=rank.rank,
                time=time.time(),
                local_rank=rank.local_rank,
                world_size=rank.world_size,
                pid=os.getpid(),
                forked=self._forked,
                isolation=self._world.mode,
                isolation_note=self._world.reason,
            )
        )

    def _end(self, error: BaseException) -> int:
        """Record the exception that ended the script, unless the end is already recorded; return the exit code."""
        if self._is_done:
            if not isinstance(error, SystemExit):
                _show(error)
            return 0
        if isinstance(error, (EventWriteError, KeyboardInterrupt)):
            raise error
        if isinstance(error, SystemExit):
            code, handled = exit_code(error), error.__context__  # of a script that exits in a handler, as Hydra does
            self._state.note_error(error)
            if code and isinstance(handled, Exception):
                self._fail(handled)
            else:
                self._finish(f"exit_code_{code}" if code else "script_end")
            self._limit_exit(code)
            raise error
        self._fail(error)
        _show(error)
        if not self._plan.measures:
            raise FailedExit(1)
        self._limit_exit(1)
        return 1

    def _finish(self, reason: str) -> None:
        state = self._state
        self._write_end(
            RankFinished(
                rank=self._rank.rank,
                time=time.time(),
                reason=reason,
                steps=state.steps,
                skipped=state.skipped,
                allocation_failures=state.allocation_failures,
                host_allocation_failures=state.host_allocation_failures,
                saves=state.saves.count("save_checkpoint"),
            )
        )

    def _write_end(self, event: Event) -> None:
        if not self._is_second or self._state.fed or self._state.phase != "script":
            self._writer.write(event)
        self._is_done = True

    def _exit_after_last_step(self) -> None:
        """End the script like ``sys.exit``; again at every later step if the script catches the exception.

        Returns if the launcher orders another trial in the running engine.
        """
        if not self._is_done:
            if self._reports_imports:
                self._writer.write(
                    ModulesImported(
                        rank=0,
                        time=time.time(),
                        modules=imported_modules(),
                        operators=loaded_operators(),
                        environment=self._environment.changed(),
                    )
                )
            measured = self._state.steps >= self._plan.end_profile_step
            self._finish("profile_done" if measured else STEPS_SKIPPED if self._state.skipped else "out_of_memory")
            if measured and self._plan.continues and (order := await_order(self._plan.root)) is not None:
                os.environ[LAUNCH_ENV] = str(order)
                self._take_on(LaunchPlan.load(order))
                return
            self._wait_for_local_ranks()
            self._limit_exit(0)
            if (main := threading.main_thread()) is not threading.current_thread() and main.ident is not None:
                signal.pthread_kill(main.ident, _EXIT_SIGNAL)
        raise SystemExit(0)

    def _take_on(self, plan: LaunchPlan) -> None:
        """Measure another trial in the running engine; its events and output go to its own run directory."""
        self._plan = plan
        self._writer.begin(events_path(plan.events_dir, self._rank.rank))
        redirect_output(Path(plan.log_dir), self._rank.rank)
        register_stacks(Path(plan.log_dir), self._rank.rank)
        self._is_done = self._reports_imports = False
        self._write_start()
        self._take_on_in_engine(plan)

    def _limit_exit(self, code: int) -> None:
        """Kill this process, with this exit code, if the script's exit handlers take too long."""
        if self._plan.measures:
            timer = threading.Timer(EXIT_LIMIT_S, end_process, args=(code,))
            timer.daemon = True
            try:
                with process_limit_lifted():  # for the thread's stack
                    timer.start()
            except RuntimeError:  # no memory for a thread
                end_process(code)

    def _wait_for_local_ranks(self) -> None:
        """Wait until the other ranks of this host have completed or failed the last step."""
        paths = [events_path(self._plan.events_dir, rank) for rank in self._rank.local_ranks]
        deadline = monotonic() + _LOCAL_RANKS_TIMEOUT_S
        while monotonic() < deadline and not all(map(_has_ended, paths)):
            sleep(0.005)

    def _fail(self, error: BaseException) -> None:
        trace = without_runtime_frames(error.__traceback__, _HERE)
        diagnosis = diagnose(error, phase=self._state.phase, device=self._state.device, limited=self._state.limited)
        for event in () if self._state.fed else self._state.if_failed:
            self._writer.write(event)
        self._write_end(
            RankFailed(
                rank=self._rank.rank,
                time=time.time(),
                outcome=diagnosis.outcome,
                phase=self._state.phase,
                error_type=type(error).__name__,
                message=shortened(hidden_text(message_with_cause(error)), MESSAGE_CHARS),
                traceback=shortened(hidden_text(format_traceback(error, trace)), TEXT_CHARS),
                missing_bytes=diagnosis.missing_bytes,
                steps=self._state.steps,
            )
        )


def _show(error: BaseException) -> None:
    trace = without_runtime_frames(error.__traceback__, _HERE)
    try:
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    except BaseException:  # noqa: BLE001 - the script's own hook
        traceback.print_exc()


class _SilentInput(io.TextIOWrapper):
    """A terminal at which nobody types; the main thread reads its end. No buffer has a lock that forks wait for."""

    def read(self, size: int | None = -1, /) -> str:
        return "" if threading.current_thread() is threading.main_thread() else super().read(size)

    def readline(self, size: int = -1, /) -> str:  # type: ignore[override]
        return "" if threading.current_thread() is threading.main_thread() else super().readline(size)


def silence_input() -> None:
    """Make this process's input a silent pipe, as scripts may poll it, or stop at its end."""
    reader, _ = os.pipe()
    os.dup2(reader, 0)
    os.close(reader)
    sys.stdin = _SilentInput(io.FileIO(0, closefd=False), encoding="utf-8")


def redirect_output(log_dir: Path, rank: int) -> None:
    """Send this process's output to files."""
    _flush_output()
    for number, name in ((1, "stdout"), (2, "stderr")):
        target = os.open(log_dir / f"rank{rank}.{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(target, number)
        os.close(target)


def _flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a full disk, or a stream that the script has closed or replaced
            stream.flush()


def end_process(code: int) -> NoReturn:
    """End immediately after flushing output, without the teardown of Python, CUDA and the process group (seconds)."""
    with contextlib.suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises for killed workers
    multiprocessing = sys.modules.get("multiprocessing")
    for worker in multiprocessing.active_children() if multiprocessing is not None else ():
        worker.kill()  # data loader workers otherwise outlive this process by seconds
    _flush_output()
    ctypes.CDLL(None).fflush(None)
    unlink_shared_buffers()
    os._exit(code)


def _has_ended(path: Path) -> bool:
    try:
        last = path.read_text(encoding="utf-8").rstrip("\n").rpartition("\n")[2]
    except OSError:
        return True  # no such rank on this host
    return isinstance(decode_event(last), (RankFinished, RankFailed))


class FailedExit(SystemExit):
    """Raised after an exception ended the script; the interpreter then shuts down normally.

    The normal shutdown is slow enough for torchrun to notice killed ranks first.
    """


def exit_as_python(code: int) -> NoReturn:
    """Exit as Python does (join threads, run exit functions, flush output) but without tearing down native libraries.

    A gloo thread still running during that teardown would abort the process, and a successful training would count as
    failed.
    """
    for part in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]
        try:
            part()
        except BaseException:  # noqa: BLE001 - printed by Python, too, and without effect on its exit code
            traceback.print_exc()
    end_process(code)


def exit_code(end: SystemExit) -> int:
    """Return Python's exit code for ``sys.exit(code)``: 0 for None, 1 for anything that is not a number."""
    return end.code if isinstance(end.code, int) else int(end.code is not None)


def take_secrets(environ: MutableMapping[str, str]) -> None:
    """Move the values of secret references from the environment, which the script's processes inherit, to memory."""
    keep({name: environ.pop(name) for name in [*environ] if name.startswith(PREFIX)})


def with_secrets(plan: LaunchPlan) -> LaunchPlan:
    """Return a launch with its secret references resolved.

    A config file with references is passed to the script as an anonymous file in this process's memory
    (``memfd_create``).
    """
    plan = replace(plan, overlay=resolved(plan.overlay), batch_source=resolved(plan.batch_source))
    try:
        text = Path(plan.config_path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return plan
    if not names_in(text):
        return plan
    descriptor = os.memfd_create("ds_config.json", 0)  # stays open if the script restarts itself
    os.write(descriptor, resolved(text).encode())
    return replace(plan, config_path=f"/proc/{os.getpid()}/fd/{descriptor}")
