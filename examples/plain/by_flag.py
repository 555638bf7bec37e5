"""Train as DeepSpeed's own examples do: ``--deepspeed --deepspeed_config F``, with a checkpoint now and then.

torchrun --nproc_per_node 2 by_flag.py --deepspeed --deepspeed_config ds_config.json
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
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save", default="checkpoints", help="folder of the checkpoints")
    parser.add_argument("--save-every", type=int, default=2, help="steps between two checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--local_rank", type=int, default=-1)
    args = deepspeed.add_config_arguments(parser).parse_args()
    deepspeed.init_distributed()
    model = Network()
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    first = 0
    if args.resume:
        path, state = engine.load_checkpoint(args.save)
        first = state["step"]
        print(f"resumed from {path} after step {first}", flush=True)
    data = Sums()
    loader = DataLoader(data, engine.train_micro_batch_size_per_gpu(), sampler=DistributedSampler(data), drop_last=True)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    for step in range(first + 1, args.steps + 1):
        numbers, sums = (tensor.to(engine.device) for tensor in next(batches))
        loss = functional.mse_loss(engine(numbers), sums)
        engine.backward(loss)
        engine.step()
        if step % args.save_every == 0:
            saved = engine.save_checkpoint(args.save, client_state={"step": step})
            print(f"step {step} loss {loss.item():.4f} saved {saved}", flush=True)


if __name__ == "__main__":
    main()
