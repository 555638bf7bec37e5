"""The first trials of ``guided`` on eight typical cases as recorded: whoever changes one decides so (``RECORD=1``).

They are the same on every CPU (``OPENBLAS_CORETYPE=Haswell`` and ``SkylakeX``).
"""

from __future__ import annotations

import os
import tempfile
from functools import cache
from pathlib import Path

import pytest

from benchmarks.ours import quick_store, search
from benchmarks.random_machines.typical import TYPICAL
from benchmarks.rig import Rig
from optuna_dsat.config.structures import Structure
from optuna_dsat.trials import attributes
from optuna_dsat.trials.lineage import MICRO_BATCH

GOLDEN = Path(__file__).parent / "golden"
SHOWN = 8
"""Trials of a case; as many launches leave none for a confirmation."""


EXPERT = {
    "125M, 8 x 40 GB": "fills the running engine's memory first, as each doubling pays; then compares the stages at "
    "that micro-batch, the simplest first. ZeRO 3 and offloads save memory that nothing needs.",
    "1.3B, 8 x 80 GB": "fills the memory under ZeRO 2, then asks whether ZeRO 0 and 1 are as fast. They are within a "
    "few percent, so settings are compared within the running launch, without a start.",
    "7B, 8 x 80 GB": "knows that ZeRO 0 does not fit, and never launches it. ZeRO 3 climbs; ZeRO 1 and 2 fit three "
    "quarters of its micro-batch with less communication, so they are compared with it.",
    "13B, 8 x 40 GB": "knows that only ZeRO 3 fits without an optimizer on the host. Activations limit the micro-batch "
    "to 4, so offloading the parameters, which makes room for one more sample, is worth a launch.",
    "7B, one 24 GB GPU": "has no choice of structures: the time of the optimizer on the host is the same for every "
    "micro-batch, so the largest one wins. It finds the edge of memory.",
    "1.3B, 16 x 32 GB over Ethernet": "makes the micro-batch as large as memory allows, as communication costs the "
    "same for every size. ZeRO 1 moves as many bytes as ZeRO 2; ZeRO 3 moves half as many again and is not tried.",
    "350M, 64 x 40 GB": "makes the micro-batch large, as the network is slow. ZeRO 1 may reduce gradients in fewer "
    "messages than ZeRO 2; ZeRO 0, which updates all parameters on each of 64 GPUs, is compared once.",
    "1.4M, 2 CPU ranks": "climbs until a doubling gains nothing, then compares the stages. Offloads to the CPU are no "
    "choice on a CPU.",
}
"""Case -> why an expert would do the same."""


@cache
def first_trials(name: str) -> tuple[tuple[str, int, str, str], ...]:
    """Return structure, micro-batch, kind of launch and reason of the first trials of a case."""
    rig = Rig(TYPICAL[name].machine, budget=SHOWN, noise=0.005, seed=0)
    with tempfile.TemporaryDirectory() as folder, quick_store(Path(folder)) as store:
        study = search("guided", rig, budget=SHOWN, seed=0, store=store)
    assert study is not None
    launches = {launch.launch_id: launch for launch in rig.launches}
    result = []
    for trial in [trial for trial in study.trials if attributes.LAUNCH_ID in trial.user_attrs][:SHOWN]:
        launch = launches[trial.user_attrs[attributes.LAUNCH_ID]]
        config = trial.user_attrs[attributes.CONFIG]
        kind = "continued" if launch.root else "launched"
        failed = "" if launch.metrics else f" -> {launch.outcome.value}"
        reason = trial.user_attrs[attributes.REASON] + failed
        result.append((Structure.of(config).words, int(config[MICRO_BATCH]), kind, reason))
    return tuple(result)


@pytest.mark.parametrize("name", TYPICAL)
def test_the_first_trials_are_the_recorded_ones(name: str) -> None:
    lines = [f"{name}: {TYPICAL[name].about}.", f"An expert: {EXPERT[name]}", ""]
    for number, (structure, size, kind, reason) in enumerate(first_trials(name)):
        lines.append(f"{number}  {structure}, micro-batch {size}, {kind}: {reason}")
    text, path = "\n".join(lines) + "\n", GOLDEN / f"{name.replace(' ', '-').replace(',', '')}.txt"
    if os.environ.get("RECORD"):
        path.write_text(text)
    assert text == path.read_text()


def test_a_small_model_sees_zero_0_in_its_second_launch() -> None:
    for name in ("125M, 8 x 40 GB", "1.3B, 8 x 80 GB", "1.4M, 2 CPU ranks"):
        launched = [structure for structure, _, kind, _ in first_trials(name)[1:] if kind == "launched"]
        assert launched[0] == "ZeRO 0"


@pytest.mark.parametrize("name", TYPICAL)
def test_a_reason_names_the_structure_of_its_trial(name: str) -> None:
    reasons = [(structure, reason) for structure, *_, reason in first_trials(name)]
    assert reasons[0][1] == "your config"
    assert all("predicted" in reason for _, reason in reasons[1:])
    assert all(reason.startswith(structure) for structure, reason in reasons if "was not measured" in reason)
