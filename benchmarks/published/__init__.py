"""Published measurements, copied from the source that each file names: tables of DeepSpeed, curves of step times."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = [
    "Curve",
    "Machine",
    "Model",
    "PublishedCurves",
    "PublishedTable",
    "Row",
    "Software",
    "published_curves",
    "published_tables",
]

_FOLDER = Path(__file__).parent
Offload = Literal["none", "cpu", "nvme"]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Model(_Record):
    """The trained transformer; a field is null where the source does not specify it."""

    name: str
    params: int = Field(gt=0)
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    ffn: int | None = None
    """Width of the feed-forward block; null for 4 x hidden."""
    gated: bool = False
    """Whether the feed-forward block has three matrices."""
    vocabulary: int | None = None
    sequence: int | None = None
    """Tokens per sample, padding included."""
    logits: int | None = None
    """Logits per sample that are stored; null for tokens times vocabulary."""
    looked_up: int = 0
    """Parameters of embeddings that are not weights of the output, too."""
    dropout: bool = False
    fused_attention: bool = False
    """Whether attention stores no matrix of sequence x sequence scores."""
    trainable_share: float = Field(default=1.0, gt=0, le=1)


class Machine(_Record):
    """The hosts of a table."""

    gpu: str | None
    """GPU as the source names it; null where it does not."""
    gpus: int = Field(ge=1)
    gpus_per_node: int = Field(ge=1)
    network_gbit_per_s: float | None = None
    """Bandwidth of a host's network, in 10**9 bits per second and direction."""
    network: str | None = None
    plan_gpu: str | None = None
    """Name of the GPU in ``optuna_dsat.cost.gpus``; null if it is not there and nothing stands in for it."""
    stand_in: bool = False
    """Whether ``plan_gpu`` is a similar GPU: only ratios of rates within the table are then comparable."""


class Software(_Record):
    """Versions, null where the source does not specify them."""

    deepspeed: str | None = None
    torch: str | None = None


class Row(_Record):
    """A measured configuration. At most one of the rates is given."""

    stage: int = Field(ge=0, le=3)
    offload_optimizer: Offload = "none"
    offload_param: Offload = "none"
    micro_batch: int | None = Field(default=None, ge=1)
    """Samples per GPU and forward pass."""
    accumulation: int = Field(default=1, ge=1)
    gpus: int = Field(ge=1)
    checkpointing: bool | None
    """Whether all layers recompute their activations; null if the source does not specify it."""
    sequence: int | None = None
    """Tokens per sample, if rows differ in it."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Further keys of the DeepSpeed config; ``zero_optimization`` is merged."""
    samples_per_s: float | None = Field(default=None, gt=0)
    """Samples per second over all GPUs."""
    tokens_per_s: float | None = Field(default=None, gt=0)
    """Tokens per second over all GPUs."""
    tflops_per_gpu: float | None = Field(default=None, gt=0)
    """10**12 model FLOPs per second and GPU, without recomputation; attention as in ``PublishedTable.causal``."""
    step_s: float | None = Field(default=None, gt=0)
    """Seconds per optimizer step."""
    run_s: float | None = Field(default=None, gt=0)
    """Seconds for the same, unspecified number of samples in all rows of the table."""
    relative_rate: float | None = Field(default=None, gt=0)
    """Samples per second in an unspecified unit, the same in all rows of the table."""
    peak_gib: float | None = Field(default=None, gt=0)
    """Peak of a GPU's memory, in 2**30 bytes. Figures of nvidia-smi in MiB are divided by 1024."""
    peak_gb: float | None = Field(default=None, gt=0)
    """Peak of a GPU's memory, in 10**9 bytes."""
    outcome: Literal["measured", "out_of_memory"] = "measured"

    @property
    def peak_bytes(self) -> float | None:
        """Peak of a GPU's memory."""
        if self.peak_gib is not None:
            return self.peak_gib * 2**30
        return None if self.peak_gb is None else self.peak_gb * 1e9

    @model_validator(mode="after")
    def _consistent(self) -> Row:
        rates = (
            self.samples_per_s,
            self.tokens_per_s,
            self.tflops_per_gpu,
            self.step_s,
            self.run_s,
            self.relative_rate,
        )
        given = sum(rate is not None for rate in rates)
        peaks = (self.peak_gib is not None) + (self.peak_gb is not None)
        if given > 1 or peaks > 1 or (self.outcome == "measured") != (given + peaks > 0):
            raise ValueError("a measured row has one rate, one peak or both; a row out of memory has neither.")
        return self


class PublishedTable(_Record):
    """A table of measurements of one model on one machine."""

    source: str = Field(pattern=r"^https://")
    title: str
    retrieved: str = Field(pattern=r"^\d{4}-\d\d-\d\d$")
    set_aside: bool = False
    """Whether the table is kept from every fit and read once, at the end."""
    precision: Literal["fp16", "bf16", "fp32"]
    memory: Literal["allocated", "reserved", "nvidia-smi", "unknown"] | None = None
    """Meaning of the peaks: torch's allocated or reserved bytes, or the whole process; null without peaks."""
    causal: bool = False
    """Whether ``tflops_per_gpu`` counts half of the attention matrix."""
    model: Model
    machine: Machine
    software: Software = Software()
    assumed: dict[str, str] = Field(default_factory=dict)
    """Field that the source does not specify -> reason for its value."""
    rows: tuple[Row, ...] = Field(min_length=2)


class Curve(_Record):
    """Step times of one model on one GPU, without DeepSpeed."""

    model: str
    gpu: str
    step_s: dict[int, float] = Field(min_length=2)
    """Micro-batch, ascending -> seconds of a training step."""

    @property
    def costs(self) -> list[float]:
        """Seconds per sample of each micro-batch, relative to the least."""
        each = [seconds / size for size, seconds in self.step_s.items()]
        return [cost / min(each) for cost in each]


class PublishedCurves(_Record):
    """Curves of one source."""

    source: str = Field(pattern=r"^https://")
    title: str
    retrieved: str = Field(pattern=r"^\d{4}-\d\d-\d\d$")
    left_out: str
    """Further measurements of the source, and the reason for leaving them out."""
    curves: tuple[Curve, ...] = Field(min_length=1)


@cache
def published_curves() -> tuple[Curve, ...]:
    """Return the curves of all files in the folder ``curves``."""
    files = [path.read_text(encoding="utf-8") for path in sorted((_FOLDER / "curves").glob("*.json"))]
    return tuple(curve for text in files for curve in PublishedCurves.model_validate_json(text).curves)


def published_tables() -> dict[str, PublishedTable]:
    """Return the tables by file name without its suffix, sorted."""
    return {
        path.stem: PublishedTable.model_validate_json(path.read_text(encoding="utf-8"))
        for path in sorted(_FOLDER.glob("*.json"))
    }
