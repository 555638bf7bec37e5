"""The whole tuner, with real launches: killed, out of disk space, and with a password to keep."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import optuna
import pytest
from sqlalchemy import MetaData, create_engine, make_url, select

from optuna_dsat.cli.parsing.password import STORAGE_ENV
from optuna_dsat.store import Store
from optuna_dsat.trials import attributes
from tests.harness.commands import Command, search, write_config
from tests.harness.workers import StoredStudy, wait_until

pytestmark = pytest.mark.torchrun

BUDGET = 2
DATABASE = "study.db"
SQLITE = f"sqlite:///{DATABASE}"

StartCommand = Callable[..., Command]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a study to which nothing happened; its database holds the script's profile."""
    folder = tmp_path_factory.mktemp("unbroken")
    write_config(folder)
    Command(folder, *search("unbroken", SQLITE, budget=BUDGET)).finish()
    return folder


@pytest.fixture
def folder(unbroken: Path, tmp_path: Path) -> Path:
    """Return a folder to tune in, with a copy of that database."""
    write_config(tmp_path)
    shutil.copy(unbroken / DATABASE, tmp_path)
    return tmp_path


@pytest.fixture
def start(folder: Path) -> Iterator[StartCommand]:
    started: list[Command] = []

    def run(*arguments: str, environ: dict[str, str] | None = None) -> Command:
        started.append(Command(folder, *arguments, environ=environ))
        return started[-1]

    yield run
    for command in started:
        command.kill()


def trial_folder(output: Path, study: str, number: int) -> Path:
    return output / study / f"trial-{number:04d}"


def test_kill_9_ends_the_launch_and_resume_measures_what_an_unbroken_study_does(
    unbroken: Path, folder: Path, start: StartCommand
) -> None:
    tuner = start(*search("killed", SQLITE, budget=BUDGET))
    events = trial_folder(folder / "optuna-dsat-output", "killed", 1) / "events" / "rank0.jsonl"
    wait_until(events.exists, what="the rank of the second launch is alive")
    assert len(tuner.launched()) >= 2, "torchrun and its rank"
    tuner.kill()
    wait_until(lambda: not tuner.launched(), what="its launch and what that started are gone", limit_s=10.0)
    start("resume", "killed", "--storage", SQLITE, "--quiet").finish()
    study = StoredStudy.read(f"sqlite:///{folder / DATABASE}", "killed")
    study.check_whole(budget=BUDGET)
    assert len(study.lost) == 1
    assert sorted(study.measured) == sorted(StoredStudy.read(f"sqlite:///{unbroken / DATABASE}", "unbroken").measured)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return the folder of a file system of one MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ("mount", "-t", "tmpfs", "-o", "size=1m", "optuna-dsat-test", str(disk))
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command to make a small file system with")
    if done.returncode != 0:
        pytest.skip(f"a small file system cannot be mounted: {done.stderr.strip()}")
    yield disk
    subprocess.run(("umount", "--lazy", str(disk)), check=True)


def fill(disk: Path) -> Path:
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    return filler


def test_a_full_disk_is_a_clear_error_and_the_study_resumes_with_more_space(
    folder: Path, small_disk: Path, start: StartCommand
) -> None:
    output = small_disk / "out"
    tuner = start(*search("full", SQLITE, budget=1, more=("--output-dir", str(output))))
    prepared = trial_folder(output, "full", 0) / "command.txt"
    wait_until(prepared.exists, what="a launch is prepared, and its rank has written no event yet")
    filler = fill(small_disk)
    _, errors = tuner.finish(code=5)
    assert "No space left" in errors
    assert len(errors.strip().splitlines()) == 1
    assert tuner.launched() == []
    filler.unlink()
    start("resume", "full", "--storage", SQLITE, "--quiet").finish()
    study = StoredStudy.read(f"sqlite:///{folder / DATABASE}", "full")
    study.check_whole(budget=1)
    assert len(study.lost) == 1


@pytest.fixture
def secret_url(postgres_url: str) -> str:
    """Return a URL with a password; the server that the suite starts itself does not ask for it."""
    url = make_url(postgres_url)
    return url.set(password=url.password or "geheim-7f3a").render_as_string(hide_password=False)


def copy_profile(source: str, target: str) -> None:
    with Store.open(source) as old, Store.open(target) as new:
        study = optuna.load_study(study_name="unbroken", storage=old.storage)
        fingerprint = study.user_attrs[attributes.FINGERPRINT]
        found = old.find_profile(fingerprint)
        assert found is not None
        new.save_profile(fingerprint, found.profile, study_uuid=found.study_uuid)


def whole_database(url: str) -> str:
    engine = create_engine(url)
    metadata = MetaData()
    with engine.connect() as connection:
        metadata.reflect(connection)
        tables = [connection.execute(select(table)).all() for table in metadata.tables.values()]
    engine.dispose()
    return repr(tables)


def process_texts(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()


@pytest.mark.postgres
def test_the_password_of_the_database_is_shown_nowhere(folder: Path, start: StartCommand, secret_url: str) -> None:
    password = str(make_url(secret_url).password)
    copy_profile(f"sqlite:///{folder / DATABASE}", secret_url)
    environ = {STORAGE_ENV: secret_url}
    tuner = start(*search("secret", secret_url, budget=1))
    events = trial_folder(folder / "optuna-dsat-output", "secret", 0) / "events" / "rank0.jsonl"
    wait_until(events.exists, what="the rank is alive")
    assert password not in Path(f"/proc/{tuner.process.pid}/cmdline").read_text()
    seen = [process_texts(process.key.pid) for process in tuner.launched()]
    assert len(seen) >= 2
    assert not any(password.encode() in text for text in seen)
    said = [*tuner.finish()]
    for arguments in (("show", "secret", "--json"), ("export", "secret"), ("show", "nothing")):
        said += start(*arguments, environ=environ).finish(code=2 * ("nothing" in arguments))
    unreachable = make_url(secret_url).set(query={}, host="127.0.0.1", port=1).render_as_string(hide_password=False)
    said += start("studies", environ={STORAGE_ENV: unreachable}).finish(code=2)
    assert not any(password in text for text in said)
    files = [Path(root, name) for root, _, names in os.walk(folder) for name in names]
    assert trial_folder(folder / "optuna-dsat-output", "secret", 0) / "env.json" in files
    assert [path for path in files if password.encode() in path.read_bytes()] == []
    assert password not in whole_database(secret_url)
