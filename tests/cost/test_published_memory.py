"""The arithmetic of transformers against tables and figures that others published."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from optuna_dsat.plan.transformer import TransformerShape, shape_of


def gpt(params: float, layers: int, hidden: int, heads: int, **changes: Any) -> TransformerShape:
    values: dict[str, Any] = {
        "params": int(params), "layers": layers, "hidden": hidden, "heads": heads, "seq_length": 2048, "vocab": 51200,
        "dropout": True, "fused_attention": False,
    }  # fmt: skip
    return TransformerShape(**{**values, **changes})


MODELS = {
    "22B": gpt(22e9, 48, 6144, 64),
    "175B (GPT-3)": gpt(175e9, 96, 12288, 96),
    "530B (MT-NLG)": gpt(530e9, 105, 20480, 128),
    "1T": gpt(1e12, 128, 25600, 160),
}
"""Korthikanti et al. (arXiv:2205.05198), table 3."""


@pytest.mark.parametrize("name", MODELS)
def test_a_layer_keeps_what_equation_1_of_korthikanti_says(name: str) -> None:
    model = MODELS[name]
    s, h, a = model.seq_length, model.hidden, model.heads
    assert model.layer_bytes() == pytest.approx(s * h * (34 + 5 * a * s / h), rel=1e-9)


def test_full_recomputation_keeps_a_layers_input() -> None:
    full = gpt(22e9, 48, 6144, 64, recompute="full")
    outside = 5 * 2048 * 6144  # dropout of the embedding, last norm and the projection's input (section 4.3)
    assert full.kept_bytes() == 48 * 2 * 2048 * 6144 + outside
    assert full.activation_bytes() < MODELS["22B"].activation_bytes() / 10


def test_flops_are_those_of_narayanan() -> None:
    """arXiv:2104.04473, equation 3: 96 B s l h^2 (1 + s / 6h + V / 16 l h) with recomputation, so 72 without."""
    hidden, layers, vocab, s = 12288, 96, 51200, 2048
    params = 12 * layers * hidden**2 + vocab * hidden
    model = gpt(params, layers, hidden, 96, fused_attention=True, causal=False)
    theirs = 72 * s * layers * hidden**2 * (1 + s / (6 * hidden) + vocab / (12 * layers * hidden))
    assert model.flops_per_sample == pytest.approx(theirs, rel=1e-3)
    full = replace(model, recompute="full")
    assert full.flops_per_sample == pytest.approx(4 / 3 * theirs, rel=1e-3)
    half = 72 * s * layers * hidden**2 * s / (6 * hidden) / 2
    assert replace(model, causal=True).flops_per_sample == pytest.approx(theirs - half, rel=1e-3)
    assert replace(model, causal=True, fused_attention=False).flops_per_sample == model.flops_per_sample
    untied = replace(model, params=params + vocab * hidden, looked_up=vocab * hidden)
    assert untied.flops_per_sample == model.flops_per_sample
    assert untied.model_flops_per_sample > model.model_flops_per_sample


@pytest.mark.parametrize(
    ("params", "hidden", "layers"), [(6.7e9, 4096, 32), (13e9, 5120, 40), (175e9, 12288, 96), (1.3e9, 2048, 24)]
)
def test_a_shape_follows_from_the_parameters(params: float, hidden: int, layers: int) -> None:
    """GPT-3's family (Brown et al., arXiv:2005.14165, table 2.1)."""
    guessed = shape_of(params=int(params), hidden=None, layers=None, heads=None)
    assert guessed.hidden == pytest.approx(hidden, rel=0.2)
    assert 12 * guessed.layers * guessed.hidden**2 == pytest.approx(params, rel=0.06)
    known = shape_of(params=int(params), hidden=hidden, layers=None, heads=None)
    assert known.layers == pytest.approx(layers, rel=0.1)
