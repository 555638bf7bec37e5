"""Check the nodes of a cluster by briefly holding an allocation, as a search would."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from optuna_dsat.doctor.finding import Finding, Status, finding_of
from optuna_dsat.errors import DsatError
from optuna_dsat.launch.places.engine import Engine
from optuna_dsat.launch.places.place import HeldPlace, Layout, Stage

_AREA = "cluster"
_WAIT_S = 120.0
"""Longest wait for an allocation."""


def examine(
    engine: Engine, layout: Layout, *, files: dict[str, str], clock: Callable[[], float] = time.monotonic
) -> list[Finding]:
    """Return findings on the nodes of an allocation, which is released.

    Args:
        engine: Owner of the allocation; it is closed.
        layout: Resources of a launch.
        files: File required on every node -> digest of its content.
        clock: Monotonic time in seconds.
    """
    try:
        engine.check(nodes=layout.nodes, slots=layout.gpus)
        place = HeldPlace(engine, layout, files=files)
        until = clock() + _WAIT_S
        while place.stage not in (Stage.USABLE, Stage.LOST) and clock() < until:
            for news in engine.news(0.2):
                if news.place is place.place:
                    place.note(news)
            place.advance()
        return list(_findings(place, layout))
    except DsatError as error:
        return [finding_of(_AREA, "nodes", str(error), status=Status.FATAL)]
    finally:
        engine.close()


def _findings(place: HeldPlace, layout: Layout) -> Iterator[Finding]:
    held = place.place
    if place.stage is Stage.LOST:
        text = f"{held.name} was lost: {held.why}."
        yield finding_of(_AREA, "nodes", text, status=Status.FATAL)
        return
    if place.stage is not Stage.USABLE:
        why = f" ({held.why})" if held.why else ""
        text = f"{held.name} was not granted in {_WAIT_S:g} s{why}: its nodes were not looked at."
        yield finding_of(_AREA, "nodes", text, status=Status.PROBLEM)
        return
    for name, seen in place.nodes:
        software = ", ".join(f"{package} {version}" for package, version in seen["versions"].items())
        kinds = dict.fromkeys(seen["devices"])
        what = f"{len(seen['devices'])} x {', '.join(kinds)}" if layout.kind == "cuda" else f"{layout.slots} CPU ranks"
        text = f"{name}: {what}; {software}."
        yield finding_of(_AREA, name, text, data={"versions": dict(seen["versions"]), "devices": list(seen["devices"])})
    meeting = f"Nodes meet at {place.address}." if layout.nodes > 1 else "A launch stays on one node."
    yield finding_of(_AREA, "network", meeting, data={"address": place.address})
