"""The Python interpreter of the user's script, which need not be the interpreter of optuna-dsat."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from optuna_dsat.errors import UsageError
from optuna_dsat.runtime.files import open_regular, shortened
from optuna_dsat.secrecy.shapes import hidden

OLDEST = (3, 9)
"""Oldest Python on which a launch runs."""
_SAFE_PATH = (3, 11)
"""First Python with ``-P``."""
_REQUIRED = {"torch": "torch", "deepspeed": "DeepSpeed"}
"""Package of a launch -> its name in messages."""
_START_S = 60.0
"""Time limit in seconds for an interpreter to start; a cold network file system takes seconds."""
_FATAL = "Fatal Python error: "
_MOST_CHARS = 300
_FIRST_BYTES = 1024
_SHEBANG = re.compile(rb"#!\s*(\S+)(?:[ \t]+(?:-S[ \t]+)?(\S+))?")
_EXEC = re.compile(rb"^'''exec' (\"[^\"]+\"|\S+)", re.MULTILINE)
"""Second line of a console script by pip whose interpreter's path is too long, or has spaces, for a first line."""
_PROBE = """
import json, sys
result = {"version": list(sys.version_info[:3]), "prefix": sys.prefix,
          "path": [entry for entry in sys.path if entry], "versions": {}}
if sys.version_info >= (3, 8):
    from importlib import metadata, util
    for name in ("torch", "deepspeed"):
        if util.find_spec(name) is not None:
            try:
                result["versions"][name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                result["versions"][name] = "of no known version"
print(json.dumps(result))
"""


@dataclass(frozen=True)
class Installation:
    """A Python interpreter and the packages of a launch that it can import."""

    python: str
    """Path of the interpreter, which may be a link: it determines the virtual environment."""
    version: tuple[int, int, int]
    prefix: str
    path: tuple[str, ...]
    """Its ``sys.path``."""
    versions: Mapping[str, str]
    """Package -> its version; without packages that are not installed."""

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the required packages that are not installed."""
        return tuple(shown for name, shown in _REQUIRED.items() if name not in self.versions)

    @property
    def all_versions(self) -> dict[str, str]:
        """Versions of Python and of the packages."""
        return {"python": ".".join(map(str, self.version)), **self.versions}

    def __str__(self) -> str:
        shown = ", ".join(f"{_REQUIRED[name]} {version}" for name, version in self.versions.items())
        return f"{self.python}: Python {'.'.join(map(str, self.version))}{', ' * bool(shown)}{shown}"


def examined(python: str) -> Installation:
    """Return version, path and packages of an interpreter, without importing the packages; the answer is kept.

    Raises:
        UsageError: If it does not start.
    """
    return _examined(python, os.environ.get("PYTHONPATH", ""))


@functools.cache
def _examined(python: str, _python_path: str) -> Installation:
    try:
        ended = subprocess.run(
            [python, "-c", _PROBE], cwd="/", capture_output=True, stdin=subprocess.DEVNULL, timeout=_START_S, check=True
        )
        facts = json.loads(ended.stdout)
    except OSError as error:
        raise UsageError(f"The interpreter {python} cannot be run here: {error.strerror}. {_REMEDY}") from None
    except subprocess.TimeoutExpired:
        raise UsageError(f"The interpreter {python} did not start within {_START_S:g} s. {_REMEDY}") from None
    except (subprocess.CalledProcessError, ValueError) as error:
        reason = _last_line(getattr(error, "stderr", b"")) or "it is not Python"
        raise UsageError(f"The interpreter {python} does not start: {reason}. {_remedy(python)}") from None
    return Installation(
        python=python,
        version=tuple(facts["version"]),
        prefix=facts["prefix"],
        path=tuple(facts["path"]),
        versions=facts["versions"],
    )


_REMEDY = "Name the interpreter of your script with --python."


def _remedy(python: str) -> str:
    environment = Path(python).parent.parent
    if (environment / "conda-meta").is_dir() and os.environ.get("CONDA_PREFIX") != str(environment):
        return f"It belongs to a conda environment that is not active: conda activate {shlex.quote(str(environment))}."
    return _REMEDY


def usable(python: str) -> Installation:
    """Return an interpreter that can run launches.

    Raises:
        UsageError: If it does not start, is too old, or has no torch or DeepSpeed.
    """
    result = examined(python)
    if result.version < OLDEST:
        raise UsageError(
            f"{python} is Python {'.'.join(map(str, result.version))}; launches need {'.'.join(map(str, OLDEST))} or "
            f"newer. {_REMEDY}"
        )
    if result.missing:
        raise UsageError(f"{python} has no {' and no '.join(result.missing)}. {_REMEDY}")
    return result


def named_python(name: str) -> str:
    """Return the absolute path of an interpreter named by the user: a path, a program, or an environment's folder.

    Raises:
        UsageError: If there is none.
    """
    path = Path(name, "bin", "python") if Path(name).is_dir() else Path(name)
    program = str(path) if os.sep in str(path) else shutil.which(name)
    if program is None or not Path(program).is_file():
        raise UsageError(f"--python is {name}: there is no such interpreter.")
    return os.path.abspath(program)  # noqa: PTH100 - keeps links: they determine the virtual environment


def default_python() -> str:
    """Return the first interpreter with torch and DeepSpeed: the active environment's, this process's, or on ``PATH``.

    Raises:
        UsageError: If none has both.
    """
    environ = os.environ
    folders = [Path(environ[name], "bin") for name in ("VIRTUAL_ENV", "CONDA_PREFIX") if environ.get(name)]
    named = [str(folder / "python") for folder in folders]
    named += [sys.executable, *(path for name in ("python", "python3") if (path := shutil.which(name)))]
    reasons = []
    for python in dict.fromkeys(path for path in named if Path(path).is_file()):
        try:
            installation = usable(python)
        except UsageError as error:
            reasons.append(str(error).removesuffix(f" {_REMEDY}"))
        else:
            return installation.python
    raise UsageError(" ".join(["No interpreter can run the script.", *reasons, _REMEDY]))


def script_python(named: str | None) -> str | None:
    """Return the named interpreter of a script; None if it belongs to the environment of this process.

    Raises:
        UsageError: If it cannot run launches, or there is none.
    """
    python = default_python() if named is None else usable(named_python(named)).python
    return None if examined(python).prefix == sys.prefix else python


def script_versions(python: str | None, *, on: str) -> dict[str, str]:
    """Return the versions of Python, torch and DeepSpeed in launches; empty if only nodes of a cluster know them."""
    try:
        return examined(python or sys.executable).all_versions
    except UsageError:
        if on == "here":
            raise
        return {}


def interpreter_of(program: Path) -> str | None:
    """Return the interpreter of an executable Python script, by its first lines; None for another file."""
    try:
        with open_regular(program) as opened:
            first = opened.read(_FIRST_BYTES) or b""
    except OSError:
        return None
    match = _SHEBANG.match(first)
    if match is None:
        return None
    word = os.fsdecode(match[1])
    if Path(word).name == "env" and match[2]:
        word = shutil.which(os.fsdecode(match[2])) or ""
    if Path(word).name == "sh" and (behind := _EXEC.search(first)) is not None:
        word = os.fsdecode(behind[1]).strip('"')
    return word if "python" in Path(word).name and Path(word).is_file() else None


def module_command(python: str, module: str, *options: str) -> list[str]:
    """Return the command that runs a module; the working directory is not on its path (Python 3.11 or newer)."""
    return [python, *(["-P"] if examined(python).version >= _SAFE_PATH else []), *options, "-m", module]


def with_package(python_path: str | None) -> str:
    """Return a value of ``PYTHONPATH`` with which an interpreter imports this copy of ``optuna_dsat``."""
    package = str(Path(__file__).resolve().parents[1] / "on_path")
    entries = python_path.split(os.pathsep) if python_path else []
    return os.pathsep.join([package, *(entry for entry in entries if entry != package)])


def package_folders(top: str, python: str | None) -> tuple[Path, ...]:
    """Return the folders in which an interpreter finds a top-level module or package; imports nothing."""
    if python is None or python == sys.executable:
        places = module_places(top)
    else:
        places = _places_elsewhere(top, python, os.environ.get("PYTHONPATH", ""))
    return tuple(Path(place).parent for place in places)


def module_places(top: str) -> list[str]:
    """Return the file of a module, or the folders of a package; empty if this interpreter has no such module."""
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):  # not a valid name, or a module without a spec
        return []
    if spec is None:
        return []
    return list(spec.submodule_search_locations or filter(None, [spec.origin]))


@functools.cache
def _places_elsewhere(top: str, python: str, _python_path: str) -> list[str]:
    import inspect

    source = f"from __future__ import annotations\nimport importlib.util, json, sys\n{inspect.getsource(module_places)}"
    code = f"{source}\nprint(json.dumps(module_places(sys.argv[1])))"
    ended = subprocess.run([python, "-c", code, top], cwd="/", capture_output=True, check=False)
    return list(json.loads(ended.stdout or b"[]"))


def has_console_script(name: str, module: str, *, python: str) -> bool:
    """Return whether a package installed for an interpreter declares a console script that runs a module."""
    return any(
        entry.group == "console_scripts" and entry.name == name and entry.module == module
        for distribution in importlib.metadata.distributions(path=list(examined(python).path))
        for entry in distribution.entry_points
    )


def _last_line(errors: bytes | None) -> str:
    """Return the fatal error in an interpreter's messages, or the last of them."""
    lines = (errors or b"").decode("utf-8", errors="replace").strip().splitlines()
    fatal = next((line for line in lines if line.startswith(_FATAL)), "".join(lines[-1:]))
    return shortened(hidden(fatal.removeprefix(_FATAL)), _MOST_CHARS)
