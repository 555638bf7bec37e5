"""Detection and resizing of batch sources other than torch's data loader."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler, dataloader

from optuna_dsat.runtime.adapt.batch_sources import BatchSources

OWN = 4


class Fed:
    """Number of micro-batches that an engine received."""

    count = 0

    def __call__(self) -> int:
        return self.count


@pytest.fixture(autouse=True)
def libraries_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("__init__", "__iter__"):
        monkeypatch.setattr(DataLoader, name, vars(DataLoader)[name])


def watch(follow: dict[str, Any] | None = None, *, fed: Fed | None = None) -> BatchSources:
    made = BatchSources(micro_batch=6, follow=follow or {}, fed=fed or Fed(), repeat=True)
    made.callbacks()["torch.utils.data.dataloader"](dataloader)
    return made


def test_the_loader_of_the_last_batch_is_known() -> None:
    made = watch()
    assert made.numbers(set()).loaded is None
    assert [made.numbers(set()).loaded for _ in DataLoader(torch.arange(6), batch_size=OWN)] == [OWN, OWN]  # type: ignore[arg-type]


class OwnLoader:
    """Data loader with the same arguments as torch's that is not a subclass of it."""

    def __init__(self, dataset: Any, batch_size: int | None = 1) -> None:
        self.dataset, self.size = dataset, batch_size or 1

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.split(self.dataset, self.size))


class Subclass(DataLoader[Any]):
    pass


@pytest.mark.parametrize("kind", [OwnLoader, Subclass])
def test_a_stateful_loader_of_torchdata_is_a_loader(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("__init__", "__iter__"):
        monkeypatch.setattr(kind, name, getattr(kind, name))
    module = types.ModuleType("stateful_dataloader")
    module.StatefulDataLoader = kind  # type: ignore[attr-defined]
    made = watch({"kind": "loader", "own": OWN})
    made.callbacks()["torchdata.stateful_dataloader.stateful_dataloader"](module)
    assert [len(batch) for batch in kind(torch.arange(12), OWN)] == [6, 6]
    assert (OWN, Path(__file__).name) in {
        (item["batch_size"], Path(item["file"]).name) for item in made.event(rank=0).loaders
    }


@pytest.mark.parametrize("split", [False, True])
def test_samples_are_those_of_a_rank_where_accelerate_shards_batches(split: bool) -> None:
    shard = pytest.importorskip("accelerate.data_loader").BatchSamplerShard
    made, samples = watch(), list(range(48))
    batches = BatchSampler(SequentialSampler(samples), batch_size=OWN * (2 if split else 1), drop_last=False)
    DataLoader(samples, batch_sampler=shard(batches, num_processes=2, split_batches=split))  # type: ignore[arg-type]
    assert made.event(rank=0).loaders[-1]["samples"] == 24


@pytest.mark.parametrize("sampler", [None, "distributed"])
def test_a_sampler_shows_whether_each_rank_loads_all_samples(sampler: str | None) -> None:
    made = watch()
    data: Any = torch.arange(12)
    part: Any = None if sampler is None else DistributedSampler(data, num_replicas=2, rank=0)
    next(iter(DataLoader(data, batch_size=OWN, sampler=part)))
    (described,) = made.event(rank=0).loaders
    assert (described["samples"], described["loads_all"]) == ((12, True) if sampler is None else (6, False))
