"""Shapes of published models for ``plan --model NAME``: the numbers of their ``config.json`` on Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


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
