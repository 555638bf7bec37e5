"""All checks, in the order in which they run: what tells most in the least time comes first."""

from __future__ import annotations

from benchmarks.prove_gpu.context import Context
from benchmarks.prove_gpu.ending import killing, pruning
from benchmarks.prove_gpu.examples import EXAMPLES, doctor, example_checks
from benchmarks.prove_gpu.filling import FILL_HIGH, FILL_LOW, edge_checks, filling
from benchmarks.prove_gpu.runner import Check
from benchmarks.prove_gpu.search import guided
from benchmarks.prove_gpu.turns import PAIRS, turns

__all__ = ["all_checks"]

_FIRST_EXAMPLES = ("gpt", "huggingface")


def all_checks() -> list[Check[Context]]:
    """Return every check.

    Those that need the model of ``filling`` ask for no less time than it does: a part that passes it over has none for
    them either.
    """
    return [
        Check(
            name="doctor",
            asked="`optuna-dsat doctor` sees the GPUs and says that launches can run.",
            run=doctor,
            needs_s=60.0,
        ),
        *example_checks(_FIRST_EXAMPLES),
        Check(
            name="warm-against-torchrun",
            asked=f"Forked launches cost less than plain ones ({PAIRS} pairs in turns), and their losses are the same.",
            run=turns,
            needs_s=170.0,
            values=True,
        ),
        Check(
            name="filling",
            asked=f"A model runs at {FILL_LOW:.0%} to {FILL_HIGH:.0%} of the GPU's memory, as predicted.",
            run=filling,
            needs_s=120.0,
            values=True,
        ),
        Check(
            name="pruning",
            asked="A launch that is stopped leaves the GPU's memory free, and the next launch runs.",
            run=pruning,
            needs_s=150.0,
            values=True,
        ),
        Check(
            name="killing",
            asked="A launch of which a rank is killed leaves the GPU's memory free, and the next launch runs.",
            run=killing,
            needs_s=150.0,
            values=True,
        ),
        *edge_checks(),
        Check(
            name="guided-search",
            asked="A guided search of the model that fills the GPU finds a config no slower than the user's.",
            run=guided,
            needs_s=150.0,
            values=True,
        ),
        *example_checks(set(EXAMPLES) - set(_FIRST_EXAMPLES)),
    ]
