"""Derive a model's shape from its Hugging Face ``config.json``, without building or loading the model."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from optuna_dsat.config.documents import as_written, checked, read_document
from optuna_dsat.errors import UsageError
from optuna_dsat.plan.families import FAMILIES, Family, Sizes, attention_params, layer_params
from optuna_dsat.plan.transformer import Recompute, TransformerShape

__all__ = ["find_config", "shape_of_config"]

_CONFIG = "config.json"
_MODEL_ID = re.compile(r"[\w.-]+/[\w.-]+")
_DEFAULT_TOKENS = 2048
"""Default number of tokens per sample, unless the model's maximum is smaller."""
_DROPOUTS = ("hidden_dropout_prob", "resid_pdrop", "resid_dropout", "hidden_dropout", "dropout", "dropout_rate")


@dataclass(kw_only=True)
class _Reader:
    """Read numbers of a config by any of their names, and record missing numbers."""

    data: Mapping[str, Any]
    missing: list[str] = field(default_factory=list)

    def size(self, *names: str, default: int | None = None) -> int:
        """Return the value of the first existing key, else the default; without either, record the key and return 1.

        Raises:
            UsageError: If the value is not a whole number above 0.
        """
        result = self.maybe(*names)
        if result is not None:
            return result
        if default is None:
            self.missing.append(names[0])
            return 1
        return default

    def maybe(self, *names: str) -> int | None:
        """Return the value of the first existing key; None if all are missing."""
        for name in names:
            value = self.data.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**40:
                raise UsageError(
                    f"--hf-config: {name} is {as_written(value)}; it must be a whole number of at least 1."
                )
            return value
        return None

    def flag(self, name: str, *, default: bool) -> bool:
        """Return a boolean."""
        value = self.data.get(name)
        return default if value is None else bool(value)


@dataclass(frozen=True, kw_only=True)
class _Count:
    """Parameters of a model, in total and per token."""

    stored: int
    active: int
    logits: int | None
    """Number of logits per sample; None for tokens times vocabulary."""


def find_config(given: Path) -> Path:
    """Return the ``config.json`` given as a file, as a model's folder, or as a model id in the cache.

    Raises:
        UsageError: If it does not exist.
    """
    if given.is_dir():
        if not (given / _CONFIG).is_file():
            raise UsageError(f"--hf-config is {given}, a folder without {_CONFIG}.")
        return given / _CONFIG
    if given.is_file():
        return given
    if not _MODEL_ID.fullmatch(str(given)):
        raise UsageError(f"--hf-config is {given}, which is not there. Give a {_CONFIG} or the folder of a model.")
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    paths = sorted((cache / f"models--{str(given).replace('/', '--')}" / "snapshots").glob(f"*/{_CONFIG}"))
    if not paths:
        raise UsageError(
            f"--hf-config is {given}, which is neither a file or folder nor a model in {cache}. Nothing is downloaded: "
            f"give a {_CONFIG} or the folder of a model."
        )
    return max(paths, key=lambda path: path.stat().st_mtime)


def shape_of_config(
    given: Path,
    *,
    seq_length: int | None,
    dropout: bool,
    fused_attention: bool,
    recompute: Recompute,
    trainable_share: float,
) -> TransformerShape:
    """Return the shape of the model that a Hugging Face config describes.

    Args:
        given: A ``config.json``, the folder of a model, or a model id that was downloaded before.
        seq_length: Tokens per sample; None for 2048, or the model's maximum if that is smaller.
        dropout: Whether to assume dropout even if the config disables it.
        fused_attention: Whether attention stores no ``s x s`` matrices.
        recompute: Activations to recompute in the backward pass.
        trainable_share: Share of the parameters that is trained.

    Raises:
        UsageError: If the config cannot be read, is of an unknown family, or lacks a number.
    """
    path = find_config(given)
    data = _load(path)
    kind = _known_kind(path, data)
    reader = _Reader(data=data)
    family = _switched(FAMILIES[kind], reader)
    sizes = _sizes(kind, family, reader)
    tokens, longest = _tokens(family, reader, seq_length)
    vocab = 1 if family.kind == "image" else reader.size("vocab_size")
    count = _count(kind, family, sizes, reader, vocab)
    if reader.missing:
        raise UsageError(f"{path} ({kind}) lacks {', '.join(dict.fromkeys(reader.missing))}.")
    if seq_length is not None and longest is not None and seq_length > longest:
        raise UsageError(f"--seq-length is {seq_length}, but {path} ({kind}) takes {longest} tokens at most.")
    both = family.kind == "encoder-decoder"
    decoders = reader.size("num_decoder_layers", default=sizes.layers) if both else 0
    return TransformerShape(
        params=count.stored,
        hidden=sizes.hidden,
        layers=sizes.layers + decoders,
        heads=sizes.heads,
        seq_length=tokens,
        vocab=vocab,
        ffn=_width_of_token(sizes),
        gated=family.gated,
        dropout=dropout or any(isinstance(data.get(name), (int, float)) and data[name] > 0 for name in _DROPOUTS),
        fused_attention=fused_attention,
        recompute=recompute,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        cross_layers=decoders,
        active_params=count.active if count.active != count.stored else None,
        largest_module=_largest_module(family, sizes, vocab * reader.size("word_embed_proj_dim", default=sizes.hidden)),
        logits=count.logits,
        trainable_share=trainable_share,
        quantized=_quantized(data)[0],
        quantized_bits=_quantized(data)[1],
        family=kind,
    )


def _quantized(data: Mapping[str, Any]) -> tuple[str, int | None]:
    """Return the name of the weights' quantization (empty if not quantized) and its bits (None if unknown)."""
    section = data.get("quantization_config")
    if not isinstance(section, Mapping) or not section:
        return "", None
    loaded = next((bits for bits in (4, 8) if section.get(f"load_in_{bits}bit")), None)
    bits = section.get("bits") or loaded
    method = section.get("quant_method") or "unknown method"
    known = bits if isinstance(bits, int) and not isinstance(bits, bool) and 0 < bits < 16 else None
    return (f"{method}, {bits} bits" if bits else str(method)), known


def _known_kind(path: Path, data: Mapping[str, Any]) -> str:
    kind = data.get("model_type")
    if not isinstance(kind, str):
        raise UsageError(f"{path} has no model_type, so it is no config of a Hugging Face model.")
    if kind not in FAMILIES:
        raise UsageError(
            f"{path} is of model_type {kind!r}, whose parameters cannot be counted here; known are "
            f"{', '.join(FAMILIES)}. Give --params, --hidden and --layers instead."
        )
    return kind


def _load(path: Path) -> Mapping[str, Any]:
    try:
        data = checked(json.loads(read_document(path).decode("utf-8-sig")), str(path))
    except OSError as error:
        raise UsageError(f"--hf-config: {path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError):
        raise UsageError(f"--hf-config: {path} is not JSON.") from None
    if not isinstance(data, dict):
        raise UsageError(f"--hf-config: {path} is no JSON object.")
    return data


def _switched(family: Family, reader: _Reader) -> Family:
    """Return the family with the biases and blocks selected by the config."""
    both = reader.flag(family.attention_switch, default=family.qkv_bias) if family.attention_switch else None
    if both is not None:
        family = replace(family, qkv_bias=both, out_bias=both)
    if family.qkv_switch:
        family = replace(family, qkv_bias=reader.flag(family.qkv_switch, default=family.qkv_bias))
    if family.ffn_switch:
        family = replace(family, ffn_bias=reader.flag(family.ffn_switch, default=family.ffn_bias))
    if str(reader.data.get("feed_forward_proj", "")).startswith("gated-"):
        family = replace(family, gated=True)
    return family


def _sizes(kind: str, family: Family, reader: _Reader) -> Sizes:
    hidden = reader.size("hidden_size", "n_embd", "d_model", "dim")
    heads = reader.size("num_attention_heads", "n_head", "num_heads", "n_heads")
    layers = reader.size("num_hidden_layers", "n_layer", "num_layers", "n_layers")
    widths = ("intermediate_size", "ffn_dim", "n_inner", "d_ff", "hidden_dim", "ffn_hidden_size")
    ffn = reader.size(*widths, default=family.ffn_factor * hidden or None)
    if hidden % heads and not family.head_dim and reader.maybe("head_dim", "d_kv") is None and not reader.missing:
        raise UsageError(f"--hf-config: hidden_size is {hidden}, no multiple of the {heads} attention heads.")
    dense = Sizes(
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=_kv_heads(kind, reader, heads),
        head_dim=reader.size("head_dim", "d_kv", default=family.head_dim or max(1, hidden // heads)),
        ffn=ffn,
    )
    return _with_experts(dense, reader) if family.experts else dense


def _kv_heads(kind: str, reader: _Reader, heads: int) -> int:
    """Return the number of heads of keys and values; Falcon's default is 1."""
    if kind != "falcon":
        return reader.size("num_key_value_heads", default=heads)
    if reader.flag("new_decoder_architecture", default=False):
        return reader.size("num_kv_heads", default=heads)
    return 1 if reader.flag("multi_query", default=True) else heads


def _with_experts(dense: Sizes, reader: _Reader) -> Sizes:
    every = reader.size("decoder_sparse_step", default=1)
    alone = reader.data.get("mlp_only_layers") or []
    sparse = sum(1 for layer in range(dense.layers) if layer not in alone and (layer + 1) % every == 0)
    return replace(
        dense,
        experts=reader.size("num_local_experts", "num_experts"),
        experts_per_token=reader.size("num_experts_per_tok"),
        expert_ffn=reader.size("moe_intermediate_size", default=dense.ffn),
        shared_ffn=reader.maybe("shared_expert_intermediate_size") or 0,
        sparse_layers=sparse,
    )


def _width_of_token(sizes: Sizes) -> int:
    """Return the mean width of the feed-forward blocks that a token passes, over the layers."""
    if not sizes.sparse_layers:
        return sizes.ffn
    sparse = sizes.experts_per_token * sizes.expert_ffn + sizes.shared_ffn
    return round((sparse * sizes.sparse_layers + sizes.ffn * (sizes.layers - sizes.sparse_layers)) / sizes.layers)


def _largest_module(family: Family, sizes: Sizes, embedding: int) -> int:
    """Return the parameters of the largest leaf module; in transformers 5 a layer's experts are a single module."""
    experts = sizes.experts * sizes.expert_ffn * (3 if family.gated else 2)
    return max(embedding, sizes.hidden * max(sizes.ffn, experts))


def _tokens(family: Family, reader: _Reader, wanted: int | None) -> tuple[int, int | None]:
    """Return the tokens per sample and the model's maximum (None if unlimited)."""
    if family.kind == "image":
        patches = _patches(reader)
        return patches + 1, patches + 1
    longest = reader.maybe("max_position_embeddings", "n_positions") if family.learned_positions else None
    known = reader.maybe("max_position_embeddings", "n_positions", "seq_length")
    return wanted or min(_DEFAULT_TOKENS, known or _DEFAULT_TOKENS), longest


def _patches(reader: _Reader) -> int:
    """Return the patches of an image."""
    (height, width), (tall, wide) = _sides(reader, "image_size"), _sides(reader, "patch_size")
    return max(1, (height // tall) * (width // wide))


def _sides(reader: _Reader, name: str) -> tuple[int, int]:
    """Return height and width of an image or a patch; a single number is both."""
    value = reader.data.get(name)
    if not isinstance(value, list):
        side = reader.size(name)
        return side, side
    if len(value) != 2 or not all(type(item) is int and item > 0 for item in value):
        raise UsageError(f"--hf-config: {name} is {as_written(value)}; it must be a whole number or two of them.")
    return value[0], value[1]


def _count(kind: str, family: Family, sizes: Sizes, reader: _Reader, vocab: int) -> _Count:
    """Count the parameters of embeddings, layers and head."""
    dense = sizes.layers - sizes.sparse_layers
    if kind == "falcon":
        family = replace(family, norms=_falcon_norms(reader))
    around = _embeddings(kind, family, sizes, reader, vocab)
    around += _final_norm(kind, family, sizes, reader)
    each = layer_params(family, sizes, experts=None)
    if family.kind == "encoder-decoder":
        decoders = reader.size("num_decoder_layers", default=sizes.layers)
        cross = attention_params(family, sizes) + family.norm_weights * sizes.hidden
        positions = 2 * sizes.heads * reader.size("relative_attention_num_buckets", default=32)
        around += decoders * (each + cross) + positions + family.norm_weights * sizes.hidden
    head, logits = _head(kind, family, sizes, reader, vocab)
    fixed = around + head + dense * each
    return _Count(
        stored=fixed + sizes.sparse_layers * layer_params(family, sizes, experts=sizes.experts),
        active=fixed + sizes.sparse_layers * layer_params(family, sizes, experts=sizes.experts_per_token),
        logits=logits,
    )


def _falcon_norms(reader: _Reader) -> int:
    """Return the number of norms of a Falcon layer."""
    if not reader.flag("parallel_attn", default=True):
        return 2
    default = 2 if reader.flag("new_decoder_architecture", default=False) else 1
    return reader.size("num_ln_in_parallel_attn", default=default)


def _final_norm(kind: str, family: Family, sizes: Sizes, reader: _Reader) -> int:
    """Return the parameters of the norm after the last layer, which OPT may lack."""
    if kind == "opt" and not reader.flag("do_layer_norm_before", default=True):
        return 0
    return family.norm_weights * sizes.hidden if family.final_norm else 0


def _embeddings(kind: str, family: Family, sizes: Sizes, reader: _Reader, vocab: int) -> int:
    """Return the parameters of the embeddings."""
    hidden = sizes.hidden
    norm = family.norm_weights * hidden if family.embedding_norm else 0
    if family.kind == "image":
        tall, wide = _sides(reader, "patch_size")
        channels = reader.size("num_channels", default=3)
        return hidden * (tall * wide * channels + 1) + hidden * (_patches(reader) + 2)
    width = reader.size("word_embed_proj_dim", default=hidden) if kind == "opt" else hidden
    rows = reader.size("max_position_embeddings", "n_positions") if family.learned_positions else 0
    kinds = reader.size("type_vocab_size", default=2) if family.kind == "encoder" and kind != "distilbert" else 0
    projections = 2 * hidden * width if width != hidden else 0
    return vocab * width + (rows + kinds) * hidden + family.extra_positions * hidden + norm + projections


def _head(kind: str, family: Family, sizes: Sizes, reader: _Reader, vocab: int) -> tuple[int, int | None]:
    """Return the parameters of the head, and the number of logits per sample (None: tokens times vocabulary).

    ``architectures`` names the trained model; the default is the language model, or the image classifier.
    """
    named = reader.data.get("architectures") or [""]
    name, hidden = str(named[0]), sizes.hidden
    labels = reader.maybe("num_labels") or len(reader.data.get("id2label") or ()) or 2
    dense = hidden * hidden + hidden
    if family.kind == "image":
        return (dense, hidden) if name.endswith("Model") else (hidden * labels + labels, labels)
    if name.endswith(("Classification", "QuestionAnswering", "MultipleChoice")):
        between = dense if family.kind == "encoder" and name.endswith("SequenceClassification") else 0
        return between + hidden * labels + labels, labels
    if name.endswith("Model") and not name.endswith("HeadModel"):
        return (dense if family.kind == "encoder" and kind != "distilbert" else 0), hidden
    bias = vocab if family.head_bias else 0
    if family.kind == "encoder":
        pooled = dense + 2 * hidden + 2 if name.endswith("PreTraining") else 0
        return dense + 2 * hidden + bias + pooled, None
    tied = reader.flag("tie_word_embeddings", default=family.tied)
    return (0 if tied else vocab * hidden) + bias, None
