"""Describe the commands of a stored study, and check whether this user ran them on this machine before.

Resuming a study runs the script, arguments, variables and modules named in the database. Hashes of studies started here
are stored in a folder of the user (``XDG_STATE_HOME``, else ``~/.local/state``), with the script's content and owner: a
database that other users can write to is not trustworthy.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from optuna_dsat.config import ds_config
from optuna_dsat.errors import UsageError
from optuna_dsat.escape.shell import shell_line
from optuna_dsat.escape.terminal import one_line
from optuna_dsat.launch.machine.host import own_folder
from optuna_dsat.runtime.files import home, read_regular, write_text_atomic
from optuna_dsat.script.command.source import module_file
from optuna_dsat.secrecy.references import names_in, value_of, without_secrets
from optuna_dsat.secrecy.shapes import hidden
from optuna_dsat.study.profile.profiled import Profiled
from optuna_dsat.study.spec import StudySpec
from optuna_dsat.words import things_in_words

_FOLDER = "studies"
_SHOWN_CHARS = 1000


def what_runs(spec: StudySpec, profiled: Profiled | None, *, is_known: bool = False) -> list[str]:
    """Summarize the commands of a study on this machine in a few lines, without secrets.

    The packages that its launches import are counted, not listed, if this user ran it here before (``is_known``).
    """
    facts = _facts(spec, profiled, is_known=is_known)
    return [f"  {name:<12} {one_line(text, limit_chars=_SHOWN_CHARS)}" for name, text in facts]


def _facts(spec: StudySpec, profiled: Profiled | None, *, is_known: bool) -> Iterator[tuple[str, str]]:
    script = spec.script
    variables = {**script.environment, **(profiled.environment if profiled is not None else {})}
    modules = profiled.preload.modules if profiled is not None else ()
    yield "script", f"-m {script.script}" if script.is_module else script.script
    if script.args:
        yield "arguments", shell_line(without_secrets(script.args))
    if variables:
        yield "environment", hidden(shell_line(f"{name}={value}" for name, value in variables.items()))
    if modules:  # some thousand: show only their packages
        names = [*dict.fromkeys(name.partition(".")[0] for name in modules)]
        shown = things_in_words(len(names), "package") if is_known else ", ".join(names)
        yield "imports", f"{shown} ({things_in_words(len(modules), 'module')})"
    yield "works in", script.cwd
    if spec.python is not None:
        yield "python", spec.python
    if script.config_path:
        yield "config", script.config_path
    yield "writes to", str(spec.study_dir)


def remember(spec: StudySpec, *, file: Path | None = None) -> None:
    """Note that this user runs a study, its script in ``file`` if given, on this machine; else ``resume`` asks."""
    path = script_file(spec) if file is None else file
    if path is None:
        return
    try:
        note = {"file": str(path), "content": _content(path), "owner": path.stat().st_uid}
        write_text_atomic(_note_of(spec), json.dumps(note) + "\n", mode=0o600)
    except (OSError, UsageError):
        return


def ran_here(spec: StudySpec, *, file: Path | None = None) -> bool:
    """Return whether this user ran a study on this machine with this script: equal content, or equal path and owner."""
    path = script_file(spec) if file is None else file
    try:
        note = json.loads(_note_of(spec).read_text(encoding="utf-8"))
        if path is None or not isinstance(note, dict):
            return False
        stays = note.get("file") == str(path) and note.get("owner") == path.stat().st_uid
        return stays or note.get("content") == _content(path)
    except (OSError, ValueError, UsageError):
        return False


def script_file(spec: StudySpec) -> Path | None:
    """Return the file of a study's script; None if it is not on this machine."""
    script = spec.script
    in_module = module_file(script.script, Path(script.cwd), python=spec.python) if script.is_module else None
    path = in_module if script.is_module else Path(script.script)
    return path if path is not None and path.is_file() else None


def _content(path: Path) -> str:
    return hashlib.sha256(read_regular(path)).hexdigest()


def _note_of(spec: StudySpec) -> Path:
    """Return the file of the note on a study, named by a hash of its commands and output paths."""
    decides: dict[str, Any] = {
        "study": spec.identity(),
        "name": spec.name,
        "writes": spec.output_dir,
        **({} if spec.python is None else {"python": spec.python}),
    }
    digest = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()
    state = Path(os.environ.get("XDG_STATE_HOME") or home() / ".local" / "state")
    state.mkdir(parents=True, exist_ok=True)
    return own_folder(_FOLDER, parent=state) / f"{digest}.json"


def missing_secrets(spec: StudySpec) -> dict[str, str]:
    """Return the variables that the study's launches need and this process lacks: variable -> setting that uses it."""
    result: dict[str, str] = {}
    for what, text in _places(spec):
        for name in names_in(text):
            if value_of(name) is None:
                result.setdefault(name, what)
    return result


def _places(spec: StudySpec) -> Iterator[tuple[str, str]]:
    """Yield every text of a study that may contain references, with a description."""
    script, before = spec.script, ""
    for arg in script.args:
        option = re.match(r"[-+~]{0,2}[A-Za-z][\w./@-]*(?==)", arg)
        yield (option[0] if option else before if before.startswith("-") else "an argument"), arg
        before = arg
    for name, value in script.environment.items():
        yield f"the variable {name}", value
    for key, value in ds_config.flatten(spec.ds_config).items():
        for item in value if isinstance(value, list | tuple) else [value]:
            if isinstance(item, str):
                yield f"{key} of the DeepSpeed config", item


def require_secrets(spec: StudySpec) -> None:
    """Raise ``UsageError`` for secrets unknown in this process, with the option and the variable for each."""
    missing = missing_secrets(spec)
    if missing:
        named = "; ".join(f"{what} by {name}" for name, what in missing.items())
        raise UsageError(
            f"The study {spec.name!r} needs secrets, which are not stored: give the value of {named} in the "
            "environment, or resume on a terminal, which asks for them."
        )
