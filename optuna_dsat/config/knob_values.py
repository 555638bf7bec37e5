"""Names and values of knobs as users write them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from pydantic import TypeAdapter, ValidationError

from optuna_dsat.config.conditions import NVME, ZERO_STAGE, ZERO_STAGES, Kind
from optuna_dsat.config.documents import as_written
from optuna_dsat.config.ds_config import size_limit
from optuna_dsat.config.knobs import KNOBS
from optuna_dsat.config.user_file import near_key
from optuna_dsat.errors import ConfigError
from optuna_dsat.runtime.overlay import MICRO_BATCH, ZERO

KNOB_OF = MappingProxyType({knob.name: knob for knob in KNOBS})
"""Name -> knob."""
_MINIMUM = {"reduce_bucket_size": 1, "allgather_bucket_size": 2}
"""Smallest value that DeepSpeed accepts; 0 for the other sizes."""


NAMES: tuple[str, ...] = (*(knob.name for knob in KNOBS if knob.name != NVME), MICRO_BATCH)
"""Names of the knobs in options: the device of the optimizer's states on NVMe follows from its offload."""


def known_names() -> str:
    """Return the names of all knobs, for messages."""
    return ", ".join(NAMES)


_SHORT_NAMES: Mapping[str, str] = {
    "batch": MICRO_BATCH,
    "stage": ZERO_STAGE,
    **{".".join(knob.path[1:]): knob.name for knob in KNOBS if knob.is_in_offload},
}
"""Short name, or key within ``zero_optimization``, in an option -> the knob."""


def resolve_names(names: Iterable[str], *, option: str) -> tuple[str, ...]:
    """Return the names of knobs, each once, given by name, by key of the config or by short name (``batch``).

    Raises:
        ConfigError: If a name of the ``option`` is not a knob; suggests the knob that it resembles.
    """
    resolved: dict[str, None] = {}
    for name in names:
        plain = name.strip().removeprefix(f"{ZERO}.")
        if plain not in NAMES and plain not in _SHORT_NAMES:
            near = near_key(plain, (*NAMES, *_SHORT_NAMES), alike=_ALIKE)
            hint = f"{near} is probably meant" if near else f"the knobs are {known_names()}"
            raise ConfigError(
                f"{option} names {name!r:.60}, which is not a knob; {hint}. batch and stage are short for the "
                "micro-batch and the ZeRO stage."
            )
        resolved[_SHORT_NAMES.get(plain, plain)] = None
    return tuple(resolved)


def resolve_fixed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return knob -> value of ``--fix``, as of ``resolve_names`` and ``normalise``."""
    fixed = {name: value for key, value in values.items() for name in resolve_names((key,), option="--fix")}
    for name, value in fixed.items():
        normalise(name, KNOB_OF[name].kind if name in KNOB_OF else "count", value, of="--fix ")
    return fixed


PERMISSIONS: tuple[str, ...] = tuple(dict.fromkeys(knob.permission for knob in KNOBS if knob.permission))
"""Values of ``--allow``."""


def check_permissions(names: Iterable[str]) -> tuple[str, ...]:
    """Return the values of ``--allow``, each once; ``ConfigError`` if one is not in ``PERMISSIONS``."""
    result = tuple(dict.fromkeys(names))
    for name in result:
        if name not in PERMISSIONS:
            raise ConfigError(f"--allow is {name!r:.60}; it takes {' and '.join(PERMISSIONS)}.")
    return result


_FLAG = TypeAdapter(bool)
"""Reads flags as DeepSpeed does: ``1``, ``"yes"`` and ``"True"`` are true."""
_ALIKE = 0.6
"""Minimum similarity of a misspelt name to a knob: short names such as ``stage`` have few letters."""


def normalise(name: str, kind: Kind, value: Any, *, key: str = "", of: str = "") -> Any:
    """Return a knob's value in its suggested form: ``5e8`` becomes 500000000, ``"true"`` becomes True.

    Text is read like JSON, so values from a command line can be passed unchanged. ``key`` is the dotted key in a
    config that has the value, ``of`` an option before the name.

    Raises:
        ConfigError: If the value has the wrong type or DeepSpeed would refuse it.
    """
    try:
        return _normalised(name, kind, value)
    except ConfigError as error:
        raise ConfigError(f"{key or of + name} is {as_written(value)}; {error}.", key=key) from None


def _normalised(name: str, kind: Kind, value: Any) -> Any:
    """Return the value; ``ConfigError`` with the rule that an invalid value violates."""
    if kind == "device":
        return _device(value)
    if kind in ("modules", "section") and isinstance(value, Mapping):
        return True
    if kind in ("flag", "modules", "section"):
        try:
            return _FLAG.validate_python(value)
        except ValidationError:
            raise ConfigError("it must be true or false") from None
    if kind == "share":
        return _share(value)
    number = 0 if kind == "blocks" and value in (None, "none") else _whole(name, value)
    if kind == "stage" and number not in ZERO_STAGES:
        raise ConfigError("ZeRO stages are 0, 1, 2 and 3")
    if kind == "ranks":
        number = number or 1  # DeepSpeed treats 0 as 1
    lowest = 1 if kind in ("count", "ranks") else _MINIMUM.get(name, 0)
    if number < lowest:
        raise ConfigError(f"it must be at least {lowest}")
    if name == "allgather_bucket_size" and number % 2:
        raise ConfigError("DeepSpeed accepts even numbers only")
    return number


def _device(value: Any) -> str:
    if isinstance(value, Mapping):
        value = value.get("device", "none")
    if value is None or value is False or value == "auto":  # accelerate and the Trainer fill in their own value
        return "none"
    if value not in ("none", "cpu", "nvme"):
        raise ConfigError("it must be none, cpu or nvme")
    return str(value)


def _share(value: Any) -> float:
    try:
        number = -1.0 if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = -1.0
    if not 0 <= number <= 1:
        raise ConfigError("it must be a number from 0 to 1")
    return number


def _whole(name: str, value: Any) -> int:
    try:
        number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else None
        if number is not None and number.is_integer():
            return int(value) if isinstance(value, int) else int(number)
    except ValueError:
        pass
    example = "one of 0, 1, 2 and 3" if name == ZERO_STAGE else "a whole number, such as 5e8 or 500000000"
    raise ConfigError(f"it must be {example}")


def distinct_sizes(name: str, sizes: Iterable[int], params: int | None) -> Iterable[int]:
    """Return sizes with different effects: at or above ``size_limit`` only the smallest."""
    if params is None:
        return sizes
    limit = size_limit(name, params)
    known = sorted(sizes)
    return [size for size in known if size < limit] + [size for size in known if size >= limit][:1]


def unique(values: Iterable[Any]) -> tuple[Any, ...]:
    """Return the values in their order, each once."""
    return tuple(dict.fromkeys(values))


_MULTIPLES = 64
"""Number of consecutive multiples searched; further multiples are at least 3% apart."""


def multiples(unit: int, high: int) -> list[int]:
    """Return the multiples of a number that are searched, in ascending order."""
    numbers, factor = [unit], 1
    while (factor := factor + 1 if factor < _MULTIPLES else factor + -(-factor * 3 // 100)) * unit <= high:
        numbers.append(factor * unit)
    return numbers
