"""The documentation says what there is, and all of it."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.core import TyperCommand, TyperOption

import optuna_dsat
from docs.generate import config_keys, figures, options
from optuna_dsat import errors, pruners, samplers
from optuna_dsat.launch import run_directory
from optuna_dsat.launch.machine.nvml import DeviceError
from optuna_dsat.launch.run_directory import OutputError
from optuna_dsat.outcome import Outcome
from optuna_dsat.study.end_reason import EndReason
from optuna_dsat.study.options.methods import METHODS

DOCS = Path(__file__).parents[2] / "docs"
COMMANDS = list(options.commands())


def read(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def test_the_page_of_options_is_up_to_date() -> None:
    assert options.page() == read("reference/options.md"), "Run `python -m docs.generate.options` (or `make docs`)."


def test_the_page_of_config_keys_is_up_to_date() -> None:
    assert config_keys.page() == read("reference/config-keys.md"), "Run `make docs`."


def sections(page: str) -> dict[str, str]:
    """Return what stands below each heading of the second level."""
    parts = re.split(r"^## (.*)$", page, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize(("name", "command"), COMMANDS, ids=[name for name, _ in COMMANDS])
def test_every_command_and_option_is_documented(name: str, command: TyperCommand) -> None:
    pages = sections(read("reference/options.md"))
    assert name in pages, "Run `python -m docs.generate.options` (or `make docs`)."
    shared = pages["Options of every search"] if "#options-of-every-search" in pages[name] else ""
    for param in command.params:
        for spelling in [*param.opts, *param.secondary_opts] if isinstance(param, TyperOption) else []:
            assert re.search(rf"`{spelling}[ `]", pages[name] + shared), spelling


def test_every_public_name_is_in_the_python_reference() -> None:
    reference = read("reference/api.md")
    for name in set(optuna_dsat.__all__) - {"__version__"}:
        assert f"optuna_dsat.{name}\n" in reference, name
    for package in (samplers, pruners):
        listed = re.search(rf"automodule:: optuna_dsat\.{package.__name__.split('.')[-1]}\n.*:members: (.*)", reference)
        assert listed is not None
        assert set(package.__all__) == {name.strip() for name in listed.group(1).split(",")}


def test_every_outcome_and_every_end_of_a_search_is_explained() -> None:
    page = read("reference/outcomes.md")
    for outcome in Outcome:
        assert f"| `{outcome.value}` |" in page
    for reason in EndReason:
        assert re.sub(r"--\w+-?\w*", r"`\g<0>`", reason.value) in page


def test_every_exit_code_is_explained() -> None:
    page = read("reference/shell.md")
    raised: list[type[errors.DsatError]] = [DeviceError, OutputError]
    raised += [item for _, item in inspect.getmembers(errors, inspect.isclass) if issubclass(item, errors.DsatError)]
    for code in {0, 130, *(item.exit_code for item in raised)}:
        assert f"| {code} |" in page


def test_every_file_of_a_launch_is_explained() -> None:
    page = read("reference/files.md")
    layout = (run_directory.__doc__ or "").partition("trial-0007/")[2]
    names = re.findall(r"[\w/]+(?:\.\w+)*\.(?:jsonl|json|txt|log)\b", layout)
    assert len(names) > 9
    for name in [*names, "trackers/"]:
        assert f"`{name}`" in page, name


def test_every_message_of_troubleshooting_is_one_that_the_code_says() -> None:
    words = [
        node.value
        for path in (DOCS.parent / "optuna_dsat").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    headings = re.findall(r"^### .*$", read("troubleshooting.md"), flags=re.MULTILINE)
    messages = [message for heading in headings for message in re.findall(r"`([^`]+)`", heading)]
    assert len(messages) > 15
    for message in messages:
        assert any(message in text for text in words), message


def test_every_page_that_is_named_is_there() -> None:
    root = DOCS.parent
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        path = root / name
        if path.suffix in (".py", ".md", ".toml", "") and path.is_file() and not path.is_symlink():
            for page in re.findall(r"\bdocs/[\w/-]+\.md\b", path.read_text(encoding="utf-8")):
                assert (root / page).is_file(), f"{name} names {page}"


def test_every_method_has_its_part_and_its_figure() -> None:
    pages = sections(read("explanation/methods.md"))
    for method in METHODS:
        assert f"figures/{method}.svg" in pages[method]


@pytest.mark.parametrize("method", METHODS)
def test_the_figures_show_what_the_searches_do(method: str, tmp_path: Path) -> None:
    again = "Run `make figures`: the search has changed."
    launches = json.loads(figures.SEARCHES.read_text())[method]
    if method == "guided":  # one that plans; one that draws is searched below, as on another CPU
        assert figures.search(method) == launches, again
    figures.draw(method, launches, tmp_path / "drawn.svg")
    assert (tmp_path / "drawn.svg").read_text() == read(f"figures/{method}.svg"), again


def test_the_recording_shows_its_last_line_whole() -> None:
    """The letters' lower ends were cut, underscores with them."""
    svg = read("figures/search.svg")
    [height] = re.findall(r'clip-terminal"><rect [^>]*height="([\d.]+)"', svg)
    lines = map(float, re.findall(r'<text class="search-r\d" [^>]*y="([\d.]+)"', svg))
    assert max(lines) + 6 <= float(height)


def test_a_search_is_the_same_on_another_cpu() -> None:
    """OpenBLAS rounds otherwise with the instructions of another CPU; a seeded search must not follow it."""
    code = "import json; from docs.generate import figures; print(json.dumps(figures.search('binary')))"
    environment = {**os.environ, "OPENBLAS_CORETYPE": "Prescott"}
    printed = subprocess.run(
        [sys.executable, "-c", code], cwd=DOCS.parent, env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert json.loads(printed) == json.loads(figures.SEARCHES.read_text())["binary"]


def test_the_pages_build_without_a_warning(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "dummy", str(DOCS), str(tmp_path)]
    done = subprocess.run(build, cwd=DOCS.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
