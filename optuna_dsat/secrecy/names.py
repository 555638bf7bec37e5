"""Detect options, variables and keys whose values are secrets, and values that cannot be secrets."""

from __future__ import annotations

import re
from pathlib import Path


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_STRONG = _words(
    """
    accesskey apikey authorization authtoken clientsecret cred credential credentials creds dsn jwt passcode passphrase
    passwd password passwords passwort privatekey psk psswd pswd pwd secret secretkey secrets
    """
)
"""Words of a name whose value is always a secret."""
_WEAK = frozenset({"auth", "bearer", "cookie", "key", "pass", "pat", "sas", "token", "webhook"})
"""Weak words: the value is a secret unless the adjacent words or the value itself rule it out."""
_PLURALS = {"keys": "key", "tokens": "token"}
_KINDS = _words(
    """
    access account admin anthropic api auth aws azure bearer bot client cloud cohere comet database db
    deploy discord encryption gcp git github gitlab google groq hf hub huggingface jwt license master mistral
    mlflow neptune openai personal private pypi refresh root s3 secret security session signing slack ssh
    storage swanlab telegram user wandb webhook
    """
)
"""Words before a weak word that name the owner or kind of the secret; a plural is a secret only after these."""
_NEVER_BEFORE = _words(
    """
    additional answer attention audio author backward begin blank bos caption class cls column
    context data dataset decoder dict dropped end eod eos eot extra feature features field first
    foreign forward group head hot id image img index input json label labels last mask max message
    messages metric min model n new next num number output pad padding per primary prompt public qa
    query question register response sample sentence sep skip sort special split start state stop
    target text train unk unknown use val value video vision vocab word
    """
)
"""Words before a weak word that change its meaning: the token that pads, the key of a column."""
_NEVER_AFTER = _words(
    """
    backend batch budget chunk class classes count counts dim dims dir directory drop dropout embed
    embedding embeddings enabled env error expiry factor file folder format frame frames frequency
    head heads hidden id ids idx index kind layer layers len length level limit loss lr map mask
    merge method mixer mode name norm num path point points pos position prob proj projection rate
    ratio reduction scale shift size spec split step steps store strategy style timeout type types
    var variable vocab weight weights width
    """
)
"""Last words of names that describe a property of a secret, or something else entirely."""
_FLAGS = _words("allow ask disable enable has is no require save skip with without")
"""First words of names of flags."""
_PLAIN_VALUES = _words(
    """
    apikey auto basic bearer default digest env false no none null off on token true yes
    """
)
_NUMBER = re.compile(r"[-+]?(\d[\d_]*)?\.?\d*(e[-+]?\d+)?", re.IGNORECASE)
_SPECIAL_TOKEN = re.compile(r"<[^<>]*>|\[[A-Z_0-9]+\]|\$\{.*\}|\$\w+|\*+")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_GLUED = re.compile(rf"(?P<kinds>(?:{'|'.join(sorted(_KINDS, key=len, reverse=True))})+)(?P<weak>keys?|tokens?)")
"""``hftoken``, ``secretaccesskey``."""
_DIGITS_AT_END = re.compile(r"\d+$")


def is_secret(name: str, value: str) -> bool:
    """Return whether the value of an option, variable or key is a secret, by its name.

    A name is such as ``--hf.token``, ``openaiKey`` or ``WANDB_API_KEY``. Numbers, booleans and paths of existing files
    are secrets only if the name denotes a password.
    """
    strength = _strength(name)
    text = value.strip().strip("\"'")
    if strength == 0 or not text or text.lower() in _PLAIN_VALUES or _SPECIAL_TOKEN.fullmatch(text) or _is_file(text):
        return False
    if strength == 3:
        return True
    if _NUMBER.fullmatch(text):
        return False
    return strength == 2 or looks_random(text) or any(item.isdigit() for item in text) or len(text) >= 20


def is_secret_name(name: str) -> bool:
    """Return whether a name denotes a secret regardless of its value."""
    return _strength(name) >= 2


def looks_random(text: str) -> bool:
    """Return whether a text looks random: a long single word of letters and digits."""
    letters, digits = sum(name.isalpha() for name in text), sum(name.isdigit() for name in text)
    return len(text) >= 16 and letters >= 4 and digits >= 3 and not re.search(r"[\s/,:]", text)


def _is_file(text: str) -> bool:
    try:
        return "/" in text and len(text) < 4096 and Path(text).expanduser().exists()
    except (OSError, ValueError, RuntimeError):
        return False


def _unglued(word: str) -> tuple[str, ...]:
    """Split a compound word of a name into its last kind of secret and its weak word."""
    if word in _STRONG or (glued := _GLUED.fullmatch(word)) is None:
        return (word,)
    kind = max((name for name in _KINDS if glued["kinds"].endswith(name)), key=len)
    return kind, glued["weak"]


def _strength(name: str) -> int:
    """Return 3 for a secret, 2 for a secret unless the value is a number, 1 if the value decides, 0 for other names."""
    words = [word.lower() for part in re.split(r"[^A-Za-z0-9]+", name) for word in _CAMEL.split(part) if word]
    words = [part for word in words for part in _unglued(_DIGITS_AT_END.sub("", word) or word)]
    if not words:
        return 0
    last = words[-1]
    if last in _NEVER_AFTER or (words[0] in _FLAGS and len(words) > 1):
        return 0
    if words[0] == "use" and len(words) > 1:  # a switch, or the secret itself
        return min(1, _strength("_".join(words[1:])))
    if _STRONG & set(words) and not (words[-1] == "secrets" and words[0] in _NEVER_BEFORE):
        return 3
    pairs = [(before, _PLURALS.get(word, word)) for before, word in zip(["", *words], words)]
    weak = [(before, word) for before, word in pairs if word in _WEAK]
    if any(before in _KINDS for before, _ in weak):
        return 3 if any(before in ("api", "access", "private", "secret", "auth") for before, _ in weak) else 2
    singular = [before for before, word in weak if word in words and before not in _NEVER_BEFORE]
    if not singular:
        return 0
    bare_key = any(word == "key" for _, word in weak) or any(word == "pass" for _, word in weak)
    return 1 if bare_key or words[0] in _NEVER_BEFORE else 2
