"""Proves the CUDA path on this machine's GPU, part by part; see ``docs/prove-gpu.md``.

python -m benchmarks.prove_gpu --state DIR [--part-minutes 9] [--only NAME ...] [--gpus 1] [--wheels DIR]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.prove_gpu.install import InstallError, environment, install

if TYPE_CHECKING:
    from benchmarks.prove_gpu.context import Context
    from benchmarks.prove_gpu.proof import Proof
    from benchmarks.prove_gpu.runner import Check

__all__ = ["main"]

EX_TEMPFAIL = 75
"""There is more to do: run the same command again (sysexits.h)."""
EX_USAGE = 2
_GRACE_S = 15.0
"""Beyond the end of a part, for what does not heed it."""
_INSTALLED = "PROVE_GPU_SITE"
"""Set where the wheels are on Python's path already."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one part; return 0 where everything is done, 75 where there is more to do, 3 without a GPU."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    args = _parser().parse_args(given)
    started = time.monotonic()
    args.state.mkdir(parents=True, exist_ok=True)
    if args.wheels is not None and _INSTALLED not in os.environ:
        _install_and_restart(args.wheels, args.state / "site", given)
    from benchmarks.prove_gpu.checks import all_checks

    names = [check.name for check in all_checks()]
    if args.list:
        print("\n".join(names))
        return 0
    if unknown := set(args.only or ()) - set(names):
        sys.stderr.write(f"There is no check {', '.join(sorted(unknown))}; there are: {', '.join(names)}.\n")
        return EX_USAGE
    chosen = [check for check in all_checks() if args.only is None or check.name in args.only]
    from optuna_dsat.errors import DsatError

    try:
        return _part(chosen, args, deadline=started + 60 * args.part_minutes)
    except DsatError as error:
        sys.stderr.write(f"prove-gpu: {error}\n")
        return error.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prove_gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--state", type=Path, required=True, help="folder that is kept between parts")
    parser.add_argument("--part-minutes", type=float, default=9.0, help="time of one part (default 9)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these checks alone")
    parser.add_argument("--again", action="store_true", help="begin the checks of --only anew")
    parser.add_argument("--gpus", type=int, help="GPUs to use (default: two where there are two, else one)")
    parser.add_argument("--wheels", type=Path, help="folder of wheels that `make pack-gpu` collected")
    parser.add_argument("--list", action="store_true", help="name the checks and end")
    return parser


def _install_and_restart(wheels: Path, site: Path, arguments: Sequence[str]) -> None:
    """Go on in an interpreter that finds what the wheels hold."""
    try:
        for name in install(wheels, site):
            print(f"installed {name}", flush=True)
    except InstallError as error:
        sys.exit(f"prove-gpu: {error}")
    root = Path(__file__).resolve().parents[2]
    environ = {**environment(root, site), _INSTALLED: "1"}
    os.execve(sys.executable, [sys.executable, "-m", "benchmarks.prove_gpu", *arguments], environ)


def _part(checks: Sequence[Check[Context]], args: argparse.Namespace, *, deadline: float) -> int:
    from benchmarks.prove_gpu.context import Context
    from benchmarks.prove_gpu.machine import Machine, NoGpuError, first_devices, look
    from benchmarks.prove_gpu.proof import Proof
    from benchmarks.prove_gpu.runner import run_part

    state = args.state.resolve()
    proof = Proof(state / "proof.json")
    devices = first_devices(args.gpus)
    if proof.machine and args.gpus is None and devices.kind == "cuda":
        devices = first_devices(len(proof.machine["gpus"]))
    if not proof.machine:
        proof.machine = look(devices).to_json()
    machine = Machine.from_json(proof.machine)
    if machine.gpus != tuple(device.name for device in devices.devices):
        raise NoGpuError(f"This state was begun on {', '.join(machine.gpus)}: give another folder with --state.")
    if args.again:
        for name in args.only or ():
            proof.forget(name)
            shutil.rmtree(state / "work" / name, ignore_errors=True)
    if machine.stand_in and len(devices.devices) > 1 and args.gpus is None:
        devices = first_devices(1)
        proof.machine["gpus"] = [devices.devices[0].name]
    context = Context(state=state, machine=machine, devices=devices, deadline=deadline)
    try:
        with _ended_at(deadline + _GRACE_S):
            left = run_part(checks, proof, context, deadline=deadline, stand_in=machine.stand_in, say=_say)
    finally:
        _write_page(proof, checks, state)
    if left:
        done = len(checks) - left
        print(f"part done, {done} of {len(checks)} checks; run the same command again")
        return EX_TEMPFAIL
    print(f"all {len(checks)} checks are over; {state.name}/proof.md says what was proven")
    return 0


@contextlib.contextmanager
def _ended_at(moment: float) -> Iterator[None]:
    """Have whatever does not heed the end of the part interrupted."""
    from benchmarks.prove_gpu.proof import OverrunError

    def interrupt(_signal: int, _frame: object) -> None:
        raise OverrunError

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, max(1.0, moment - time.monotonic()))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _write_page(proof: Proof, checks: Sequence[Check[Context]], state: Path) -> None:
    from benchmarks.prove_gpu.page import page
    from benchmarks.prove_gpu.proof import replace, scrubbed

    left = [check.name for check in checks if check.name not in proof.records]
    written = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    text = page(proof.machine, list(proof.records.values()), written=written, left=left)
    proof.write()
    replace(state / "proof.md", scrubbed(text, state=state))


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
