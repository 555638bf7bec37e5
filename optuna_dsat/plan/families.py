"""Model families of Hugging Face's transformers (composition of layers, embeddings and heads) and published models.

Counts follow the modules of transformers 5. An attention block has four projections. A feed-forward block has two
matrices, or three if gated. Either may have biases. A mixture of experts has one feed-forward block per expert and a
router. Known errors: modules smaller than a layer's norm are left out, such as T5's relative positions in further
layers or the optional norms of Phi's queries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

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
    grouped: bool = False
    """Whether the config may set the number of key-value heads and the head size."""
    ffn_width: str = "intermediate_size"
    """Key of the feed-forward block's width; empty if the model always uses the default."""
    ffn_factor: int = 0
    """Default ratio of the feed-forward block's width to the hidden size; 0 if the config must specify the width."""
    head_dim: int = 0
    """Default head size; 0 for the hidden size divided by the number of heads."""
    experts: bool = False


_GATED = Family(gated=True, norm_weights=1, tied=False, grouped=True)
_SWITCHED = replace(_GATED, attention_switch="attention_bias")
_GEMMA = replace(_SWITCHED, tied=True, head_dim=256)
_BIASED = Family(qkv_bias=True, out_bias=True, ffn_bias=True)
_GPT = replace(_BIASED, learned_positions=True, ffn_width="n_inner", ffn_factor=4)
_ENCODER = replace(
    _BIASED,
    kind="encoder",
    learned_positions=True,
    embedding_norm=True,
    final_norm=False,
    token_types=2,
    pooled=True,
    head_bias=True,
)
_T5 = Family(kind="encoder-decoder", norm_weights=1, ffn_width="d_ff")

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": replace(_SWITCHED, ffn_switch="mlp_bias"),
        "mistral": _GATED,
        "mixtral": replace(_GATED, experts=True),
        "qwen2": replace(_GATED, qkv_bias=True),
        "qwen2_moe": replace(_GATED, qkv_bias=True, qkv_switch="qkv_bias", experts=True),
        "qwen3": replace(_SWITCHED, head_norms=2, head_dim=128),
        "qwen3_moe": replace(_SWITCHED, head_norms=2, experts=True),
        "gemma": _GEMMA,
        "gemma2": replace(_GEMMA, norms=4),
        "gemma3_text": replace(_GEMMA, norms=4, head_norms=2),
        "phi": replace(_BIASED, norms=1, tied=False, head_bias=True, grouped=True),
        "phi3": _GATED,
        "gpt2": _GPT,
        "gpt_neo": Family(out_bias=True, ffn_bias=True, learned_positions=True, ffn_factor=4),
        "gptj": Family(ffn_bias=True, norms=1, tied=False, head_bias=True, ffn_width="n_inner", ffn_factor=4),
        "gpt_neox": replace(_BIASED, tied=False, attention_switch="attention_bias"),
        "opt": replace(
            _BIASED,
            learned_positions=True,
            extra_positions=2,
            attention_switch="enable_bias",
            ffn_switch="enable_bias",
            final_norm_switch="do_layer_norm_before",
            projected=True,
            ffn_width="ffn_dim",
        ),
        "bloom": replace(_BIASED, embedding_norm=True, ffn_width="", ffn_factor=4),
        "falcon": Family(attention_switch="bias", ffn_switch="bias", ffn_width="ffn_hidden_size", ffn_factor=4),
        "bert": _ENCODER,
        "roberta": _ENCODER,
        "xlm-roberta": _ENCODER,
        "distilbert": replace(_ENCODER, token_types=0, pooled=False, ffn_width="hidden_dim"),
        "vit": replace(_BIASED, kind="image", qkv_switch="qkv_bias"),
        "t5": _T5,
        "mt5": _T5,
    }
)
"""``model_type`` of a config -> family."""


def _llama(hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, vocab: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        **more,
    }


def _gpt2(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    dropouts = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
    sizes = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": 1024, "vocab_size": 50257}
    return {"model_type": "gpt2", **sizes, **dropouts}


def _bert(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "bert",
        "architectures": ["BertForMaskedLM"],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden,
        "vocab_size": 30522,
        "max_position_embeddings": 512,
        "hidden_dropout_prob": 0.1,
    }


_TIED = {"tie_word_embeddings": True}
_QWEN = {"model_type": "qwen2", "max_position_embeddings": 32768}
_LLAMA_3 = {"max_position_embeddings": 131072}
_MISTRAL = {"model_type": "mistral", "max_position_embeddings": 32768}
_MIXTRAL = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
KNOWN_MODELS: Mapping[str, Mapping[str, Any]] = {
    "bert-base": _bert(768, 12, 12),
    "bert-large": _bert(1024, 24, 16),
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
    "llama-2-7b": _llama(4096, 32, 32, 32, 11008, 32000, max_position_embeddings=4096),
    "llama-2-13b": _llama(5120, 40, 40, 40, 13824, 32000, max_position_embeddings=4096),
    "llama-2-70b": _llama(8192, 80, 64, 8, 28672, 32000, max_position_embeddings=4096),
    "llama-3.1-8b": _llama(4096, 32, 32, 8, 14336, 128256, **_LLAMA_3),
    "llama-3.1-70b": _llama(8192, 80, 64, 8, 28672, 128256, **_LLAMA_3),
    "llama-3.2-1b": _llama(2048, 16, 32, 8, 8192, 128256, head_dim=64, **_LLAMA_3, **_TIED),
    "llama-3.2-3b": _llama(3072, 28, 24, 8, 8192, 128256, head_dim=128, **_LLAMA_3, **_TIED),
    "mistral-7b": _llama(4096, 32, 32, 8, 14336, 32000, **_MISTRAL),
    "mixtral-8x7b": _llama(4096, 32, 32, 8, 14336, 32000, **(_MISTRAL | _MIXTRAL)),
    "qwen2.5-0.5b": _llama(896, 24, 14, 2, 4864, 151936, **_QWEN, **_TIED),
    "qwen2.5-1.5b": _llama(1536, 28, 12, 2, 8960, 151936, **_QWEN, **_TIED),
    "qwen2.5-7b": _llama(3584, 28, 28, 4, 18944, 152064, **(_QWEN | {"max_position_embeddings": 131072})),
}
"""Name -> config."""
