"""What the sources of a script show: whether it starts its ranks, or says where they meet, and options it declares."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from optuna_dsat.runtime.user_code import parsed_source
from optuna_dsat.script.module_file import module_file

__all__ = ["declared_options", "says_where_to_meet", "starts_own_ranks"]

_LAUNCHING = frozenset({"lightning", "lightning_fabric", "pytorch_lightning", "torchrunx"})
"""Packages that start a process for each device by themselves."""
_SPAWNERS = frozenset({"spawn", "start_processes"})
"""Functions of ``torch.multiprocessing`` that do."""
_MOST_FILES = 200


def starts_own_ranks(script: str, *, is_module: bool, cwd: Path) -> bool:
    """Whether a script, or a file of the user's that it imports, uses what starts a process for each device.

    Args:
        script: Its path, absolute or relative to ``cwd``, or a module's name if ``is_module``.
        is_module: Whether it is a module.
        cwd: The working directory.
    """
    return any(
        _spawns(nodes, imported) or any(name.partition(".")[0] in _LAUNCHING for name in imported)
        for nodes, imported in _files(script, is_module=is_module, cwd=cwd)
    )


def says_where_to_meet(script: str, *, is_module: bool, cwd: Path) -> bool:
    """Whether a script, or a file of the user's that it imports, sets ``MASTER_PORT``: under torchrun it would wait."""
    return any(
        isinstance(node, ast.Subscript)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.slice, ast.Constant)
        and node.slice.value == "MASTER_PORT"
        for nodes, _ in _files(script, is_module=is_module, cwd=cwd)
        for node in nodes
    )


def declared_options(options: Sequence[str], *, script: str, is_module: bool, cwd: Path) -> set[str]:
    """Return those of the options that a script, or a file of the user's that it imports, visibly declares.

    It is declared by its spelling (argparse, click, ``sys.argv``) or as a field of a class (``HfArgumentParser``).

    Args:
        options: Options, as ``--dry-run``.
        script: Its path, absolute or relative to ``cwd``, or a module's name if ``is_module``.
        is_module: Whether it is a module.
        cwd: The working directory.
    """
    literals: set[str] = set()
    fields: set[str] = set()
    for nodes, _ in _files(script, is_module=is_module, cwd=cwd):
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                literals.add(node.value)
            elif isinstance(node, ast.ClassDef):
                targets = [line.target for line in node.body if isinstance(line, ast.AnnAssign)]
                fields |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {option for option in options if option in literals or option.strip("-").replace("-", "_") in fields}


def _spawns(nodes: Sequence[ast.AST], imported: Sequence[str]) -> bool:
    functions = [node.func for node in nodes if isinstance(node, ast.Call)]
    called = {func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "") for func in functions}
    return bool(called & _SPAWNERS) and any(name.startswith("torch.multiprocessing") for name in imported)


def _files(script: str, *, is_module: bool, cwd: Path) -> Iterator[tuple[list[ast.AST], list[str]]]:
    """Yield the syntax nodes and the imported modules of a script and of the user's files that it imports."""
    first = module_file(script, cwd) if is_module else cwd / script
    waiting: list[Path] = [] if first is None else [first]
    seen: set[Path] = set()
    while waiting and len(seen) < _MOST_FILES:
        file = waiting.pop()
        if file in seen:
            continue
        seen.add(file)
        try:
            nodes = list(ast.walk(parsed_source(file)))
        except (OSError, SyntaxError, ValueError):
            continue
        imported = list(_imported(nodes))
        yield nodes, imported
        waiting += _own_files(imported, folders=(file.parent, first.parent if first else cwd, cwd))


def _imported(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Yield the names of imported modules, those relative to a package without their dots."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            yield from filter(None, (base, *(f"{base}.{alias.name}".lstrip(".") for alias in node.names)))


def _own_files(names: Sequence[str], *, folders: Sequence[Path]) -> Iterator[Path]:
    for name in names:
        path = name.replace(".", "/")
        for folder in folders:
            yield from (file for end in (".py", "/__init__.py") if (file := folder / f"{path}{end}").is_file())
