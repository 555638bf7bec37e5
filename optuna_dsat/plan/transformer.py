"""Parameters, FLOPs and activations of a transformer, computed from its shape.

Symbols: s sequence length, b micro-batch (1 here: all values are per sample), h hidden size, L layers, a heads, f width
of the feed-forward block, v vocabulary, e bytes of an activation (2 in half precision).

Activations follow Korthikanti et al. (arXiv:2205.05198, section 4.1, equation 1): a layer stores ``s b h (34 + 5 a s /
h)`` bytes in half precision with dropout and ``f = 4 h``: attention ``11 s b h + 5 a s^2 b``, the feed-forward block
``19 s b h`` and two layer norms ``4 s b h``. A fused attention kernel saves ``5 a s^2 b``. Full recomputation stores a
layer's input (``2 s b h``) and needs the activations of a single layer during the backward pass (section 5). Outside
the layers: ``s b h`` for the embedding's dropout, ``4 s b h`` for the last norm and the projection's input, and the
logits (section 4.3).

FLOPs follow Narayanan et al. (arXiv:2104.04473, section 5.1): 6 per parameter and token, and ``12 L s^2 h`` for
attention, of which a fused kernel computes half for a causal model (FlashAttention-2, arXiv:2307.08691, section 4.1);
full recomputation repeats the forward pass. An embedding that is no output is looked up, which takes no FLOPs.

With grouped-query attention or a different head size, attention stores its input, queries and output at the width of
the queries, and keys and values at their own width. In a mixture of experts, a token computes and stores activations
of its assigned experts only. Frozen weights (LoRA) need no gradient, which saves 2 of the 6 operations. Their
activations are assumed to be stored, which is an overestimate if no adapter reads them.

Known errors: the formulas omit the workspaces of kernels and a framework's casts and copies. A loss that is computed in
half precision, or without a copy of the logits, needs less memory than assumed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from optuna_dsat.errors import UsageError
from optuna_dsat.words import count_in_words, params_in_words, things_in_words

Recompute = Literal["none", "full"]

_LOGITS_KEPT = 10
"""Bytes per logit at the end of the forward pass: half-precision logits, their fp32 copy, and the log-softmax that
the loss keeps, as in Hugging Face's causal language models.
"""
_HALF_SPEED_TOKENS = 400
"""Tokens at which matrix multiplications reach half of a GPU's speed: tiles of 128 rows on about a hundred
multiprocessors, several matrices wide (NVIDIA, "Matrix Multiplication Background", section 3).
"""
_MATRICES = 4
"""Weights of a layer, which ZeRO 3 gathers separately; 7 if the block is gated and q, k and v are separate."""
_HOOKS_S = 0.007
"""Seconds per layer and pass of ZeRO 3's hooks on the host: with it ZeRO 3 is predicted 1.06 times as fast relative to
ZeRO 2 as in the published tables that are not set aside (median of seven, ``benchmarks/published``).
"""
_SCALE_BITS = 0.5
"""Bits per quantized weight for the scale of its block: 32 for 64 weights (QLoRA, arXiv:2305.14314, section 3).
"""
_LOGITS_GRADIENT = 4
"""Bytes per logit that the loss's backward pass adds, before anything else is freed."""


@dataclass(frozen=True, kw_only=True)
class TransformerShape:
    """Numbers of a transformer that determine its memory and FLOPs."""

    params: int
    hidden: int
    layers: int
    heads: int
    seq_length: int = 2048
    vocab: int = 50257
    ffn: int | None = None
    """Width of the feed-forward block; None for 4 h, or 8/3 h if it is gated."""
    gated: bool = False
    """Whether the feed-forward block is gated (SwiGLU: three matrices), as in LLaMA."""
    dropout: bool = False
    fused_attention: bool = True
    """Whether attention stores no ``s x s`` matrices (FlashAttention, torch's scaled_dot_product_attention)."""
    recompute: Recompute = "none"
    """Activations recomputed in the backward pass (activation checkpointing)."""
    kv_heads: int | None = None
    """Heads of keys and values (grouped-query attention); None for the number of query heads."""
    head_dim: int | None = None
    """Size of a head; None for the hidden size divided by the number of heads."""
    cross_layers: int = 0
    """Layers with cross-attention to an encoder's output."""
    active_params: int | None = None
    """Parameters used per token in a mixture of experts; None for all."""
    largest_module: int | None = None
    """Parameters of the largest single module; None for the embedding, or a matrix of the feed-forward block."""
    logits: int | None = None
    """Number of logits per sample; None for tokens times vocabulary."""
    looked_up: int = 0
    """Parameters of embeddings that are not weights of the output, too."""
    causal: bool = True
    """Whether a token attends to earlier tokens only."""
    trainable_share: float = 1.0
    """Share of the parameters that is trained, as with LoRA."""
    quantized: str = ""
    """Quantization of the checkpoint's weights, such as ``bitsandbytes, 4 bits``; empty if not quantized."""
    quantized_bits: int | None = None
    """Bits of a quantized weight; None if unknown, or without quantization."""
    family: str = ""
    """Name of the family, such as ``llama``; empty if unknown."""

    def __post_init__(self) -> None:
        for name in ("params", "hidden", "layers", "heads", "seq_length", "vocab"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be at least 1.")
        if not 0 < self.trainable_share <= 1:
            raise UsageError(
                f"--trainable-share is {self.trainable_share:.4g}; it must be above 0 and at most 1 (100%)."
            )
        if self.head_dim is None and self.hidden % self.heads:
            raise UsageError(f"--hidden is {self.hidden}, no multiple of the {self.heads} heads (--heads).")
        if self.recompute not in get_args(Recompute):
            raise UsageError(f"--recompute is {self.recompute!r}; it must be one of {', '.join(get_args(Recompute))}.")

    @property
    def width(self) -> int:
        """f, the width of the feed-forward block."""
        if self.ffn is not None:
            return self.ffn
        return round(8 * self.hidden / 3) if self.gated else 4 * self.hidden

    @property
    def q_width(self) -> int:
        """Total width of a layer's queries."""
        return self.hidden if self.head_dim is None else self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Total width of a layer's keys, equal to the total width of its values."""
        return self.q_width if self.kv_heads is None else self.q_width * self.kv_heads // self.heads

    @property
    def trainable_params(self) -> int:
        """Parameters that the optimizer updates."""
        return max(1, round(self.params * self.trainable_share))

    @property
    def quantized_params(self) -> int:
        """Parameters stored in ``quantized_bits``: all frozen parameters except the embedding and the output."""
        if self.quantized_bits is None:
            return 0
        return max(0, self.params - self.trainable_params - 2 * self.vocab * self.hidden)

    def stored_params(self, *, element: int) -> int:
        """Return the stored parameters in units of ``element`` bytes; a quantized parameter is a fraction of a unit."""
        bits = (self.quantized_bits or 0) + _SCALE_BITS
        return self.params - self.quantized_params + round(self.quantized_params * min(1.0, bits / (8 * element)))

    @property
    def largest_layer_params(self) -> int:
        """Parameters of the largest single module: the embedding, or a matrix of the feed-forward block."""
        largest = max(self.vocab * self.hidden, self.width * self.hidden)
        return min(self.params, largest if self.largest_module is None else self.largest_module)

    @property
    def attention_flops(self) -> int:
        """FLOPs of the attention scores and of their product with the values, in the forward pass."""
        return 4 * (self.layers + self.cross_layers) * self.q_width * self.seq_length**2

    @property
    def model_flops_per_sample(self) -> int:
        """FLOPs of forward and backward pass by which utilisation is defined (arXiv:2204.02311, appendix B).

        They count all parameters and the whole attention matrix, and no recomputation.
        """
        return self._flops(self.active_params or self.params, attention=self.attention_flops)

    @property
    def flops_per_sample(self) -> int:
        """FLOPs that forward and backward pass compute, including recomputation."""
        attention = self.attention_flops // (2 if self.causal and self.fused_attention else 1)
        multiplied = (self.active_params or self.params) - self.looked_up
        again = 2 * multiplied * self.seq_length + attention if self.recompute == "full" else 0
        return self._flops(multiplied, attention=attention) + again

    def _flops(self, params: int, *, attention: int) -> int:
        """Return the FLOPs of forward and backward pass; ``attention`` are FLOPs of the forward pass.

        In the backward pass, the gradients of activations cost as many as the forward pass, and the gradients of
        trained weights cost the same again.
        """
        forward = 2 * params * self.seq_length
        return 2 * forward + round(forward * self.trainable_share) + 3 * attention

    @property
    def words(self) -> str:
        """Description of the shape in a sentence."""
        attention = "" if self.fused_attention else ", plain attention"
        parts = [f"{params_in_words(self.params)} parameters"]
        if self.active_params is not None:
            parts.append(f"{params_in_words(self.active_params)} of them for each token")
        if self.trainable_share < 1:
            parts.append(f"{params_in_words(self.trainable_params)} of them trained")
        known = [
            things_in_words(self.layers, "layer"),
            f"hidden size {self.hidden}",
            things_in_words(self.heads, "head"),
            f"{things_in_words(self.seq_length, 'token')} a sample",
        ]
        if self.vocab > 1:  # image models have no vocabulary
            known.append(f"vocabulary {count_in_words(self.vocab)}")
        return (
            f"{f'{self.family}, ' if self.family else ''}{', '.join(parts)}: {', '.join(known)}; "
            f"recomputation: {self.recompute}{attention}."
        )

    def priors(self) -> dict[str, tuple[float, float]]:
        """Return the step-time coefficients determined by the shape: median and spread of each."""
        matrices = 7 if self.gated else _MATRICES
        return {
            "idle": (_HALF_SPEED_TOKENS / self.seq_length, 1.0),
            "modules": (float(matrices * self.layers), 0.3),
            "hooks": (_HOOKS_S * self.layers, 1.0),
        }

    def layer_bytes(self, *, element: int = 2) -> int:
        """Return the bytes per sample that a layer stores for the backward pass, ``element`` for an activation."""
        scale = element / 2
        s, h = self.seq_length, self.hidden
        masks = 1 if self.dropout else 0
        attention = self._attention_bytes(element)
        block = scale * (2 * h + (8 if self.gated else 4) * self.width) * s + masks * s * h
        return round(attention + block + scale * 4 * s * h)

    def _attention_bytes(self, element: int) -> float:
        """Return the bytes stored by an attention block: its input, q, k, v and the output projection's input."""
        kept = element * (self.hidden + 2 * self.q_width + 2 * self.kv_width) * self.seq_length
        return kept + self.seq_length * self.hidden * self.dropout + self._scores_bytes(element / 2)

    def _scores_bytes(self, scale: float) -> float:
        """Return the bytes of the attention scores: ``s x s`` per head, or a single fp32 number per row if fused."""
        rows = self.heads * self.seq_length
        if self.fused_attention:
            return 4 * rows
        return rows * self.seq_length * (scale * 4 + (1 if self.dropout else 0))

    def kept_bytes(self, *, element: int = 2) -> int:
        """Return the bytes per sample of all layers' activations after the forward pass, without logits and loss."""
        s, h, scale = self.seq_length, self.hidden, element / 2
        each = round(scale * 2 * s * h) if self.recompute == "full" else self.layer_bytes(element=element)
        crossed = 0 if self.recompute == "full" else round(self.cross_layers * self._attention_bytes(element))
        return self.layers * each + crossed + round(scale * 4 * s * h) + (s * h if self.dropout else 0)

    def activation_bytes(self, *, element: int = 2) -> int:
        """Return the bytes per sample at the peak: activations plus the larger of the loss and a recomputed layer.

        When the backward pass starts, memory contains all activations, the logits, the tensors of the loss and the
        logits' gradient. With full recomputation, the activations of a layer are added after the logits are freed.
        """
        logits = self.seq_length * self.vocab if self.logits is None else self.logits
        loss = (_LOGITS_KEPT + _LOGITS_GRADIENT) * logits
        again = self.layer_bytes(element=element) if self.recompute == "full" else 0
        return self.kept_bytes(element=element) + max(loss, again)


def shape_of(
    *, params: int, hidden: int | None, layers: int | None, heads: int | None, **others: object
) -> TransformerShape:
    """Return a shape, missing numbers derived: 12 L h^2 parameters, heads of 128; ``UsageError`` if impossible."""
    if params < 1:
        raise UsageError(f"--params is {params}; it must be at least 1.")
    if hidden is None:
        # Published models keep h / L near 128: GPT-3 175 B has 12288 / 96, LLaMA 7 B 4096 / 32.
        hidden = round(((params / 12 / layers) ** 0.5 if layers else (128 * params / 12) ** (1 / 3)) / 128)
        hidden = max(128, 128 * hidden)
    if layers is None:
        layers = max(1, round(params / 12 / hidden**2))
    if heads is None:
        heads = next(count for count in range(max(1, hidden // 128), 0, -1) if hidden % count == 0)
    return TransformerShape(params=params, hidden=hidden, layers=layers, heads=heads, **others)  # type: ignore[arg-type]
