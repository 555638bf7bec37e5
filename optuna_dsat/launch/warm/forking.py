"""Warm launches: forked from a process with all modules imported, with fewer, or not at all.

A forked launch may fail just because of the fork, for example if an imported module has touched CUDA. Until a forked
launch has trained, failures are repeated by plain torchrun. If the repetition trains, the next launches are forked with
fewer modules imported, or not at all.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from optuna_dsat.launch.launch import FailedFork, Launch
from optuna_dsat.launch.machine.processes import new_mark
from optuna_dsat.launch.protocol import Verdict
from optuna_dsat.launch.run_directory import RANK_VARIABLES, TRACKER_FOLDERS, PreparedLaunch
from optuna_dsat.launch.warm.server import ForkServer, WarmAgent, WarmUnavailableError
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.agent.forked import can_fork
from optuna_dsat.runtime.agent.preload import Preload
from optuna_dsat.runtime.agent.processes import MARK_ENV
from optuna_dsat.runtime.rank import LAUNCH_ENV, names_rank

IMPORTING = "importing torch, DeepSpeed and what the script imports"
"""Phase shown while the first forked launch waits for imports."""

_POSSIBLY_BY_FORKING = frozenset(
    {
        Outcome.COMMUNICATION_ERROR,
        Outcome.INVALID_CONFIG,  # errors in deepspeed.initialize, including CUDA's rejection of a fork
        Outcome.SCRIPT_ERROR,
        Outcome.STALLED,
        Outcome.TIMEOUT,
    }
)
"""Outcomes of a forked launch that the fork may have caused."""

_EXIT_LIMIT_S = 2.0
"""Longest wait for the exit code of a server that has closed its socket."""

_RESTARTS = 5
"""Most restarts of the server, without packages that it must not import or after it died."""

_PER_LAUNCH = frozenset({LAUNCH_ENV, MARK_ENV, "CUDA_VISIBLE_DEVICES", "PYTHONPATH", *TRACKER_FOLDERS})
"""Environment variables that may differ between launches of a study."""

_WATCHED = RANK_VARIABLES | TRACKER_FOLDERS
"""Environment variables that no import may read before a fork. The server has none of them, so that code that copies
its whole environment does not count as a reader."""


def _of_ranks(environ: Mapping[str, str]) -> frozenset[str]:
    return frozenset(name for name, value in environ.items() if names_rank(value))


class Forking:
    """Forks launches as long as that works."""

    def __init__(
        self,
        log: Path,
        *,
        enabled: bool,
        on_notice: Callable[[str], None],
        on_phase: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._log = log
        self.enabled = enabled
        """Whether the next launch is forked if possible."""
        self._notify = on_notice
        self._on_phase = on_phase
        self._server: ForkServer | None = None
        self._retired: list[ForkServer] = []
        """Servers of launches in flight that fork no more."""
        self._environ: dict[str, str] = {}
        self.preload = Preload()
        """What forked launches find imported."""
        self._preloads_pending = 0
        """Preloads that the server has not finished."""
        self._restarts = 0
        self._deaths = 0
        """Servers that exited or were killed."""
        self._failed = ""
        """Why no server gets through its imports; empty if none ended by itself there."""
        self._read: set[str] = set()
        """Environment variables that the server's imports have read."""
        self._proven: Preload | None = None
        """Imports of a forked launch that has trained; None without one."""

    def prepare(self, preload: Preload) -> None:
        """Set the modules that launches share; imported at once if the server runs, else with the first launch."""
        if not self.enabled:
            return
        self.preload = replace(preload, left_out=self.preload.left_out)
        self._drop_if_ended()
        if self._server is not None and (self._preloads_pending or self._read & set(preload.environment)):
            self._retire()  # it may have read a variable that the script changes: another one is watched from its start
        elif self._server is not None:
            with self._plain_if_unavailable():
                self._order_preload(self._server)

    def begin(self, environ: Mapping[str, str], *, python: str) -> None:
        """Start the imports for launches in ``environ``, unless already started; does not wait."""
        if self.enabled:
            with self._plain_if_unavailable():
                self._begin(environ, python=python)

    @property
    def is_ready(self) -> bool:
        """Whether a fork waits for no imports: they are done, or were not begun, or their process has ended."""
        if not self.enabled or self._server is None or self._server.has_ended:
            return True
        return self._server.finished_preloads >= self._preloads_pending

    def start(self, order: PreparedLaunch) -> WarmAgent | None:
        """Fork a launch; return its agent, or None if it must be started by plain torchrun."""
        if self.enabled:
            with self._plain_if_unavailable(), self._while_importing():
                return self.fork(order)
        return None

    @contextlib.contextmanager
    def _while_importing(self) -> Iterator[None]:
        if self._server is not None and not self._preloads_pending:
            yield
            return
        self._on_phase(IMPORTING)
        try:
            yield
        finally:
            self._on_phase("")

    @contextlib.contextmanager
    def _plain_if_unavailable(self) -> Iterator[None]:
        try:
            yield
        except WarmUnavailableError as error:
            self._notify(f"Launches run by plain torchrun, which takes seconds longer for each: {error}.")

    def may_repeat(self, launch: Launch) -> bool:
        """Whether the launch may be repeated plainly, or is such a repetition: its outcome is known only at its end."""
        return launch.repeats is not None or (self._is_unproven(launch) and not launch.log.has_trained)

    def _is_unproven(self, launch: Launch) -> bool:
        """Whether the launch was forked and none with the same modules imported has trained yet."""
        return self.enabled and launch.preloaded is not None and launch.preloaded != self._proven

    def learn_from(self, launch: Launch) -> None:
        """Note whether a forked launch shows that forks work here."""
        if launch.preloaded is None or not self.enabled:
            return
        if not all(start.forked for start in launch.log.starts):
            self._stop(
                "Something imported before a fork initialises CUDA in torchrun's agent, which no fork survives: all "
                "launches run by plain torchrun, which takes seconds longer for each."
            )
        elif launch.log.has_trained:
            self.prove(launch.preloaded)

    def prove(self, preload: Preload) -> None:
        """Note that a forked launch with these modules imported has trained."""
        self._proven = preload

    def suspect(self, launch: Launch, verdict: Verdict) -> FailedFork | None:
        """Return a failure that the fork may have caused: neither this launch nor one forked like it has trained."""
        self.learn_from(launch)
        if launch.repeats is not None and launch.log.has_trained and self.enabled:
            self.retreat(launch.repeats)
        if launch.preloaded is None or not self._is_unproven(launch) or launch.log.has_trained:
            return None
        if verdict.outcome not in _POSSIBLY_BY_FORKING:
            return None
        return FailedFork(preloaded=launch.preloaded, message=verdict.message)

    def retreat(self, failed: FailedFork) -> None:
        """Import only modules that are proven to work before a fork, or fork no longer."""
        if failed.preloaded != self.preload:
            return  # a launch beside it failed alike and was dealt with
        why = failed.message
        if self._proven is not None and self._proven != self.preload:
            self._retire()
            self.preload = self._proven
            self._notify(
                "A launch failed when forked with all that your script imports ready, and trains by plain torchrun: "
                f"each imports that for itself from here on, as the profile launch did. Forked, it ended with: {why}"
            )
            return
        self._stop(
            "The first launch failed when forked from a warm process and trains by plain torchrun: all run plainly, "
            f"which takes seconds longer for each. Forked, it ended with: {why}"
        )

    def _stop(self, notice: str) -> None:
        self._retire()
        self.enabled = False
        self._notify(notice)

    def _retire(self) -> None:
        """Fork no more from the present server; it is ended once the launches forked from it are over."""
        if self._server is not None:
            self._retired.append(self._server)
            self._server = None
        for server in [server for server in self._retired if server.is_idle]:
            self._retired.remove(server)
            server.close()

    def _begin(self, environ: Mapping[str, str], *, python: str) -> None:
        """Start the server for launches in ``environ``, if it does not run, and its imports; does not wait."""
        self._drop_if_ended()
        if self._server is not None:
            return
        if not can_fork():
            raise WarmUnavailableError("it needs Linux 5.3 or newer")
        if self._failed:
            raise WarmUnavailableError(self._failed)
        if self._deaths > _RESTARTS:
            raise WarmUnavailableError(f"the process that launches are forked from was killed {self._deaths} times")
        self._environ = dict(environ)
        hidden = self._watched() | {LAUNCH_ENV, *self.preload.environment}
        variables = {name: value for name, value in environ.items() if name not in hidden}
        variables[MARK_ENV] = new_mark()  # it outlives the launch that ``environ`` belongs to
        self._server = ForkServer(variables, self._log, python=python)
        self._preloads_pending = 0
        self._read = set()
        self._order_preload(self._server)

    def _drop_if_ended(self) -> None:
        if self._server is None:
            return
        if self._server.has_ended:
            self._drop(self._server)
        elif self._server.is_stuck:
            self._deaths += 1
            self._retire()

    def _drop(self, server: ForkServer) -> None:
        """Forget a server that has ended; the next one is started with the next launch, a few times at most."""
        self._deaths += 1
        self._server = None
        if server.has_ended:
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.process.wait(_EXIT_LIMIT_S)
        server.close()
        code = server.process.returncode
        if self._preloads_pending and code is not None and code >= 0:  # by itself: the next one would as well
            self._failed = f"the process that launches are forked from ended with exit code {code}; see {server.log}"

    def _order_preload(self, server: ForkServer) -> None:
        server.order(do="preload", preload=self.preload.to_json(), watched=sorted(self._watched()))
        self._preloads_pending += 1

    def _watched(self) -> frozenset[str]:
        return _WATCHED | _of_ranks(self._environ)

    def fork(self, order: PreparedLaunch) -> WarmAgent:
        """Fork a launch; waits for the imports if they are not finished.

        Raises:
            WarmUnavailableError: If it cannot be forked.
        """
        while True:
            if self._server is not None and _of_ranks(order.environ) - self._environ.keys():
                self._retire()  # it may have read variables of other launchers, which launches have from here on
            self._begin(order.environ, python=order.python)
            self._check_environment(order.environ)
            server = self._ready_server(order.environ, python=order.python)
            try:
                server.order(
                    do="launch",
                    launch_id=order.launch_id,
                    mark=order.mark,
                    record=str(order.directory.agent_record),
                    arguments=list(order.arguments),
                    environ=dict(order.environ),
                    cwd=order.cwd,
                    log=str(order.directory.agent_log),
                )
                return WarmAgent(server, order.launch_id, self.preload)
            except WarmUnavailableError:
                if not server.has_ended:
                    self._drop_if_ended()
                    raise  # it refuses, or is stuck; one that was killed at this moment is started again

    def _check_environment(self, environ: Mapping[str, str]) -> None:
        changed = {
            name
            for name in (environ.keys() | self._environ.keys()) - _PER_LAUNCH
            if environ.get(name) != self._environ.get(name)
        }
        if changed:
            raise WarmUnavailableError(f"the environment of this launch differs in {', '.join(sorted(changed))}")

    def _ready_server(self, environ: Mapping[str, str], *, python: str) -> ForkServer:
        while True:
            if self._server is None:
                self._begin(environ, python=python)
            if (server := self._server) is None:
                raise WarmUnavailableError("there is no process to fork from")
            refused: dict[str, str] = {}
            try:
                while self._preloads_pending:
                    ready = server.await_ready()
                    self._preloads_pending -= 1
                    refused |= ready["refused"]
                    self._read |= set(ready["read"])
            except WarmUnavailableError:
                killed = server.has_ended
                self._drop(server)
                if killed and not self._failed and self._deaths <= _RESTARTS:
                    continue
                raise
            if not refused:
                return server
            self._restart_without(refused)

    def _restart_without(self, refused: Mapping[str, str]) -> None:
        """End the server; the next one does not import the refused packages."""
        self._retire()
        self._restarts += 1
        essential = {"torch", "deepspeed", "numpy"} & refused.keys()
        if essential or self._restarts > _RESTARTS:
            name = sorted(essential or refused)[0]
            raise WarmUnavailableError(f"{name} cannot be imported before a fork: {refused[name]}")
        self.preload = replace(self.preload, left_out=tuple(sorted({*self.preload.left_out, *refused})))

    def close(self) -> None:
        """End all servers, and with them all forked launches."""
        for server in (self._server, *self._retired):
            if server is not None:
                server.close()
        self._server = None
        self._retired.clear()
