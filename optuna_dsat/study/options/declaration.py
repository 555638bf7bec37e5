"""Declaration of an option: the content of its field's annotation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, dataclass, fields
from functools import partial
from typing import Any, get_args, get_type_hints

from optuna_dsat.escape.shell import shell_line

DEFAULT_STORAGE = "sqlite:///optuna-dsat.db"
STORAGE_ENV = "OPTUNA_DSAT_STORAGE"
"""Environment variable that commands read ``--storage`` from if it is not given."""
DEFAULT_OUTPUT_DIR = "optuna-dsat-output"
OUTPUT_DIR_ENV = "OPTUNA_DSAT_OUTPUT_DIR"
"""Environment variable that commands read ``--output-dir`` from if it is not given."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """Meaning and command-line spelling of an option; part of the ``Annotated`` type of its field."""

    help: str
    panel: str | None = None
    """Group of the command's help; None for a positional argument."""
    first: bool = False
    """Whether the help shows it before one asks for all options."""
    none: str | None = None
    """Meaning of None, in words."""
    none_if: str = ""
    """Condition under which it does."""
    python_help: str | None = None
    """Meaning of the keyword of ``tune``; None for ``help``."""
    metavar: str | None = None
    flags: tuple[str, ...] = ()
    """Spellings on the command line; empty for the field's name with dashes."""
    env: str | None = None
    """Environment variable that a command reads the value from."""
    text_type: Any = None
    """Type of the value on a command line; None for the field's, or for texts where that is a sequence or mapping."""
    parse: Callable[[Any], Any] | None = None
    """From the value of ``text_type`` to the field's; None where they are the same."""
    autotuning: str | None = None
    """Field of ``config.autotuning_section.Autotuning`` that gives the value if nothing else does."""
    least: float | None = None
    """Smallest value that a command accepts; None for the field's own rule."""
    choices: tuple[str, ...] = ()
    """Values that a shell completes."""
    before: str = ""
    """Option of a base class before which help and documentation list this one."""
    budget: bool = False
    """Whether a study may be continued with another value: its results stay comparable."""
    places: tuple[str, ...] = ()
    """Values of ``--on`` with which it has an effect; empty for all."""

    def spelled(self, field: str) -> str:
        """Return its long name on a command line, without dashes; ``field`` is the name of its field."""
        flags = (flag.split("/")[0].lstrip("-") for flag in self.flags)
        return max(flags, key=len, default=field.replace("_", "-"))

    @property
    def command_help(self) -> str:
        """Help text of the command."""
        if self.none is None:
            return self.help
        return f"{self.help}  \\[{' '.join(filter(None, ('default', self.none_if)))}: {self.none}]"

    @property
    def keyword_help(self) -> str:
        """Text of the Python documentation."""
        if self.python_help is not None:
            return self.python_help
        if self.none is None:
            return self.help
        return f"{self.help} None for {' '.join(filter(None, (self.none, self.none_if)))}."


what = partial(Option, panel="What to tune")
limit = partial(Option, panel="Budget", budget=True)
measured = partial(Option, panel="Measuring")
where = partial(Option, panel="Where")
running = partial(Option, panel="Where", budget=True)
of_method = partial(Option, panel="Method")
of_output = partial(Option, panel="Output")
PANELS = tuple(item.keywords["panel"] for item in (what, limit, measured, where, of_method, of_output))
"""Groups of a search's options in the order of its help."""


def option_of(annotation: Any) -> Option | None:
    """Return the ``Option`` in the annotation of a field; None if it has none."""
    return next((arg for arg in get_args(annotation)[1:] if isinstance(arg, Option)), None)


def options_in(kind: type[Any]) -> dict[str, Option]:
    """Return the options that a class declares, by field name."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: option for name, hint in hints.items() if (option := option_of(hint)) is not None}


def fields_of(kind: Any) -> list[tuple[Field[Any], Any]]:
    """Return the fields of a class of options with their annotations, in the order in which they are documented."""
    hints = get_type_hints(kind, include_extras=True)
    listed: list[Field[Any]] = []
    for field_ in sorted(fields(kind), key=lambda item: bool(_before(hints[item.name]))):
        names = [other.name for other in listed]
        before = _before(hints[field_.name])
        listed.insert(names.index(before) if before else len(listed), field_)
    return [(item, hints[item.name]) for item in listed]


def _before(annotation: Any) -> str:
    option = option_of(annotation)
    return "" if option is None else option.before


def stored_command(*words: str, storage: str) -> str:
    """Return a command on stored studies, with their storage (a URL without its password) unless it is the default."""
    return shell_line(["optuna-dsat", *words, *([] if storage == DEFAULT_STORAGE else ["--storage", storage])])
