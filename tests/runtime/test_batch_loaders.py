"""Detection and resizing of batch sources other than torch's data loader."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    dataloader,
    dataset,
)

from optuna_dsat.runtime.adapt.loaders import LoaderWatch
from optuna_dsat.runtime.events import BatchSourcesFound
from optuna_dsat.script.batch_rule import BatchRule, guesses

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
    monkeypatch.setattr(IterableDataset, "__init_subclass__", IterableDataset.__init_subclass__)


def watch(follow: dict[str, Any] | None = None, *, fed: Fed | None = None) -> LoaderWatch:
    made = LoaderWatch(micro_batch=6, follow=follow or {}, fed=fed or Fed(), repeat=True)
    made.callbacks()["torch.utils.data.dataloader"](dataloader)
    made._datasets_of_torch_imported(dataset)
    return made


def rules(made: LoaderWatch) -> list[BatchRule]:
    return guesses(BatchSourcesFound(rank=0, time=0.0, options={}, loaders=made.described()), own=OWN, ranks=1)


def test_the_loader_of_the_last_batch_is_known() -> None:
    made = watch()
    assert made.loaded is None
    assert [made.loaded for _ in DataLoader(torch.arange(6), batch_size=OWN)] == [OWN, OWN]  # type: ignore[arg-type]


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
    assert (OWN, Path(__file__).name) in {(item["batch_size"], Path(item["file"]).name) for item in made.described()}


def stream_class() -> type[Any]:
    """Return a dataset class that yields batches, defined after the watch was installed."""

    class Stream(IterableDataset[torch.Tensor]):
        def __init__(self, batch_size: int = OWN) -> None:
            self.batch_size = batch_size
            self.epoch = 0

        def __iter__(self) -> Iterator[torch.Tensor]:
            yield from torch.split(torch.arange(12), self.batch_size)

    return Stream


@pytest.mark.parametrize("split", [False, True])
def test_samples_are_those_of_a_rank_where_accelerate_shards_batches(split: bool) -> None:
    shard = pytest.importorskip("accelerate.data_loader").BatchSamplerShard
    made, samples = watch(), list(range(48))
    batches = BatchSampler(SequentialSampler(samples), batch_size=OWN * (2 if split else 1), drop_last=False)
    DataLoader(samples, batch_sampler=shard(batches, num_processes=2, split_batches=split))  # type: ignore[arg-type]
    assert made.described()[-1]["samples"] == 24


def test_a_stream_that_batches_by_itself_behind_a_loader() -> None:
    made = watch()
    assert [len(item) for item in DataLoader(stream_class()(), batch_size=None)] == [OWN] * 3
    (rule,) = rules(made)
    assert rule.kind == "attribute"
    assert rule.key.endswith("Stream.batch_size")
    assert Path(rule.file).name == Path(__file__).name
    watch(rule.source(ranks=1))
    assert [len(item) for item in DataLoader(stream_class()(), batch_size=None)] == [6, 6]


def test_a_stream_that_is_iterated_itself() -> None:
    made = watch()
    stream = stream_class()()
    assert [len(item) for item in stream] == [OWN] * 3
    assert [len(item) for item in stream] == [OWN] * 3, "an evaluation ends"
    (rule,) = rules(made)
    fed = Fed()
    watch(rule.source(ranks=1), fed=fed)
    sizes = []
    for batch in stream_class()():
        sizes.append(len(batch))
        fed.count += 1
        if len(sizes) == 5:
            break
    assert sizes == [6] * 5, "what feeds the engine begins again"


def test_another_number_of_the_data_set_stays() -> None:
    made = watch({"kind": "attribute", "key": "Stream.batch_size", "own": OWN})
    stream = stream_class()()
    stream.epoch = OWN
    list(stream)
    assert stream.epoch == OWN
    assert made.described()


def test_batches_of_a_set_are_not_taken_for_its_samples() -> None:
    class Batches(Dataset[torch.Tensor]):
        def __init__(self) -> None:
            self.size = OWN

        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.zeros(self.size)

    made = watch()
    DataLoader(Batches(), batch_size=None)
    assert all(item["samples"] is None for item in made.described())
    assert [rule.kind for rule in rules(made)] == ["attribute"]


@pytest.mark.parametrize("how", ["iter", "batch", "iterable", "torch"])
def test_batches_of_datasets(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    for kind in (datasets.Dataset, datasets.IterableDataset):
        for name in ("iter", "batch"):
            monkeypatch.setattr(kind, name, vars(kind)[name])

    def sizes() -> list[int]:
        data = datasets.Dataset.from_dict({"x": list(range(12))})
        if how == "torch":
            data = data.with_format("torch")
        if how == "iterable":
            data = data.to_iterable_dataset()
        batches = data.batch(batch_size=OWN) if how == "batch" else data.iter(OWN)
        return [len(batch["x"]) for batch in batches]

    def watched(follow: dict[str, Any]) -> LoaderWatch:
        made = LoaderWatch(micro_batch=6, follow=follow, fed=Fed(), repeat=True)
        callbacks = made.callbacks()
        callbacks["datasets.arrow_dataset"](datasets.arrow_dataset)
        callbacks["datasets.iterable_dataset"](datasets.iterable_dataset)
        return made

    made = watched({})
    assert sizes() == [OWN] * 3
    rule = rules(made)[0]
    assert (rule.kind, Path(rule.file).name) == ("loader", Path(__file__).name)
    watched(rule.source(ranks=1))
    assert sizes() == [6, 6]


@pytest.mark.parametrize("how", ["method", "stage"])
def test_batches_of_webdataset(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    webdataset = pytest.importorskip("webdataset")
    for module in (webdataset.filters, webdataset):  # the package has a copy of the name
        monkeypatch.setattr(module, "batched", webdataset.filters.batched)

    def sizes() -> list[int]:
        def source() -> Iterator[tuple[int]]:
            return iter([(index,) for index in range(12)])

        if how == "method":
            pipeline = type("Pipeline", (webdataset.DataPipeline, webdataset.FluidInterface), {})
            batches = pipeline(source).batched(OWN)
        else:
            batches = webdataset.DataPipeline(source, webdataset.batched(OWN))
        return [len(batch[0]) for batch in batches]

    made = LoaderWatch(micro_batch=6, follow={}, fed=Fed(), repeat=True)
    made.callbacks()["webdataset.filters"](webdataset.filters)
    assert sizes() == [OWN] * 3
    rule = rules(made)[0]
    assert (rule.kind, Path(rule.file).name) == ("loader", Path(__file__).name)
    follower = LoaderWatch(micro_batch=6, follow=rule.source(ranks=1), fed=Fed(), repeat=True)
    follower.callbacks()["webdataset.filters"](webdataset.filters)
    assert sizes() == [6, 6]


@pytest.mark.parametrize("sampler", [None, "distributed"])
def test_a_sampler_shows_whether_each_rank_loads_all_samples(sampler: str | None) -> None:
    made = watch()
    data: Any = torch.arange(12)
    part: Any = None if sampler is None else DistributedSampler(data, num_replicas=2, rank=0)
    next(iter(DataLoader(data, batch_size=OWN, sampler=part)))
    (described,) = made.described()
    assert (described["samples"], described["loads_all"]) == ((12, True) if sampler is None else (6, False))
