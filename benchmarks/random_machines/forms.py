"""Shapes that a cost may take over the micro-batch or over the size of a knob."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from benchmarks.published import published_curves

Array = NDArray[np.float64]

_OCTAVES = 18
"""Octaves of the micro-batch (or of a size relative to its smallest value) that a table covers."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A positive factor over the base-2 logarithm of a size, linear between knots one octave apart, held beyond."""

    form: str
    """Name of the shape."""
    knots: tuple[float, ...]
    """The factor at 2**0, 2**1, ...: shape (octaves,)."""

    def at(self, size: Array) -> Array:
        """Return the factor at each size; shape of ``size``."""
        return np.interp(np.log2(np.maximum(size, 1.0)), np.arange(len(self.knots)), self.knots)


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds per sample over the micro-batch: those of a step are linear between knots."""

    form: str
    """Name of the measured curve."""
    sizes: tuple[float, ...]
    """Samples, ascending from 0. Beyond the last, samples take as long as there."""
    times: tuple[float, ...]
    """Of a step of each size, relative to a sample at full speed."""

    def at(self, size: Array) -> Array:
        """Return the factor at each size; shape of ``size``."""
        within = np.clip(size, 1.0, self.sizes[-1])
        return np.asarray(np.interp(within, self.sizes, self.times) / within)


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Kernels that compute whole tiles: part of the work is that of the next multiple of a tile's size."""

    size: int
    """Samples of a tile."""
    share: float
    """Share of the work that is rounded up, 0 to 1."""

    def work(self, micro_batch: Array) -> Array:
        """Return the samples that are computed in effect; shape of ``micro_batch``."""
        return (1 - self.share) * micro_batch + self.share * self.size * np.ceil(micro_batch / self.size)


def _curve(form: str, value: Callable[[float], float], octaves: int = _OCTAVES) -> Curve:
    return Curve(form=form, knots=tuple(value(float(octave)) for octave in range(octaves + 1)))


def hyperbolic(half: float) -> Curve:
    """Half of the full speed at ``half`` samples: seconds grow as micro-batch + half."""
    return _curve("hyperbolic", lambda octave: 1 + half / 2**octave)


def linear() -> Curve:
    """As many seconds or bytes for each sample, in a batch of any size."""
    return _curve("linear", lambda _: 1.0)


def _hyperbolic(dice: random.Random) -> Curve:
    return hyperbolic(2 ** dice.uniform(-2, 6))


def _power(dice: random.Random) -> Curve:
    """Seconds grow as a power of the micro-batch below 1, up to some size."""
    exponent, until = dice.uniform(0.55, 0.95), dice.uniform(3, 12)
    return _curve("power", lambda octave: 2 ** ((1 - exponent) * max(0.0, until - octave)))


def _table(dice: random.Random) -> Curve:
    """Falls by a random step each octave, with none left after some octaves."""
    steps = [dice.expovariate(1.0) * dice.uniform(0.05, 0.5) * 0.75**octave for octave in range(_OCTAVES)]
    return _curve("table", lambda octave: math.exp(sum(steps[int(octave) :])))


def _peak(dice: random.Random) -> Curve:
    """Saturates, and loses speed again beyond a size of its own."""
    half, turn, slope = 2 ** dice.uniform(-1, 4), dice.uniform(1, 8), dice.uniform(0.03, 0.2)
    return _curve("peak", lambda octave: (1 + half / 2**octave) * math.exp(slope * max(0.0, octave - turn)))


def _waves(dice: random.Random) -> Curve:
    """Saturates with smooth random waves on top."""
    half = 2 ** dice.uniform(-2, 5)
    waves = [(dice.gauss(0, 0.06), dice.uniform(0.3, 1.6), dice.uniform(0, 2 * math.pi)) for _ in range(4)]
    return _curve(
        "waves",
        lambda octave: (1 + half / 2**octave) * math.exp(sum(a * math.sin(f * octave + p) for a, f, p in waves)),
    )


def _plateau(dice: random.Random) -> Curve:
    """Flat from some small size on, but for a per cent or two."""
    start, drift = dice.uniform(0, 4), dice.uniform(-0.003, 0.003)
    return _curve("plateau", lambda octave: 1 + 0.8 * max(0.0, start - octave) + drift * octave)


COMPUTE_FORMS: dict[str, Callable[[random.Random], Curve]] = {
    "hyperbolic": _hyperbolic,
    "power": _power,
    "table": _table,
    "peak": _peak,
    "waves": _waves,
    "plateau": _plateau,
}
"""Name -> draws the seconds per sample over the micro-batch, relative to those at full speed."""


def draw_compute(dice: random.Random) -> Curve:
    """Return seconds per sample over the micro-batch, relative to full speed."""
    return COMPUTE_FORMS[dice.choice(list(COMPUTE_FORMS))](dice)


def draw_published(dice: random.Random, capacity: float) -> StepTimes:
    """Return a published curve, relative to full speed.

    It is stretched: its largest micro-batch becomes up to four times as large or as small, and at most twice
    ``capacity``, the samples whose activations fill the device.
    """
    curve = dice.choice(published_curves())
    largest = max(curve.step_s)
    scale = min(2 ** dice.uniform(-2, 2), max(1.0, capacity * 2 ** dice.uniform(-3, 1)) / largest)
    sizes = [size * scale for size in curve.step_s]
    times = [cost * size for cost, size in zip(curve.costs, sizes, strict=True)]
    of_none = times[0] - (times[1] - times[0]) / (sizes[1] - sizes[0]) * sizes[0]
    start = min(max(0.0, of_none), times[0])
    return StepTimes(form=f"{curve.model} on {curve.gpu}", sizes=(0.0, *sizes), times=(start, *times))


def _memory_power(dice: random.Random) -> Curve:
    exponent = dice.uniform(-0.05, 0.05)
    return _curve("power", lambda octave: 2 ** (exponent * octave))


def _memory_steps(dice: random.Random) -> Curve:
    """Workspaces that come and go: a random factor at each octave."""
    steps = [dice.uniform(0.92, 1.08) for _ in range(_OCTAVES + 1)]
    return _curve("steps", lambda octave: steps[int(octave)])


MEMORY_FORMS: dict[str, Callable[[random.Random], Curve]] = {
    "linear": lambda _: linear(),
    "power": _memory_power,
    "steps": _memory_steps,
}
"""Name -> draws the activation bytes per sample over the micro-batch, relative to those of one sample."""


def draw_memory(dice: random.Random) -> Curve:
    """Return activation bytes per sample over the micro-batch, relative to those of the profile's."""
    return MEMORY_FORMS[dice.choice(list(MEMORY_FORMS))](dice)


def draw_size_effect(dice: random.Random, *, strength: float) -> Curve:
    """Return the effect of a knob's size on the whole step, of either sign; sizes are relative to 10,000 elements."""
    kind = dice.choice(("rising", "falling", "valley", "table"))
    middle, width = dice.uniform(4, 14), dice.uniform(2, 5)
    noise = [dice.uniform(-1, 1) for _ in range(_OCTAVES + 1)]

    def value(octave: float) -> float:
        if kind == "valley":
            return 1 + strength * min(1.0, ((octave - middle) / width) ** 2)
        if kind == "table":
            return 1 + strength * noise[int(octave)] / 2
        risen = 1 / (1 + math.exp(-(octave - middle) / (width / 2)))
        return 1 + strength * (risen if kind == "rising" else 1 - risen)

    return _curve(f"size {kind}", value)


def draw_walk(dice: random.Random, *, spread: float) -> Curve:
    """Return the effect of a knob's size on the whole step: its logarithm changes by ``spread`` per doubling."""
    steps = list(accumulate(dice.gauss(0, spread) for _ in range(_OCTAVES + 1)))
    return _curve("size walk", lambda octave: math.exp(steps[int(octave)]))
