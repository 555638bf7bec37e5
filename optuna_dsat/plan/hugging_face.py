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
from optuna_dsat.plan.families import FAMILIES, KNOWN_MODELS, Family
from optuna_dsat.plan.transformer import Recompute, TransformerShape

_CONFIG = "config.json"
_OTHER_CONFIGS = ("adapter_config.json", "model_index.json")
"""Files of an adapter's and of a diffusion pipeline's folder, which describe no model that can be counted."""
_MODEL_ID = re.compile(r"[\w.-]+/[\w.-]+")
_DEFAULT_TOKENS = 2048
"""Default number of tokens per sample, unless the model's maximum is smaller."""
_PARTS = ("text_config", "vision_config", "audio_config")
"""Sections of a multimodal model's config, one for each of its parts."""
_NOT_OF_WEIGHTS = re.compile("activation|cache|input|output|act_")
"""Matches keys of a ``quantization_config`` that are not about its weights."""
_BITS = re.compile(
    r"(?:int|float|fp)([1-9]\d?)_?weight"
    r'|"(?:n|num_|w_)?bits?": "?([1-9]\d?)\b|"quant_algo": "w([1-9]\d?)a'
    r'|"(?:quant_method|quant_type|quant_algo|weights|(?:\w+_)?dtype|_data)": "[a-z_]*(?:int|fp|float)([1-9]\d?)',
    re.IGNORECASE,
)
"""Bits of a weight in a ``quantization_config``, by their number or by a type such as ``int4``."""
_DROPOUTS = ("hidden_dropout_prob", "resid_pdrop", "resid_dropout", "hidden_dropout", "dropout", "dropout_rate")


@dataclass(kw_only=True)
class _Reader:
    """Read numbers of a config by any of their names, and record missing numbers."""

    data: Mapping[str, Any]
    missing: list[str] = field(default_factory=list)

    def size(self, *names: str, default: int | None = None) -> int:
        """Return the first existing key's value (``UsageError`` if not above 0), or the default, or 1 if none."""
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
                raise UsageError(f"The model: {name} is {as_written(value)}; it must be a whole number of at least 1.")
            return value
        return None

    def flag(self, name: str, *, default: bool) -> bool:
        """Return a boolean."""
        value = self.data.get(name)
        return default if value is None else bool(value)


def find_config(given: Path) -> Path:
    """Return ``config.json``: a file, of a model's folder, of a cached model id; ``UsageError`` without any."""
    if given.is_dir():
        path = next((given / name for name in (_CONFIG, *_OTHER_CONFIGS) if (given / name).is_file()), None)
        if path is None:
            raise UsageError(f"The model {given} is a folder without {_CONFIG}.")
        return path
    if given.is_file():
        return given
    if not _MODEL_ID.fullmatch(str(given)):
        raise UsageError(
            f"The model {given} is neither there nor known. Give a {_CONFIG}, the folder of a model, or one of "
            f"{', '.join(KNOWN_MODELS)}."
        )
    home = os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface")  # noqa: PTH111 - home may be missing
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    paths = sorted((cache / f"models--{str(given).replace('/', '--')}" / "snapshots").glob(f"*/{_CONFIG}"))
    if not paths:
        raise UsageError(
            f"The model {given} is neither a file or folder nor a model in {cache}. Nothing is downloaded: "
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
        given: A ``config.json``, the folder of a model, a model id that was downloaded before, or a name in
            ``KNOWN_MODELS``.
        seq_length: Tokens per sample; None for 2048, or the model's maximum if that is smaller.
        dropout: Whether to assume dropout even if the config disables it.
        fused_attention: Whether attention stores no ``s x s`` matrices.
        recompute: Activations to recompute in the backward pass.
        trainable_share: Share of the parameters that is trained.

    Raises:
        UsageError: If the config cannot be read, is of an unknown family, or lacks a number.
    """
    path, data = _config_of(given)
    kind = _known_kind(path, data)
    model = _Model(kind, _Reader(data=data))
    tokens, longest = model.tokens(seq_length)
    stored, active, logits = model.params()
    if missing := dict.fromkeys(model.reader.missing):
        raise UsageError(f"{path} ({kind}) lacks {', '.join(missing)}.")
    if seq_length is not None and longest is not None and seq_length > longest:
        raise UsageError(f"--seq-length is {seq_length}, but {path} ({kind}) takes {longest} tokens at most.")
    quantized, bits = _quantized(data)
    return TransformerShape(
        params=stored,
        hidden=model.hidden,
        layers=model.layers + model.decoders,
        heads=model.heads,
        seq_length=tokens,
        vocab=model.vocab,
        ffn=model.width_of_token(),
        gated=model.family.gated,
        dropout=dropout or any(isinstance(data.get(name), (int, float)) and data[name] > 0 for name in _DROPOUTS),
        fused_attention=fused_attention,
        recompute=recompute,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        cross_layers=model.decoders,
        active_params=active if active != stored else None,
        largest_module=model.largest_module(),
        logits=logits,
        looked_up=model.looked_up(),
        causal=model.family.kind == "decoder",
        trainable_share=trainable_share,
        quantized=quantized,
        quantized_bits=bits,
        family=kind,
    )


def _quantized(data: Mapping[str, Any]) -> tuple[str, int | None]:
    """Return the name of the weights' quantization (empty if not quantized) and its bits (None if unknown)."""
    section = data.get("quantization_config") or data.get("compression_config") or data.get("quantization")  # MLX
    if not isinstance(section, Mapping) or not section:
        return "", None
    loaded = next((bits for bits in (4, 8) if section.get(f"load_in_{bits}bit")), None)
    if loaded is None and "load_in_4bit" in section:
        return "", None
    named = _BITS.search(json.dumps(_of_weights(section)))
    bits = loaded or (int(next(filter(None, named.groups()))) if named else None)
    method = section.get("quant_method") or "unknown method"
    return (f"{method}, {bits} bits" if bits else str(method)), bits if bits is not None and bits < 16 else None


def _of_weights(section: Any) -> Any:
    """Return a section of a ``quantization_config`` without the settings of activations and caches, at any depth."""
    if not isinstance(section, Mapping):
        return section
    return {key: _of_weights(value) for key, value in section.items() if not _NOT_OF_WEIGHTS.search(key)}


def _known_kind(path: Path, data: Mapping[str, Any]) -> str:
    kind = data.get("model_type")
    if "peft_type" in data:
        base = data.get("base_model_name_or_path") or "its base model"
        raise UsageError(
            f"{path} is of an adapter ({as_written(data['peft_type'])}). Give --model {base}, and the adapter's share "
            "of the parameters with --trainable-share."
        )
    if not isinstance(kind, str):
        name = data.get("_class_name")
        why = f"is of diffusers' {name}" if name else "has no model_type, as configs of transformers have"
        raise UsageError(f"{path} {why}: it cannot be counted here. Give --params, --hidden and --layers instead.")
    parts = {
        name: section.get("model_type") for name in _PARTS if isinstance(section := data.get(name), Mapping) and section
    }
    if parts:
        described = ", ".join(f"{name} of model_type {of!r}" for name, of in parts.items())
        raise UsageError(
            f"{path} is of model_type {kind!r}, a model of several parts ({described}), which cannot be counted "
            "together here. Give --params, --hidden and --layers of the whole model instead."
        )
    if kind not in FAMILIES:
        raise UsageError(
            f"{path} is of model_type {kind!r}, whose parameters cannot be counted here; known are "
            f"{', '.join(FAMILIES)}. Give --params, --hidden and --layers instead."
        )
    return kind


def _config_of(given: Path) -> tuple[Path, Mapping[str, Any]]:
    """Return the config and its path; for a known model, its name."""
    known = KNOWN_MODELS.get(str(given).lower())
    if known is not None and not given.exists():
        return given, known
    path = find_config(given)
    return path, _load(path)


def _load(path: Path) -> Mapping[str, Any]:
    try:
        data = checked(json.loads(read_document(path).decode("utf-8-sig")), str(path))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError):
        raise UsageError(f"{path} is not JSON.") from None
    if not isinstance(data, dict):
        raise UsageError(f"{path} is not a JSON object.")
    return data


class _Model:
    """Sizes and parameters of a model by its config; ``kind`` is a key of ``FAMILIES``."""

    def __init__(self, kind: str, reader: _Reader) -> None:
        self.reader = reader
        self.family = family = _switched(kind, reader)
        self.hidden = reader.size("hidden_size", "n_embd", "d_model", "dim")
        self.heads = reader.size("num_attention_heads", "n_head", "num_heads", "n_heads")
        self.layers = reader.size("num_hidden_layers", "n_layer", "num_layers", "n_layers")
        self.ffn = reader.size(family.ffn_width, default=family.ffn_factor * self.hidden or None)
        sizes = ("head_dim", "d_kv") if family.grouped or family.kind == "encoder-decoder" else ()
        width = family.head_dim or reader.maybe(*sizes)
        if self.hidden % self.heads and width is None and not reader.missing:
            raise UsageError(f"The model: hidden_size is {self.hidden}, not divisible by the heads, {self.heads}.")
        default = family.head_dim or max(1, self.hidden // self.heads)
        self.head_dim = reader.size(*sizes, default=default)
        if kind == "falcon" and not reader.flag("new_decoder_architecture", default=False):
            self.kv_heads = 1 if reader.flag("multi_query", default=True) else self.heads
        else:
            key = "num_kv_heads" if kind == "falcon" else "num_key_value_heads"
            self.kv_heads = reader.size(key, default=self.heads) if kind == "falcon" or family.grouped else self.heads
        both = family.kind == "encoder-decoder" and not _architecture(reader.data).endswith("EncoderModel")
        self.decoders = reader.size("num_decoder_layers", default=self.layers) if both else 0
        self.vocab = 1 if family.kind == "image" else reader.size("vocab_size")
        self.sparse_layers = self.experts = self.experts_per_token = self.shared_ffn = 0
        self.expert_ffn = self.ffn
        if family.experts:
            every, alone = reader.size("decoder_sparse_step", default=1), reader.data.get("mlp_only_layers") or []
            self.sparse_layers = sum(layer not in alone and (layer + 1) % every == 0 for layer in range(self.layers))
            self.experts = reader.size("num_local_experts", "num_experts")
            self.experts_per_token = reader.size("num_experts_per_tok")
            self.expert_ffn = reader.size("moe_intermediate_size", default=self.ffn)
            self.shared_ffn = reader.maybe("shared_expert_intermediate_size") or 0

    def width_of_token(self) -> int:
        """Return the mean width of the feed-forward blocks that a token passes, over the layers."""
        sparse = self.experts_per_token * self.expert_ffn + self.shared_ffn
        dense = self.ffn * (self.layers - self.sparse_layers)
        return round((sparse * self.sparse_layers + dense) / self.layers)

    def largest_module(self) -> int:
        """Return the parameters of the largest leaf module; in transformers 5 a layer's experts are one module."""
        embedding = self.vocab * self.reader.size("word_embed_proj_dim", default=self.hidden)
        experts = self.experts * self.expert_ffn * (3 if self.family.gated else 2)
        return max(embedding, self.hidden * max(self.ffn, experts))

    def tokens(self, wanted: int | None) -> tuple[int, int | None]:
        """Return the tokens per sample and the model's maximum (None if unlimited)."""
        if self.family.kind == "image":
            return self._patches() + 1, self._patches() + 1
        names = ("max_position_embeddings", "n_positions")
        longest = self.reader.maybe(*names) if self.family.learned_positions else None
        known = self.reader.maybe(*names, "seq_length")
        return wanted or min(_DEFAULT_TOKENS, known or _DEFAULT_TOKENS), longest

    def _patches(self) -> int:
        """Return the patches of an image."""
        (height, width), (tall, wide) = self._sides("image_size"), self._sides("patch_size")
        return max(1, (height // tall) * (width // wide))

    def _sides(self, name: str) -> tuple[int, int]:
        """Return height and width of an image or a patch; a single number is both."""
        value = self.reader.data.get(name)
        if not isinstance(value, list):
            side = self.reader.size(name)
            return side, side
        if len(value) != 2 or not all(type(item) is int and item > 0 for item in value):
            raise UsageError(f"The model: {name} is {as_written(value)}; it must be a whole number or two of them.")
        return value[0], value[1]

    def params(self) -> tuple[int, int, int | None]:
        """Return the parameters, stored and used per token, and logits per sample (None: tokens x vocabulary)."""
        head, logits = self._head()
        dense = self._attention() + self._norms() + self._block(self.ffn)
        fixed = self._embeddings() + head + (self.layers - self.sparse_layers) * dense
        if self.family.final_norm and self.reader.flag(self.family.final_norm_switch, default=True):
            fixed += self.family.norm_weights * self.hidden
        if self.decoders:
            norm = self.family.norm_weights * self.hidden
            buckets = self.reader.size("relative_attention_num_buckets", default=32)
            fixed += self.decoders * (dense + self._attention() + norm) + norm + 2 * self.heads * buckets
        stored, active = (
            fixed + self.sparse_layers * self._sparse(count) for count in (self.experts, self.experts_per_token)
        )
        return stored, active, logits

    def looked_up(self) -> int:
        """Return the parameters of the embeddings that are not weights of the output, too."""
        if self.family.kind == "image":
            return 0
        is_output = self._head()[1] is None and self._is_tied
        return self._positions() * self.hidden + (0 if is_output else self.vocab * self._embedding_width())

    def _norms(self) -> int:
        family = self.family
        return family.norm_weights * (family.norms * self.hidden + family.head_norms * self.head_dim)

    def _attention(self) -> int:
        """Return the parameters of the four projections of an attention block."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        biases = (queries + 2 * keys) * self.family.qkv_bias + self.hidden * self.family.out_bias
        return self.hidden * (2 * queries + 2 * keys) + biases

    def _block(self, width: int) -> int:
        """Return the parameters of a dense feed-forward block."""
        inward = 2 if self.family.gated else 1
        biases = (inward * width + self.hidden) * self.family.ffn_bias
        return (inward + 1) * self.hidden * width + biases

    def _sparse(self, experts: int) -> int:
        """Return the parameters of a layer with so many of its experts."""
        shared = self._block(self.shared_ffn) + self.hidden if self.shared_ffn else 0
        routed = experts * self._block(self.expert_ffn) + self.experts * self.hidden
        return self._attention() + self._norms() + routed + shared

    def _embeddings(self) -> int:
        """Return the parameters of the embeddings."""
        family, reader, hidden = self.family, self.reader, self.hidden
        if family.kind == "image":
            tall, wide = self._sides("patch_size")
            channels = reader.size("num_channels", default=3)
            return hidden * (tall * wide * channels + 1) + hidden * (self._patches() + 2)
        width, norm = self._embedding_width(), family.norm_weights * hidden if family.embedding_norm else 0
        projections = 2 * hidden * width if width != hidden else 0
        return self.vocab * width + self._positions() * hidden + norm + projections

    def _embedding_width(self) -> int:
        return self.reader.size("word_embed_proj_dim", default=self.hidden) if self.family.projected else self.hidden

    def _positions(self) -> int:
        """Return the rows of the embeddings of positions and token types."""
        family, reader = self.family, self.reader
        rows = reader.size("max_position_embeddings", "n_positions") if family.learned_positions else 0
        rows += family.extra_positions
        return rows + (reader.size("type_vocab_size", default=family.token_types) if family.token_types else 0)

    @property
    def _is_tied(self) -> bool:
        return self.reader.flag("tie_word_embeddings", default=self.family.tied)

    def _head(self) -> tuple[int, int | None]:
        """Return the parameters of the head, and the number of logits per sample (None: tokens times vocabulary).

        ``architectures`` names the trained model; the default is the language model, or the image classifier.
        """
        data, family, hidden = self.reader.data, self.family, self.hidden
        name = _architecture(data)
        labels = self.reader.maybe("num_labels") or len(data.get("id2label") or ()) or 2
        dense = hidden * hidden + hidden
        if family.kind == "image":
            return (dense, hidden) if name.endswith("Model") else (hidden * labels + labels, labels)
        if name.endswith(("Classification", "QuestionAnswering", "MultipleChoice")):
            has_dense = name.endswith(("SequenceClassification", "MultipleChoice")) and family.kind != "decoder"
            between, labels = dense * has_dense, 1 if name.endswith("MultipleChoice") else labels
            return between + hidden * labels + labels, labels
        if name.endswith("Model") and not name.endswith("HeadModel"):
            return dense * family.pooled, hidden
        bias = self.vocab if family.head_bias else 0
        tied = self._is_tied
        if family.kind == "encoder":
            pooled = dense + 2 * hidden + 2 if name.endswith("PreTraining") else 0
            return (0 if tied else self.vocab * hidden) + dense + 2 * hidden + bias + pooled, None
        return (0 if tied else self.vocab * hidden) + bias, None


def _architecture(data: Mapping[str, Any]) -> str:
    """Return the class of the trained model; empty if the config names none."""
    return str((data.get("architectures") or [""])[0])


def _switched(kind: str, reader: _Reader) -> Family:
    """Return the family with the biases and blocks selected by the config."""
    family = FAMILIES[kind]
    if family.attention_switch:
        both = reader.flag(family.attention_switch, default=family.qkv_bias)
        family = replace(family, qkv_bias=both, out_bias=both)
    if family.qkv_switch:
        family = replace(family, qkv_bias=reader.flag(family.qkv_switch, default=family.qkv_bias))
    if family.ffn_switch:
        family = replace(family, ffn_bias=reader.flag(family.ffn_switch, default=family.ffn_bias))
    if str(reader.data.get("feed_forward_proj", "")).startswith("gated-"):
        family = replace(family, gated=True)
    if kind == "falcon":
        new = reader.flag("new_decoder_architecture", default=False)
        parallel = reader.flag("parallel_attn", default=True)
        norms = reader.size("num_ln_in_parallel_attn", default=2 if new else 1) if parallel else 2
        family = replace(family, norms=norms)
    return family
