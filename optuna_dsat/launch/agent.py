"""torchrun that ends with the tuner and records its ranks' exit codes.

    python -m optuna_dsat.launch.agent RECORD TUNER_PID TORCHRUN_ARGUMENTS...

The same as ``python -m torch.distributed.run TORCHRUN_ARGUMENTS...``, with seven differences. The kernel kills it when
the thread that started it ends, and so with the tuner, also if that is killed. If ranks fail, it writes their exit
codes and signals to RECORD as JSON: torchrun itself only logs them, and outcomes are not read from logs. Ended by a
signal, it leaves with 128 and its number, as shells do. It serves one machine, so it does not wait for others. It never
calls CUDA (``launch/cuda_state.py``). It enters the launch's own view of the file system (``runtime/world.py``). It
ends after all that a measured launch has started (``launch/orphans.py``).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optuna_dsat.launch.cuda_state import cuda_hidden
from optuna_dsat.launch.loopback import store_on_loopback
from optuna_dsat.launch.orphans import adopt_orphans, end_children
from optuna_dsat.runtime.atomic_write import write_text_atomic
from optuna_dsat.runtime.launch_plan import LAUNCH_ENV, LaunchPlan
from optuna_dsat.runtime.rank_process import AGENT_ENV, die_with_parent
from optuna_dsat.runtime.world import enter_world

__all__ = ["main"]


def _write_record(path: Path, failures: Mapping[int, Any]) -> None:
    record = {
        "failures": [
            {"rank": rank, "pid": failure.pid, "exit_code": failure.exitcode, "time": failure.timestamp}
            for rank, failure in sorted(failures.items())
        ]
    }
    write_text_atomic(path, json.dumps(record))


def _hasten_rendezvous() -> None:
    """Remove what one machine does not need from the rendezvous, together some 0.3 s of a launch.

    That is a random delay, which spreads nodes in time, and the search through all modules for the name of the calling
    function, recorded for events that are not used. Another version of torch may have neither.
    """
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    module: Any = dynamic_rendezvous
    if not (hasattr(module, "get_method_name") and hasattr(module, "_delay")):
        return
    wait = module._delay

    def delay(seconds: float | tuple[float, float]) -> None:
        if not isinstance(seconds, tuple):
            wait(seconds)

    module._delay = delay
    module.get_method_name = lambda *_, **__: ""


def main(argv: list[str]) -> int:
    """Run torchrun with the arguments after the first two; return the exit code."""
    record, parent_pid, arguments = Path(argv[0]), int(argv[1]), argv[2:]
    die_with_parent(parent_pid)
    os.environ[AGENT_ENV] = str(os.getpid())
    plan = LaunchPlan.load(os.environ[LAUNCH_ENV])
    if not plan.measures:
        return _run_torchrun(arguments, record)
    enter_world(plan.world, cwd=os.getcwd(), arguments=arguments, environ=os.environ)  # noqa: PTH109 - a text
    adopt_orphans()
    try:
        return _run_torchrun(arguments, record)
    finally:
        end_children()


def _run_torchrun(arguments: list[str], record: Path) -> int:
    """Run torchrun; return the exit code."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    _hasten_rendezvous()
    try:
        with cuda_hidden(), store_on_loopback():
            run.run(run.parse_args(arguments))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        _write_record(record, error.failures)
        return 1
    except SignalException as error:  # it has ended its ranks
        print(error, file=sys.stderr)
        return 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
