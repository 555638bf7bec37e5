"""Compare the predictions of ``optuna-dsat plan`` with published measurements.

python -m benchmarks.published_measurements [--set-aside]

A deviation is the logarithm of predicted over measured rate. A contrast is the difference between the deviations of two
rows of a table that differ in one setting only: the table's common factor cancels. Contrasts are averaged over a
table, so that a table with many rows counts once.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations
from statistics import fmean, median, pstdev
from typing import Any

from benchmarks.published import Curve, PublishedTable, Row, published_curves, published_tables
from optuna_dsat.cost.gpus import GPUS
from optuna_dsat.cost.memory import estimate
from optuna_dsat.cost.memory_posterior import MemoryPosterior
from optuna_dsat.plan.from_shape import Machine, plan_shape
from optuna_dsat.plan.prediction import predict_steps
from optuna_dsat.plan.transformer import TransformerShape, shape_of

_SIMILAR = 1.6
"""Largest ratio of micro-batches that a contrast of another setting ignores: autotuners report each stage's best."""
_MEMORY, _RATE = 0.10, 1.25


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Prediction and measurement of a row; a field is None if it is not comparable."""

    table: str
    row: Row
    absolute: bool
    """Whether rates are comparable beyond the table's common factor."""
    predicted_rate: float
    """Samples per second."""
    rate_range: tuple[float, float]
    """Its 90% interval."""
    measured_rate: float | None
    predicted_bytes: int
    measured_bytes: float | None
    fits: bool
    """Whether the prediction fits into the GPU's memory."""

    @property
    def deviation(self) -> float | None:
        """Logarithm of predicted over measured rate, up to the table's common factor."""
        return None if self.measured_rate is None else math.log(self.predicted_rate / self.measured_rate)

    @property
    def in_range(self) -> bool | None:
        """Whether the measured rate is in the interval; None without a rate that is comparable as such."""
        low, high = self.rate_range
        return None if self.measured_rate is None or not self.absolute else low <= self.measured_rate <= high

    @property
    def memory_deviation(self) -> float | None:
        """Logarithm of predicted over measured peak."""
        return None if self.measured_bytes is None else math.log(self.predicted_bytes / self.measured_bytes)


def shape_of_row(table: PublishedTable, row: Row) -> TransformerShape:
    """Return the shape of the table's model with the row's sequence and recomputation."""
    model = table.model
    same = model.model_dump(
        exclude_none=True, exclude={"name", "params", "layers", "hidden", "heads", "vocabulary", "sequence"}
    )
    renamed = {"seq_length": row.sequence or model.sequence, "vocab": model.vocabulary}
    return shape_of(
        params=model.params,
        hidden=model.hidden,
        layers=model.layers,
        heads=model.heads,
        recompute="full" if row.checkpointing else "none",
        **same,
        **{name: value for name, value in renamed.items() if value is not None},
    )


def config_of_row(table: PublishedTable, row: Row) -> dict[str, Any]:
    """Return the row's DeepSpeed config."""
    further = dict(row.config)
    zero: dict[str, Any] = {"stage": row.stage, **further.pop("zero_optimization", {})}
    for name in ("offload_optimizer", "offload_param"):
        if getattr(row, name) != "none":
            zero[name] = {"device": getattr(row, name)}
    return {
        **({} if table.precision == "fp32" else {table.precision: {"enabled": True}}),
        "optimizer": {"type": "AdamW"},
        "gradient_accumulation_steps": row.accumulation,
        "zero_optimization": zero,
        **further,
    }


def measured_rate(table: PublishedTable, row: Row, shape: TransformerShape) -> float | None:
    """Return the measured samples per second; in an unspecified unit if the source specifies none."""
    if row.tflops_per_gpu is not None:
        flops = shape.model_flops_per_sample - (1.5 * shape.attention_flops if table.causal else 0)
        return row.tflops_per_gpu * 1e12 * row.gpus / flops
    if row.step_s is not None:
        return (row.micro_batch or 0) * row.accumulation * row.gpus / row.step_s
    if row.tokens_per_s is not None:
        return row.tokens_per_s / shape.seq_length
    if row.run_s is not None:
        return 1 / row.run_s
    return row.samples_per_s if row.samples_per_s is not None else row.relative_rate


def compare(name: str, table: PublishedTable) -> tuple[list[Comparison], list[str]]:
    """Return the comparisons of a table, and a reason for each row that is left out."""
    results, left_out = [], []
    gpu = GPUS.get(table.machine.plan_gpu or "")
    for number, row in enumerate(table.rows):
        unknown = {
            "the cost model's GPU": gpu,
            "the micro-batch": row.micro_batch,
            "checkpointing": row.checkpointing,
            "the sequence length": row.sequence or table.model.sequence,
        }
        if gpu is None or row.micro_batch is None or None in unknown.values():
            missing = ", ".join(what for what, value in unknown.items() if value is None)
            left_out.append(f"{name}, row {number} is left out: {missing} is unknown.")
            continue
        per_node = min(row.gpus, table.machine.gpus_per_node)
        machine = Machine(
            gpu=gpu,
            gpus_per_node=per_node,
            nodes=row.gpus // per_node,
            given_network_gbit_per_s=table.machine.network_gbit_per_s,
            given_host_bytes=None,
        )
        shape, config = shape_of_row(table, row), config_of_row(table, row)
        subject = plan_shape(shape, machine, config=config, memory_margin=0.05).subject
        peak = estimate(subject.profile, config, micro_batch=row.micro_batch, hardware=subject.hardware).device_bytes
        step = predict_steps(subject, [config], [row.micro_batch])[0]
        samples = step.samples_per_s * step.step_s
        results.append(
            Comparison(
                table=name,
                row=row,
                absolute=not table.machine.stand_in and row.run_s is None and row.relative_rate is None,
                predicted_rate=step.samples_per_s,
                rate_range=(samples / step.high_s, samples / step.low_s),
                measured_rate=measured_rate(table, row, shape),
                predicted_bytes=peak + left_free(gpu.memory_bytes, table.memory),
                measured_bytes=row.peak_bytes,
                fits=peak <= subject.usable_bytes,
            )
        )
    return results, left_out


def left_free(device_bytes: int, memory: str | None) -> int:
    """Return the bytes that ``plan`` leaves free, as far as a kind of measured peak contains them.

    Reserved bytes include fragmentation; the figures of nvidia-smi include the CUDA context as well.
    """
    if memory not in ("reserved", "nvidia-smi"):
        return 0
    posterior = MemoryPosterior(device_bytes=device_bytes, bytes_per_sample=0, on_cpu=memory == "reserved")
    return device_bytes - round(posterior.usable)


def right_order(results: Sequence[Comparison]) -> tuple[int, int]:
    """Return how many pairs of a table's rates are predicted in the right order, and the number of pairs."""
    rated = [(item.measured_rate, item.predicted_rate) for item in results if item.measured_rate is not None]
    pairs = [(a, b) for a, b in combinations(rated, 2) if a[0] != b[0]]
    return sum((a[0] < b[0]) == (a[1] < b[1]) and a[1] != b[1] for a, b in pairs), len(pairs)


def deviations(results: Sequence[Comparison]) -> list[float]:
    """Return the deviations of rates from their table's median."""
    values = [item.deviation for item in results if item.deviation is not None]
    return [value - median(values) for value in values]


def _settings(row: Row) -> dict[str, Any]:
    """Return the settings of a row that are compared."""
    names = ("stage", "offload_optimizer", "offload_param", "micro_batch", "accumulation", "gpus", "checkpointing")
    zero = row.config.get("zero_optimization", {})
    knobs = ("overlap_comm", "reduce_bucket_size", "stage3_max_live_parameters")
    return {name: getattr(row, name) for name in (*names, "sequence")} | {name: zero.get(name) for name in knobs}


_BYSTANDERS = {"accumulation", "micro_batch", "overlap_comm", "reduce_bucket_size", "stage3_max_live_parameters"}
_LOOSE = {
    **dict.fromkeys(("stage", "offload_optimizer", "offload_param"), _BYSTANDERS),
    "micro_batch": {"accumulation"},
}
"""Setting -> further settings in which the two rows of a contrast may differ."""


def contrasts(results: Sequence[Comparison], setting: str) -> dict[tuple[Any, Any], float]:
    """Return the mean difference of a table's deviations between two values of a setting, the larger minus the smaller.

    No offload is smaller than offload.
    """
    found: dict[tuple[Any, Any], list[float]] = {}
    rated = [(item.deviation, _settings(item.row)) for item in results if item.deviation is not None]
    for (first, a), (second, b) in combinations(rated, 2):
        others = [name for name in a if a[name] != b[name] and name not in {setting, *_LOOSE.get(setting, ())}]
        ratio = max(a["micro_batch"], b["micro_batch"]) / min(a["micro_batch"], b["micro_batch"])
        if others or (setting != "micro_batch" and ratio > _SIMILAR) or None in (a[setting], b[setting]):
            continue
        low, high = sorted((a[setting], b[setting]), key=lambda value: (value != "none", value))
        if low != high:
            found.setdefault((low, high), []).append(second - first if b[setting] == high else first - second)
    return {values: fmean(differences) for values, differences in found.items()}


def slopes(results: Sequence[Comparison], setting: str) -> list[float]:
    """Return the change of a table's deviations per doubling of a number, by least squares; empty without pairs."""
    points = [(math.log2(high / low), change) for (low, high), change in contrasts(results, setting).items()]
    return [sum(x * y for x, y in points) / sum(x * x for x, _ in points)] if points else []


def needless_savings(results: Sequence[Comparison]) -> list[float]:
    """Return the measured rates with ZeRO 3 or an offload relative to a simpler structure at the same micro-batch.

    A structure is simpler if it has fewer of ZeRO 3, an offloaded optimizer and offloaded parameters.
    """
    rows = [(item.row, item.measured_rate) for item in results if item.measured_rate and item.row.micro_batch]
    ratios = []
    for (row, rate), (other, its_rate) in permutations(rows, 2):
        fewer, more = _savings(row), _savings(other)
        if _batch(row) == _batch(other) and fewer != more and all(a <= b for a, b in zip(fewer, more, strict=True)):
            ratios.append(its_rate / rate)
    return ratios


def _savings(row: Row) -> tuple[bool, bool, bool]:
    return row.stage == 3, row.offload_optimizer != "none", row.offload_param != "none"


def _batch(row: Row) -> tuple[Any, ...]:
    return row.micro_batch, row.accumulation, row.gpus, row.checkpointing, row.sequence


def roughness(curve: Curve) -> list[float]:
    """Return the logarithms of a curve's step times, relative to a linear interpolation between their neighbours."""
    points = [(float(size), seconds) for size, seconds in curve.step_s.items()]
    return [
        math.log(time / (before + (later - before) * (size - least) / (most - least)))
        for (least, before), (size, time), (most, later) in zip(points, points[1:], points[2:], strict=False)
    ]


def curve_lines(curves: Sequence[Curve]) -> list[str]:
    """Return a table of curves: how rough they are, and the speed that they lose before memory ends."""
    lines = [
        "| curve | micro-batches | best speed | speed at the largest | roughness |",
        "|---|--:|--:|--:|--:|",
    ]
    for curve in curves:
        sizes, costs = [*curve.step_s], curve.costs
        rough = math.sqrt(fmean(value**2 for value in roughness(curve)))
        lines.append(
            f"| {curve.model} on {curve.gpu} | {sizes[0]} to {sizes[-1]} | {costs[0]:.1f}x | {1 / costs[-1]:.0%} "
            f"| {rough:.1%} |"
        )
    return lines


def _line(name: str, values: Sequence[float]) -> str:
    if not values:
        return f"| {name} | 0 | | |"
    return f"| {name} | {len(values)} | {math.exp(median(values)):.2f} | {pstdev(values):.2f} |"


def table_line(name: str, results: Sequence[Comparison], left_out: int) -> str:
    """Return the summary of a table as a row of Markdown."""
    memory = [item.memory_deviation for item in results if item.memory_deviation is not None]
    rates = [item.deviation for item in results if item.deviation is not None and item.absolute]
    close = sum(abs(math.expm1(value)) <= _MEMORY for value in memory)
    near = sum(abs(value) <= math.log(_RATE) for value in rates)
    within = sum(bool(item.in_range) for item in results)
    right, pairs = right_order(results)
    cells = [name, len(results), left_out]
    cells += [f"{close}/{len(memory)}", f"{math.exp(median(memory)):.2f}"] if memory else ["", ""]
    shares = [f"{near}/{len(rates)}", f"{within}/{len(rates)}"]
    cells += [*shares, f"{math.exp(median(rates)):.2f}"] if rates else ["", "", ""]
    return f"| {' | '.join(str(cell) for cell in cells)} | {f'{right}/{pairs}' if pairs else ''} |"


_PAIRS: Mapping[str, Sequence[tuple[Any, Any]]] = {
    "stage": [(0, 1), (1, 2), (2, 3), (1, 3)],
    "offload_optimizer": [("none", "cpu")],
    "offload_param": [("none", "cpu")],
    "overlap_comm": [(False, True)],
}
_NUMBERS = ("micro_batch", "sequence", "reduce_bucket_size", "stage3_max_live_parameters")


def distributions(
    results: Sequence[Sequence[Comparison]], kinds: Mapping[str, str | None]
) -> dict[str, Sequence[float]]:
    """Return the deviations over all tables by name: a value per table, or per row of a table for memory.

    Args:
        results: The comparisons of each table.
        kinds: Table -> meaning of its peaks.
    """
    known = [[item.deviation for item in items if item.deviation is not None and item.absolute] for items in results]
    rates = {
        "common factor of a table": [median(values) for values in known if values],
        "rows, common factor removed": [x for items in results for x in deviations(items)],
    }
    for setting, pairs in _PAIRS.items():
        of_tables = [contrasts(items, setting) for items in results]
        for pair in pairs:
            values = [by_pair[pair] for by_pair in of_tables if pair in by_pair]
            rates[f"{setting} {pair[1]} against {pair[0]}"] = values
    for setting in _NUMBERS:
        rates[f"per doubling of {setting}"] = [x for items in results for x in slopes(items, setting)]
    groups: dict[str, list[float]] = {}
    for items in results:
        peaks = [(item, item.memory_deviation) for item in items if item.memory_deviation is not None]
        for item, deviation in peaks:
            offload = "" if item.row.offload_optimizer == "none" else ", offload"
            for group in (f"ZeRO {item.row.stage}{offload}", f"{kinds[item.table]} peaks", "all"):
                groups.setdefault(group, []).append(deviation)
            common = median(other for _, other in peaks)
            groups.setdefault("rows, common factor removed", []).append(deviation - common)
    memory = {f"memory: {name}": values for name, values in sorted(groups.items())}
    return {**{f"rate: {name}": values for name, values in rates.items()}, **memory}


_HEADINGS = (
    "table", "rows", "left out", "memory within 10%", "peak, median", "rates within 1.25x", "in the range",
    "rate, median", "in order",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--set-aside", action="store_true", help="compare the tables that are set aside instead")
    options = parser.parse_args(arguments)
    tables = {name: table for name, table in published_tables().items() if table.set_aside == options.set_aside}
    compared = {name: compare(name, table) for name, table in tables.items()}
    print(f"| {' | '.join(_HEADINGS)} |\n|---|{'--:|' * (len(_HEADINGS) - 1)}")
    for name, (results, left_out) in compared.items():
        print(table_line(name, results, len(left_out)))
    print("\nMedians are of predicted over measured. Distribution over tables, or over rows for memory:\n")
    print("| deviation | values | median factor | standard deviation of the logarithm |\n|---|--:|--:|--:|")
    kinds = {name: table.memory for name, table in tables.items()}
    values = distributions([results for results, _ in compared.values()], kinds)
    print("\n".join(_line(name, values[name]) for name in values))
    ended = [item for results, _ in compared.values() for item in results if item.row.outcome == "out_of_memory"]
    fitted = [item for results, _ in compared.values() for item in results if item.row.outcome == "measured"]
    print(f"\nOut of memory, and predicted so: {sum(not item.fits for item in ended)}/{len(ended)}.")
    print(f"Measured, and predicted to fit: {sum(item.fits for item in fitted)}/{len(fitted)}.")
    savings = [ratios for results, _ in compared.values() if (ratios := needless_savings(results))]
    if savings:
        every = [ratio for ratios in savings for ratio in ratios]
        share = fmean(fmean(ratio > 1 for ratio in ratios) for ratios in savings)
        print(
            "ZeRO 3 or an offload, and fewer of them at the same micro-batch: faster in "
            f"{sum(ratio > 1 for ratio in every)} of {len(every)} pairs, "
            f"{share:.0%} in the mean of {len(savings)} tables; {max(every):.2f}x at most."
        )
    print("\n" + "\n".join(curve_lines(published_curves())) + "\n")
    for why in (reason for _, left_out in compared.values() for reason in left_out):
        print(why)


if __name__ == "__main__":
    main()
