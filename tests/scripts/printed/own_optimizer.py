"""An optimizer of the script's own that reads the shapes of parameters: own_optimizer.py --deepspeed_config F."""

import argparse
from typing import Any

import deepspeed
import torch
from torch.utils.data import TensorDataset

parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int, default=-1)
args = parser.parse_args()


class RowNorm(torch.optim.Optimizer):
    """Scales the gradient of each row."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for parameter in self.param_groups[0]["params"]:
            gradient = parameter.grad.reshape(parameter.shape[0], -1)
            parameter.sub_((gradient / (gradient.norm(dim=1, keepdim=True) + 1e-8)).view_as(parameter), alpha=0.01)


deepspeed.init_distributed()
model = torch.nn.Linear(4, 1)
engine, _, loader, _ = deepspeed.initialize(
    args=args, model=model, optimizer=RowNorm(model.parameters()), training_data=TensorDataset(torch.ones(240, 4))
)
for (x,) in loader:
    engine.backward(engine(x).mean())
    engine.step()
