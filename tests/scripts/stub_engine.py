"""A training that never was: ``stub_engine.py CONFIG`` writes the runtime's events without torch or DeepSpeed.

For launches whose start, silence, stop or end is what a test is about. Takes the options of ``tiny_launch.py``.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from optuna_dsat.runtime.events import EngineReady, EventWriter, RankFinished, StepMeasured, events_path
from optuna_dsat.runtime.rank import LAUNCH_ENV, LaunchPlan


def end(kind: str) -> None:
    """End this rank, or hang, as asked."""
    if kind == "raise slowly":
        time.sleep(1.0)
        raise ValueError("the script's own mistake")
    if kind == "exit":
        sys.exit(7)
    if kind == "sleep":
        time.sleep(600)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("--end", default="")
    parser.add_argument("--end-rank", type=int, default=-1)
    parser.add_argument("--at", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--exit-with", default="", help="after the last step, wait until this file exists")
    parser.add_argument("--orphan", action="store_true", help="leave a grandchild behind that outlives its parent")
    parser.add_argument("--daemon", default="", help="have a daemon of no environment that writes its number here")
    args = parser.parse_args()
    if args.daemon:
        start = f"setsid sleep 600 </dev/null >/dev/null 2>&1 & echo $! >> {args.daemon}"
        subprocess.run(["env", "-i", "sh", "-c", start], check=True)
    if args.orphan:
        subprocess.run(["sh", "-c", "sleep 600 & sleep 600 & exit 0"], check=True, start_new_session=True)
    plan, rank = LaunchPlan.load(Path(os.environ[LAUNCH_ENV])), int(os.environ["RANK"])
    writer = EventWriter(events_path(plan.events_dir, rank))
    writer.write(
        EngineReady(
            rank=rank, time=time.time(), zero_stage=0, train_batch_size=8, train_micro_batch_size_per_gpu=4,
            gradient_accumulation_steps=1, data_parallel_size=2, pipeline=False, device="cpu",
        )
    )  # fmt: skip
    print("training starts", flush=True)
    for step in range(1, args.steps + 1):
        if step == args.at and args.end and args.end_rank in (-1, rank):
            end(args.end)
        time.sleep(args.step_s)
        writer.write(
            StepMeasured(
                rank=rank, time=time.time(), step=step, latency_s=0.1, forward_s=0.03, backward_s=0.03, step_s=0.03,
                samples=4, observed_micro_batch=4, loss=0.5, peak_allocated_bytes=2**20, peak_reserved_bytes=2**20,
                rss_bytes=2**20,
            )
        )  # fmt: skip
        if plan.end_profile_step is not None and step >= plan.end_profile_step:
            writer.write(RankFinished(rank=rank, time=time.time(), reason="profile_done", steps=step))
            while args.exit_with and not Path(args.exit_with).exists():
                time.sleep(0.02)
            os._exit(0)


if __name__ == "__main__":
    main()
