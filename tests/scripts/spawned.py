"""Starts its two ranks by itself."""

from __future__ import annotations

import os
import sys
from multiprocessing.context import SpawnProcess

import torch
import torch.multiprocessing as mp


def train(rank: int, ranks: int, port: str) -> None:
    import deepspeed

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    torch.distributed.init_process_group("gloo", rank=rank, world_size=ranks)
    model = torch.nn.Linear(4, 4)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    while True:
        loss = engine(torch.randn(engine.train_micro_batch_size_per_gpu(), 4)).pow(2).mean()
        engine.backward(loss)
        engine.step()


class Worker(SpawnProcess):
    def __init__(self, number: int, port: str) -> None:
        super().__init__()
        self.number, self.port = number, port

    def run(self) -> None:
        train(self.number, 2, self.port)


if __name__ == "__main__":
    port, *started_by = sys.argv[1:]
    if started_by:
        processes: list[SpawnProcess] = [Worker(rank, port) for rank in range(2)]
        if started_by == ["Process"]:
            processes = [SpawnProcess(target=train, args=(rank, 2, port)) for rank in range(2)]
        for process in processes:
            process.start()
        for process in processes if started_by == ["Process"] else ():  # Python's exit awaits the others
            process.join()
    else:
        mp.spawn(train, args=(2, port), nprocs=2)  # type: ignore[attr-defined,no-untyped-call]
