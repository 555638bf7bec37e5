"""Allocations held through ``srun``, whose standard input and output are the connection to the agents.

A thread reads the messages of all allocations, writes their commands and pings them, so that none is lost while the
head computes.
"""

from __future__ import annotations

import json
import math
import os
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO

from optuna_dsat.launch.agent.files import Joiner
from optuna_dsat.launch.places.engine import LOST_S, PING_S, ClusterError, News, Order, Place, PlaceState, ping_order
from optuna_dsat.script.interpreter import with_package
from optuna_dsat.words import things_in_words

_ANSWER_S = 4.0
"""Longest wait for SLURM's controller before a search is refused."""
_JOB = re.compile(r"\bjob (\d+)", re.IGNORECASE)
_NOISE = re.compile(r"queued and waiting|has been allocated|Job step aborted|Force Terminated|forcing job termination")
"""Output of srun that is never the cause of a failure."""
_END = re.compile(r"task[s ].*: (Exited|Killed|Terminated|Segmentation|Aborted)")
_PREFIX = re.compile(r"^(srun: |slurmstepd(-\S+)?: )?((allocation )?(error|failure): )?")
_INSIDE = "SLURM_JOB_ID"


def place_arguments(*, nodes: int, slots: int, arguments: Sequence[str]) -> list[str]:
    """Return the options of srun for an allocation; the user's options come last and take precedence."""
    gpus = [f"--gpus-per-node={slots}"] if slots else []
    return [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", *gpus, *arguments]


def srun_command(*, nodes: int, slots: int, arguments: Sequence[str], python: str | None = None) -> list[str]:
    """Return the command that holds an allocation: an agent per node, tied to this process."""
    tied = [sys.executable, "-P", "-m", "optuna_dsat.launch.places.tied", str(os.getpid())]
    agent = [python or sys.executable, "-P", "-m", "optuna_dsat.launch.places.node_agent"]
    options = ["--kill-on-bad-exit=1", "--export=ALL"]
    if not any(word.startswith(("--job-name", "-J")) for word in arguments):
        options.append("--job-name=optuna-dsat")
    return [*tied, "srun", *options, *place_arguments(nodes=nodes, slots=slots, arguments=arguments), *agent]


def agent_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of srun, inherited by its tasks."""
    return {**environ, "PYTHONPATH": with_package(environ.get("PYTHONPATH"))}


def check_request(*, nodes: int, slots: int, arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    """Check with SLURM that such an allocation could ever be granted.

    Raises:
        ClusterError: If it could not, or if SLURM does not answer.
    """
    if environ.get(_INSIDE):
        _check_allocation(nodes, environ)
        return
    asked = place_arguments(nodes=nodes, slots=slots, arguments=arguments)
    try:
        answer = subprocess.run(
            ["srun", "--test-only", *asked, "true"],
            capture_output=True,
            text=True,
            timeout=_ANSWER_S,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except FileNotFoundError:
        raise ClusterError("srun was not found: --on slurm needs SLURM's commands on this machine.") from None
    except subprocess.TimeoutExpired:
        raise ClusterError(f"SLURM's controller gave no answer in {_ANSWER_S:g} s (srun --test-only).") from None
    if answer.returncode:
        cause = cause_in(answer.stderr.splitlines()) or f"exit code {answer.returncode}"
        raise ClusterError(f"SLURM cannot grant {' '.join(asked)}: {cause}.")


def _check_allocation(nodes: int, environ: Mapping[str, str]) -> None:
    have = environ.get("SLURM_JOB_NUM_NODES", "")
    if have.isdigit() and int(have) < nodes:
        raise ClusterError(
            f"--nodes-per-trial is {nodes}, but the SLURM job {environ[_INSIDE]} that this runs in has "
            f"{things_in_words(int(have), 'node')}."
        )


def cause_in(lines: Sequence[str]) -> str:
    """Return the first line of srun that names a cause, without its prefix; empty if none does.

    The end of a task counts as the cause only if no other line names a cause.
    """
    parts = [line.strip() for line in lines if line.strip() and not _NOISE.search(line)]
    errors = [line for line in parts if "error:" in line or "failure:" in line] or parts
    errors.sort(key=lambda line: _END.search(line) is not None)
    return _PREFIX.sub("", errors[0]).rstrip(".") if errors else ""


def job_in(lines: Sequence[str]) -> str | None:
    """Return the job number in srun's messages, or None."""
    return next((match[1] for line in lines if (match := _JOB.search(line))), None)


_PAUSE_S = 0.05
"""Longest wait of the thread for input, and so of a command before it is sent."""
_REASON_S = 2.0
"""Interval between queries for the queue reason."""
_NO_REASON = "None"
"""SLURM's reason for a job that is about to start."""
_COMMAND_S = 10.0
"""Time limit of a SLURM command."""
_LEAVE_S = 3.0
"""Time for agents to exit, and again for srun after SIGTERM."""
_HELLO_S = 90.0
"""Longest time between the hellos of the first and the last agent; imports from a cold file system are slow."""


class SlurmPlace:
    """A running ``srun``, started from the calling thread."""

    def __init__(self, *, nodes: int, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self.state = PlaceState.QUEUED
        self.why = ""
        self.nodes = nodes
        self.job: str | None = None
        self.names: dict[int, str] = {}
        """Node number -> SLURM's name of the node, for all nodes that sent a hello."""
        self.heard: dict[int, float] = {}
        """Node number -> monotonic time of the last message."""
        self.first_hello: float | None = None
        self.ask_at = 0.0
        """Monotonic time from which to ask for the queue reason; infinite while a query runs."""
        self.leaving_since: float | None = None
        """Monotonic time of the release; None before."""
        self.stderr_lines: list[str] = []
        self.joiner = Joiner()
        self.outgoing = b""
        self.terminated = False
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environ),
            start_new_session=True,  # Ctrl-C must not reach srun
        )
        for pipe in self.pipes:
            os.set_blocking(pipe.fileno(), False)

    @property
    def name(self) -> str:
        """Name for the user."""
        return f"SLURM job {self.job}" if self.job else "a SLURM job"

    @property
    def pipes(self) -> tuple[IO[bytes], IO[bytes], IO[bytes]]:
        """Standard input, output and error of srun."""
        process = self.process
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        return process.stdin, process.stdout, process.stderr

    def lose(self, why: str) -> None:
        """Mark as lost; the first reason is kept."""
        if self.state is not PlaceState.LOST:
            self.state, self.why = PlaceState.LOST, why

    def silent_node(self, now: float) -> str:
        """Return a reason if a node is silent, else an empty string."""
        for node, heard in self.heard.items():
            if now - heard > LOST_S:
                return f"node {self.names.get(node, node)} did not respond for {LOST_S:g} s"
        if self.state is PlaceState.QUEUED and self.first_hello is not None and now - self.first_hello > _HELLO_S:
            nodes = things_in_words(self.nodes, "node")
            return f"only {len(self.names)} of {nodes} started an agent within {_HELLO_S:g} s"
        return ""

    def write_out(self) -> None:
        """Write as many pending commands as the pipe accepts."""
        stdin = self.pipes[0]
        if stdin.closed:
            return
        with suppress(BlockingIOError, BrokenPipeError):
            while self.outgoing:
                self.outgoing = self.outgoing[os.write(stdin.fileno(), self.outgoing) :]
        if self.leaving_since is not None and not self.outgoing:
            stdin.close()  # the agents read the end of their input

    def close_pipes(self) -> None:
        """Close all pipes."""
        for pipe in self.pipes:
            with suppress(OSError):
                pipe.close()


class SlurmEngine:
    """Requests allocations from SLURM (an ``Engine``)."""

    def __init__(self, arguments: Sequence[str], *, python: str | None = None) -> None:
        self._python = python
        self._arguments = tuple(arguments)
        self._environ = dict(os.environ)
        self._inside = bool(self._environ.get("SLURM_JOB_ID"))
        self._places: list[SlurmPlace] = []
        self._news: list[News] = []
        self._changed = threading.Condition()
        """Guards all of the above; notified of messages and of state changes."""
        self._pinged = 0.0
        self._closing = False
        self._thread: threading.Thread | None = None

    def check(self, *, nodes: int, slots: int) -> None:
        """Raise if SLURM can never grant such an allocation."""
        check_request(nodes=nodes, slots=slots, arguments=self._arguments, environ=self._environ)

    def request(self, *, nodes: int, slots: int) -> Place:
        """Start srun for an allocation. The calling thread must live as long as the allocation."""
        command = srun_command(nodes=nodes, slots=slots, arguments=self._arguments, python=self._python)
        place = SlurmPlace(nodes=nodes, command=command, environ=agent_environment(self._environ))
        place.job = self._environ["SLURM_JOB_ID"] if self._inside else None
        with self._changed:
            self._places.append(place)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="slurm", daemon=True)
            self._thread.start()
        return place

    def order(self, place: Place, order: Order, *, node: int | None = None) -> None:
        """Send a command to a node, or to all nodes for None, without waiting."""
        assert isinstance(place, SlurmPlace)
        with self._changed:
            if place.leaving_since is None and place.state is not PlaceState.LOST:
                place.outgoing += json.dumps({**order, "to": node}).encode() + b"\n"

    def news(self, timeout_s: float) -> Sequence[News]:
        """Return messages of agents; wait up to ``timeout_s`` for messages or a change of state."""
        with self._changed:
            if not self._news and timeout_s > 0:
                self._changed.wait(timeout_s)
            news, self._news = self._news, []
        return news

    def release(self, place: Place) -> None:
        """Release an allocation without waiting."""
        assert isinstance(place, SlurmPlace)
        with self._changed:
            if place.leaving_since is None:
                place.leaving_since = time.monotonic()
                if place.state is PlaceState.QUEUED and place.first_hello is None:
                    self._end(place)

    def close(self) -> None:
        """Release all allocations and wait, some seconds at most, until their srun has ended."""
        for place in list(self._places):
            self.release(place)
        self._closing = True
        if self._thread is not None:
            self._thread.join(4 * _LEAVE_S)
        for place in self._places:
            place.process.kill()
            place.process.wait()
            place.close_pipes()
        self._places.clear()

    def _run(self) -> None:
        while not (self._closing and not self._places):
            with self._changed:
                self._look_at_all(time.monotonic())
                reading = {p.fileno(): (place, p) for place in self._places for p in place.pipes[1:] if not p.closed}
                writing = [
                    place.pipes[0].fileno() for place in self._places if place.outgoing and not place.pipes[0].closed
                ]
            ready, _, _ = select.select([*reading], writing, [], _PAUSE_S)
            with self._changed:
                for descriptor in ready:
                    self._read(*reading[descriptor])

    def _read(self, place: SlurmPlace, pipe: IO[bytes]) -> None:
        try:
            data = os.read(pipe.fileno(), 1 << 20)
        except BlockingIOError:
            return
        if not data:
            pipe.close()
            return
        if pipe is place.pipes[2]:
            place.stderr_lines = [*place.stderr_lines, *data.decode("utf-8", errors="replace").splitlines()][-50:]
            if place.job is None:
                place.job = job_in(place.stderr_lines)
            return
        now, unix = time.monotonic(), time.time()
        for node, message in place.joiner.feed(data):
            place.heard[node] = now
            if message.get("news") == "hello":
                place.names[node] = str(message.get("name"))
                place.first_hello = place.first_hello or now
                place.job = place.job or message.get("job")  # srun reports no number of an immediate job
                if len(place.names) == place.nodes and place.state is PlaceState.QUEUED:
                    place.state, place.why = PlaceState.READY, ""
            self._news.append(News(place=place, node=node, message=message, time=unix))
        self._changed.notify_all()

    def _look_at_all(self, now: float) -> None:
        ping = now - self._pinged >= PING_S
        if ping:
            self._pinged = now
        for place in list(self._places):
            if ping and place.first_hello is not None and place.leaving_since is None:
                place.outgoing += json.dumps({**ping_order(), "to": None}).encode() + b"\n"
            self._look_at(place, now)
            place.write_out()

    def _look_at(self, place: SlurmPlace, now: float) -> None:
        """Detect lost or ended allocations, and enforce the end of released allocations."""
        output_read = place.pipes[1].closed and place.pipes[2].closed
        if place.process.poll() is not None and output_read:
            if place.leaving_since is None:
                code = place.process.returncode
                place.lose(cause_in(place.stderr_lines) or cause_in(place.joiner.strays) or f"srun ended with {code}")
            place.close_pipes()
            self._places.remove(place)
            self._changed.notify_all()
            return
        if place.leaving_since is None and (why := place.silent_node(now)):
            place.lose(why)
            place.leaving_since = now
            self._end(place)
            self._changed.notify_all()
        if place.leaving_since is not None and now - place.leaving_since > _LEAVE_S:
            if not place.terminated:
                self._end(place)
            if now - place.leaving_since > 2 * _LEAVE_S:
                place.process.kill()
        if (
            place.state is PlaceState.QUEUED
            and place.job is not None
            and place.first_hello is None
            and not self._inside
            and now >= place.ask_at
        ):
            self._ask_why(place, place.job)

    def _end(self, place: SlurmPlace) -> None:
        """Terminate srun and cancel the job."""
        place.terminated = True
        with suppress(ProcessLookupError):
            place.process.terminate()
        if place.job is not None and not self._inside:
            command = ["scancel", "--quiet", place.job]
            threading.Thread(target=self._output_of, args=(command,), name="scancel").start()

    def _ask_why(self, place: SlurmPlace, job: str) -> None:
        """Ask SLURM why a job is pending, without waiting for the answer."""

        def note() -> None:
            why = self._output_of(["squeue", "--noheader", f"--jobs={job}", "--format=%r"]).strip()
            with self._changed:
                place.ask_at = time.monotonic() + _REASON_S
                if place.state is PlaceState.QUEUED and why not in ("", _NO_REASON, place.why):
                    place.why = why
                    self._changed.notify_all()

        place.ask_at = math.inf
        threading.Thread(target=note, name="squeue", daemon=True).start()

    def _output_of(self, command: Sequence[str]) -> str:
        """Return the output of a SLURM command; empty if it cannot be run or takes too long."""
        with suppress(OSError, subprocess.TimeoutExpired):
            return subprocess.run(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=self._environ,
                timeout=_COMMAND_S,
                check=False,
            ).stdout
        return ""
