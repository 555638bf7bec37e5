"""Records integers from a script's parser: argparse and its subclasses, click, typer, Fire, Hydra."""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping, MutableMapping, MutableSequence, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from optuna_dsat.runtime.imports import patch
from optuna_dsat.runtime.user_code import is_size, is_stage

_BATCH = re.compile(r"batch|(^|[-_.])(m?bsz?|mbs|micro|b|bz|bsize)(=?$|[-_.=])|^-*mb=?$", re.IGNORECASE)
"""Names of batch sizes."""
_ELSEWHERE = re.compile(r"eval|valid|test|predict|infer|generat", re.IGNORECASE)
"""Names of batch sizes outside of training."""
_LENGTH = re.compile(r"bptt|seq|len|context|ctx|block|window|token|rollout|horizon|n(um)?[-_.]?steps", re.IGNORECASE)
"""Names of lengths of sequences and rollouts."""
_ACCUMULATION = re.compile(r"accum|grad\w*[-_.]acc|update[-_.]freq|(^|[-_.])gas(=?$|[-_.=])", re.IGNORECASE)
"""Names of accumulation steps."""
_STAGE = re.compile(r"stage(?!s)|zero", re.IGNORECASE)
"""Names of possible ZeRO stages; 'stages' is excluded, since it is a count."""


def means_batch(name: str) -> bool:
    """Return whether a name suggests a batch size, of training or evaluation."""
    return _BATCH.search(name) is not None


def means_elsewhere(name: str) -> bool:
    """Return whether a name suggests evaluation, inference or similar."""
    return _ELSEWHERE.search(name) is not None


def means_length(name: str) -> bool:
    """Return whether a name suggests the length of a sequence or rollout and not a batch size."""
    return _LENGTH.search(name) is not None and not means_batch(name)


def means_stage(name: str) -> bool:
    """Return whether a name may refer to a ZeRO stage."""
    return _STAGE.search(name) is not None


def means_accumulation(name: str) -> bool:
    """Return whether a name may refer to accumulation steps."""
    return _ACCUMULATION.search(name) is not None


@cache  # called for every option of the script at each forward pass
def names_training_batch(name: str) -> bool:
    """Return whether a name suggests the training batch size."""
    return means_batch(name) and not means_elsewhere(name)


_DEPTH = 8
"""Maximum depth at which nested settings are searched."""


@cache  # called at each forward pass
def _numbers_in(arguments: Sequence[str]) -> dict[str, int]:
    """Return the sizes in arguments ``key=N``, and the batch sizes in ``--key N``, ``--key=N`` and ``KEY N`` (yacs)."""
    result: dict[str, int] = {}
    for word, following in zip(arguments, [*arguments[1:], ""]):
        name, equals, value = word.partition("=")
        is_override = bool(equals) and not name.startswith("-")
        text = value if equals else following
        if name and text.isdecimal() and is_size(int(text)) and (is_override or names_training_batch(name)):
            result.setdefault(f"{name.lstrip('+')}=" if is_override else name, int(text))
    return result


class ParserWatch:
    """Records parsed values. ``simple_parsing`` and ``HfArgumentParser`` are subclasses of argparse's parser."""

    def __init__(self, *, outputs: Path | None = None) -> None:
        self._outputs = outputs
        self.options: dict[str, int] = {}
        """Option -> parsed value; an option that ends with ``=`` is an override ``key=value``."""
        self.defaults: dict[str, int] = {}
        """Option -> default."""
        self.choices: dict[str, list[int]] = {}
        """Option that may be the ZeRO stage -> stages that it lists as choices."""

    def numbers(self) -> dict[str, int]:
        """Return ``options``, and the arguments ``key=N`` and batch sizes ``--key N`` that the script parses itself."""
        others = _numbers_in(tuple(sys.argv[1:]))
        return {**self.options, **{name: value for name, value in others.items() if name not in self.options}}

    def install(self) -> None:
        """Start recording values parsed by argparse; other libraries are patched on import (``callbacks``)."""

        @patch(argparse.ArgumentParser, "parse_known_args")
        def parse_known_args(original: Any, parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
            result = original(parser, *args, **kwargs)
            values = vars(result[0])
            for action in parser._actions:
                self._note(action.option_strings, values.get(action.dest, action.default))
                for option in action.option_strings:
                    if is_size(action.default):
                        self.defaults.setdefault(option, action.default)
                    if isinstance(action.choices, Iterable) and means_stage(option):
                        self.choices.setdefault(option, [choice for choice in action.choices if is_stage(choice)])
            return result

    def callbacks(self) -> dict[str, Callable[[ModuleType], None]]:
        """Return module name -> function to call when the module has been imported."""
        return {
            "click.core": self._click_imported,
            "typer._click.core": self._click_imported,
            "fire.core": self._fire_imported,
            "hydra.core.utils": self._hydra_imported,
        }

    def _note(self, spellings: Sequence[str], value: Any) -> None:
        """Record an option's value under the spellings used on the command line, or under all if it is not given."""
        for option in [spelling for spelling in spellings if spelling in _given()] or spellings:
            if is_size(value) or (is_stage(value) and means_stage(option)):
                self.options.setdefault(option, value)

    def _click_imported(self, core: Any) -> None:
        @patch(core.Command, "make_context")
        def make_context(original: Any, command: Any, *args: Any, **kwargs: Any) -> Any:
            context = original(command, *args, **kwargs)
            for param in getattr(command, "params", ()):
                dashed = [option for option in getattr(param, "opts", ()) if option.startswith("-")]
                self._note(sorted(dashed, key=len, reverse=True), context.params.get(param.name))
            return context

    def _fire_imported(self, core: Any) -> None:
        """Record the parameters of the functions that Python Fire calls; it has no parser object to query."""

        @patch(core, "_MakeParseFn")
        def make_parse(original: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
            parse = original(function, *args, **kwargs)

            def noting(words: Any) -> Any:
                parsed = parse(words)
                given, named = parsed[0]
                self._note_parameters(function, given, named)
                return parsed

            return noting

    def _note_parameters(self, function: Any, given: Sequence[Any], named: Mapping[str, Any]) -> None:
        """Record options and defaults of a call, but not positional arguments, which no option can change."""
        try:
            signature = inspect.signature(function)
            bound = signature.bind(*given, **named)
        except (TypeError, ValueError):
            return
        bound.apply_defaults()
        for name, parameter in signature.parameters.items():
            options = [f"--{name}", f"--{name.replace('_', '-')}"]
            value, default = bound.arguments.get(name), parameter.default
            if value == default or not _given().isdisjoint(options):
                self._note(options if not _given().isdisjoint(options) else options[:1], value)
            if isinstance(default, int) and is_size(default):
                self.defaults.setdefault(options[0], default)

    def _hydra_imported(self, utils: Any) -> None:
        @patch(utils, "run_job", copies=True)
        def run_job(original: Any, *args: Any, **kwargs: Any) -> Any:
            config = kwargs.get("config") if "config" in kwargs else (args[1] if len(args) > 1 else None)
            omegaconf = sys.modules.get("omegaconf")
            if omegaconf is not None and config is not None:
                for _, _, key, value in numbers(omegaconf.OmegaConf.to_container(config, resolve=False)):
                    if not key.startswith("hydra."):
                        self.options.setdefault(f"{key}=", value)
                if self._outputs is not None:
                    with omegaconf.open_dict(config):
                        config.hydra.run.dir = str(self._outputs)
            return original(*args, **kwargs)


def _given() -> set[str]:
    return {arg.partition("=")[0] for arg in sys.argv[1:]}


def numbers(settings: Any, prefix: str = "", depth: int = 0) -> Iterable[tuple[Any, Any, str, int]]:
    """Yield (container, key in it, dotted key, value) of every integer in nested mappings and lists."""
    if depth > _DEPTH or not isinstance(settings, (MutableMapping, MutableSequence)):
        return
    items = settings.items() if isinstance(settings, Mapping) else enumerate(settings)
    for name, value in list(items):
        key = f"{prefix}.{name}" if prefix else str(name)
        if is_size(value):
            yield settings, name, key, value
        else:
            yield from numbers(value, key, depth + 1)
