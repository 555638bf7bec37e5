"""What a model definition of Determined is told about its imports, before anything is launched."""

from __future__ import annotations

from pathlib import Path

import pytest

import optuna_dsat.integrations.deepspeed_trial as package
from optuna_dsat.errors import UsageError
from optuna_dsat.integrations.deepspeed_trial import DeepSpeedTrialContext
from optuna_dsat.script.trial_class import ATTRIBUTES, PROVIDED, REFUSED, find_trial_class

CLASS = "\nclass MyTrial:\n    def __init__(self, context):\n        self.context = context\n"


def refusal(folder: Path, text: str) -> str:
    (folder / "model_def.py").write_text(text + CLASS)
    with pytest.raises(UsageError) as raised:
        find_trial_class("model_def:MyTrial", folder)
    return str(raised.value)


def test_every_name_that_is_promised_is_there() -> None:
    assert set(package.__all__) >= PROVIDED
    assert all(hasattr(package, name) for name in PROVIDED)
    assert not PROVIDED & REFUSED.keys()
    assert not [name for name in ATTRIBUTES if hasattr(DeepSpeedTrialContext, name)]


def test_an_import_of_determined_is_refused_with_the_line_to_write(tmp_path: Path) -> None:
    words = refusal(
        tmp_path,
        "import determined as det\nfrom determined.pytorch import DataLoader, PyTorchTrial\n"
        "from determined.pytorch import deepspeed as det_ds\n",
    )
    assert "line 1: `import determined`" in words
    assert "line 2: from optuna_dsat.integrations.deepspeed_trial import DataLoader" in words
    assert "line 2: PyTorchTrial of Determined is not here: derive from DeepSpeedTrial" in words
    assert "line 3: import the names that you use of deepspeed" in words


def test_attributes_of_the_context_are_refused_by_name(tmp_path: Path) -> None:
    words = refusal(tmp_path, "def seed(self):\n    return self.context.env.trial_seed\n")
    assert "line 2: context.env of Determined is not here" in words
    assert "get_trial_seed()" in words


def test_an_import_for_either_library_is_left_alone(tmp_path: Path) -> None:
    text = "try:\n    from determined.pytorch import DataLoader\nexcept ImportError:\n    pass\n"
    (tmp_path / "model_def.py").write_text(text + CLASS)
    assert find_trial_class("model_def:MyTrial", tmp_path) == tmp_path / "model_def.py"


def test_a_name_of_determined_is_not_imported_from_here(tmp_path: Path) -> None:
    words = refusal(tmp_path, "from optuna_dsat.integrations.deepspeed_trial import LRScheduler\n")
    assert "line 1: LRScheduler of Determined is not here: give the scheduler to" in words
