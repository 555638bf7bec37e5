"""All paths of a launch's directory in a single class; its files are written atomically.

The directory of a launch:

    trial-0007/
      ds_config.json      the launch's complete DeepSpeed config, which the script reads
      launch.json         the launch description that every rank reads
      command.json        the command, its working directory, its devices
      command.txt         the command as a line for a shell
      env.json            environment variables, by an allow-list
      agent.json          exit codes and signals of failed ranks, as seen by torchrun; missing if it was killed
      report.json         the launch's report
      next.json           the next trial of the same ranks, or the order to leave (``runtime/measure/live.py``)
      events/rank0.jsonl  events of rank 0
      logs/agent.log      output of torchrun itself
      logs/rank0.stdout.log, logs/rank0.stderr.log
      logs/rank0.stacks.log  stacks of rank 0 while it was silent
      trackers/           output of experiment trackers and TensorBoard, which they would otherwise upload
      world/              changes of the launch to the user's files, while it runs (``runtime/isolation/world.py``)
      world.json          which folders were protected, and how
"""

from __future__ import annotations

import contextlib
import errno
import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from optuna_dsat.errors import DsatError
from optuna_dsat.launch.protocol import LaunchReport, is_launch_id
from optuna_dsat.runtime.files import set_aside, write_text_atomic
from optuna_dsat.script.interpreter import module_command
from optuna_dsat.secrecy.names import is_secret_name
from optuna_dsat.secrecy.references import hidden_text, shell_join, without_secrets

_RECORDED_NAMES = frozenset(
    {
        "CLEARML_OFFLINE_MODE",
        "CUDA_DEVICE_ORDER",
        "CUDA_HOME",
        "CUDA_LAUNCH_BLOCKING",
        "CUDA_VISIBLE_DEVICES",
        "DS_ACCELERATOR",
        "HF_DATASETS_OFFLINE",
        "HF_HUB_OFFLINE",
        "LD_LIBRARY_PATH",
        "LD_PRELOAD",
        "LOCAL_SIZE",
        "MKL_NUM_THREADS",
        "NEPTUNE_MODE",
        "OMP_NUM_THREADS",
        "OPTUNA_DSAT_LAUNCH",
        "OPTUNA_DSAT_LAUNCH_ID",
        "PYTHONPATH",
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
        "SWANLAB_MODE",
        "TOKENIZERS_PARALLELISM",
        "TORCH_EXTENSIONS_DIR",
        "TRANSFORMERS_OFFLINE",
        "WANDB_MODE",
    }
)
_RECORDED_PREFIXES = ("ACCELERATE_", "DS_BUILD_", "GLOO_", "NCCL_", "TORCH_NCCL_")


class OutputError(DsatError):
    """A launch's directory cannot be written: a full disk, a quota or missing permissions.

    The study is intact; it can be resumed once the directory can be written again.
    """

    exit_code = 5


def recorded_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables on the allow-list, without values that look like secrets."""
    return {
        name: hidden_text(environ[name], environ)
        for name in sorted(environ)
        if name in _RECORDED_NAMES or (name.startswith(_RECORDED_PREFIXES) and not is_secret_name(name))
    }


@contextlib.contextmanager
def readable_errors(path: Path) -> Iterator[None]:
    """Return a context in which an OSError at a path becomes an ``OutputError`` with the remedy."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            text = f"No space left to write {path}. Free some space or choose another --output-dir, then resume."
        else:
            text = f"Cannot write {path}: {error.strerror}. Choose an --output-dir that can be written."
        raise OutputError(text) from error


class _Path:
    """A path in a run directory."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, directory: RunDirectory, _owner: type[RunDirectory]) -> Path:
        return directory.root / self._name


@dataclass(frozen=True)
class RunDirectory:
    """The directory of a launch and all paths in it, which the module's docstring describes."""

    root: Path
    leavings: Path | None = None
    """Journal outside of it for leftovers of the launch's processes elsewhere; None for none."""

    @classmethod
    def create(cls, output_dir: Path, launch_id: str) -> RunDirectory:
        """Create an empty directory for a launch; rename the directory of an earlier launch with the same ID.

        Raises:
            ValueError: If ``launch_id`` is not a valid directory name.
            OutputError: If the directory cannot be created.
        """
        if not is_launch_id(launch_id):
            raise ValueError(f"launch_id names a directory: letters, digits, '.', '_' and '-' only; got {launch_id!r}.")
        root = output_dir.resolve() / launch_id
        with readable_errors(root):
            if root.exists():
                set_aside(root)
            directory = cls(root)
            directory.events_dir.mkdir(parents=True)
            directory.log_dir.mkdir()
            directory.trackers_dir.mkdir()
        return directory

    config = _Path("ds_config.json")
    launch = _Path("launch.json")
    command_json = _Path("command.json")
    command_text = _Path("command.txt")
    environment = _Path("env.json")
    agent_record = _Path("agent.json")
    report = _Path("report.json")
    trackers_dir = _Path("trackers")
    events_dir = _Path("events")
    log_dir = _Path("logs")
    agent_log = _Path("logs/agent.log")
    torchrun_dir = _Path("logs/torchrun")
    """Folder that torchrun creates for its logs; remains empty, since ranks write to ``log_dir``."""
    world = _Path("world")

    def events(self, rank: int) -> Path:
        """Event file of a rank."""
        return self.events_dir / f"rank{rank}.jsonl"

    def stdout(self, rank: int) -> Path:
        """Standard output of a rank."""
        return self.log_dir / f"rank{rank}.stdout.log"

    def stderr(self, rank: int) -> Path:
        """Standard error of a rank."""
        return self.log_dir / f"rank{rank}.stderr.log"

    def write_json(self, path: Path, data: Mapping[str, Any]) -> None:
        """Write ``data`` to ``path``, atomically.

        Raises:
            OutputError: If it cannot be written.
        """
        self.write_text(path, json.dumps(data, indent=2, default=str) + "\n")

    def write_text(self, path: Path, text: str) -> None:
        """Write ``text`` atomically, without following a link that a script has put in a folder's place."""
        with readable_errors(path):
            if path.parent.is_symlink():
                path.parent.unlink()
            path.parent.mkdir(exist_ok=True)
            write_text_atomic(path, text)

    def write_command(
        self, command: Sequence[str], *, cwd: str, devices: Sequence[int], environ: Mapping[str, str]
    ) -> None:
        """Write command and environment, both without secrets."""
        shown = without_secrets(command)
        environment = recorded_environment(environ)
        self.write_json(self.command_json, {"command": shown, "cwd": cwd, "devices": list(devices)})
        self.write_json(self.environment, environment)
        settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in environment.items())
        self.write_text(self.command_text, f"cd {shlex.quote(cwd)}\nenv {settings} {shell_join(shown)}\n")

    def copy_command(self, other: RunDirectory) -> None:
        """Copy command and environment from the launch that this one continues."""
        for name in (self.command_json.name, self.command_text.name, self.environment.name):
            self.write_text(self.root / name, (other.root / name).read_text(encoding="utf-8", errors="surrogateescape"))

    def write_report(self, report: LaunchReport) -> None:
        """Write the launch's report."""
        self.write_json(self.report, asdict(report))


@dataclass(frozen=True, kw_only=True)
class PreparedLaunch:
    """Command and environment of a launch with an existing run directory."""

    launch_id: str
    mark: str
    """Mark of its processes."""
    directory: RunDirectory
    cwd: str
    python: str
    """Interpreter of the ranks."""
    arguments: Sequence[str]
    """torchrun's arguments, without ``python -m torch.distributed.run``."""
    shown: tuple[str, ...]
    """The command as plain torchrun, without secrets."""
    environ: Mapping[str, str]

    def argv(self, tuner_pid: int) -> list[str]:
        """Return the command to start: torchrun by ``runtime/agent/torchrun.py``, which ends with the tuner."""
        agent = module_command(self.python, "optuna_dsat.runtime.agent.torchrun")
        return [*agent, str(self.directory.agent_record), str(tuner_pid), *self.arguments]


RANK_VARIABLES = frozenset(
    {
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "RANK",
        "ROLE_NAME",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "WORLD_SIZE",
    }
)
"""Variables that torchrun sets for its ranks; a stale value would connect a launch to another job or a used port."""


_TRACKER_PLACES: dict[str, Callable[[Path], str]] = {
    "COMET_OFFLINE_DIRECTORY": str,
    "MLFLOW_TRACKING_URI": lambda folder: (folder / "mlflow").as_uri(),
    "TENSORBOARD_LOGGING_DIR": lambda folder: str(folder / "tensorboard"),
    "WANDB_DIR": str,
}
"""Variable with a tracker's location -> its value for a launch's folder for trackers."""


TRACKER_FOLDERS = frozenset(_TRACKER_PLACES)
"""Variables whose value is a folder of the launch."""
