"""Synthetic rows for the data sets of the hub that ``datasets.load_dataset`` would download.

``python -m benchmarks.first_try.stand_ins.hub_datasets FOLDER NAME=KIND ...`` writes a file of rows for each split.
Where FOLDER is named by ``FIRST_TRY_DATASETS``, ``load_dataset`` reads the rows of a NAME from there by its own reader
of JSON lines; other names, files and readers are its own. A NAME that begins with ``.`` is a folder that
``load_from_disk`` reads.
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

__all__ = ["AFTER", "KINDS", "write_rows"]

_SPLITS = {"train": 512, "validation": 64, "test": 64}
_WORDS = (
    "a",
    "tiny",
    "model",
    "learns",
    "few",
    "words",
    "that",
    "mean",
    "nothing",
    "and",
    "are",
    "drawn",
    "by",
    "chance",
)


def _text(draw: random.Random, words: int = 12) -> str:
    return " ".join(draw.choices(_WORDS, k=words))


def _chat(draw: random.Random) -> list[dict[str, str]]:
    return [{"role": "user", "content": _text(draw)}, {"role": "assistant", "content": _text(draw)}]


def _preference(draw: random.Random) -> dict[str, Any]:
    chosen, rejected = _chat(draw), _chat(draw)
    return {"prompt": chosen[0]["content"], "chosen": chosen, "rejected": [chosen[0], rejected[1]]}


KINDS: Mapping[str, Callable[[random.Random, int], dict[str, Any]]] = {
    "alpaca": lambda draw, _: {"instruction": _text(draw), "input": "", "output": _text(draw)},
    "chat": lambda draw, index: {"messages": _chat(draw), "prompt": _text(draw), "prompt_id": str(index)},
    "classes": lambda draw, index: {"text": _text(draw), "label": draw.randrange(2), "idx": index},
    "code": lambda draw, _: {"content": _text(draw, 60)},
    "dialogue": lambda draw, index: {"id": str(index), "dialogue": _text(draw), "summary": _text(draw, 5)},
    "dolly": lambda draw, _: {
        "instruction": _text(draw),
        "context": "",
        "response": _text(draw),
        "category": "open_qa",
    },
    "gsm8k": lambda draw, index: {"question": _text(draw), "answer": f"{_text(draw)}\n#### {index}"},
    "instruct": lambda draw, _: {"prompt": _text(draw), "completion": _text(draw)},
    "messages": lambda draw, _: {"messages": _chat(draw)},
    "pairs": lambda draw, index: {
        "sentence1": _text(draw),
        "sentence2": _text(draw),
        "label": draw.randrange(2),
        "idx": index,
    },
    "preference": lambda draw, _: _preference(draw),
    "replies": lambda draw, _: {
        "prompt": f"Human: {_text(draw)} Assistant:",
        "response": _text(draw),
        "chosen": _text(draw),
        "rejected": _text(draw),
    },
    "sentiment": lambda draw, index: {"sentence": _text(draw), "label": index % 3},
    "text": lambda draw, _: {"text": _text(draw, 40)},
    "tokens": lambda draw, _: {
        "input_ids": draw.choices(range(10, 250), k=48),
        "attention_mask": [1] * 48,
        "labels": draw.choices(range(10, 250), k=16),
    },
    "tweets": lambda draw, index: {
        "Tweet text": _text(draw),
        "ID": index,
        "Label": draw.choice((1, 2)),
        "text_label": draw.choice(("complaint", "no complaint")),
    },
}
"""Kind -> a row of it."""


def write_rows(name: str, kind: str, *, folder: Path) -> Path:
    """Write the splits of one data set; return its folder."""
    target = folder / name.replace("/", "--")
    target.mkdir(parents=True, exist_ok=True)
    for split, rows in _SPLITS.items():
        draw = random.Random(f"{name} {split}")
        lines = (json.dumps(KINDS[kind](draw, index)) for index in range(rows))
        (target / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return target


def write_on_disk(folder: Path, kind: str) -> Path:
    """Write a data set's splits, and ``eval`` beside them, as ``load_from_disk`` reads them; return the folder."""
    datasets: Any = importlib.import_module("datasets")

    splits = {}
    for split, rows in {**_SPLITS, "eval": 64}.items():
        draw = random.Random(split)
        splits[split] = datasets.Dataset.from_list([KINDS[kind](draw, index) for index in range(rows)])
    datasets.DatasetDict(splits).save_to_disk(str(folder))
    return folder


def _rows_of(path: Any) -> dict[str, str]:
    """Return split -> file of a data set that stands in for one of the hub; empty for any other."""
    folder = Path(os.environ.get("FIRST_TRY_DATASETS", "")) / str(path).replace("/", "--")
    return {split: str(folder / f"{split}.jsonl") for split in _SPLITS if (folder / f"{split}.jsonl").is_file()}


_KEPT = ("split", "streaming", "cache_dir", "keep_in_memory")


def _load(module: ModuleType) -> None:
    if not os.environ.get("FIRST_TRY_DATASETS"):
        return
    original = module.load_dataset

    @functools.wraps(original)
    def load_dataset(path: Any, *args: Any, **kwargs: Any) -> Any:
        files = _rows_of(path)
        if not files:
            return original(path, *args, **kwargs)
        split = kwargs.get("split") or ""
        aliases = dict.fromkeys(_named(str(split)) - files.keys(), files["test"])
        return original("json", data_files={**files, **aliases}, **{key: kwargs[key] for key in _KEPT if key in kwargs})

    module.load_dataset = load_dataset  # type: ignore[attr-defined]


def _named(split: str) -> set[str]:
    """Return the names in a split as ``load_dataset`` takes it: ``train[:10%]+validation``."""
    return {part.partition("[")[0] for part in split.split("+") if part and part != "all"}


AFTER = {"datasets.load": _load}


def main(argv: Sequence[str]) -> None:
    """Write the data sets that the arguments name."""
    for word in argv[1:]:
        name, _, kind = word.rpartition("=")
        on_disk = name.startswith((".", "/"))
        print(write_on_disk(Path(name), kind) if on_disk else write_rows(name, kind, folder=Path(argv[0])))


if __name__ == "__main__":
    main(sys.argv[1:])
