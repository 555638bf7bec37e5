from __future__ import annotations

import subprocess
import time

import pytest

from optuna_dsat.secrecy import references
from optuna_dsat.secrecy.references import (
    References,
    hidden_text,
    keep,
    names_in,
    refer_in_command,
    resolved,
    shell_join,
    without_secrets,
)
from optuna_dsat.secrecy.shapes import hidden, hidden_data

SECRET = "geheim-7f3a"


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(references, "_given", {})


@pytest.mark.parametrize(
    "command",
    [
        (f"--openai_key={SECRET}",),
        ("--pwd", SECRET),
        ("--wandb-key", SECRET),
        ("--hfToken", SECRET),
        (f"--hf.token={SECRET}",),
        (f"wandb.api_key={SECRET}",),
        (f"+hub.token={SECRET}",),
        (f"https://host/x?token={SECRET}",),
        (f"https://host/x?a=1&api_key={SECRET}&b=2",),
        ("--token", f"-{SECRET}"),
        ("--password", f"--{SECRET.title()}$"),
        ("--password", f"--{SECRET}"),
        ("--token", f"--{SECRET}", "--lr", "1"),
        (f"--token=-{SECRET}",),
        ("-token", SECRET),
        ("--use_auth_token", SECRET),
        ("--db-pass", SECRET),
        ("--client_secret", SECRET),
        ("--auth", f"me:{SECRET}"),
        ("--mistral_key", SECRET),
        ("--hf_token2", SECRET),
        ("--header", f"Authorization: Bearer {SECRET}"),
        ("--settings", f'{{"api_key": "{SECRET}"}}'),
        (f"--kwargs=token={SECRET},x=1",),
        (f"HF_TOKEN={SECRET}",),
        ("--api-keys", SECRET, f"{SECRET}2"),
        (f"https://me:{SECRET}@host/",),
        (f"--db=postgresql://me:a/b#c?{SECRET}@host/db",),
        ("--hftoken", SECRET),
        ("--wandbkey", SECRET),
        (f"--secretaccesskey={SECRET}",),
        ("--creds", SECRET),
        (f"--api_token:{SECRET}",),
        ("--opts", "hub.token", SECRET),
        ("--settings", f'{{\\"hub\\": {{\\"token\\": \\"{SECRET}\\"}}}}'),
        ("--more", f"--lr 1 --hf-token {SECRET}"),
        ("--more", f"--password 'a b {SECRET}'"),
        ("--header", f"Authorization: token {SECRET}"),
        (f"authorization={SECRET}",),
        ("--header", f"Cookie: theme=dark; session={SECRET}"),
        (f"https://host/callback?state=1&code={SECRET}",),
    ],
)
def test_secrets_are_found_by_name(command: tuple[str, ...]) -> None:
    assert not [word for word in without_secrets(command) if SECRET in word]
    named = References()
    assert resolved(refer_in_command(command, named), named.values) == command


@pytest.mark.parametrize(
    "secret",
    [
        "sk-proj-abcdefGHIJKL123456",
        "hf_abcDEF123456",
        "ghp_abcdefghijklmnop1234",
        "AKIAIOSFODNN7EXAMPLE",
        "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abcDEF",
        "xoxb-1234567890-abcdef",
        "glpat-abcdefghij1234567890",
        "old_hf_AbCdEfGhIjKlMnOpQrStUvWxYz01234567",
        "my_ghp_abcdefghijklmnop1234",
    ],
)
def test_secrets_are_found_by_shape(secret: str) -> None:
    prefix = secret[: len(secret) - len(secret.removeprefix("old_").removeprefix("my_"))]
    assert without_secrets(["--x", secret, f"--y={secret}"]) == ("--x", f"{prefix}***", f"--y={prefix}***")
    assert secret not in hidden(f"401: {secret} is not valid")


@pytest.mark.parametrize(
    "command",
    [
        ("train.py", "--lr", "1"),
        ("--max-tokens", "5"),
        ("--tokenizer", "gpt2"),
        ("--key-dim", "64"),
        ("--num_keys", "3"),
        ("--tokens", "512"),
        ("--token", "3"),
        ("--pad_token", "<pad>"),
        ("--eos-token", "</s>"),
        ("--image_key", "image"),
        ("--use_auth_token", "--lr", "1"),
        ("--use_auth_token", "true"),
        ("--password", "--next", "v"),
        ("--password", "--next=v"),
        ("--ask-password", "--verbose"),
        ("--token_path", "/x/y"),
        ("--revision", "d670460b4b4aece5915caf5c68d12f560a9fe3e4"),
        ("--model", "meta-llama/Llama-2-7b-hf"),
        ("/data/Models/Llama2/very/long/path/Ckpt12345",),
        ("https://host:80/x",),
        ("https://host/x?code=python&lang=de",),
        ("http://user@host/x",),
        ("--author", "me1"),
        ("--monkey", "abc123"),
        ("--more", "--tokenizer gpt2 --max-tokens 5"),
        ("model.key_dim", "64a"),
        ("--model", "convert_hf_llama70B"),
        ("--token", "${OPTUNA_DSAT_SECRET_TOKEN}"),
    ],
)
def test_what_is_no_secret_stays(command: tuple[str, ...]) -> None:
    assert without_secrets(command) == command


def test_messages_of_parsers_stay() -> None:
    for text in ("expected token: ';'", "Missing key: layers.0.weight", "KeyError: 'foo1'", "device=cuda:0 token=3"):
        assert hidden(text) == text


@pytest.mark.parametrize(
    "part", ["a://", "postgres://a:", "http://u:", "redis+", "a=", "--b ", "-----BEGIN PRIVATE KEY"]
)
def test_a_text_that_is_made_to_take_long_takes_no_minutes(part: str) -> None:
    begun = time.process_time()
    hidden(part * (64_000 // len(part)))
    assert time.process_time() - begun < 2


def test_json_loses_secrets_under_their_keys() -> None:
    data = {"comet": {"api_key": SECRET, "project": "p"}, "list": [f"https://u:{SECRET}@h"], "token": 3}
    assert hidden_data(data) == {
        "comet": {"api_key": "***", "project": "p"},
        "list": ["https://u:***@h"],
        "token": 3,
    }


def test_equal_names_get_variables_of_their_own_and_the_same_each_time() -> None:
    command = ("--token", "abc1", "--token", "xyz2", "--token", "abc1")
    first, second = References(), References()
    referred = refer_in_command(command, first)
    assert referred == refer_in_command(command, second)
    assert first.values == {"OPTUNA_DSAT_SECRET_TOKEN": "abc1", "OPTUNA_DSAT_SECRET_TOKEN_2": "xyz2"}
    assert refer_in_command(referred, References(referred)) == referred


def test_a_value_comes_from_what_was_kept_then_from_the_environment() -> None:
    reference = "${OPTUNA_DSAT_SECRET_HF_TOKEN}"
    assert resolved(reference, {}) == reference
    assert resolved([reference], {"HF_TOKEN": "own"}) == ["own"]
    assert resolved(reference, {"HF_TOKEN": "own", "OPTUNA_DSAT_SECRET_HF_TOKEN": "given"}) == "given"
    assert resolved("${OPTUNA_DSAT_SECRET_TOKEN}", {"TOKEN": "another's"}) == "${OPTUNA_DSAT_SECRET_TOKEN}"
    keep({"OPTUNA_DSAT_SECRET_HF_TOKEN": "kept"})
    assert resolved({"a": (reference,)}, {"OPTUNA_DSAT_SECRET_HF_TOKEN": "given"}) == {"a": ("kept",)}


def test_a_printed_command_takes_its_secrets_from_the_environment_or_says_which_is_missing() -> None:
    named = References()
    line = shell_join(refer_in_command(("echo", "a b", f"--url=https://me:{SECRET}@h/$x"), named))
    done = subprocess.run(["sh", "-c", line], env=named.values, capture_output=True, text=True, check=True)
    assert done.stdout == f"a b --url=https://me:{SECRET}@h/$x\n"
    [name] = names_in(line)
    refused = subprocess.run(["sh", "-c", line], env={}, capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert name in refused.stderr


def test_known_values_are_hidden_in_any_text() -> None:
    environ = {"WANDB_API_KEY": "plain", "MY_PASSWORD": "rosenkohl", "PATH": "/usr/bin"}
    keep({"OPTUNA_DSAT_SECRET_TOKEN": "kartoffel"})
    text = "rosenkohl and kartoffel are no user of /usr/bin"
    assert hidden_text(text, environ) == "*** and *** are no user of /usr/bin"
