"""Build a study from options: one code path for the commands and for ``optuna_dsat.tune``."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from optuna_dsat.config.ds_config import flatten
from optuna_dsat.config.knobs import MODEL
from optuna_dsat.config.user_file import misspelt_in_words, misspelt_types
from optuna_dsat.errors import PATH_ERRORS, UsageError
from optuna_dsat.script.command.interception import is_of_launch
from optuna_dsat.script.settings_file import missing_config
from optuna_dsat.secrecy.names import is_secret
from optuna_dsat.study.options.declaration import options_in
from optuna_dsat.study.spec import StudyRequest, StudySpec
from optuna_dsat.tuning.options.autotuning import Sweep, sweep_of, with_autotuning
from optuna_dsat.tuning.options.given import Given, with_config
from optuna_dsat.tuning.options.tune_options import DEFAULT_METHOD
from optuna_dsat.tuning.spec_builder import build_spec, search_devices

_DEVICES = ("gpus_per_trial", "cpu_ranks")
_OF_THIS_SEARCH = ("command line", "training command", "argument")
"""Origins of options given for this search only; files and the environment apply to all searches."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A study that is ready to start: all options are checked, and nothing has been launched or written."""

    request: StudyRequest
    given: Given
    """The options; unset ones are filled from the config's ``autotuning`` section."""
    notes: Sequence[str]
    """Lines for the user.

    They report unsupported keys of the ``autotuning`` section, misspelt keys of the config, and oddities of the
    devices.
    """


def prepare_each(method: str | None, given: Given) -> list[Prepared]:
    """Check the options and return the requested studies in the order in which they run.

    The options or the config select a missing method. There is one study, or one for each number of GPUs or CPU ranks
    that an option or the config's ``autotuning.num_gpus`` lists, named ``NAME-8gpu`` or ``NAME-2rank``; on a cluster
    ``NAME-2x8gpu`` or ``NAME-2node``.

    Raises:
        UsageError: At the first invalid option.
    """
    _check_texts(given)
    try:
        return _prepare_each(method, with_config(given))
    except OSError as error:
        if error.errno not in PATH_ERRORS:
            raise
        raise UsageError(f"{error.filename}: {error.strerror}.") from None


def _prepare_each(method: str | None, given: Given) -> list[Prepared]:
    sweep, notes = sweep_of(_one_kind_of_device(given))
    if sweep is None:
        only = prepare(method, given)
        return [replace(only, notes=[*notes, *only.notes])]
    studies = [_at_count(method, given, sweep, count=count) for count in sweep.counts]
    first = replace(studies[0], notes=[*notes, *studies[0].notes])
    return [first, *(replace(study, notes=[]) for study in studies[1:])]


def _at_count(method: str | None, given: Given, sweep: Sweep, *, count: int) -> Prepared:
    """Check and return the study at one number of devices."""
    sized = given.with_values({sweep.option: count}, sweep.origin)
    spec = prepare(method, sized).request.spec
    nodes = f"{spec.nodes_per_trial}x" if spec.nodes_per_trial > 1 and sweep.unit != "node" else ""
    return prepare(method, sized.with_values({"study": f"{spec.name}-{nodes}{count}{sweep.unit}"}, sweep.origin))


def prepare(method: str | None, given: Given) -> Prepared:
    """Check the options and return the requested study. The options or the config select a missing method."""
    given, notes = with_autotuning(_one_kind_of_device(given), keep_values=method is None)
    _check_places(given)
    options = given.options
    if method is None:
        named: str | None = getattr(options, "method", None)
        method = DEFAULT_METHOD if named is None else named
    if options.on != "here" and "max_concurrent_trials" not in given.origins:
        options = replace(
            options, max_concurrent_trials=1
        )  # otherwise more cluster nodes would be requested than one launch uses
    devices = search_devices(options)
    spec = build_spec(method, options, devices)
    if spec.on != "here":
        from optuna_dsat.tuning.cluster import check_cluster

        check_cluster(spec)
    read = {key: value for key, value in spec.ds_config.items() if key != MODEL}
    misspelt = [*misspelt_in_words([*read, *flatten(read)]), *misspelt_types(read)]
    request = StudyRequest(
        spec=spec,
        devices=devices,
        storage=options.storage,
        reuse_profile=options.profile_reuse,
        check_loss=options.check_loss,
        callbacks=tuple(options.callbacks or ()),
    )
    return Prepared(request=request, given=given, notes=[*notes, *misspelt, *devices.notices, *_of_process(spec)])


def at_ranks(prepared: Prepared, ranks: int) -> Prepared | None:
    """Return the study at a smaller number of ranks; at a larger one if the training command stood for one rank.

    None if options give the number, or it is not smaller.
    """
    options, devices = prepared.given.options, prepared.request.devices
    origins = [prepared.given.origins.get(name) for name in _DEVICES if getattr(options, name) is not None]
    is_alone = origins == ["training command"] and devices.per_launch == 1
    if options.on != "here" or not (is_alone or (not origins and ranks < devices.per_launch)):
        return None
    values = {"gpus_per_trial" if devices.kind == "cuda" else "cpu_ranks": ranks}
    again = prepare(prepared.request.spec.method, prepared.given.with_values(values, "the script"))
    return replace(again, request=replace(again.request, is_retry=True))


_OF_ALL_SCRIPTS = frozenset({
    "_", "HOME", "HOSTNAME", "LANG", "LOGNAME", "PATH", "PWD", "SHELL", "TERM", "TMPDIR", "USER",
    "CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR", "LOCAL_SIZE", "OMP_NUM_THREADS",
})  # fmt: skip
"""Variables that are the same in any shell, or of the devices."""


def _of_process(spec: StudySpec) -> Iterator[str]:
    """Yield notes on the standard input and the variables of this process that the script reads."""
    script = spec.script
    if missing := missing_config(script.args, cwd=Path(script.cwd)):
        yield f"{missing} names no file in {script.cwd}: correct it, unless the script writes this file itself."
    with contextlib.suppress(OSError):  # closed
        is_given = stat.S_IFMT(os.fstat(0).st_mode) in (stat.S_IFIFO, stat.S_IFREG, stat.S_IFSOCK)
        if is_given and spec.source.reads_input():
            yield "The script reads its standard input, which is empty in trials: have it read a file instead."
    stored = {*script.environment, *_OF_ALL_SCRIPTS}
    given = {
        name for name in os.environ.keys() - stored if not is_of_launch(name) and not is_secret(name, os.environ[name])
    }
    if read := spec.source.mentioned(sorted(given)):
        yield (
            f"The script reads {', '.join(read)} from this shell's environment, which is neither stored nor in the "
            f"printed command: --env {read[0]}=VALUE is."
        )


def _one_kind_of_device(given: Given) -> Given:
    """Drop the kind of device from an options file if this search was given the other kind."""
    named = [name for name in _DEVICES if given.origins.get(name) in _OF_THIS_SEARCH]
    if len(named) != 1:
        return given
    (other,) = set(_DEVICES) - set(named)
    return given.without(other)


def _check_places(given: Given) -> None:
    """Raise if an option given for this search has no effect where its launches run."""
    for name, declared in options_in(type(given.options)).items():
        places = declared.places
        if places and given.options.on not in places and given.origins.get(name) in _OF_THIS_SEARCH:
            here = "here" if given.options.on == "here" else f"by --on {given.options.on}"
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} is for launches by --on {' or '.join(places)}; these run {here}.")


def _check_texts(given: Given) -> None:
    """Raise for strings that cannot be a path, argument or variable; the message names the option only."""
    for field_ in fields(given.options):
        value = getattr(given.options, field_.name)
        if field_.name == "ds_config" and isinstance(value, Mapping):
            continue  # data, checked like the content of a file
        for text in _texts(value):
            try:
                wrong = "a NUL character" if b"\x00" in os.fsencode(text) else ""
            except UnicodeEncodeError:
                wrong = "half a surrogate pair"
            if wrong:
                raise UsageError(f"--{field_.name.replace('_', '-')} holds {wrong}: no system takes such a text.")


def _texts(value: Any) -> Iterator[str]:
    """Yield the strings and paths in a value."""
    if isinstance(value, str | os.PathLike):
        yield str(os.fspath(value))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _texts(item)


def check_storage(request: StudyRequest) -> None:
    """Raise ``StorageUrlError`` or ``StudyConflictError`` as a real run would; creates nothing."""
    from optuna_dsat.store import Store, database_exists, has_our_tables, refuse_others_database
    from optuna_dsat.study.stored import check_study

    if not database_exists(request.storage):
        return  # the run creates it
    if not has_our_tables(request.storage):  # the run creates them
        refuse_others_database(request.storage, request.spec.name)
        return
    with Store.open(request.storage, create=False) as store:
        check_study(store, request.spec)
