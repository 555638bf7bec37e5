"""Tiny random models with a tokenizer of bytes, written where ``from_pretrained`` looks for a model of the hub.

``PYTHON -m benchmarks.first_try.stand_ins.hub HF_HOME NAME=KIND ...`` writes them with the libraries of that
interpreter. A NAME that begins with ``.`` or ``/`` is a folder of its own, any other one a model of the hub in the
cache below HF_HOME. Scripts then load them as they are, with ``HF_HUB_OFFLINE=1``; no library is changed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["KINDS", "write_model"]

_REVISION = "0" * 40
_SPECIAL = ("<pad>", "<s>", "</s>", "<unk>", "[MASK]", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<image>")
_VOCABULARY = 320
_TEXT = {"vocab_size": _VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# Sizes whose squares times 0.9 are whole: older versions of transformers hand that to DeepSpeed as a bucket size.
_USUAL = {
    **_TEXT,
    "hidden_size": 80,
    "intermediate_size": 160,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 2048,
}
_T5 = {
    "vocab_size": _VOCABULARY,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
    "d_model": 80,
    "d_kv": 40,
    "d_ff": 160,
    "num_layers": 2,
    "num_heads": 2,
    "is_encoder_decoder": True,
}
_GPT2 = {**_TEXT, "n_embd": 80, "n_layer": 2, "n_head": 2, "n_positions": 2048}
KINDS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "bert": ("BertForMaskedLM", "bert", _USUAL),
    "bloom": ("BloomForCausalLM", "bloom", {**_TEXT, "hidden_size": 80, "n_layer": 2, "n_head": 2}),
    "gpt2": ("GPT2LMHeadModel", "gpt2", _GPT2),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", "gpt_bigcode", _GPT2),
    "gpt_neox": ("GPTNeoXForCausalLM", "gpt_neox", _USUAL),
    "llama": ("LlamaForCausalLM", "llama", {**_USUAL, "num_key_value_heads": 2}),
    "mistral": ("MistralForCausalLM", "mistral", {**_USUAL, "num_key_value_heads": 1, "sliding_window": None}),
    "mt5": ("MT5ForConditionalGeneration", "mt5", _T5),
    "opt": ("OPTForCausalLM", "opt", {**_USUAL, "ffn_dim": 160, "word_embed_proj_dim": 80}),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", {**_USUAL, "num_key_value_heads": 1}),
    "roberta": ("RobertaForMaskedLM", "roberta", _USUAL),
    "t5": ("T5ForConditionalGeneration", "t5", _T5),
    "xlm-roberta": ("XLMRobertaForMaskedLM", "xlm-roberta", _USUAL),
}
"""Kind -> class of the model, ``model_type``, and the fields of its config that make it tiny."""

_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model(name: str, kind: str, *, home: Path) -> Path:
    """Write one model with its tokenizer; return its folder.

    Args:
        name: A model of the hub, or a folder.
        kind: A key of ``KINDS``.
        home: ``HF_HOME`` of the launches.
    """
    folder = Path(name) if name.startswith((".", "/")) else _snapshot(name, home=home)
    folder.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(folder)
    architecture, model_type, fields = KINDS[kind]
    import transformers

    config = transformers.AutoConfig.for_model(model_type, **fields, architectures=[architecture])
    getattr(transformers, architecture)(config).save_pretrained(folder)
    return folder


def _snapshot(name: str, *, home: Path) -> Path:
    """Return the folder of a model in the hub's cache, with the reference that leads to it."""
    cached = home / "hub" / f"models--{name.replace('/', '--')}"
    reference = cached / "refs" / "main"
    reference.parent.mkdir(parents=True, exist_ok=True)
    reference.write_text(_REVISION, encoding="utf-8")
    return cached / "snapshots" / _REVISION


def _write_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose tokens are bytes and the special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate((*_SPECIAL, *letters))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", vocabulary["<s>"])]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    words = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 2048,
        "model_input_names": ["input_ids", "attention_mask"],
        "pad_token": "<pad>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "mask_token": "[MASK]",
        "chat_template": _CHAT,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(words, indent=1), encoding="utf-8")


def main(argv: Sequence[str]) -> None:
    """Write the models that the arguments name."""
    from benchmarks.first_try.stand_ins import install

    install()  # what transformers imports may need them, too
    home = Path(argv[0])
    for word in argv[1:]:
        name, _, kind = word.rpartition("=")
        print(write_model(name, kind, home=home))


if __name__ == "__main__":
    main(sys.argv[1:])
