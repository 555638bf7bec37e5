"""Logs and configs of a study as artifacts that optuna-dashboard offers for download.

Optuna's ``upload_artifact`` records an artifact with its trial, which Optuna forbids once the trial has finished, and
logs are complete only then. So the record is a system attribute of the study, which optuna-dashboard also reads.
An artifact's id is a hash of its study, trial, name and content; writing it again changes nothing.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import optuna
from optuna.artifacts import FileSystemArtifactStore
from optuna.artifacts.exceptions import ArtifactNotFound

from optuna_dsat.escape.paths import OutsideError, held_inside
from optuna_dsat.launch.run_directory import RunDirectory
from optuna_dsat.report.view import StudyView
from optuna_dsat.secrecy.references import hidden_text
from optuna_dsat.secrecy.shapes import hidden_data
from optuna_dsat.study.command import BEST_CONFIG, SAME_BATCH_CONFIG
from optuna_dsat.study.result import BEST_METRICS
from optuna_dsat.trials import attributes

FOLDER = "artifacts"
"""Folder of the artifacts in a study's output directory."""
LOG_LIMIT_BYTES = 256 * 1024
"""Longer logs are cut to their end: two logs of each of 8 ranks in 64 launches then take at most 256 MiB."""

_STUDY_PREFIX = "artifacts:"
_TRIAL_PREFIX = "dashboard:artifacts:{trial_id}:"
_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, "optuna-dsat/artifacts")
_REMOVED = json.dumps(None)
"""Value with which optuna-dashboard marks a removed artifact."""
_OUR_VERSION = 5
"""UUID version of our artifact ids; Optuna uses version 4."""

_Present: TypeAlias = dict[tuple[str, str], set[str]]
"""(prefix, file name) -> keys of the recorded artifacts."""


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """A file to offer."""

    trial_id: int | None
    """Optuna's id of the artifact's trial; None for the study itself."""
    filename: str
    content: bytes

    @property
    def prefix(self) -> str:
        """Beginning of the key of its system attribute."""
        return _STUDY_PREFIX if self.trial_id is None else _TRIAL_PREFIX.format(trial_id=self.trial_id)

    @property
    def mimetype(self) -> str:
        """MIME type by the file's name."""
        return "application/json" if self.filename.endswith(".json") else "text/plain; charset=utf-8"

    def identifier(self, study_uuid: str) -> str:
        """Return an id that depends on study, trial, name and content only."""
        digest = hashlib.sha256(self.content).hexdigest()
        return str(uuid.uuid5(_NAMESPACE, f"{study_uuid}/{self.prefix}/{self.filename}/{digest}"))


def tail(path: Path, limit_bytes: int = LOG_LIMIT_BYTES) -> bytes:
    """Return the end of a file from the start of a line, after a line with the omitted size, or all of it.

    Raises:
        OSError: If it cannot be read, is a link or is not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "no regular file", str(path))
        size = status.st_size
        if size <= limit_bytes:
            return file.read()
        file.seek(size - limit_bytes)
        kept = file.read(limit_bytes)
    kept = kept[kept.find(b"\n") + 1 :]
    return f"[the first {size - len(kept)} bytes are left out; the whole log: {path}]\n".encode() + kept


def log_without_secrets(content: bytes) -> bytes:
    """Return the end of a log as served to others; binary content is unchanged."""
    if b"\0" in content:
        return content
    return hidden_text(content.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")


def artifacts_of(view: StudyView, on_refused: Callable[[str], None] = lambda _: None) -> Iterator[Artifact]:
    """Yield the files of a study: its best config, the profile launch's logs, config and logs of every launched trial.

    Files that are not on this machine, and empty logs, are left out. Configs come without secrets.

    ``on_refused`` is called with the name of each file left out because it leads out of the study's folder.
    """
    for name in (BEST_CONFIG, SAME_BATCH_CONFIG, BEST_METRICS):
        content = _content(view, name, on_refused=on_refused)
        with contextlib.suppress(ValueError, RecursionError):
            yield Artifact(trial_id=None, filename=name, content=_json(json.loads(content)))
    for row in view.launches:
        if row.trial_number is None:
            yield from _logs(view, row.report.launch_id, trial_id=None, on_refused=on_refused)
    for trial in view.launched:
        config = trial.user_attrs[attributes.CONFIG]
        yield Artifact(trial_id=trial._trial_id, filename="ds_config.json", content=_json(config))
        for launch_id in view.launch_ids(trial):
            yield from _logs(view, launch_id, trial_id=trial._trial_id, on_refused=on_refused)


def _json(data: Mapping[str, Any]) -> bytes:
    return (json.dumps(hidden_data(data), indent=2) + "\n").encode()


def _logs(
    view: StudyView, launch_id: str, *, trial_id: int | None, on_refused: Callable[[str], None]
) -> Iterator[Artifact]:
    directory = RunDirectory(Path(launch_id))
    ranks = range(view.spec.slots_per_trial)
    paths = [path for rank in ranks for path in (directory.stderr(rank), directory.stdout(rank))]
    for path in (*paths, directory.agent_log):
        content = _content(view, *path.parts, on_refused=on_refused)
        if content:
            yield Artifact(trial_id=trial_id, filename=f"{launch_id}.{path.name}", content=content)


def _content(view: StudyView, *names: str, on_refused: Callable[[str], None]) -> bytes:
    """Return the end of a file in the study's folder; empty if it is missing or leads out of the folder."""
    if view.folder is None:
        return b""
    try:
        return tail(held_inside(view.folder, *names))
    except OutsideError:
        on_refused("/".join(names))
    except OSError:
        pass
    return b""


def save_artifacts(
    study: optuna.Study,
    study_uuid: str,
    artifacts: Iterable[Artifact],
    store: FileSystemArtifactStore,
    *,
    read_attributes: Callable[[], Mapping[str, Any]],
) -> None:
    """Save artifacts for optuna-dashboard; each replaces an earlier one of its name.

    ``read_attributes`` returns the study's current system attributes in the database.
    """
    storage, study_id = study._storage, study._study_id
    present = _present(read_attributes())
    for artifact in artifacts:
        identifier = artifact.identifier(study_uuid)
        key, others = artifact.prefix + identifier, present.get((artifact.prefix, artifact.filename), set())
        if key not in others:
            record = {
                "artifact_id": identifier,
                "filename": artifact.filename,
                "mimetype": artifact.mimetype,
                "encoding": None,
            }
            store.write(identifier, io.BytesIO(artifact.content))
            storage.set_study_system_attr(study_id, key, json.dumps(record))
        for other in others - {key}:
            storage.set_study_system_attr(study_id, other, _REMOVED)
            with contextlib.suppress(ArtifactNotFound):
                store.remove(other.removeprefix(artifact.prefix))


def _is_ours(identifier: str) -> bool:
    """Whether an artifact was written by this module; ids of users' uploads are random."""
    try:
        return uuid.UUID(identifier).version == _OUR_VERSION
    except ValueError:
        return False


def _present(attributes: Mapping[str, Any]) -> _Present:
    """Return the recorded artifacts that this module wrote."""
    result: _Present = {}
    for key, value in attributes.items():
        prefix, separator, identifier = key.rpartition(":")
        if not key.startswith((_STUDY_PREFIX, "dashboard:artifacts:")) or value == _REMOVED or not _is_ours(identifier):
            continue
        result.setdefault((prefix + separator, str(json.loads(value)["filename"])), set()).add(key)
    return result
