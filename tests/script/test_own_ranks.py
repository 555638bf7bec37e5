"""What a script's source shows of its options."""

from __future__ import annotations

from pathlib import Path

import pytest

from optuna_dsat.script.command.own_ranks import declared_options


@pytest.mark.parametrize(
    ("source", "declared"),
    [
        ("import argparse\np = argparse.ArgumentParser()\np.add_argument('--seed', type=int)\n", True),
        ("import sys\nif '--seed' in sys.argv:\n    pass\n", True),
        ("import click\n@click.option('--seed')\ndef main(seed): ...\n", True),
        ("from transformers import HfArgumentParser\nclass Arguments:\n    seed: int = 0\n", True),
        ("import fire\ndef main(seed=0): ...\nfire.Fire(main)\n", True),
        ("import subprocess\nsubprocess.run(['tool', '--seed', '1'])\n", False),
        ("class State:\n    seed: int = 0\n", False),
        ("print('use --seed')\n", False),
    ],
)
def test_an_option_is_the_scripts_where_its_source_declares_it(tmp_path: Path, source: str, declared: bool) -> None:
    (tmp_path / "train.py").write_text(source)
    result = declared_options(["--seed"], script="train.py", is_module=False, cwd=tmp_path)
    assert (result == {"--seed"}) is declared
