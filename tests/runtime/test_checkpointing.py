"""Checkpointed blocks: the same training in less memory, or a refusal with the reason."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import optuna_dsat
from optuna_dsat.runtime.adapt.checkpointing import MODEL_KNOBS, CheckpointingError
from optuna_dsat.runtime.measure.blocks import (
    DEEPSPEED_CHECKPOINT,
    TORCH_CHECKPOINT,
    BlockWatch,
    reason_against,
    repeated_blocks,
)
from optuna_dsat.runtime.overlay import CHECKPOINT_EVERY
from tests.harness.ranks import WarmRanks
from tests.runtime.checkpointed_engines import BLOCKS, HIDDEN, Block, Model, gpt2

SCRIPT = Path(__file__).with_name("checkpointed_engines.py")


def config(stage: int, **zero: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "bf16": {"enabled": stage > 0},
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 10_000, **zero},
        "steps_per_print": 10**6,
    }


MODELS: tuple[tuple[int, dict[str, Any], str], ...] = (
    (0, {}, "plain"),
    (2, {}, "plain"),
    (2, {"offload_optimizer": {"device": "cpu"}}, "plain"),
    (3, {"stage3_param_persistence_threshold": 0}, "plain"),
    (3, {"stage3_param_persistence_threshold": 0}, "library"),
    (1, {}, "pipeline"),
)
"""Stage, its settings, and the kind of model."""


@pytest.mark.torchrun
def test_a_checkpointed_model_trains_alike_at_every_stage(warm_ranks: WarmRanks, tmp_path: Path) -> None:
    asked = [{"config": config(stage, **zero), "kind": kind} for stage, zero, kind in MODELS]
    results = warm_ranks.train_engines(SCRIPT, asked, tmp_path)
    for model, result in zip(MODELS, results, strict=True):
        (losses, norm, kept), *others = result.values()
        assert len(set(losses)) == len(losses), model
        for other_losses, other_norm, _ in others:
            assert other_losses == losses, model
            assert other_norm == norm, model
        every_block, every_second = (other[2] for other in others)
        assert every_block < every_second < kept, model


def test_only_the_inputs_of_blocks_are_kept() -> None:
    kept = []
    for every in (0, 1):
        model = Model() if not every else optuna_dsat.checkpoint_blocks(Model())
        sizes: list[int] = []

        def pack(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            if not isinstance(tensor, nn.Parameter):
                sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(torch.randn(4, 16, HIDDEN))
        kept.append(sum(sizes) / (4 * 16 * HIDDEN))
    assert kept[0] > 10 * BLOCKS
    assert kept[1] == pytest.approx(BLOCKS + 2, abs=1)  # their inputs, the first layer's and the loss's


def test_names_and_copies_stay_right() -> None:
    model, names = Model(), list(Model().state_dict())
    optuna_dsat.checkpoint_blocks(model)
    assert [name for name, _ in model.named_parameters()] == list(model.state_dict()) == names
    assert [type(module) for module in model.modules()] == [type(module) for module in Model().modules()]
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.zero_()
        assert made(torch.ones(1, 2, HIDDEN)).item() == 0.0
        assert model(torch.ones(1, 2, HIDDEN)).item() > 0.0


def test_every_second_block_and_none_without_gradients() -> None:
    model = optuna_dsat.checkpoint_blocks(Model(), every=2)
    assert ["forward" in vars(block) for block in model.blocks] == [True, False, True, False]
    model.eval()
    with torch.no_grad():
        assert not model(torch.randn(2, 2, HIDDEN)).requires_grad


class Composite(nn.Module):
    """A block whose forward pass is a function."""

    def __init__(self, function: Any, *, part: nn.Module | None = None) -> None:
        super().__init__()
        self.part = part if part is not None else nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(1))
        self.function = function

    def forward(self, x: Tensor, *args: Any) -> Any:
        return self.function(self, x, *args)


class Cache:
    """Something that blocks fill."""


class Chain(nn.Module):
    def __init__(self, *blocks: nn.Module, cache: Any = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.cache = () if cache is None else (cache,)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            out = block(x, *self.cache)
            x = out[0] if isinstance(out, tuple) else out
        return x.sum()


def counting(block: Any, x: Tensor) -> Tensor:
    block.count += 1
    return block.part(x)  # type: ignore[no-any-return]


def replacing(block: Any, x: Tensor) -> Tensor:
    block.count = block.count + 1
    return block.part(x)  # type: ignore[no-any-return]


def in_place(block: Any, x: Tensor) -> Tensor:
    return block.part(x.mul_(2))  # type: ignore[no-any-return]


def returns_cache(block: Any, x: Tensor) -> tuple[Tensor, Cache]:
    return block.part(x), Cache()


def appends(block: Any, x: Tensor, kept: list[Tensor]) -> Tensor:
    kept.append(x)
    return block.part(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Chain(nn.Linear(4, 4), nn.Linear(4, 4)), "fewer than two repeated blocks"),
        (Chain(Block()), "fewer than two repeated blocks"),
        (Chain(*(Composite(counting, part=nn.BatchNorm1d(4)) for _ in range(2))), "BatchNorm1d, whose statistics"),
        (optuna_dsat.checkpoint_blocks(Model()), "checkpointed already"),
    ],
)
def test_models_that_cannot_be_checkpointed_are_refused(model: nn.Module, reason: str) -> None:
    with pytest.raises(CheckpointingError, match=reason):
        optuna_dsat.checkpoint_blocks(model)


@pytest.mark.parametrize("value", [True, 1, "yes"])
def test_a_model_with_a_switch_that_is_on_is_refused(value: object) -> None:
    model = Model()
    model.gradient_checkpointing = value  # type: ignore[assignment]
    with pytest.raises(CheckpointingError, match="Model checkpoints its activations already"):
        optuna_dsat.checkpoint_blocks(model)


@pytest.mark.parametrize(
    ("function", "cache", "reason"),
    [
        (counting, None, "updates its buffer count"),
        (replacing, None, "updates its buffer count"),
        (in_place, None, "changes its inputs"),
        (returns_cache, None, "returns a Cache"),
        (lambda block, x, _cache: block.part(x), Cache(), "takes a Cache"),
        (appends, [], "changes its inputs"),
    ],
)
def test_what_the_second_forward_pass_would_repeat_ends_the_first(function: Any, cache: Any, reason: str) -> None:
    model = Chain(Composite(function), Composite(function), cache=cache)
    optuna_dsat.checkpoint_blocks(model)
    with pytest.raises(CheckpointingError, match=reason):
        model(torch.ones(2, 4))


def test_the_blocks_with_most_parameters_are_meant_and_not_their_parts() -> None:
    model = nn.Module()
    model.heads = nn.ModuleList([nn.Sequential(nn.Linear(2, 2)) for _ in range(9)])
    model.encoder = nn.ModuleList([Block(), Block()])
    model.decoder = nn.Sequential(Block(), nn.ReLU(), Block())
    assert repeated_blocks(model) == [*model.encoder, model.decoder[0], model.decoder[2]]


def test_a_model_of_transformers_checkpoints_by_its_own_method() -> None:
    model = optuna_dsat.checkpoint_blocks(gpt2(), every=2)
    assert model.is_activation_checkpointing
    assert not any("forward" in vars(module) for module in model.modules())
    with pytest.raises(CheckpointingError, match="checkpointed already"):
        optuna_dsat.checkpoint_blocks(model)


@pytest.mark.usefixtures("switchable")
def test_a_flag_of_the_script_s_model_is_switched_off() -> None:
    model, change = gpt2().train(), MODEL_KNOBS[CHECKPOINT_EVERY]
    model.activation_checkpointing_enable()
    tokens = torch.arange(8).view(2, 4)
    forwards: list[Any] = []
    repeated_blocks(model)[0].attn.register_forward_hook(lambda *_: forwards.append(1))
    results = []
    switched: list[int] = []
    for every, passes in ((None, 2), (0, 1)):
        if every is not None:
            change(model, every, lambda: switched.append(1))
        torch.manual_seed(1)
        model.zero_grad()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        results.append([loss, *(parameter.grad.clone() for parameter in model.parameters())])
        assert len(forwards) == passes
        forwards.clear()
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert switched
    assert BlockWatch(model).reason == ""
    pipeline = PipelineModule(Block(), Block(), specs=[])
    pipeline.activation_checkpoint_interval = 1  # type: ignore[assignment]
    change(pipeline, 0, lambda: None)
    assert pipeline.activation_checkpoint_interval == 0


@pytest.mark.parametrize("every", [0, -1, True, 1.5])
def test_every_is_a_positive_number(every: Any) -> None:
    with pytest.raises(ValueError, match="write 1 for every block"):
        optuna_dsat.checkpoint_blocks(Model(), every)


def observed(model: nn.Module, *, again: bool = False) -> BlockWatch:
    """Return the watch of a model after a forward and a backward pass, which runs the blocks again on request."""
    watch = BlockWatch(model)
    counts = {"saved": 0, "flops": 0}

    def count(*_: Any) -> None:
        counts["saved"] += 100
        counts["flops"] += 10

    for block in watch.blocks:
        block.register_forward_hook(count)  # between the watch's hooks, as it runs before them
    with watch.forward(saved_bytes=lambda: counts["saved"], flops=lambda: counts["flops"]):
        loss = model(torch.ones(2, 4))
    with watch.backward():
        loss.backward()
        if again:
            model(torch.ones(2, 4))
    assert not any(block._forward_pre_hooks for block in watch.blocks)
    return watch


def plain(block: Any, x: Tensor) -> Tensor:
    return block.part(x)  # type: ignore[no-any-return]


def test_a_profile_learns_the_share_of_the_blocks() -> None:
    watch = observed(Chain(Composite(plain), Composite(plain), Composite(plain)))
    assert (watch.reason, len(watch.blocks)) == ("", 3)
    assert (watch.saved_bytes, watch.flops) == (300, 30)
    assert watch.input_bytes == 2 * (2 * 4 * 4)  # the first input needs no gradient
    watch.discard()
    assert (watch.saved_bytes, watch.input_bytes, watch.flops) == (0, 0, 0)


def test_a_profile_gives_the_reasons_against_it() -> None:
    assert "updates its buffer" in observed(Chain(Composite(counting), Composite(counting))).reason
    assert observed(Chain(Composite(plain), Composite(plain)), again=True).reason.endswith("its blocks already")
    assert "fewer than two" in observed(Chain(Composite(plain))).reason


def test_a_model_that_cannot_be_examined_trains_as_it_did() -> None:
    class Touchy(Composite):
        def named_buffers(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError("not now")

    watch = observed(Chain(Touchy(plain), Touchy(plain)))
    assert watch.reason == "its blocks cannot be examined (RuntimeError)"


class PipelineModule(nn.Module):
    """A stage as DeepSpeed's: layers are its children, and it knows those of all stages."""

    def __init__(self, *layers: nn.Module, specs: list[Any]) -> None:
        super().__init__()
        for number, layer in enumerate(layers):
            self.add_module(str(number), layer)
        self._layer_specs = specs


def test_a_pipeline_s_stage_may_hold_one_of_the_blocks_that_the_pipeline_repeats() -> None:
    block, head = Block(), nn.TransformerEncoderLayer(64, 2)
    stage = PipelineModule(block, head, specs=[LayerSpec(Block), block, head])
    assert repeated_blocks(stage) == [block]
    assert BlockWatch(stage).reason == ""
    optuna_dsat.checkpoint_blocks(PipelineModule(nn.Linear(4, 4), specs=[nn.Linear(4, 4), LayerSpec(Block)]))
    stage.activation_checkpoint_interval = 1  # type: ignore[assignment]
    with pytest.raises(CheckpointingError, match="by its activation_checkpoint_interval"):
        optuna_dsat.checkpoint_blocks(stage)


@pytest.fixture
def switchable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Switch the process's checkpointing on again afterwards."""
    modules = [sys.modules[name] for name in (TORCH_CHECKPOINT, DEEPSPEED_CHECKPOINT)]
    monkeypatch.setattr(modules[0], "_checkpoint_without_reentrant_generator", generator_of(modules[0]))
    monkeypatch.setattr(modules[1], "is_configured", lambda: True)
    monkeypatch.setattr(modules[1], "non_reentrant_checkpoint", modules[1].non_reentrant_checkpoint)
    yield
    for module in modules:
        del module.CheckpointFunction.apply


def generator_of(module: Any) -> Any:
    return module._checkpoint_without_reentrant_generator


@pytest.mark.usefixtures("switchable")
@pytest.mark.parametrize(
    ("call", "wrap"),
    [
        (partial(checkpoint, use_reentrant=False), None),
        (partial(checkpoint, use_reentrant=True), None),
        (deepspeed.checkpointing.checkpoint, None),
        (lambda *args: deepspeed.checkpointing.non_reentrant_checkpoint(*args), None),
        (None, checkpoint_wrapper),
    ],
    ids=["not-reentrant", "reentrant", "deepspeed", "deepspeed-not-reentrant", "wrapped"],
)
def test_calls_of_the_script_are_switched_off(call: Any, wrap: Any) -> None:
    model = Chain(*(wrap(Block()) if wrap else Block() for _ in range(2)))
    passes, switched = [], []
    next(module for module in model.modules() if isinstance(module, Block)).norm.register_forward_hook(
        lambda *_: passes.append(1)
    )

    def gradients() -> tuple[int, list[Tensor]]:
        torch.manual_seed(1)
        model.zero_grad()
        x = torch.ones(2, 3, HIDDEN, requires_grad=True)
        for block in model.blocks:
            x = call(block, x) if call else block(x)
        x.sum().backward()  # type: ignore[no-untyped-call]
        ran = len(passes)
        passes.clear()
        return ran, [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]

    assert reason_against(model)[:6] in ("the sc", "it is ")
    own, expected = gradients()
    found = []
    for every in (0, 1):
        MODEL_KNOBS[CHECKPOINT_EVERY](model, every, lambda: switched.append(1))
        ran, result = gradients()
        found.append(ran)
        assert all(map(torch.equal, result, expected))
    assert (own, found) == (2, [1, 2])
    assert switched
