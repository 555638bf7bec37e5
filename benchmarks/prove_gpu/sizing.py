"""A GPT of ``examples/gpt`` that fills a GPU of any size: how its options are chosen."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Size", "size_for"]

_STATE_BYTES = 18
"""Bytes a parameter on one rank: 2 and 2 in half precision, 12 of fp32 weights and Adam's moments (ZeRO paper,
arXiv:1910.02054), and the room of a bucket."""
_ACTIVATION_FACTOR = 34
"""Bytes of activations a layer, token and hidden unit in half precision, with attention that stores no scores
(arXiv:2205.05198)."""
_STATES_SHARE = 0.18
"""Share of the GPU that states take: activations are to have most of it, and a model is built anew at each launch."""
_LARGEST_MICRO_BATCH = 32
"""About how many samples are to fit."""
_HEAD = 64
"""Width of an attention head."""
_HIDDEN_PER_LAYER = 80
"""Width over depth, between GPT-2's (64) and GPT-3's (128)."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """Options of ``examples/gpt/train.py``."""

    layers: int
    hidden: int
    sequence: int

    @property
    def heads(self) -> int:
        """Attention heads."""
        return self.hidden // _HEAD

    @property
    def params(self) -> int:
        """Parameters of the transformer's matrices, which are nearly all."""
        return 12 * self.layers * self.hidden**2

    def arguments(self) -> tuple[str, ...]:
        """Return the options."""
        values = {"layers": self.layers, "hidden": self.hidden, "heads": self.heads, "seq": self.sequence}
        return tuple(word for name, value in values.items() for word in (f"--{name}", str(value)))


def size_for(memory_bytes: int, *, states_share: float = _STATES_SHARE) -> Size:
    """Return a model whose states take about this share of a GPU, and of which some thirty samples fill the rest.

    Args:
        memory_bytes: Memory of one GPU.
        states_share: Share of it that weights, gradients and optimizer states take on one rank.
    """
    params = memory_bytes * states_share / _STATE_BYTES
    hidden = max(_HEAD, _HEAD * round((params * _HIDDEN_PER_LAYER / 12) ** (1 / 3) / _HEAD))
    layers = max(2, round(params / (12 * hidden**2)))
    per_sample = memory_bytes * (0.9 - states_share) / _LARGEST_MICRO_BATCH
    tokens = per_sample / (_ACTIVATION_FACTOR * hidden * layers)
    sequence = max(64, 64 * round(tokens / 64))
    return Size(layers=layers, hidden=hidden, sequence=sequence)
