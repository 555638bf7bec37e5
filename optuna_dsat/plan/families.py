"""Model families of Hugging Face's transformers: composition of their layers, embeddings and heads.

Counts follow the modules of transformers 5. An attention block has four projections. A feed-forward block has two
matrices, or three if gated. Either may have biases. A mixture of experts has one feed-forward block per expert and a
router. Known errors: modules smaller than a layer's norm are left out, such as T5's relative positions in further
layers or the optional norms of Phi's queries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

Kind = Literal["decoder", "encoder", "encoder-decoder", "image"]


@dataclass(frozen=True, kw_only=True)
class Family:
    """Properties shared by the models of a ``model_type``."""

    kind: Kind = "decoder"
    gated: bool = False
    """Whether the feed-forward block has three matrices."""
    norm_weights: int = 2
    """Weights of a norm per unit of its width: 1 for RMSNorm, 2 for LayerNorm."""
    norms: int = 2
    """Norms per layer over the hidden size."""
    head_norms: int = 0
    """Norms per layer over the head size."""
    embedding_norm: bool = False
    final_norm: bool = True
    final_norm_switch: str = ""
    """Key of the config that turns the norm after the last layer on or off; empty if it has none."""
    token_types: int = 0
    """Default number of token types, which have an embedding each."""
    pooled: bool = False
    """Whether the plain model ends with a dense layer, as BERT's does."""
    projected: bool = False
    """Whether embeddings may have another width than the layers (``word_embed_proj_dim``)."""
    qkv_bias: bool = False
    out_bias: bool = False
    ffn_bias: bool = False
    attention_switch: str = ""
    """Key of the config that turns biases of all four projections on or off; empty if it has none."""
    qkv_switch: str = ""
    """Likewise, for queries, keys and values."""
    ffn_switch: str = ""
    """Likewise, for the feed-forward block."""
    learned_positions: bool = False
    extra_positions: int = 0
    """Rows of the position table in addition to the number in the config."""
    tied: bool = True
    """Whether embedding and output share their weights if the config does not specify it."""
    head_bias: bool = False
    """Whether the output layer has a bias."""
    ffn_factor: int = 0
    """Default ratio of the feed-forward block's width to the hidden size; 0 if the config must specify the width."""
    head_dim: int = 0
    """Default head size; 0 for the hidden size divided by the number of heads."""
    experts: bool = False


_GATED = Family(gated=True, norm_weights=1, tied=False)
_GEMMA = Family(gated=True, norm_weights=1, head_dim=256, attention_switch="attention_bias")
_GPT = Family(qkv_bias=True, out_bias=True, ffn_bias=True, learned_positions=True, ffn_factor=4)
_ENCODER = Family(
    kind="encoder",
    qkv_bias=True,
    out_bias=True,
    ffn_bias=True,
    learned_positions=True,
    embedding_norm=True,
    final_norm=False,
    token_types=2,
    pooled=True,
    head_bias=True,
)
_T5 = Family(kind="encoder-decoder", norm_weights=1)
_QWEN3 = Family(gated=True, norm_weights=1, tied=False, head_norms=2, head_dim=128, attention_switch="attention_bias")

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(
            gated=True, norm_weights=1, tied=False, attention_switch="attention_bias", ffn_switch="mlp_bias"
        ),
        "mistral": _GATED,
        "mixtral": Family(gated=True, norm_weights=1, tied=False, experts=True),
        "qwen2": Family(gated=True, norm_weights=1, tied=False, qkv_bias=True),
        "qwen2_moe": Family(gated=True, norm_weights=1, tied=False, qkv_bias=True, qkv_switch="qkv_bias", experts=True),
        "qwen3": _QWEN3,
        "qwen3_moe": Family(
            gated=True,
            norm_weights=1,
            tied=False,
            head_norms=2,
            attention_switch="attention_bias",
            experts=True,
        ),
        "gemma": _GEMMA,
        "gemma2": Family(gated=True, norm_weights=1, norms=4, head_dim=256, attention_switch="attention_bias"),
        "gemma3_text": Family(
            gated=True, norm_weights=1, norms=4, head_norms=2, head_dim=256, attention_switch="attention_bias"
        ),
        "phi": Family(qkv_bias=True, out_bias=True, ffn_bias=True, norms=1, tied=False, head_bias=True),
        "phi3": _GATED,
        "gpt2": _GPT,
        "gpt_neo": Family(out_bias=True, ffn_bias=True, learned_positions=True, ffn_factor=4),
        "gptj": Family(ffn_bias=True, norms=1, tied=False, head_bias=True, ffn_factor=4),
        "gpt_neox": Family(qkv_bias=True, out_bias=True, ffn_bias=True, tied=False, attention_switch="attention_bias"),
        "opt": Family(
            qkv_bias=True,
            out_bias=True,
            ffn_bias=True,
            learned_positions=True,
            extra_positions=2,
            attention_switch="enable_bias",
            ffn_switch="enable_bias",
            final_norm_switch="do_layer_norm_before",
            projected=True,
        ),
        "bloom": Family(qkv_bias=True, out_bias=True, ffn_bias=True, embedding_norm=True, ffn_factor=4),
        "falcon": Family(attention_switch="bias", ffn_switch="bias", ffn_factor=4),
        "bert": _ENCODER,
        "roberta": _ENCODER,
        "xlm-roberta": _ENCODER,
        "distilbert": replace(_ENCODER, token_types=0, pooled=False),
        "vit": Family(kind="image", qkv_bias=True, out_bias=True, ffn_bias=True, qkv_switch="qkv_bias"),
        "t5": _T5,
        "mt5": _T5,
    }
)
"""``model_type`` of a config -> family."""
