"""The processes of tuners by their roles: tuner, warm parent, torchrun's agent, rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import psutil

from optuna_dsat.launch.machine.processes import find_marked

__all__ = ["ROLES", "marked_of", "roles_of"]

ROLES = ("tuner", "warm parent", "agent", "rank")
_WARM_PARENT = "optuna_dsat.runtime.agent.fork_server"


def roles_of(tuners: Iterable[int]) -> dict[str, list[int]]:
    """Return the living processes of tuners, by their roles."""
    result: dict[str, list[int]] = {role: [] for role in ROLES}
    for tuner in tuners:
        try:
            result["tuner"].append(psutil.Process(tuner).pid)
            for role, pid in _below(psutil.Process(tuner)):
                result[role].append(pid)
        except psutil.Error:
            continue
    return {role: pids for role, pids in result.items() if pids}


def _below(tuner: psutil.Process) -> Iterator[tuple[str, int]]:
    """Yield the processes that a tuner started: a warm parent forks agents, an agent starts ranks."""
    for child in tuner.children():
        if _WARM_PARENT in child.cmdline():
            yield "warm parent", child.pid
            agents = child.children()
        else:
            agents = [child] if _is_agent(child) else []
        for agent in agents:
            yield "agent", agent.pid
            yield from (("rank", rank.pid) for rank in agent.children())


def _is_agent(process: psutil.Process) -> bool:
    return any("optuna_dsat.runtime.agent.torchrun" in word for word in process.cmdline())


def marked_of(tuners: Iterable[int]) -> list[int]:
    """Return the living processes that carry the mark of one of these tuners."""
    numbers = {str(tuner) for tuner in tuners}
    return [item.key.pid for item in find_marked() if item.mark.split(":")[1] in numbers]
