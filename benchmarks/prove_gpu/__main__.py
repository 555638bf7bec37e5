"""Proves the CUDA path on this machine's GPU, part by part; see ``docs/prove-gpu.md``.

python -m benchmarks.prove_gpu --state DIR [--part-minutes 9] [--only NAME ...] [--gpus 1] [--wheels DIR]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import site
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.prove_gpu.context import Context
    from benchmarks.prove_gpu.proof import Check

EX_TEMPFAIL = 75
"""There is more to do: run the same command again (sysexits.h)."""
EX_USAGE = 2
_GRACE_S = 15.0
"""Beyond the end of a part, for what does not heed it."""
_TESTED = ("deepspeed", "optuna", "optuna-dsat")
"""Packages that are installed from the wheels although the machine has them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one part; return 0 where everything is done, 75 where there is more to do, 3 without a GPU."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    args = _parser().parse_args(given)
    started = time.monotonic()
    args.state.mkdir(parents=True, exist_ok=True)
    if args.wheels is not None and not Path(sys.prefix).is_relative_to(args.state.resolve()):
        python = environment(args.wheels, args.state.resolve() / "env")
        root = str(Path(__file__).resolve().parents[2])
        paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        os.execve(python, [str(python), "-m", "benchmarks.prove_gpu", *given], {**os.environ, "PYTHONPATH": paths})
    from benchmarks.prove_gpu.checks import all_checks
    from optuna_dsat.errors import DsatError

    names = [check.name for check in all_checks()]
    if args.list:
        print("\n".join(names))
        return 0
    if unknown := set(args.only or ()) - set(names):
        sys.stderr.write(f"There is no check {', '.join(sorted(unknown))}; there are: {', '.join(names)}.\n")
        return EX_USAGE
    chosen = [check for check in all_checks() if args.only is None or check.name in args.only]
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


def environment(wheels: Path, folder: Path) -> Path:
    """Return the interpreter of an environment with the packages of this one and, before them, those of the wheels.

    Made once, without a network. pip installs the packages that are tested, and of their needs those that this
    interpreter lacks or has too old.
    """
    python, ready = folder / "bin" / "python", folder / "ready"
    if ready.exists():
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for number, path in enumerate((*site.getsitepackages(), site.getusersitepackages())):
        (packages / f"machine-{number}.pth").write_text(f"import site; site.addsitedir({path!r})")
    install = [str(python), "-m", "pip", "install", "--no-index", "--find-links", str(wheels.resolve()), "--quiet"]
    subprocess.run([*install, "--ignore-installed", "--no-deps", *_TESTED], check=True)
    subprocess.run([*install, *_TESTED], check=True)
    ready.touch()
    return python


def _part(checks: Sequence[Check[Context]], args: argparse.Namespace, *, deadline: float) -> int:
    from benchmarks.prove_gpu import machine
    from benchmarks.prove_gpu.context import Context
    from benchmarks.prove_gpu.proof import Proof, page, run_part, scrubbed, write

    state = args.state.resolve()
    proof = Proof(state / "proof.json")
    devices = machine.first_devices(args.gpus or (len(proof.machine["gpus"]) if proof.machine else None))
    if not proof.machine:
        proof.machine = machine.look(devices)
    if proof.machine["gpus"] != [device.name for device in devices.devices]:
        raise machine.NoGpuError(
            f"This state was begun on {', '.join(proof.machine['gpus'])}: give another folder with --state."
        )
    for name in (args.only or ()) if args.again else ():
        proof.forget(name)
        shutil.rmtree(state / "work" / name, ignore_errors=True)
    context = Context(state=state, machine=proof.machine, devices=devices, deadline=deadline)
    stand_in = bool(proof.machine["stand_in"])
    try:
        with _ended_at(deadline + _GRACE_S):
            left = run_part(checks, proof, context, deadline=deadline, stand_in=stand_in, say=_say)
    finally:
        write(state / "proof.md", scrubbed(page(proof, checks)))
    if left:
        print(f"part done, {len(checks) - len(left)} of {len(checks)} checks; run the same command again")
        return EX_TEMPFAIL
    print(f"all {len(checks)} checks are over; {state.name}/proof.md says what was proven")
    return 0


@contextlib.contextmanager
def _ended_at(moment: float) -> Iterator[None]:
    """Interrupt whatever does not heed the end of the part."""
    from benchmarks.prove_gpu.proof import PartOverError

    def interrupt(_signal: int, _frame: object) -> None:
        raise PartOverError(cut_off=True)

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, max(1.0, moment - time.monotonic()))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
