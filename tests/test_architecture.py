from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = [
    {"cli", "api"},
    {"study_run", "prepare"},
    {"session", "report", "doctor"},
    {
        "tuner",
        "telling",
        "methods",
        "confirmation",
        "finalists",
        "loss_check",
        "profiling",
        "export",
        "progress",
        "study_space",
        "script_plan",
        "stored",
        "study_explanation",
        "warm_start",
    },
    {"samplers", "pruners", "launch", "store", "integrations"},
    {
        "lineage",
        "bisection",
        "potential",
        "advice",
        "belief",
        "experience",
        "explanation",
        "residuals",
        "gpus",
        "planning",
        "transformer",
        "memory",
        "memory_fit",
        "memory_belief",
        "foresight",
        "step_theory",
        "model_states",
        "space",
        "search_space",
        "knobs",
        "operators",
        "ds_config",
        "autotuning",
        "arg_mapping",
        "history",
        "measurement",
        "module_file",
        "script_trainer",
        "standing",
        "words",
        "options",
        "spec",
        "trial_class",
    },
    {"outcome", "errors", "runtime"},
]


def layer_of(part: str) -> int:
    for depth, names in enumerate(LAYERS):
        if part in names or any(part.startswith(("_" + name, name + "_")) for name in names):
            return depth
    raise AssertionError(f"optuna_dsat.{part} has no place in the layers")


def sources() -> list[tuple[str, Path]]:
    found = [(path.stem, path) for path in (ROOT / "optuna_dsat").glob("*.py") if path.stem != "__init__"]
    for folder in ("cli", "doctor", "integrations", "launch", "report", "runtime", "store"):
        found += [(folder, path) for path in (ROOT / "optuna_dsat" / folder).rglob("*.py")]
    for folder in ("samplers", "pruners"):
        found += [(folder, path) for path in (ROOT / folder).rglob("*.py")]
    return found


def imports_of(path: Path) -> set[str]:
    """Return the parts of optuna_dsat that a file imports, at the top or inside functions."""
    parts: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "optuna_dsat":
            names = node.module.split(".")[1:2] or [alias.name for alias in node.names]
            parts |= set(names)
        elif isinstance(node, ast.Import):
            parts |= {a.name.split(".")[1] for a in node.names if a.name.startswith("optuna_dsat.")}
    return parts - {"__version__"}


@pytest.mark.parametrize(
    ("part", "path"), sources(), ids=lambda value: value.name if isinstance(value, Path) else value
)
def test_imports_run_downwards_only(part: str, path: Path) -> None:
    upwards = {name for name in imports_of(path) if layer_of(name) < layer_of(part)}
    assert not upwards, f"{path.relative_to(ROOT)} imports {sorted(upwards)} from above"


def test_the_runtime_imports_nothing_of_the_rest() -> None:
    for path in (ROOT / "optuna_dsat" / "runtime").rglob("*.py"):
        assert imports_of(path) <= {"runtime", "outcome"}, path


def test_integrations_live_in_the_users_process_too() -> None:
    for path in (ROOT / "optuna_dsat" / "integrations").rglob("*.py"):
        assert imports_of(path) <= {"integrations", "runtime", "errors", "trial_class"}, path
    assert imports_of(ROOT / "optuna_dsat" / "trial_class.py") <= {"errors", "module_file", "runtime"}


def test_samplers_and_pruners_neither_launch_nor_store() -> None:
    for folder in ("samplers", "pruners"):
        for path in (ROOT / folder).rglob("*.py"):
            assert not imports_of(path) & {"launch", "store", "session", "tuner", "cli"}, path


def test_help_imports_neither_torch_nor_optuna_nor_plotly() -> None:
    code = (
        "import sys\n"
        "from optuna_dsat.cli import main\n"
        "try:\n    main(['random', '--help'])\nexcept SystemExit as e:\n    assert e.code == 0, e.code\n"
        "heavy = {'torch', 'deepspeed', 'optuna', 'plotly', 'sqlalchemy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "--zero-stages" in done.stdout
