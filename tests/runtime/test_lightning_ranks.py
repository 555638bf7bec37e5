"""A Lightning Trainer whose device count differs from the launch's number of ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from optuna_dsat.runtime.adapt.lightning import LightningHook
from optuna_dsat.runtime.rank import LaunchPlan, Rank


@pytest.fixture
def trainer() -> Any:
    """Return a class with the arguments of Lightning's Trainer, patched as in a launch of two ranks."""

    class Trainer:
        def __init__(self, *, devices: Any = "auto", num_nodes: int = 1) -> None:
            self.asked = (devices, num_nodes)

        def fit(self) -> None:
            """Train."""

    plan = LaunchPlan(
        launch_id="profile",
        purpose="profile",
        events_dir="/run/events",
        log_dir="/run/logs",
        config_path="/run/ds_config.json",
        user_config_path="/home/ds_config.json",
        overlay={},
    )
    rank = Rank(rank=0, local_rank=0, world_size=2, local_world_size=2, host="h", launch_path="", can_compile=False)
    hook = LightningHook(plan=plan, rank=rank, write=print)
    hook.callbacks()["lightning.pytorch.trainer.trainer"](SimpleNamespace(Trainer=Trainer))
    return Trainer


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"devices": "auto"},
        {"devices": -1},
        {"devices": 2},
        {"devices": [0, 1]},
        {"devices": "2"},
        {"devices": "0,1"},
        {"devices": "-1"},
    ],
)
def test_what_fits_the_launch_is_left_alone(trainer: Any, asked: dict[str, Any]) -> None:
    assert trainer(**asked).asked == (asked.get("devices", "auto"), 1)


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({"devices": 1}, 1),
        ({"devices": [3]}, 1),
        ({"devices": "1"}, 1),
        ({"devices": "3,"}, 1),
        ({"devices": 2, "num_nodes": 2}, 4),
    ],
)
def test_what_does_not_is_refused_with_the_option_that_gives_it_its_number(
    trainer: Any, asked: dict[str, Any], wanted: int
) -> None:
    with pytest.raises(ValueError, match=rf"this launch has 2 ranks: tune with --gpus-per-trial {wanted} "):
        trainer(**asked)
