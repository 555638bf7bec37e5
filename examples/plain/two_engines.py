"""Train two models, each with an engine of its own: one that adds up, and one that learns how wrong the first is.

torchrun --nproc_per_node 2 two_engines.py --deepspeed_config ds_config.json
"""

from __future__ import annotations

import argparse
import itertools

import deepspeed
from parts import Network, Sums
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config", required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--critic-steps", type=int, default=3, help="steps of the second model for each of the first")
    args = parser.parse_args()
    network, critic = Network(), Network(hidden=8)
    engine, *_ = deepspeed.initialize(args=args, model=network, model_parameters=network.parameters())
    second, *_ = deepspeed.initialize(args=args, model=critic, model_parameters=critic.parameters())
    data = Sums()
    loader = DataLoader(data, engine.train_micro_batch_size_per_gpu(), sampler=DistributedSampler(data), drop_last=True)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    for _ in range(args.steps):
        numbers, sums = (tensor.to(engine.device) for tensor in next(batches))
        predicted = engine(numbers)
        engine.backward(functional.mse_loss(predicted, sums))
        engine.step()
        error = (predicted - sums).detach().abs()
        for _ in range(args.critic_steps):
            second.backward(functional.mse_loss(second(numbers), error))
            second.step()


if __name__ == "__main__":
    main()
