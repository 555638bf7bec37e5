"""Draw ``docs/figures/search.svg``: lines that a search of ``examples/gpt`` prints, run for it.

    python -m docs.generate.recording

The time in the title is that of the whole command. Paths are shown relative to the checkout.
"""

from __future__ import annotations

import io
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[2]
SVG = ROOT / "docs" / "figures" / "search.svg"
SCRIPT = "examples/gpt/train.py"
CONFIG = "examples/gpt/ds_config.json"
TYPED = f"optuna-dsat tune --max-trials 15 deepspeed --num_gpus 2 {SCRIPT} --deepspeed_config {CONFIG}"
"""The command as shown. The study and its folder are temporary, so these options are left out."""
WIDTH = 116
SHOWN = re.compile(r"Profile \(|Trial \d+: .*done$|At (your|a) global batch|Fastest, trial|Config:|Changed from")
_FORMAT = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>{styles} text {{ font-family: ui-monospace, Menlo, Consolas, monospace; font-size: {char_height}px;
line-height: {line_height}px; font-variant-east-asian: full-width; }} </style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}" height="{height}"/>
</clipPath>{lines}</defs>
{chrome}<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}<g class="{unique_id}-matrix">{matrix}</g></g></svg>
"""
"""Rich's own format without its fonts, which lie on another host."""


def search(folder: str) -> tuple[list[str], float]:
    """Run the search; return the lines that it printed, and its seconds."""
    words = shlex.split(TYPED)
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", "from optuna_dsat.cli import main; main()", "tune",
         "--storage", f"sqlite:///{folder}/study.db", "--output-dir", folder, *words[2:]],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True,
    )  # fmt: skip
    text = done.stdout.replace(folder, "optuna-dsat-output").replace(f"{ROOT}/", "")
    return text.splitlines(), time.monotonic() - begin


def shown(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines to draw: profile, trials, answers and the command that trains with the result."""
    trains = False
    for line in lines:
        if SHOWN.match(line) or trains:
            yield line
        trains = line == "Train with it:"


def draw(lines: Iterable[str], *, title: str) -> None:
    """Write the picture of a terminal with lines."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text(f"$ {TYPED}", style="bold"))
    for line in lines:
        text = Text(line)
        text.highlight_regex(r"[\d.]+x (as fast as )?your config", "bold green")
        text.highlight_regex(r"best so far", "green")
        text.highlight_regex(r"^(Trial \d+|At (your|a) global batch of [\d,]+ samples?):", "cyan")
        console.print(text)
    SVG.write_text(console.export_svg(title=title, code_format=_FORMAT, unique_id="search"))


def main() -> None:
    """Run the search and draw it."""
    with tempfile.TemporaryDirectory() as folder:
        lines, seconds = search(folder)
    print(*lines, sep="\n")
    draw(shown(lines), title=f"examples/gpt on two CPU ranks: {seconds:.0f} s")


if __name__ == "__main__":
    main()
