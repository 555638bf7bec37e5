"""Static analysis of a script: whether it spawns its own ranks or sets ``MASTER_PORT``, and its declared options.

No user code is imported, also not to find the file that ``python -m NAME`` or ``import NAME`` runs.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from optuna_dsat.errors import UsageError
from optuna_dsat.runtime.user_code import called_name, declares_option, parsed_source
from optuna_dsat.script.interpreter import package_folders


def python_tree(file: Path, what: str) -> ast.Module:
    """Return the syntax tree of a Python file.

    Raises:
        UsageError: If it is not Python, or cannot be read.
    """
    try:
        return parsed_source(file)
    except SyntaxError as error:
        where = f" (line {error.lineno})" if error.lineno else ""
        raise UsageError(f"{what} is not Python{where}: {error.args[0]}.") from None
    except OSError as error:
        raise UsageError(f"{what} cannot be read: {error.strerror}.") from None


def module_file(name: str, cwd: Path, *, of_package: str = "__main__.py", python: str | None = None) -> Path | None:
    """Return the file that ``python -m name`` runs in ``cwd``; None without one.

    The working directory precedes installed packages. Nothing is imported, so submodules of a package that extends its
    ``__path__`` on import are not found. With ``__init__.py`` of a package, it is the file that ``import name`` runs.
    """
    top, *rest = name.split(".")
    for folder in (cwd, *package_folders(top, python)):
        base = folder.joinpath(top, *rest)
        for file in (base / of_package, base.with_name(f"{base.name}.py")):
            if file.is_file():
                return file
    return None


_LAUNCHING = frozenset({"lightning", "lightning_fabric", "pytorch_lightning", "torchrunx"})
"""Packages that start one process per device themselves."""
_SPAWNERS = frozenset({"spawn", "start_processes"})
"""Functions of ``torch.multiprocessing`` that spawn ranks."""
_MOST_FILES = 200
_SIGNATURE_PARSERS = frozenset({"transformers", "trl", "fire", "tyro", "simple_parsing", "jsonargparse", "typer"})
"""Packages that derive options from fields or parameters, such as ``HfArgumentParser`` and ``fire.Fire``."""
_TO_TRAIN = tuple(f"--{name}" for name in ("do_train", "do-train", "train", "training", "is_train", "mode", "phase"))
"""Options without which scripts may only evaluate."""


@dataclass(frozen=True)
class Source:
    """The source of a script and of the user files that it imports, of which ``_MOST_FILES`` are read."""

    script: str
    """A path, absolute or relative to ``cwd``, or the name of a module."""
    is_module: bool
    cwd: Path
    python: str | None = None

    def starts_own_ranks(self) -> bool:
        """Detect scripts that start one process per device themselves."""
        return any(
            _spawns(nodes, imported) or any(name.partition(".")[0] in _LAUNCHING for name in imported)
            for nodes, imported in self._files()
        )

    def says_where_to_meet(self) -> bool:
        """Detect scripts that set ``MASTER_PORT``: under torchrun they would wait."""
        return any(
            isinstance(node, ast.Subscript)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.slice, ast.Constant)
            and node.slice.value == "MASTER_PORT"
            for node in self._nodes()
        )

    def reads_input(self) -> bool:
        """Detect scripts that read their standard input."""
        return any(
            (isinstance(node, ast.Attribute) and node.attr == "stdin" and getattr(node.value, "id", "") == "sys")
            or (isinstance(node, ast.Call) and ast.unparse(node.func) in ("input", "fileinput.input"))
            or (isinstance(node, ast.Constant) and node.value == "/dev/stdin")
            for node in self._nodes()
        )

    def mentioned(self, names: Iterable[str]) -> list[str]:
        """Return the subset of names by which the script may read the environment.

        The key of an assignment, as in ``os.environ["NAME"] = "1"``, does not count, nor a value, as in
        ``x == "NAME"``.
        """
        keys = (key for node in self._nodes() for key in _keys(node))
        literals = {key.value for key in keys if isinstance(key, ast.Constant)}
        return [name for name in names if name in literals]

    def declared_options(self, options: Sequence[str]) -> set[str]:
        """Return the subset of options that the script visibly declares.

        An option is declared if its name occurs in a call such as ``add_argument`` or in a comparison, as with
        ``sys.argv``. If a package of ``_SIGNATURE_PARSERS`` is imported, fields of classes and parameters of functions
        also declare options.
        """
        spellings: set[str] = set()
        names: set[str] = set()
        imported: set[str] = set()
        for nodes, modules in self._files():
            imported |= {module.partition(".")[0] for module in modules}
            for node in nodes:
                spellings.update(_spellings(node))
                names.update(_names(node))
        if not imported & _SIGNATURE_PARSERS:
            names = set()
        return {option for option in options if option in spellings or option.strip("-").replace("-", "_") in names}

    def options_to_train(self) -> list[str]:
        """Return the options of the script without which it may not train.

        ``do_train`` of Hugging Face's ``TrainingArguments`` is not declared in user files, but read there.
        """
        names = {node.attr for node in self._nodes() if isinstance(node, ast.Attribute)}
        return sorted(self.declared_options(_TO_TRAIN) or {_TO_TRAIN[0]} & {f"--{name}" for name in names})

    def _nodes(self) -> Iterator[ast.AST]:
        return (node for nodes, _ in self._files() for node in nodes)

    def _files(self) -> Iterator[tuple[list[ast.AST], list[str]]]:
        """Yield the syntax nodes and the imported modules of each file."""
        if self.is_module:
            first = module_file(self.script, self.cwd, python=self.python)
        else:
            first = (self.cwd / self.script).resolve()
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
            imported = list(imported_modules(nodes))
            yield nodes, imported
            waiting += _own_files(imported, folders=(file.parent, first.parent if first else self.cwd, self.cwd))


def _keys(node: ast.AST) -> Sequence[ast.expr]:
    """Return the parts of a node that may be keys which it reads: a subscript, an argument, the left of an ``in``."""
    if isinstance(node, ast.Subscript):
        return () if isinstance(node.ctx, ast.Store) else (node.slice,)
    if isinstance(node, ast.Call):
        return [*node.args[:1], *(keyword.value for keyword in node.keywords if "env" in (keyword.arg or ""))]
    if isinstance(node, ast.Compare):
        return (node.left,) if isinstance(node.ops[0], (ast.In, ast.NotIn)) else ()
    return getattr(node, "elts", ())  # a list of names


def _spellings(node: ast.AST) -> Iterator[str]:
    """Yield the strings in a call that declares an option, or in a comparison."""
    parts: list[ast.expr] = []
    if isinstance(node, ast.Compare):
        parts = [node.left, *node.comparators]
    elif isinstance(node, ast.Call):
        parts = node.args if declares_option(node) else []
    for part in parts:
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.ClassDef):
        targets = [line.target for line in node.body if isinstance(line, ast.AnnAssign)]
        yield from (target.id for target in targets if isinstance(target, ast.Name))
    elif isinstance(node, ast.FunctionDef):
        yield from (argument.arg for argument in (*node.args.args, *node.args.kwonlyargs))


def _spawns(nodes: Sequence[ast.AST], imported: Sequence[str]) -> bool:
    called = {called_name(node) for node in nodes if isinstance(node, ast.Call)}
    uses = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute) and node.attr == "multiprocessing"}
    if called & _SPAWNERS and any(name.startswith("torch.multiprocessing") for name in (*imported, *uses)):
        return True
    multiprocessing = any(name.removeprefix("torch.").startswith("multiprocessing") for name in (*imported, *uses))
    return multiprocessing and "Process" in called and numbers_ranks(nodes)


def numbers_ranks(nodes: Iterable[ast.AST]) -> bool:
    """Whether code computes the ``RANK`` of an environment or process group, as for each process that it starts."""
    values: list[ast.expr | None] = []
    for node in nodes:
        if isinstance(node, ast.Assign):
            keys = [target.slice for target in node.targets if isinstance(target, ast.Subscript)]
            values += [node.value for key in keys if isinstance(key, ast.Constant) and key.value == "RANK"]
        elif isinstance(node, ast.Dict):
            places = [n for n, key in enumerate(node.keys) if isinstance(key, ast.Constant) and key.value == "RANK"]
            values += [node.values[place] for place in places]
        elif isinstance(node, ast.Call):
            name = "rank" if called_name(node) == "init_process_group" else "RANK"
            values += [keyword.value for keyword in node.keywords if keyword.arg == name]
    computed = [ast.unparse(value) for value in values if value is not None and not isinstance(value, ast.Constant)]
    return any("env" not in text for text in computed)  # a variable of another launcher


def imported_modules(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Yield the modules, and the names in them, that syntax nodes import."""
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
