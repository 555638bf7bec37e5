"""torchrun that ends with the tuner and records its ranks' exit codes.

    python -m optuna_dsat.runtime.agent.torchrun RECORD TUNER_PID TORCHRUN_ARGUMENTS...

The same as ``python -m torch.distributed.run TORCHRUN_ARGUMENTS...``, with eight differences:

- The kernel kills it when the thread that started it ends, and so with the tuner, even if that is killed.
- If ranks fail, it writes their exit codes and signals to RECORD as JSON. torchrun only logs them, and outcomes are
  never parsed from logs.
- If a signal ends it, its exit code is 128 plus the signal, as in shells.
- It serves a single machine, so it does not wait for others.
- It never calls CUDA (``runtime/agent/cuda.py``).
- It enters the launch's private view of the file system (``runtime/isolation/world.py``).
- Its ranks import ours before the working directory is on their path (Python 3.11 or newer).
- It ends after all processes that a measured launch has started (``launch/machine/tree.py``).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from optuna_dsat.runtime.agent.cuda import cuda_hidden
from optuna_dsat.runtime.agent.processes import adopt_orphans, die_with_parent, end_children
from optuna_dsat.runtime.files import write_text_atomic
from optuna_dsat.runtime.isolation.world import enter_world
from optuna_dsat.runtime.process import AGENT_ENV, SAFE_PATH_ENV, UNTIL_SCRIPT
from optuna_dsat.runtime.rank import LAUNCH_ENV, LaunchPlan

# Ports of a launch listen on the loopback address, or for several machines on the address of node 0 only.
#
# torch's store, which the agent creates for the rendezvous and shares with the ranks, listens on all addresses of the
# machine regardless of the endpoint. Gloo and NCCL use the address that the host name resolves to.

LOOPBACK = "127.0.0.1"
LOOPBACK_ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Variables of a launch on a single machine; the user's values take precedence."""


@contextlib.contextmanager
def store_on_loopback() -> Iterator[None]:
    """Within this context, torchrun binds its stores, for the rendezvous and the ranks, to the requested address only.

    It is the loopback address, or of node 0. A version of torch that creates stores elsewhere is not changed.
    """
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend, dynamic_rendezvous, static_tcp_rendezvous

    backend: Any = c10d_rendezvous_backend
    static: Any = static_tcp_rendezvous
    handler: Any = dynamic_rendezvous.DynamicRendezvousHandler
    tcp_store, for_ranks = getattr(backend, "TCPStore", None), getattr(handler, "_create_tcp_store_server", None)
    if tcp_store is None or for_ranks is None:
        yield
        return

    def store(host: str, port: int, *arguments: Any, is_master: bool = False, **options: Any) -> Any:
        if not is_master or host != LOOPBACK:
            return tcp_store(host, port, *arguments, is_master=is_master, **options)
        listening = socket.create_server((LOOPBACK, port))
        chosen = listening.getsockname()[1]
        return tcp_store(host, chosen, *arguments, is_master=True, master_listen_fd=listening.detach(), **options)

    def static_store(host: str, port: int, *arguments: Any, **options: Any) -> Any:
        is_master = arguments[1] if len(arguments) > 1 else options.get("is_master")
        if not is_master:
            return tcp_store(host, port, *arguments, **options)
        listening = socket.create_server((host, port))
        return tcp_store(host, port, *arguments, master_listen_fd=listening.detach(), **options)

    own_static = getattr(static, "TCPStore", None)
    backend.TCPStore = store
    static.TCPStore = static_store
    handler._create_tcp_store_server = lambda _self, host, port: store(host, port, is_master=True, multi_tenant=True)
    try:
        yield
    finally:
        backend.TCPStore, handler._create_tcp_store_server = tcp_store, for_ranks
        static.TCPStore = own_static


def _write_record(path: Path, failures: Mapping[int, Any]) -> None:
    record = {
        "failures": [
            {"rank": rank, "pid": failure.pid, "exit_code": failure.exitcode, "time": failure.timestamp}
            for rank, failure in sorted(failures.items())
        ]
    }
    write_text_atomic(path, json.dumps(record))


def _hasten_rendezvous() -> None:
    """Skip work in the rendezvous that a single machine does not need, which saves about 0.3 s per launch.

    A random delay spreads nodes in time; unused events search all modules for the calling function's name.
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
    os.environ.setdefault(SAFE_PATH_ENV, UNTIL_SCRIPT)
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
