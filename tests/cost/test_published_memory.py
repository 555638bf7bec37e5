"""The memory model and the transformer arithmetic against tables and figures that others published."""

from __future__ import annotations

from typing import Any

import pytest
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

from optuna_dsat.cost.memory import Hardware, ModelProfile, estimate
from optuna_dsat.plan.transformer import TransformerShape, shape_of

GIB = 2**30
STATES = ("parameters", "gradients", "master", "optimizer")


def profile(params: int, *, layer: int = 0, activations: int = 0) -> ModelProfile:
    return ModelProfile(
        params=params,
        trainable_params=params,
        largest_layer_params=layer,
        param_bytes=2,
        activation_bytes_per_sample=activations,
        flops_per_sample=10**12,
        device_memory_bytes=80 * GIB,
        host_memory_bytes=1000 * GIB,
        peak_bytes=0,
    )


def hardware(ranks: int, *, per_node: int = 8) -> Hardware:
    return Hardware(
        world_size=ranks, ranks_per_node=per_node, device_memory_bytes=80 * GIB, host_memory_bytes=1000 * GIB
    )


def config(stage: int, **zero: Any) -> dict[str, Any]:
    return {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": stage, **zero}}


ZERO_TABLE_1: dict[int, dict[int, tuple[float, float, float]]] = {
    7_500_000_000: {
        1: (120, 120, 120), 4: (52.5, 41.3, 30), 16: (35.6, 21.6, 7.5), 64: (31.4, 16.6, 1.88), 256: (30.4, 15.4, 0.47),
        1024: (30.1, 15.1, 0.12),
    },
    128_000_000_000: {
        1: (2048, 2048, 2048), 4: (896, 704, 512), 16: (608, 368, 128), 64: (536, 284, 32), 256: (518, 263, 8),
        1024: (513, 257, 2),
    },
    10**12: {
        1: (16000, 16000, 16000), 4: (7000, 5500, 4000), 16: (4750, 2875, 1000), 64: (4187, 2218, 250),
        256: (4046, 2054, 62.5), 1024: (4011, 2013, 15.6),
    },
}  # fmt: skip
"""Rajbhandari et al., "ZeRO" (arXiv:1910.02054), table 1: parameters -> degree of data parallelism -> GB of states
per device with P_os, P_os+g and P_os+g+p.
"""


@pytest.mark.parametrize(
    ("params", "ranks", "stage", "gigabytes"),
    [
        (params, ranks, stage, row[stage - 1])
        for params, rows in ZERO_TABLE_1.items()
        for ranks, row in rows.items()
        for stage in (1, 2, 3)
    ],
)
def test_table_1_of_the_zero_paper(params: int, ranks: int, stage: int, gigabytes: float) -> None:
    parts = estimate(profile(params), config(stage), micro_batch=0, hardware=hardware(ranks)).parts
    result = sum(size for name, size in parts.items() if name in STATES)
    assert result / 1e9 == pytest.approx(gigabytes, rel=0.025)


ZERO_TABLE_2 = [(0, 2.0), (1, 7.6), (2, 14.4), (3, 128.0)]
"""The same paper, table 2, first row: billions of parameters whose model states fill 32 GB on 64 GPUs."""


@pytest.mark.parametrize(("stage", "billions"), ZERO_TABLE_2)
def test_table_2_of_the_zero_paper(stage: int, billions: float) -> None:
    model = profile(round(billions * 1e9))
    parts = estimate(model, config(stage), micro_batch=0, hardware=hardware(64)).parts
    assert sum(parts.get(name, 0) for name in STATES) / 1e9 == pytest.approx(32, rel=0.01)


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


@pytest.mark.parametrize(("name", "saved"), [("175B (GPT-3)", 0.70), ("530B (MT-NLG)", 0.65)])
def test_selective_recomputation_saves_what_section_5_says(name: str, saved: float) -> None:
    plain = MODELS[name]
    selective = gpt(plain.params, plain.layers, plain.hidden, plain.heads, recompute="selective")
    assert 1 - selective.layer_bytes() / plain.layer_bytes() == pytest.approx(saved, abs=0.006)


def test_full_recomputation_keeps_a_layers_input() -> None:
    full = gpt(22e9, 48, 6144, 64, recompute="full")
    outside = 5 * 2048 * 6144  # dropout of the embedding, last norm and the projection's input (section 4.3)
    assert full.kept_bytes() == 48 * 2 * 2048 * 6144 + outside
    assert full.activation_bytes() < MODELS["22B"].activation_bytes() / 10


def test_flops_are_those_of_narayanan() -> None:
    """arXiv:2104.04473, equation 3: 96 B s l h^2 (1 + s / 6h + V / 16 l h) with recomputation, so 72 without."""
    hidden, layers, vocab, s = 12288, 96, 51200, 2048
    params = 12 * layers * hidden**2 + vocab * hidden
    model = gpt(params, layers, hidden, 96, fused_attention=True)
    theirs = 72 * s * layers * hidden**2 * (1 + s / (6 * hidden) + vocab / (12 * layers * hidden))
    assert model.flops_per_sample == pytest.approx(theirs, rel=1e-3)
    full = gpt(params, layers, hidden, 96, fused_attention=True, recompute="full")
    assert full.flops_per_sample == pytest.approx(4 / 3 * theirs, rel=1e-3)


@pytest.mark.parametrize("gpus", [1, 4, 8])
@pytest.mark.parametrize("nodes", [1, 4])
def test_deepspeeds_own_estimators_for_a_model_of_three_billions(gpus: int, nodes: int) -> None:
    """T0_3B of DeepSpeed's documentation: 2783 M parameters, 65 M in the largest layer."""
    params, layer, ranks = 2_783_000_000, 65_000_000, gpus * nodes
    parts = estimate(profile(params, layer=layer), config(2), micro_batch=0, hardware=hardware(ranks)).parts
    _, second = estimate_zero2_model_states_mem_needs(params, gpus, nodes, cpu_offload=False)
    states = sum(parts.get(name, 0) for name in STATES)
    assert states + 4 * params / ranks == pytest.approx(second, rel=0.01)  # theirs counts the fp32 gradients, too
    both = config(3, offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"})
    where = hardware(ranks, per_node=gpus)
    host = estimate(profile(params, layer=layer), both, micro_batch=0, hardware=where).host_bytes
    cpu, _, _ = estimate_zero3_model_states_mem_needs(
        params, layer, gpus, nodes, True, True, additional_buffer_factor=1.0
    )
    assert host == pytest.approx(cpu, rel=0.12)  # ours keeps the half-precision gradients of the partition besides


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
