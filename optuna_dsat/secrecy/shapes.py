"""Find secrets in text by their shape, or by the name before them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from optuna_dsat.secrecy.names import is_secret, is_secret_name, looks_random

HIDDEN = "***"
_MOST_CHARS = 1_000_000
"""Longest text to search: arguments of commands are never longer."""

_SHAPES = tuple(
    re.compile(pattern)
    for pattern in (
        r"\b(?:sk|pk|rk)[-_](?:[A-Za-z0-9]+[-_])*[A-Za-z0-9_-]{12,}",  # OpenAI, Anthropic, Stripe and similar
        r"\bhf_(?=[A-Za-z0-9]*[A-Z0-9])[A-Za-z0-9]{6,}",
        r"\bhf_[A-Za-z]{24,}",
        r"hf_[A-Za-z0-9]{32,}",  # also within a longer word
        r"(?<![A-Za-z0-9])(?:gh[oprsu]_|github_pat_|glpat-|gldt-|npm_|gsk_|r8_|xai-|nvapi-|lsv2_|dop_v1_|dapi|whsec_|shpat_)[\w-]{10,}",
        r"\bpypi-[\w-]{16,}",
        r"\bxox[abeoprs]-[\w-]{8,}",
        r"\b(?:AKIA|ASIA|AROA|AIDA)[A-Z0-9]{12,}\b",
        r"\bAIza[\w-]{20,}",
        r"\bya29\.[\w.-]{10,}",
        r"\bSG\.[\w-]{10,}\.[\w-]{10,}",
        r"\beyJ[\w-]{6,}\.[\w-]+(?:\.[\w-]*)?",  # JSON web tokens
        r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)",
        r"(?<=hooks\.slack\.com/services/)[\w/]+",
        r"(?<=/api/webhooks/)\d+/[\w-]+",
        r"(?i)(?<=\bbearer )[\w.~+/=-]{6,}",
        r"(?i)(?<=\bauthorization: basic )[\w+/=-]{6,}",
    )
)
_AWS_SECRET = re.compile(r"(?<![\w/+=.-])[A-Za-z0-9+][A-Za-z0-9/+]{39}(?![\w/+=.-])")
_CHANGE = re.compile(r"(?<=[a-z])[A-Z0-9/+]|(?<=[A-Z])[a-z0-9/+]|(?<=[0-9/+])[A-Za-z]")
_LEAST_CHANGES = 14
"""Minimum changes between lower case, upper case and digits in 40 characters; random text has about 25."""
_DATABASE_URL = re.compile(
    r"(?i)\b(?:postgres|mysql|mariadb|mssql|oracle|cockroach|snowflake|redshift|mongodb|rediss?|amqps?)[\w+.-]{0,40}://"
    r"[^:/@\s]{0,200}:(?P<secret>\S{1,1000})@(?=\S)"
)
"""URL split as in SQLAlchemy: the password may contain ``/``, ``#`` and ``?``. Lengths are limited, here and below:
without a limit, a malicious text of 64 KB takes minutes to match."""
_URL = re.compile(
    r"(?<![a-zA-Z0-9+.-])[a-zA-Z][a-zA-Z0-9+.-]*://[^/\s:@?#]{0,200}:(?!\d{1,5}(?:[/?#\s]|$))(?=[^@\s]{1,1000}@)(?P<secret>[^@\s]{1,1000}(?:@[^@/?#\s]{1,1000}){0,9})@(?=[^\s@])"
)
_URL_USER = re.compile(r"(?<![a-zA-Z0-9+.-])[a-zA-Z][a-zA-Z0-9+.-]*://(?P<secret>[^/\s:@?#]{16,})@")
_HEADER = re.compile(
    r"(?i)(?<![\w-])(?:(?:proxy-)?authorization[\"']?\s*[:=]\s*[\"']?(?:(?:apikey|basic|bearer|digest|token)\s+)?"
    r"(?P<value>[\w.~+/=:-]{6,})|(?:set-)?cookie[\"']?\s*:\s*[\"']?(?P<cookie>[\w.-]+=[^\r\n\"']{4,}))"
)
"""HTTP headers for authentication."""
_NAMED = re.compile(
    r"(?<![\w.-])-{0,2}(?P<name>[A-Za-z][\w.-]*)(?P<quote>\\*[\"']?)\s*(?P<mark>[=:])\s*"
    r"(?:\"(?P<double>[^\"]+)\"|'(?P<single>[^']+)'|\\+\"(?P<escaped>[^\"\\]+)\\+\"|(?P<bare>(?!//)[^\s\"'&,;={}\[\]()<>]+(?:=+(?![^\s\"'&,;]))?))"
)
_AFTER_OPTION = re.compile(
    r"(?<![\w-])--?(?P<name>[A-Za-z][\w.-]*)\s+"
    r"(?:\"(?P<double>[^\"]+)\"|'(?P<single>[^']+)'|(?P<bare>[^\s\"'-][^\s\"']*))"
)
"""An option and its value within a text, such as the arguments of another program."""
_QUERY_NAMES = frozenset({"sig", "signature", "x-amz-signature", "x-amz-credential", "x-amz-security-token"})
_CODE = re.compile(r"(?<=[?&]code=)(?=[\w.~%/-]*\d)(?=[\w.~%/-]*[A-Za-z])[\w.~%/-]{8,}")
"""Authorization code of OAuth: only in a query, because other codes are exit or language codes."""


@dataclass(frozen=True, order=True)
class Found:
    """A secret in a text."""

    start: int
    end: int
    name: str = ""
    """The name before it, such as ``api_key``; empty if detected by its shape alone."""


def find_secrets(text: str, *, prose: bool = False) -> list[Found]:
    """Return the secrets in a text, in order of occurrence, without overlaps.

    In ``prose``, a message of a program, ``token: x`` may be a parser's remark: only values that look like secrets
    count.
    """
    matches = sorted(_candidates(text, prose=prose), key=lambda match: (match.start, -match.end))
    kept: list[Found] = []
    for match in matches:
        taken = text.startswith("${", match.start) or set(text[match.start : match.end]) == {"*"}
        if match.end > match.start and not taken and not (kept and match.start < kept[-1].end):
            kept.append(match)
    return kept


def _candidates(text: str, *, prose: bool) -> Iterator[Found]:
    if not 4 <= len(text) <= _MOST_CHARS:
        return
    for match in _NAMED.finditer(text):
        group = next(item for item in ("double", "single", "escaped", "bare") if match[item] is not None)
        name, value = match["name"], match[group]
        if name.lower() in _QUERY_NAMES or _is_named_secret(name, value, prose=prose and match["mark"] == ":"):
            yield Found(*match.span(group), name)
    for match in _AFTER_OPTION.finditer(text):
        group = next(item for item in ("double", "single", "bare") if match[item] is not None)
        if _is_named_secret(match["name"], match[group], prose=prose):
            yield Found(*match.span(group), match["name"])
    for match in _HEADER.finditer(text):
        if not prose or match["cookie"] or any(item.isdigit() for item in match["value"]):
            yield Found(*match.span("cookie" if match["cookie"] else "value"), "authorization")
    for pattern in (_DATABASE_URL, _URL):
        for match in pattern.finditer(text):
            yield Found(*match.span("secret"), "url password")
    for match in _CODE.finditer(text):
        yield Found(*match.span(), "code")
    for match in _URL_USER.finditer(text):
        if looks_random(match["secret"]):
            yield Found(*match.span("secret"), "url user")
    for pattern in _SHAPES:
        for match in pattern.finditer(text):
            yield Found(*match.span())
    for match in _AWS_SECRET.finditer(text):
        mixed = re.search("[A-Z]", match[0]) and re.search("[a-z]", match[0])
        if mixed and len(_CHANGE.findall(match[0])) >= _LEAST_CHANGES:
            yield Found(*match.span())


def _is_named_secret(name: str, value: str, *, prose: bool) -> bool:
    if not is_secret(name, value):
        return False
    return not prose or looks_random(value) or (is_secret_name(name) and any(item.isdigit() for item in value))


def replaced(text: str, by: Callable[[Found], str], *, prose: bool = False) -> str:
    """Return a text with each secret replaced by the result of ``by``."""
    for secret in reversed(find_secrets(text, prose=prose)):
        text = f"{text[: secret.start]}{by(secret)}{text[secret.end :]}"
    return text


def hidden(text: str) -> str:
    """Return a program's message with its secrets replaced by ``***``."""
    return replaced(text, lambda _: HIDDEN, prose=True)


def hidden_data(data: Any, name: str = "") -> Any:
    """Return JSON data with its secrets, detected by key and by shape, replaced by ``***``."""
    if isinstance(data, Mapping):
        return {key: hidden_data(value, str(key)) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [hidden_data(item, name) for item in data]
    if isinstance(data, str):
        return HIDDEN if name and is_secret(name, data) else hidden(data)
    return data
