"""Run a command until it starts a rank, and return this rank's script, arguments and environment.

The command is run unchanged, with ``interceptor`` in each of its Python processes. The first rank is recorded instead
of started; then all processes of the command are terminated.
"""

from __future__ import annotations

import ast
import contextlib
import errno
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from optuna_dsat.errors import UsageError
from optuna_dsat.runtime.files import open_regular, read_regular, shortened
from optuna_dsat.runtime.isolation.mounts import why_no_overlay
from optuna_dsat.runtime.isolation.world import World, plan_apart
from optuna_dsat.runtime.user_code import LAUNCH_LINE, called_name, parsed_source
from optuna_dsat.script.command import interceptor
from optuna_dsat.script.command.preparation import Prepared, keep_prepared, until_exit
from optuna_dsat.script.command.source import imported_modules, module_file, numbers_ranks
from optuna_dsat.secrecy.references import without_secrets

REMEDY = "Name the script and its config instead: optuna-dsat METHOD SCRIPT CONFIG -- ARGUMENTS."
"""What to do where a command cannot be run here."""
_POLL_S = 0.05
_SHOWN_CHARS = 300
_PACKAGES = str(Path(__file__).resolve().parents[3])
_ENTER = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from optuna_dsat.runtime.isolation.world import run_apart; run_apart(*sys.argv[2:])"
)
"""Code of the process that becomes a command in overlays."""
_REFUSED = re.compile(r"^[^:]*: error: |^(\w+\.)*\w+(Error|Exception): ")
"""Matches the beginning of an error message of argparse, or of an exception's last line."""
_SHORTEST_WAIT_S = 0.3
_LONGEST_WAIT_S = 3.0
_LONGEST_END_S = 10.0
"""Maximum time that srun may take to end its job."""
_BACKGROUND_S = 60.0
"""Maximum time that processes which a command left behind may take to reach their launch."""
_STDERR = 2
_FIRST_BYTES = 256
"""Number of leading bytes of a file that identify its interpreter."""
_SHELLS = (".sh", ".bash", ".zsh")
_PYTHONS = ("python", "python3", f"python3.{sys.version_info.minor}")
_SUBMITTERS = ("sbatch", "qsub", "bsub", "condor_submit")
"""Programs that submit a job, whose ranks start elsewhere and later."""
_SUBMITS_NOTHING = """\
#!/bin/sh
echo "$(basename "$0"): not submitted. A job starts later: name its script, as in 'optuna-dsat METHOD bash JOB.sh'." >&2
exit 1
"""
_STARTERS = frozenset(
    {"Popen", "call", "check_call", "check_output", "execvp", "execvpe", "execv", "popen", "run", "system"}
)
"""Functions of ``subprocess`` and ``os`` that start a program."""
_OF_PROCESSES = frozenset(
    {"_", "SHLVL", "PWD", "OLDPWD", "PATH", interceptor.RECORD, interceptor.TYPED, interceptor.LAUNCHER}
)
"""Variables that differ between any two processes."""
_OF_LAUNCHES = frozenset(
    {"MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}
)
"""Variables that each launch sets itself."""
_OF_MPI = (
    "GFORTRAN_UNBUFFERED_PRECONNECTED",
    "HFI_NO_BACKTRACE",
    "HOROVOD_",
    "HYDI_",
    "HYDRA_",
    "IPATH_NO_BACKTRACE",
    "MPIEXEC_",
    "MPI_LOCAL",
    "MV2_COMM_",
    "OPAL_",
    "OMPI_",
    "ORTE_",
    "PMIX_",
    "PMI_",
    "PRTE_",
    "SRUN_",
)
"""Prefixes of the variables that Open MPI, MPICH, MVAPICH, horovodrun and srun set for a rank."""
_OF_SLURM = frozenset(
    {"SLURM_GTIDS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NPROCS", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_TASK_PID"}
)
"""Variables that srun sets for a task."""
_RANKS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_SIZE"),
    ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS", None),
    ("PMI_RANK", "PMI_SIZE", None),
    ("RANK", "WORLD_SIZE", None),
)
"""Variables with the index of a rank, the total number of ranks and the ranks per node."""
_SAME_VALUES = {
    "RANK": ("OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "HOROVOD_RANK", "SLURM_PROCID"),
    "LOCAL_RANK": (
        *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_NODE_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
        *("HOROVOD_LOCAL_RANK", "PMI_LOCAL_RANK", "SLURM_LOCALID"),
    ),
    "WORLD_SIZE": (
        *("OMPI_COMM_WORLD_SIZE", "OMPI_UNIVERSE_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE", "HOROVOD_SIZE"),
        *("SLURM_NTASKS", "SLURM_NPROCS"),
    ),
    "LOCAL_WORLD_SIZE": (
        *("OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "HOROVOD_LOCAL_SIZE"),
        *("PMI_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE"),
    ),
    "GROUP_RANK": ("HOROVOD_CROSS_RANK", "SLURM_NODEID"),
    "GROUP_WORLD_SIZE": ("HOROVOD_CROSS_SIZE", "SLURM_JOB_NUM_NODES", "SLURM_NNODES", "SLURM_STEP_NUM_NODES"),
    "MASTER_ADDR": ("SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_STEP_NODELIST"),
    "MASTER_PORT": ("SLURM_JOBID", "SLURM_JOB_ID"),
}
"""Variable of torchrun -> variables of mpirun, horovodrun and srun with its value. Scripts take a list of nodes for the
address of its first, and derive a port from the number of the job: a launch has its own number."""
OF_LAUNCHERS = {name: f"${same}" for same, names in _SAME_VALUES.items() for name in names}
"""Variables that mpirun, horovodrun or srun sets for its ranks -> ``$NAME``, with the value of torchrun's variable."""
_STEP = ("SLURM_STEP_ID", "SLURM_JOB_ID")
_NODES = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES")
_OF_TASKS = "SLURM_CPUS_PER_TASK"
"""Variable that srun sets to the same value in any job."""
_OF_IMPORTS = frozenset({"PYTORCH_NVML_BASED_CUDA_CHECK"})
"""Variables that DeepSpeed sets on import, and so any program that calls its launcher."""
_FIELDS = "ACCELERATE_CONFIG_DS_FIELDS"
_OF_WRAPPERS = ("BASH_FUNC_", "CONDA_", "MAKE", "MFLAGS", "PIPENV_", "POETRY_", "PDM_", "UV", "VIRTUAL_ENV")
"""Prefixes of variables that wrappers set for themselves."""


@dataclass(frozen=True, kw_only=True)
class InterceptedRank:
    """The first rank that a command starts."""

    words: tuple[str, ...]
    """The command of the rank: Python and a script or module."""
    python: str
    """Path of its interpreter."""
    folder: Path
    environment: Mapping[str, str]
    """Variables that the command and accelerate set for it, except for rank and rendezvous."""
    launcher: str | None = None
    """The outermost launcher: ``deepspeed``, ``deepspeed.launcher.launch``, ``torchrun`` or ``accelerate``."""
    launch_words: tuple[str, ...] = ()
    """The launcher's command; that of the rank without a launcher."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The launcher's options as it parsed them, and its conclusions (``interceptor``)."""
    ranks: int | None = None
    """Ranks on each node that another program, such as mpirun, starts; None for a single process."""
    nodes: int = 1
    rank_variables: Mapping[str, str] = field(default_factory=dict)
    """The part of ``OF_LAUNCHERS`` that mpirun or srun has set for it; empty where another program starts the ranks."""
    prepared: str = ""
    """Folder of the files that the command has prepared (``runtime.isolation.prepared``); empty for none."""


def is_wrapper(word: str, *, cwd: Path) -> bool:
    """Whether a command's first word, which is not a launcher, runs a program or a shell script instead of Python."""
    path = cwd / word
    if path.is_file():
        if path.suffix in _SHELLS:
            return True
        with contextlib.suppress(OSError), open_regular(path) as opened:
            first = (opened.read(_FIRST_BYTES) or b"").partition(b"\n")[0]
            return first.startswith((b"\x7fELF", b"#!")) and not (first.startswith(b"#!") and b"python" in first)
        return False
    return not path.exists() and "/" not in word and not word.endswith(".py") and shutil.which(word) is not None


def is_of_rank(name: str) -> bool:
    """Return whether mpirun, horovodrun or srun sets a variable for a single rank."""
    return name in _OF_SLURM or name.startswith(_OF_MPI)


def is_of_launch(name: str) -> bool:
    """Return whether a launch sets a variable for each of its ranks."""
    return name in _OF_LAUNCHES or is_of_rank(name)


def count_launches(words: Sequence[str], *, cwd: Path, script: str = "") -> int:
    """Count the launches in the shell scripts of a command, one of which launches ``script``."""
    name = re.escape(Path(script).name)
    names_script = (
        re.compile(rf"(?:deepspeed|torchrun|accelerate|python\S*)\s.*{name}(?:\s|$)") if name else LAUNCH_LINE
    )
    text = ""
    for word in words:
        with contextlib.suppress(OSError):
            if (cwd / word).is_file() and is_wrapper(word, cwd=cwd):  # a program on PATH is no text
                text += read_regular(cwd / word).decode(errors="replace")
    lines = text.replace("\\\n", " ").splitlines()
    code = [line for line in lines if not line.strip().startswith(("#", "echo "))]
    return sum(bool(names_script.search(line) or LAUNCH_LINE.search(line)) for line in code)


def starts_launcher(file: Path, *, cwd: Path) -> bool:
    """Whether a Python file starts a launcher, perhaps by a shell script, or ranks by Python's command.

    A script that itself trains may name a launcher in a comment: it is launched if it names itself in the command.
    """
    try:
        tree = parsed_source(file)
    except (OSError, SyntaxError, ValueError):
        return False
    nodes = list(ast.walk(tree))
    if "submitit" in (imported := set(imported_modules(nodes))):  # it submits a job, or starts the ranks
        return True
    called = {called_name(node) for node in nodes if isinstance(node, ast.Call)}
    if called & {*_STARTERS, "fork"} and numbers_ranks(nodes):
        return "fork" in called or "executable" in (getattr(node, "attr", "") for node in nodes)
    if "initialize" in called:
        commands = [node for node in nodes if isinstance(node, ast.Call | ast.Assign)]
        restarts = [node for node in commands if re.search(r"\b(__file__|sys\.argv)\b", ast.unparse(node))]
        nodes = [node for restart in restarts for node in ast.walk(restart) if isinstance(node, ast.List | ast.Tuple)]
    elif imported & set(interceptor.MODULES):
        return True
    return bool(called & _STARTERS) and any(_names_launcher(node, cwd=cwd) for node in nodes)


def _names_launcher(node: ast.AST, *, cwd: Path) -> bool:
    """Whether a literal is the command of a launcher, or of a shell script with one: a list of words, or a line."""
    if isinstance(node, ast.List | ast.Tuple):
        words = [item.value for item in node.elts if isinstance(item, ast.Constant) and isinstance(item.value, str)]
        first = node.elts[0].value if node.elts and isinstance(node.elts[0], ast.Constant) else None
        is_name = isinstance(first, str) and Path(first).name in interceptor.LAUNCHERS and len(node.elts) > 1
        return is_name or ("-m" in words and bool(set(words) & set(interceptor.MODULES)))
    if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
        return False
    return bool(LAUNCH_LINE.search(node.value)) or count_launches(node.value.split()[:2], cwd=cwd) > 0


def intercept(
    words: Sequence[str],
    *,
    cwd: Path,
    python: str | None = None,
    launcher: str | None = None,
    on_notice: Callable[[str], None] = lambda _: None,
    into: Callable[[], Path] = until_exit,
) -> InterceptedRank:
    """Run a command without input and return the first rank that it starts.

    Programs that ``PATH`` lacks are searched for in the environment of the interpreter ``python``. The output of a
    ``launcher`` is read for its error; other programs write to stderr, and ``on_notice`` is called before: they may
    take as long as they need to reach their launch. Files that they write before are kept in a subfolder of ``into``;
    without it, until this process ends.

    Raises:
        UsageError: If it ends without starting a rank.
    """
    line = f"`{shlex.join(without_secrets(words))}`"
    why = "" if launcher is not None else why_no_overlay(Path(tempfile.gettempdir()))
    if launcher is None:
        apart = "Trials see what it writes, your files do not change."
        real = f"No overlay can be mounted ({why}): it writes to your files."
        on_notice(
            f"Running {line} up to the launch of a training, which is read and not started. {real if why else apart}"
        )
    with tempfile.TemporaryDirectory(prefix="optuna-dsat-launch-") as made:
        folder = Path(made)
        record = folder / "launch.json"
        _install_interceptor(folder, python or sys.executable)
        files = [cwd / word for word in words if word.endswith(".py")]
        modules = (module_file(word, cwd, python=python) for before, word in pairwise(words) if before == "-m")
        starts_another = any(starts_launcher(file, cwd=cwd) for file in (*files, *filter(None, modules)))
        environ = {
            **os.environ,
            interceptor.RECORD: str(record),
            interceptor.TYPED: json.dumps([] if starts_another else list(words)),
            "PATH": _in_front(folder, os.environ.get("PATH", os.defpath)),
            "PYTHONPATH": _in_front(folder, os.environ.get("PYTHONPATH", "")),
        }
        log = folder / "output"
        try:
            with log.open("wb") as output:
                records = _first_ranks(
                    words,
                    record,
                    cwd=cwd,
                    environ=environ,
                    output=None if launcher is None else output,
                    into=into,
                )
        except OSError as error:
            raise UsageError(f"{words[0]} cannot be run: {error.strerror}. {REMEDY}") from None
        world = World.load(plan_apart(made).record)
        if isinstance(records, int) and launcher is not None:
            raise UsageError(f"{launcher} started no rank here: {_reason(log, code=records)}. {REMEDY}")
        refused = record.with_name(f"{record.name}{interceptor.REFUSED}")
        if isinstance(records, int) and refused.is_file():
            reason = shortened(refused.read_text(encoding="utf-8", errors="replace").rstrip("."), _SHOWN_CHARS)
            raise UsageError(f"{line} launched no training, as a launcher in it refused its options: {reason}.")
    if isinstance(records, int):
        how = "" if records == 0 else f" with exit code {records} (it is run without input: it can ask no question)"
        raise UsageError(
            f"{line} ended{how} and launched no training: neither by deepspeed, torchrun or accelerate, nor by a "
            f"Python script that begins to train with DeepSpeed. {REMEDY}"
        )
    if launcher is None and not why and (world.mode != "mount" or world.reason):
        on_notice(f"{line} wrote to your files until its launch, as no overlay can be mounted: {world.reason}.")
    result, *others = records
    made_before: Prepared = result.get("prepared", Prepared())
    cwd = Path(result["folder"])
    for notice in made_before.notices(cwd):
        on_notice(notice)
    of_rank = result["environment"]
    ranks, nodes = ranks_of(of_rank)
    by_other = ranks is not None and "launcher" not in result
    rank_variables = {name: same for name, same in OF_LAUNCHERS.items() if by_other and name in of_rank}
    if ranks is None and others:
        ranks = len(records)
        of_rank = {
            name: value
            for name, value in of_rank.items()
            if all(rank["environment"].get(name) == value for rank in others)
        }
    by = result.get("launcher", {"name": None, "words": result["words"], "environment": of_rank})
    variables = _set_by_command({**by["environment"], **_of_plugin(of_rank)}, folder=folder)
    options = by.get("options", {})
    return InterceptedRank(
        words=tuple(made_before.named(word, cwd) for word in result["words"]),
        python=result["python"],
        folder=cwd,
        environment={name: made_before.named(value, cwd) for name, value in variables.items()},
        launcher=by["name"],
        launch_words=tuple(by["words"]),
        options={name: made_before.named(v, cwd) if isinstance(v, str) else v for name, v in options.items()},
        prepared=made_before.folder,
        ranks=ranks,
        nodes=nodes,
        rank_variables=rank_variables,
    )


def _of_plugin(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of accelerate if they are for its DeepSpeed plugin; else each launch sets the plugin up.

    With a list of the fields of its YAML, the plugin would reject the fields that a config file replaces.
    """
    if "ACCELERATE_USE_DEEPSPEED" not in environment:
        return {}
    return {name: environment[name] for name in environment if name.startswith("ACCELERATE_") and name != _FIELDS}


def _reason(log: Path, *, code: int) -> str:
    """Return the last line of a launcher's output: its error, without the name that argparse writes before it."""
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    last = lines[-1].strip() if lines and code else f"it ended with exit code {code}"
    return shortened(_REFUSED.sub("", last).rstrip("."), _SHOWN_CHARS)


def _install_interceptor(folder: Path, python: str) -> None:
    """Fill a folder for the front of PATH and PYTHONPATH: Python runs ``interceptor``, even if PYTHONPATH is reset.

    Programs that submit a job are replaced: nothing is submitted.
    """
    shutil.copyfile(interceptor.__file__, folder / "sitecustomize.py")
    shims = {name: _SUBMITS_NOTHING for name in _SUBMITTERS if shutil.which(name)}
    for name in (*interceptor.LAUNCHERS, *_PYTHONS):
        real = shutil.which(name) or shutil.which(name, path=str(Path(python).parent))
        if real is None:
            continue
        text = f'PYTHONPATH={shlex.quote(str(folder))}"${{PYTHONPATH:+:$PYTHONPATH}}" exec {shlex.quote(real)} "$@"'
        shims[name] = f"#!/bin/sh\n{text}\n"
    for name, text in shims.items():
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(0o700)


def _in_front(folder: Path, path: str) -> str:
    return os.pathsep.join(filter(None, (str(folder), path)))


def _first_ranks(
    words: Sequence[str],
    record: Path,
    *,
    cwd: Path,
    environ: Mapping[str, str],
    output: IO[bytes] | None,
    into: Callable[[], Path],
) -> list[dict[str, Any]] | int:
    """Run a command until it starts a rank. Return its record, or the exit code if it starts none.

    Records of the other ranks follow if neither a launcher nor a variable gives the number of ranks.
    """
    started = time.monotonic()
    file = cwd / words[0]
    if file.is_file():
        words = [*([] if os.access(file, os.X_OK) else ["bash"]), str(file), *words[1:]]
    elif shutil.which(words[0], path=environ["PATH"]) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    apart = [] if output else [sys.executable, "-I", "-c", _ENTER, _PACKAGES, str(record.parent)]
    process = subprocess.Popen(
        [*apart, *words],
        cwd=cwd,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=output or _STDERR,
        stderr=output,
        start_new_session=True,
    )
    groups = {process.pid}
    signals = [signal.SIGKILL]
    ended = started
    try:
        while True:
            code = process.poll()  # polled first: the record may be written just before the exit
            if record.is_file():
                result: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
                groups.add(int(result["group"]))
                if any(result["environment"].get(name) != os.environ.get(name) for name in _STEP):
                    signals = [signal.SIGTERM, signal.SIGKILL]  # the job of a killed srun would keep its nodes
                if apart:
                    result["prepared"] = keep_prepared(result, folder=record.parent, into=into())
                if "launcher" in result or ranks_of(result["environment"])[0] is not None:
                    return [result]
                time.sleep(min(max((time.monotonic() - started) / 2, _SHORTEST_WAIT_S), _LONGEST_WAIT_S))
                ranks = [json.loads(file.read_text(encoding="utf-8")) for file in record.parent.glob("*.rank*")]
                groups.update(int(rank["group"]) for rank in ranks)
                same = {rank["process"]: rank for rank in ranks if rank["words"] == result["words"]}
                return [result, *(same[process] for process in same if process != result["process"])]
            if code is None:
                ended = time.monotonic()
            elif time.monotonic() - ended > _BACKGROUND_S or not _has_processes(process.pid):
                return code
            time.sleep(_POLL_S)
    finally:
        for number in signals:
            for group in groups:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(group, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(None if number == signal.SIGKILL else _LONGEST_END_S)


def _has_processes(group: int) -> bool:
    """Whether a command left processes behind, such as ``nohup torchrun ... &``."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def ranks_of(environment: Mapping[str, str]) -> tuple[int | None, int]:
    """Return (ranks per node, nodes) of a launch from a rank's variables that differ from this process's."""
    for index, everywhere, here in _RANKS:
        changed = any(environment.get(name) != os.environ.get(name) for name in (index, everywhere, *_STEP))
        given = index in environment and (here is None or here in environment)
        total = environment.get(everywhere, "")
        if not changed or not given or not total.isdigit() or not int(total):
            continue
        counts = [environment.get(name, "") for name in ((here,) if here else _NODES)]
        count = next((int(value) for value in counts if value.isdigit() and int(value)), None)
        ranks = int(total) if count is None else count if here else max(1, int(total) // count)
        return ranks, max(1, int(total) // ranks)
    return None, 1


def _set_by_command(environment: Mapping[str, str], *, folder: Path) -> dict[str, str]:
    """Return the variables of a launch that differ from this process's and are relevant to it."""
    result = {**environment, "PYTHONPATH": _without(folder, environment.get("PYTHONPATH", ""))}
    inherited = {"PYTHONPATH": "", **os.environ}
    return {
        name: value
        for name, value in result.items()
        if inherited.get(name) != value
        and name not in _OF_PROCESSES | _OF_IMPORTS
        and (name == _OF_TASKS or not name.startswith((*_OF_WRAPPERS, "SLURM")))
        and not is_of_launch(name)
        and name.isidentifier()
    }


def _without(folder: Path, path: str) -> str:
    return os.pathsep.join(entry for entry in path.split(os.pathsep) if entry and entry != str(folder))
