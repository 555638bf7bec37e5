"""The example's definition, which initialises torch.distributed by itself and is killed where a variable says so."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
from model_def import MyTrial  # type: ignore[import-not-found]  # beside it where it runs

from optuna_dsat.integrations.deepspeed_trial import DeepSpeedTrialContext


class ByHand(MyTrial):  # type: ignore[misc]
    def __init__(self, context: DeepSpeedTrialContext) -> None:
        if torch.distributed.is_initialized():
            raise RuntimeError("torch.distributed runs already.")
        torch.distributed.init_process_group("gloo")
        deepspeed.init_distributed(dist_init_required=False)
        super().__init__(context)

    def train_batch(self, dataloader_iter: Iterator[Any] | None, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        if self.context.distributed.get_rank() == 1 and str(batch_idx) == os.environ.get("KILL_AT"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().train_batch(  # type: ignore[no-any-return]
            dataloader_iter, epoch_idx, batch_idx
        )
