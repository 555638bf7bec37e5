"""The key of a stored profile: a hash of everything that a profile launch depends on."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable
from pathlib import Path

from optuna_dsat.config import ds_config
from optuna_dsat.runtime.files import read_regular
from optuna_dsat.script.command.source import module_file
from optuna_dsat.script.interpreter import script_versions
from optuna_dsat.script.settings_file import settings_files
from optuna_dsat.script.trial_class import RUNNER, find_trial_class
from optuna_dsat.study.spec import ScriptSpec, StudySpec

_KNOB_SECTIONS = {
    ds_config.ZERO, ds_config.TRAIN_BATCH, ds_config.MICRO_BATCH, ds_config.GRADIENT_ACCUMULATION, "autotuning",
}  # fmt: skip
_MAX_FILES = 200


def fingerprint(spec: StudySpec, *, device_names: tuple[str, ...]) -> str:
    """Return a hash of everything that a profile depends on.

    That is the content of the script and the Python files in its folder, the script's arguments, the settings files
    among them, the config without its knobs and batch sizes, hardware and versions. A model that is imported from
    elsewhere or read from data is not included: ``--no-profile-reuse`` is needed after changing it.
    """
    outside = {key: value for key, value in spec.ds_config.items() if key not in _KNOB_SECTIONS}
    versions = script_versions(spec.python, on=spec.on)
    parts = {
        "code": _code_hashes(_code_folders(spec)),
        **_settings_hashes(spec.script),
        "script": spec.script.script if spec.script.is_module else Path(spec.script.script).name,
        "args": spec.script.args,
        "arg_mappings": spec.script.arg_mappings,
        "environment": spec.script.environment,
        "follow_batch": spec.follow_batch,
        "config": outside,
        "device": spec.device,
        "devices": device_names,
        "slots": spec.slots_per_trial,
        **({} if spec.nodes_per_trial == 1 else {"nodes": spec.nodes_per_trial}),
        "device_memory_bytes": "free" if spec.free_memory else spec.device_memory_bytes,
        "versions": {name: text for name, text in versions.items() if name != "python"},
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _settings_hashes(script: ScriptSpec) -> dict[str, list[str]]:
    """Return the hashes of settings files among the script's arguments, which may set its model; empty without any."""
    config = Path(script.cwd, script.config_path).resolve()
    files = [path for path in settings_files(script.args, cwd=Path(script.cwd)) if path.resolve() != config]
    return {"settings": [_content_hash(path) for path in files]} if files else {}


def _code_folders(spec: StudySpec) -> list[Path]:
    """Return the folders with code of a launch: the script's, and for a module the working directory."""
    script, cwd = spec.script, Path(spec.script.cwd)
    if not script.is_module:
        return [script.folder]
    if script.script == RUNNER:
        return sorted({cwd, find_trial_class(script.args[0], cwd).parent})
    file = module_file(script.script, cwd, python=spec.python)
    return [cwd] if file is None else sorted({cwd, file.parent})


def _code_hashes(folders: Iterable[Path]) -> list[str]:
    """Return the hashes of the Python files in these folders and one level below, at most ``_MAX_FILES`` of each."""
    files: dict[Path, None] = {}
    for folder in folders:
        files |= dict.fromkeys(
            itertools.islice(sorted(folder.glob("*.py")) + sorted(folder.glob("*/*.py")), _MAX_FILES)
        )
    return [_content_hash(path) for path in files if path.is_file()]


def _content_hash(path: Path) -> str:
    """Return the hash of a file's content; empty if it cannot be read, by the launch neither."""
    try:
        return hashlib.sha256(read_regular(path)).hexdigest()
    except OSError:
        return ""
