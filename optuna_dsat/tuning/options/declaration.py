"""Declaration of an option: the content of its field's annotation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

__all__ = [
    "BUDGET",
    "MEASURE",
    "METHOD",
    "OUTPUT_PANEL",
    "PANELS",
    "WHAT",
    "WHERE",
    "Option",
    "option_of",
    "options_in",
]

WHAT = "What to tune"
BUDGET = "Budget"
MEASURE = "Measuring"
WHERE = "Where"
METHOD = "Method"
OUTPUT_PANEL = "Output"
PANELS = (WHAT, BUDGET, MEASURE, WHERE, METHOD, OUTPUT_PANEL)
"""Groups of a search's options in the order of its help."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """Meaning and command-line spelling of an option; part of the ``Annotated`` type of its field."""

    help: str
    panel: str | None = None
    """Group of the command's help; None for a positional argument."""
    first: bool = False
    """Whether the help shows it before one asks for all options."""
    none: str | None = None
    """What None stands for, in words."""
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
    """Type of the value on a command line; None for the field's."""
    parse: Callable[[Any], Any] | None = None
    """From the value of ``text_type`` to the field's; None where they are the same."""
    autotuning: str | None = None
    """Field of ``config.autotuning_section.Autotuning`` that gives the value if nothing else does."""
    choices: Callable[[], Iterable[str]] | None = None
    """Values that a shell completes."""

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


def option_of(annotation: Any) -> Option | None:
    """Return the ``Option`` in the annotation of a field; None if it has none."""
    return next((one for one in get_args(annotation)[1:] if isinstance(one, Option)), None)


def options_in(kind: type[Any]) -> dict[str, Option]:
    """Return the options that a class declares, by field name."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: option for name, hint in hints.items() if (option := option_of(hint)) is not None}
