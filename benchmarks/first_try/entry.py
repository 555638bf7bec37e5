"""An entry of the list: one public script, as a YAML file of ``scripts/``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

SCRIPTS = Path(__file__).parent / "scripts"


class EntryError(ValueError):
    """An entry says something that the format does not know, or lacks what it needs."""


@dataclass(frozen=True, kw_only=True)
class Edit:
    """An exact replacement in one file of the checkout: a size, a path or what the machine cannot do; never a loop."""

    path: str
    """File, relative to the repository."""
    old: str
    """Text that stands there exactly once."""
    new: str


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One public script."""

    name: str
    """The file's name without its suffix."""
    style: str
    """How it uses DeepSpeed, in a few words: own loop, Trainer, accelerate, Lightning, console script, pipeline, GAN,
    Determined, and what sets its batch size."""
    repository: str
    """``owner/name`` on GitHub."""
    commit: str
    folder: str = "."
    """Folder of the repository in which its README has the command run."""
    command: str
    """The command that its README gives, after the alterations."""
    given: str = ""
    """The README's own command where ``command`` differs from it."""
    altered: tuple[str, ...] = ()
    """Everything that differs from the repository as it stands, one sentence each: every edit, file and changed
    argument is told here."""
    needs: tuple[str, ...] = ()
    """Packages beyond torch and DeepSpeed, as pip names them."""
    modules: tuple[str, ...] = ()
    """Modules of ``needs`` whose absence makes the entry ``not judged``; empty for names equal to the packages'."""
    data: str = ""
    """What it downloads or reads, and what stands in for it."""
    files: Mapping[str, Any] = field(default_factory=dict)
    """Path relative to the repository -> its content: a string as it is, anything else as JSON, or
    ``{generate: NAME, ...}`` for a generator of ``stand_ins/files.py``."""
    models: Mapping[str, str] = field(default_factory=dict)
    """Model of the hub, or folder relative to ``folder`` that begins with ``.`` -> kind of ``stand_ins/hub.py`` that
    stands in for it."""
    datasets: Mapping[str, str] = field(default_factory=dict)
    """Data set of the hub, or folder for ``load_from_disk`` that begins with ``.`` -> kind of
    ``stand_ins/hub.py`` that stands in for it."""
    python: str = ""
    """Name of the environment that its script needs, whose interpreter the variable ``FIRST_TRY_PYTHON_NAME`` names;
    empty for the runner's own."""
    edits: tuple[Edit, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables that its README has the user set, or that its stand-ins read."""
    config: str = ""
    """The DeepSpeed config file that plain Optuna rewrites, relative to ``folder``; empty if the script has none."""
    rows: int = 1
    """Rows that the module is fed for each sample, as of two views."""
    second: tuple[str, ...] = ()
    """Options that the refusal of the first try names, for a second try."""
    not_judged: str = ""
    """Why the script cannot train here whatever tunes it; it is run all the same, and counts as nothing."""
    alone: bool = True
    """Whether the command trains without a tuner; not so for the arguments of ``det experiment create``."""


def read_entries(folder: Path = SCRIPTS) -> list[Entry]:
    """Return the entries of a folder by name.

    Raises:
        EntryError: If one of them is wrong.
    """
    return [read_entry(path) for path in sorted(folder.glob("*.yaml"))]


def read_entry(path: Path) -> Entry:
    """Return the entry of a file.

    Raises:
        EntryError: If it is wrong.
    """
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(data, dict):
        raise EntryError(f"{path.name}: a mapping is needed.")
    known = {field_.name for field_ in fields(Entry)} - {"name"}
    if strange := sorted(data.keys() - known):
        raise EntryError(f"{path.name}: unknown: {', '.join(strange)}; known: {', '.join(sorted(known))}.")
    lists = {name: tuple(data.get(name) or ()) for name in ("altered", "needs", "modules", "second")}
    try:
        edits = tuple(Edit(**edit) for edit in data.get("edits") or ())
        entry = Entry(**{"name": path.stem, **data, **lists, "edits": edits})
    except TypeError as error:
        raise EntryError(f"{path.name}: {error}") from error
    if entry.given and not entry.altered:
        raise EntryError(f"{path.name}: its command differs from the README's: say in `altered` how.")
    if (entry.edits or entry.files) and not (entry.altered or entry.data):
        raise EntryError(f"{path.name}: edits and files are told in `altered` or `data`.")
    return entry
