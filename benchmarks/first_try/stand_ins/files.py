"""Small synthetic files for the data that a README has its reader download."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

_WORDS = "the a one model data train runs fast slow batch step loss learns reads"


def _sentence(draw: random.Random, words: int) -> str:
    return " ".join(draw.choice(_WORDS.split()) for _ in range(words)).capitalize() + "."


def _gzip_bytes(path: Path, *, size: int = 100_000_000) -> None:
    """Write a gzip file of so many bytes of words."""
    import gzip

    draw = random.Random(7)
    block = (" ".join(_sentence(draw, 24) for _ in range(500)) + "\n").encode()
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(size // len(block) + 1):
            file.write(block)


def _records(path: Path, *, fields: dict[str, int], rows: int = 256, lines: bool = False) -> None:
    """Write records of text as a JSON list, or as JSON lines; ``fields``: name -> words."""
    draw = random.Random(7)
    result = [{name: _sentence(draw, words) for name, words in fields.items()} for _ in range(rows)]
    text = "\n".join(map(json.dumps, result)) + "\n" if lines else json.dumps(result)
    path.write_text(text, encoding="utf-8")


def _csv(path: Path, *, fields: dict[str, int], rows: int = 256) -> None:
    """Write a CSV table of text; ``fields``: name -> words."""
    import csv

    draw = random.Random(7)
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(fields)
        table.writerows([_sentence(draw, words) for words in fields.values()] for _ in range(rows))


def _conversations(path: Path, *, rows: int = 256, roles: tuple[str, str] = ("user", "assistant")) -> None:
    """Write conversations of two turns as a JSON list, as LLaVA, FastChat and Qwen read them."""
    draw = random.Random(7)
    result = [
        {"id": str(row), "conversations": [{"from": role, "value": _sentence(draw, 8)} for role in roles]}
        for row in range(rows)
    ]
    path.write_text(json.dumps(result), encoding="utf-8")


def _images(path: Path, *, kinds: int = 4, each: int = 32, size: int = 64) -> None:
    """Write a folder of classes with random JPEG images, as ``torchvision.datasets.ImageFolder`` reads it."""
    from PIL import Image

    draw = random.Random(7)
    for kind in range(kinds):
        folder = path / f"class{kind}"
        folder.mkdir(parents=True)
        for number in range(each):
            pixels = bytes(draw.randrange(256) for _ in range(3 * 64))
            Image.frombytes("RGB", (8, 8), pixels).resize((size, size)).save(folder / f"{number}.jpg")


def _tokens(path: Path, *, count: int, vocabulary: int) -> None:
    """Write an array of random tokens, as NumPy reads it."""
    import numpy

    drawn = numpy.random.default_rng(7).integers(0, vocabulary, count, dtype=numpy.uint16)
    numpy.save(path, drawn)


GENERATORS: dict[str, Callable[..., None]] = {
    "gzip": _gzip_bytes,
    "records": _records,
    "csv": _csv,
    "conversations": _conversations,
    "images": _images,
    "tokens": _tokens,
}
