"""Secrets in a search with real launches: those of the script reach it alone, that of the database no one."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

import pytest
from sqlalchemy import MetaData, create_engine, make_url, select

from optuna_dsat.study.options.declaration import STORAGE_ENV
from tests.harness.commands import Command, search, write_config
from tests.harness.entry_points import Ended, Run, run_here

__all__ = ["run_here"]

pytestmark = pytest.mark.torchrun

SECRETS = ("-rosenkohl9", "geheim-7f3a1", "kartoffel/8#x", "sellerie77", "spinat-5c5c")
"""Token, key, password of a URL, variable, key in the DeepSpeed config."""
SCRIPT = """
import hashlib, json, os, sys
config, token, key, url = sys.argv[1], sys.argv[3], sys.argv[4].partition("=")[2], sys.argv[5]
seen = [token, key, url.partition("me:")[2].rpartition("@")[0], os.environ["MY_PASSWORD"],
        json.load(open(config))["comet"]["api_key"]]
assert not [name for name in os.environ if name.startswith("OPTUNA_DSAT_SECRET")]
assert [hashlib.sha256(one.encode()).hexdigest() for one in seen] == {digests}, "not what was given"
import deepspeed, torch
model = torch.nn.Linear(16, 1)
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for step in range(100):
    engine.backward(engine(torch.randn(1, 16)).square().mean())
    engine.step()
"""


def texts_of(pid: int, kind: str) -> str:
    try:
        return Path(f"/proc/{pid}/{kind}").read_text(errors="replace")
    except OSError:
        return ""


@pytest.fixture
def secret_url(postgres_url: str) -> str:
    """Return a URL with a password; the server that the suite starts itself does not ask for it."""
    url = make_url(postgres_url)
    return url.set(password=url.password or "bohnen-7f3a").render_as_string(hide_password=False)


def whole_database(url: str) -> str:
    engine = create_engine(url)
    metadata = MetaData()
    with engine.connect() as connection:
        metadata.reflect(connection)
        tables = [connection.execute(select(table)).all() for table in metadata.tables.values()]
    engine.dispose()
    return repr(tables)


@pytest.mark.postgres
def test_secrets_reach_the_script_and_stand_nowhere_else(
    tmp_path: Path, secret_url: str, run_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_config(tmp_path)
    path = tmp_path / "ds.json"
    config = json.loads(path.read_text())
    token, key, password, variable, api_key = SECRETS
    path.write_text(json.dumps({**config, "comet": {"enabled": False, "api_key": api_key}}))
    digests = [hashlib.sha256(secret.encode()).hexdigest() for secret in SECRETS]
    (tmp_path / "own.py").write_text(SCRIPT.format(digests=digests))
    options = search("s", secret_url, budget=1, more=("--env", f"MY_PASSWORD={variable}"))
    start = options.index("--")
    words = ("ds.json", "--hf-token", token, f"wandb.key={key}", f"postgresql://me:{password}@host/db")
    tuner = Command(tmp_path, "binary", "own.py", *options[2:start], "--", *words)
    shown, environments = set(), set()
    while tuner.process.poll() is None:
        launched = [item.key.pid for item in tuner.launched()]
        shown |= {texts_of(pid, "cmdline") for pid in [*launched, *([tuner.process.pid] if launched else [])]}
        environments |= {texts_of(pid, "environ") for pid in launched}
        time.sleep(0.2)  # each process lives for seconds, and each look costs one of them its time
    assert len(shown) >= 2
    said = [*tuner.finish(), *shown]

    def shown_here(url: str, *words: str) -> Ended:
        monkeypatch.setenv(STORAGE_ENV, url)
        ended = run_here(*words)
        monkeypatch.delenv(STORAGE_ENV)
        said.extend((ended.stdout, ended.stderr))
        return ended

    for command in (("show", "s", "--json"), ("export", "s"), ("report", "s")):
        assert shown_here(secret_url, *command).returncode == 0
    refused = shown_here(secret_url, "resume", "s", "--max-trials", "2")
    assert refused.returncode == 2
    assert "--hf-token by OPTUNA_DSAT_SECRET_HF_TOKEN" in refused.stderr.splitlines()[-1]
    unreachable = make_url(secret_url).set(query={}, host="127.0.0.1", port=1).render_as_string(hide_password=False)
    assert shown_here(unreachable, "studies").returncode == 2
    said += [whole_database(secret_url)]
    best = tmp_path / "optuna-dsat-output" / "s" / "best_ds_config.json"
    assert json.loads(best.read_text())["comet"]["api_key"] == api_key
    assert best.stat().st_mode & 0o077 == 0
    for root, _, names in os.walk(tmp_path / "optuna-dsat-output"):
        said += [Path(root, name).read_text(errors="replace") for name in names if name != best.name]
    of_database = str(make_url(secret_url).password)
    assert [(item, text) for text in said for item in (*SECRETS, of_database) if item in text] == []
    assert not any(of_database in text for text in environments)
