"""Tiny random models and synthetic rows in place of models and data sets of the Hugging Face hub.

``PYTHON -m benchmarks.first_try.stand_ins.hub HF_HOME ROWS models|datasets NAME=KIND ...`` writes them with the
libraries of that interpreter. A NAME that begins with ``.`` or ``/`` is a folder of its own. Other models are put into
the cache below HF_HOME, and loaded as they are with ``HF_HUB_OFFLINE=1``. Rows of other data sets are put below ROWS;
where ``FIRST_TRY_DATASETS`` names that folder, ``load_dataset`` reads them by its own reader of JSON lines.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_REVISION = "0" * 40
_SPECIAL = ("<pad>", "<s>", "</s>", "<unk>", "[MASK]", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<image>")
# Widths whose squares times 0.9 are whole: older versions of transformers hand that to DeepSpeed as a bucket size.
_TINY: Mapping[str, Any] = {
    "vocab_size": 320,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "word_embed_proj_dim"), 80),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim"), 160),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head"), 2),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 2048),
    "d_kv": 40,
    "num_key_value_heads": 1,
    "sliding_window": None,
}
"""Fields of configs that make a model tiny; each model knows some of them."""
MODELS: Mapping[str, str] = {
    "bert": "BertForMaskedLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_bigcode": "GPTBigCodeForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "opt": "OPTForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "roberta": "RobertaForMaskedLM",
    "t5": "T5ForConditionalGeneration",
}
"""Kind, which is the ``model_type`` -> class of the model."""
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPLITS = {"train": 512, "validation": 64, "test": 64}
_WORDS = "a tiny model learns few words that mean nothing and are drawn by chance"


def _text(draw: random.Random, words: int) -> str:
    return " ".join(draw.choices(_WORDS.split(), k=words))


def _chat(draw: random.Random, _: int = 0) -> list[dict[str, str]]:
    return [{"role": role, "content": _text(draw, 12)} for role in ("user", "assistant")]


def _label(draw: random.Random, _: int) -> int:
    return draw.randrange(2)


def _index(_: random.Random, index: int) -> int:
    return index


def _name(_: random.Random, index: int) -> str:
    return str(index)


def _tokens(count: int) -> Callable[[random.Random, int], list[int]]:
    return lambda draw, _: draw.choices(range(10, 250), k=count)


ROWS: Mapping[str, Mapping[str, int | Callable[[random.Random, int], Any]]] = {
    "chat": {"messages": _chat, "prompt": 12, "prompt_id": _name},
    "classes": {"text": 12, "label": _label, "idx": _index},
    "code": {"content": 60},
    "dolly": {"instruction": 12, "context": 0, "response": 12, "category": 1},
    "gsm8k": {"question": 12, "answer": lambda draw, index: f"{_text(draw, 12)}\n#### {index}"},
    "messages": {"messages": _chat},
    "pairs": {"sentence1": 12, "sentence2": 12, "label": _label, "idx": _index},
    "replies": {
        "prompt": lambda draw, _: f"Human: {_text(draw, 12)} Assistant:",
        **dict.fromkeys(("response", "chosen", "rejected"), 12),
    },
    "text": {"text": 40},
    "tokens": {"input_ids": _tokens(48), "attention_mask": lambda *_: [1] * 48, "labels": _tokens(16)},
    "tweets": {
        "Tweet text": 12,
        "ID": _index,
        "Label": lambda draw, _: draw.choice((1, 2)),
        "text_label": lambda draw, _: draw.choice(("complaint", "no complaint")),
    },
}
"""Kind -> the fields of a row: words of a text, or a function of the dice and the row's index."""


def _rows(kind: str, split: str, count: int) -> list[dict[str, Any]]:
    draw = random.Random(f"{kind} {split}")
    fields = ROWS[kind].items()
    return [
        {name: _text(draw, value) if isinstance(value, int) else value(draw, index) for name, value in fields}
        for index in range(count)
    ]


def write_rows(name: str, kind: str, *, folder: Path) -> None:
    """Write the splits of one data set: below ``folder``, or into its own folder as ``load_from_disk`` reads them."""
    if name.startswith((".", "/")):
        datasets: Any = importlib.import_module("datasets")
        splits = {split: _rows(kind, split, count) for split, count in {**_SPLITS, "eval": 64}.items()}
        own = {split: datasets.Dataset.from_list(rows) for split, rows in splits.items()}
        datasets.DatasetDict(own).save_to_disk(name)
        return
    target = folder / name.replace("/", "--")
    target.mkdir(parents=True, exist_ok=True)
    for split, count in _SPLITS.items():
        lines = map(json.dumps, _rows(kind, split, count))
        (target / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_model(name: str, kind: str, *, home: Path) -> None:
    """Write one model with its tokenizer: into ``HF_HOME`` as the hub's cache has it, or into its own folder."""
    import transformers

    folder = Path(name)
    if not name.startswith((".", "/")):
        cached = home / "hub" / f"models--{name.replace('/', '--')}"
        folder = cached / "snapshots" / _REVISION
        (cached / "refs").mkdir(parents=True, exist_ok=True)
        (cached / "refs" / "main").write_text(_REVISION, encoding="utf-8")
    folder.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(folder)
    config = transformers.AutoConfig.for_model(kind, **_TINY, architectures=[MODELS[kind]])
    getattr(transformers, MODELS[kind])(config).save_pretrained(folder)


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
    names = ("pad_token", "bos_token", "eos_token", "unk_token", "mask_token")
    words = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 2048,
        "model_input_names": ["input_ids", "attention_mask"],
        **dict(zip(names, _SPECIAL, strict=False)),
        "chat_template": _CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(words, indent=1), encoding="utf-8")


_KEPT = ("split", "streaming", "cache_dir", "keep_in_memory")


def _load(module: ModuleType) -> None:
    if not os.environ.get("FIRST_TRY_DATASETS"):
        return
    original = module.load_dataset

    @functools.wraps(original)
    def load_dataset(path: Any, *args: Any, **kwargs: Any) -> Any:
        folder = Path(os.environ["FIRST_TRY_DATASETS"]) / str(path).replace("/", "--")
        files = {split: str(folder / f"{split}.jsonl") for split in _SPLITS if (folder / f"{split}.jsonl").is_file()}
        if not files:
            return original(path, *args, **kwargs)
        named = {part.partition("[")[0] for part in str(kwargs.get("split") or "all").split("+")} - {"all"}
        aliases = dict.fromkeys(named - files.keys(), files["test"])
        return original("json", data_files={**files, **aliases}, **{key: kwargs[key] for key in _KEPT if key in kwargs})

    module.load_dataset = load_dataset  # type: ignore[attr-defined]


AFTER = {"datasets.load": _load}


def main(argv: Sequence[str]) -> None:
    """Write the models or data sets that the arguments name."""
    from benchmarks.first_try.stand_ins import install

    install()  # what transformers imports may need them, too
    home, folder, what, *words = argv
    for word in words:
        name, _, kind = word.rpartition("=")
        if what == "models":
            write_model(name, kind, home=Path(home))
        else:
            write_rows(name, kind, folder=Path(folder))


if __name__ == "__main__":
    main(sys.argv[1:])
