"""A tiny DeepSpeed training whose end can be chosen: ``tiny_launch.py CONFIG --end KIND --end-rank R --at STEP``."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import subprocess
import sys
import time
from typing import Any

import deepspeed
import torch


def end(kind: str) -> None:
    """End this rank, or hang, as asked."""
    if kind == "raise":
        raise ValueError("the script's own mistake")
    if kind == "exit":
        sys.exit(7)  # with gloo's threads running: they may abort Python's own exit
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    if kind == "sleep":
        time.sleep(600)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("--end", default="")
    parser.add_argument("--end-rank", type=int, default=-1)
    parser.add_argument("--at", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--orphan", action="store_true", help="leave a grandchild behind that outlives its parent")
    parser.add_argument("--sequence-parallel", action="store_true", help="both ranks hold a part of each sample")
    args = parser.parse_args()
    if args.orphan:
        subprocess.run(["sh", "-c", "sleep 600 & sleep 600 & exit 0"], check=True, start_new_session=True)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 1))
    mpu: Any = None
    if args.sequence_parallel:
        mpu = importlib.import_module("deepspeed.runtime.sequence_parallel.parallel_state_sp")
        deepspeed.init_distributed()
        mpu.initialize_sequence_parallel(2)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=args.config, mpu=mpu)
    print("training starts")
    for step in range(1, args.steps + 1):
        if step == args.at and args.end and args.end_rank in (-1, int(os.environ["RANK"])):
            end(args.end)
        time.sleep(args.step_s)
        loss = engine(torch.randn(args.batch, 16)).square().mean()
        engine.backward(loss)
        engine.step()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
