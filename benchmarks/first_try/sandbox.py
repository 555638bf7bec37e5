"""The folder in which one script is run one way: its checkout, altered as its entry says, and an environment."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.first_try.entry import Entry, EntryError
from benchmarks.first_try.hugging_face import interpreter_of, prepare_hub
from benchmarks.first_try.sources import check_out
from benchmarks.first_try.stand_ins.files import GENERATORS
from benchmarks.pdsh import write_pdsh

_STAND_INS = Path(__file__).parent / "stand_ins"
_END_S = 20.0
_SITE = """\
import importlib.machinery
import importlib.util
import sys
from pathlib import Path

spec = importlib.util.spec_from_file_location(
    "first_try_stand_ins", {init!r}, submodule_search_locations=[{folder!r}]
)
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
spec.loader.exec_module(module)
module.install()
others = [one for one in sys.path if Path(one or ".").resolve() != Path(__file__).resolve().parent]
hidden = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
if hidden is not None and hidden.loader is not None:
    hidden.loader.exec_module(importlib.util.module_from_spec(hidden))
"""
"""Loads the stand-ins, then the ``sitecustomize`` that this one hides."""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """A command that has ended, or was ended."""

    command: tuple[str, ...]
    exit_code: int | None
    """None if its time was up."""
    output: str
    errors: str
    seconds: float
    witnessed: tuple[Mapping[str, Any], ...]
    """What ``stand_ins/witness.py`` wrote, with samples for rows."""


class Sandbox:
    """A checkout outside the project, and commands run in it."""

    def __init__(self, entry: Entry, folder: Path, *, sources: Path | None) -> None:
        """Check the script out and alter it.

        Raises:
            SourceError: If it cannot be had.
            EntryError: If an edit does not apply.
        """
        self.entry = entry
        self.folder = folder.resolve()
        self.checkout = self.folder / "checkout"
        self.cwd = self.checkout / entry.folder
        check_out(entry, self.checkout, sources)
        self._alter()
        self.python = interpreter_of(entry)
        self._hub = prepare_hub(entry, python=self.python, folder=self.folder, cwd=self.cwd)
        site = self.folder / "site"
        site.mkdir()
        self._bin = self.folder / "bin"
        self._bin.mkdir()
        init = str(_STAND_INS / "__init__.py")
        (site / "sitecustomize.py").write_text(_SITE.format(init=init, folder=str(_STAND_INS)), encoding="utf-8")

    def stand_in_for_pdsh(self) -> None:
        """Give commands a pdsh where the machine has none: DeepSpeed's autotuner needs it, on one machine, too."""
        if shutil.which("pdsh") is None:
            write_pdsh(self._bin)

    def _alter(self) -> None:
        for edit in self.entry.edits:
            path = self.checkout / edit.path
            text = path.read_text(encoding="utf-8")
            if text.count(edit.old) != 1:
                raise EntryError(f"{self.entry.name}: {edit.old!r} stands {text.count(edit.old)} times in {edit.path}.")
            path.write_text(text.replace(edit.old, edit.new), encoding="utf-8")
        for name, content in self.entry.files.items():
            path = self.checkout / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, dict) and "generate" in content:
                options = {key: value for key, value in content.items() if key != "generate"}
                GENERATORS[content["generate"]](path, **options)
            else:
                path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")

    def environment(self, witness: Path, **more: str) -> dict[str, str]:
        """Return the environment of a command: this process's own, stand-ins and what the entry gives."""
        environ = {
            **os.environ,
            "DS_ACCELERATOR": os.environ.get("DS_ACCELERATOR", "cpu"),
            "LOCAL_SIZE": os.environ.get("LOCAL_SIZE", "2"),  # without a GPU: devices that DeepSpeed's launcher counts
            "FIRST_TRY_CHECKOUT": str(self.checkout),
            "FIRST_TRY_WITNESS": str(witness),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "PATH": os.pathsep.join((str(self._bin), str(Path(self.python).parent), os.environ.get("PATH", ""))),
            **self._hub,
            **self.entry.env,
            **more,
        }
        paths = (str(self.folder / "site"), self.entry.env.get("PYTHONPATH"), os.environ.get("PYTHONPATH"))
        return {**environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}

    def run(self, name: str, command: Sequence[str], *, limit_s: float, shared: bool = False, **environ: str) -> Ran:
        """Run a command in the script's folder, in a session of its own, until it ends or its time is up.

        Args:
            name: Of this run; its output is kept in ``NAME.out`` and ``NAME.err``.
            command: The command.
            limit_s: Seconds that it may take, once it has begun.
            shared: Whether others may run beside it; those that use the launcher's one port may not.
            environ: Further variables.
        """
        witness = self.folder / f"{name}.witness"
        witness.mkdir()
        out, err = self.folder / f"{name}.out", self.folder / f"{name}.err"
        with out.open("wb") as output, err.open("wb") as errors, contextlib.nullcontext() if shared else _port():
            begun = time.monotonic()
            process = subprocess.Popen(
                list(command),
                cwd=self.cwd,
                env=self.environment(witness, **environ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )
            code = _wait(process, limit_s)
            _end_left_over(witness)
        return Ran(
            command=tuple(command),
            exit_code=code,
            output=out.read_text(encoding="utf-8", errors="replace"),
            errors=err.read_text(encoding="utf-8", errors="replace"),
            seconds=time.monotonic() - begun,
            witnessed=_rows(witness, each=self.entry.rows),
        )


@contextlib.contextmanager
def _port() -> Iterator[None]:
    """Wait for the port that DeepSpeed's launcher uses, among all runs of this machine."""
    with (Path(tempfile.gettempdir()) / "first-try-port.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    """Return the exit code, None if its time was up; nothing of its session is left running."""
    code: int | None = None
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return code


def _end_left_over(witness: Path) -> None:
    """End what a command left in sessions of its own, as launchers' ranks are; the variable of its runs tells it."""
    ours = f"FIRST_TRY_WITNESS={witness}".encode()
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            if ours in environ.read_bytes().split(b"\0"):
                os.kill(int(environ.parent.name), signal.SIGKILL)


def _rows(folder: Path, *, each: int) -> tuple[Mapping[str, Any], ...]:
    lines = [line for path in sorted(folder.glob("*.jsonl")) for line in path.read_text(encoding="utf-8").splitlines()]
    rows = []
    for line in lines:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue  # a rank that was killed while it wrote
        if row["event"] == "fed" and row["size"] is not None:
            row["size"] = row["size"] / each if row["size"] % each else row["size"] // each
        rows.append(row)
    return tuple(rows)
