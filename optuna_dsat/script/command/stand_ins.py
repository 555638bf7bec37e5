"""Import a launcher's parser without the surrounding libraries, which take seconds to import and parse no options.

``torch.distributed.run`` and ``deepspeed.launcher.runner`` import all of torch and DeepSpeed in addition to the
function that builds their parser. Here, modules that are not named are replaced by stand-ins: they can be imported and
mentioned while modules are executed, for example in an annotation. Any other use of a stand-in raises
``StandInUsedError``, so a parser either behaves exactly like the launcher's own or is not used.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, NoReturn

__all__ = ["Stage", "StandIn", "StandInUsedError", "imported_alone"]


class StandInUsedError(BaseException):
    """A stand-in was used where the real object is needed; ``except Exception`` does not catch this."""


class Stage:
    """Whether stand-ins may still be called and asked for attributes, as decorators are when a module is executed."""

    def __init__(self) -> None:
        self.importing = True

    def end_imports(self) -> None:
        """Make every further use of a stand-in raise."""
        self.importing = False


class StandIn:
    """Placeholder for an object of a module that was not imported."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def _another(self) -> StandIn:
        if not self._stage.importing:
            self._refuse()
        return StandIn(self._stage)

    def _refuse(self, *_: Any) -> NoReturn:
        raise StandInUsedError

    def __getattr__(self, name: str) -> StandIn:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._another()

    def __call__(self, *_: Any, **__: Any) -> StandIn:
        """Return another stand-in, as a decorator would."""
        return self._another()

    def __getitem__(self, _: Any) -> StandIn:
        return self._another()

    def __or__(self, _: Any) -> StandIn:
        return self._another()

    def __ror__(self, _: Any) -> StandIn:
        return self._another()

    def __eq__(self, other: object) -> bool:
        if not self._stage.importing:
            self._refuse()
        return self is other

    def __mro_entries__(self, _: tuple[Any, ...]) -> tuple[type, ...]:
        return (object,)

    __bool__ = __iter__ = __len__ = __str__ = __format__ = __lt__ = __int__ = __contains__ = _refuse
    __hash__ = object.__hash__


class _Module(ModuleType):
    """A module of stand-ins."""

    def __init__(self, name: str, stage: Stage) -> None:
        super().__init__(name)
        self._stage = stage

    def __getattr__(self, name: str) -> StandIn:
        if name.startswith("__"):
            raise AttributeError(name)
        if not self._stage.importing:
            raise StandInUsedError
        return StandIn(self._stage)


class _Empty(Loader):
    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name, self._stage)

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module empty."""


class _Finder(MetaPathFinder):
    def __init__(self, names: Collection[str], roots: Collection[str], stage: Stage) -> None:
        self._names = names
        self._roots = roots
        self._stage = stage

    def find_spec(self, fullname: str, path: Sequence[str] | None, _target: ModuleType | None = None) -> Any:
        if _root(fullname) not in self._roots:
            return None
        real = PathFinder.find_spec(fullname, path)
        if real is None or fullname in self._names:
            return real
        spec = ModuleSpec(fullname, _Empty(self._stage), origin=real.origin)
        spec.submodule_search_locations = real.submodule_search_locations
        return spec


def _root(name: str) -> str:
    return name.partition(".")[0]


@contextmanager
def imported_alone(names: Collection[str], *, without: Collection[str] = ()) -> Iterator[Stage]:
    """Within the block, imports from the packages of ``names`` execute only these modules, unloaded afterwards.

    Args:
        names: Modules, by their full names.
        without: Other packages of which no module is executed.

    Raises:
        StandInUsedError: If one of the packages is already imported: its own modules are then as fast.
    """
    roots = {*without, *(_root(name) for name in names)}
    if any(_root(name) in roots for name in sys.modules):
        raise StandInUsedError
    stage = Stage()
    finder = _Finder(names, roots, stage)
    sys.meta_path.insert(0, finder)
    try:
        yield stage
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if _root(name) in roots]:
            del sys.modules[name]
        importlib.invalidate_caches()
