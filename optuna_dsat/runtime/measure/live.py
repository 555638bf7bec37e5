"""Changes settings of a running DeepSpeed engine between two optimizer steps.

DeepSpeed reads them at each step from the attributes below; ``optuna_dsat.config.knobs`` has the ZeRO stages at which
it does. Updated parameters and collectives after a change equal a fresh engine's (``tests/runtime/test_live.py``). The
first steps after a change may still have the earlier batch size (``Transition``).

Ranks that have measured their trial wait for an order: to go on with another in the running engine, or to leave.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from weakref import WeakKeyDictionary

from optuna_dsat.runtime.files import write_text_atomic
from optuna_dsat.runtime.measure.blocks import compiled_by_script
from optuna_dsat.runtime.measure.engine import data_parallel_size, is_pipeline
from optuna_dsat.runtime.overlay import GRADIENT_ACCUMULATION, MICRO_BATCH

_ZERO = "zero_optimization."
_COORDINATOR = "_PartitionedParameterCoordinator__"
"""Prefix of its private attributes (``zero/partitioned_param_coordinator.py``)."""
_OLD_BUFFER = "_DeepSpeedZeroOptimizer_Stage3__ipg_bucket_flat_buffer"
"""The bucket of ZeRO 3 before DeepSpeed 0.17 (``zero/stage3.py``)."""


class NotLiveError(RuntimeError):
    """A running engine, or the script around it, cannot take on a setting."""


def change_all(engines: WeakKeyDictionary[Any, None], changes: Mapping[str, Any]) -> None:
    """Change settings of all engines that the script still has: a fresh launch's overlay applies to all, too."""
    if len(engines) > 1:
        gc.collect()  # on each rank the same engines remain, some of whose setters communicate
    for engine in [*engines]:
        change_settings(engine, changes)


def change_settings(engine: Any, changes: Mapping[str, Any]) -> None:
    """Change settings of an engine, as returned by ``optuna_dsat.config.differences.live_changes``.

    Call it on all ranks between the same two optimizer steps. After an error the engine may be partly changed: end the
    launch. The engine's config keeps its knobs' first values.

    Raises:
        NotLiveError: If this version of DeepSpeed has no such attribute, or the model is compiled for its batch size.
    """
    if {MICRO_BATCH, GRADIENT_ACCUMULATION} & changes.keys():
        _change_batch(engine, changes.get(MICRO_BATCH), changes.get(GRADIENT_ACCUMULATION))
    for key, value in changes.items():
        if key.startswith(_ZERO) and _has(engine.optimizer, key):
            knob = key[len(_ZERO) :]
            SETTERS[knob](engine.optimizer, value)
            if knob.startswith("stage3_"):
                _forget_released_parameters(engine.optimizer)


def _has(optimizer: Any, key: str) -> bool:
    """Return whether a setting concerns an engine: one without an optimizer only gathers parameters, at ZeRO 3."""
    gathers = hasattr(optimizer, "get_param_coordinator")  # DeepSpeedZeRoOffload
    return key.startswith(f"{_ZERO}stage3_") if gathers else optimizer is not None


def forget_shapes(engine: Any) -> None:
    """Have the stages of a pipeline send the shapes of activations anew, which they send once otherwise."""
    if is_pipeline(engine):
        engine.reset_activation_shape()


def _change_batch(engine: Any, micro_batch: int | None, accumulation: int | None) -> None:
    """Change the batch sizes that the engine's config has; the data follow by ``BatchSources.rescale``.

    ``engine.py``: ``set_train_micro_batch_size`` keeps the accumulation, which ``is_gradient_accumulation_boundary``
    compares with ``micro_steps``.
    """
    config = engine._config
    if micro_batch is not None and _is_compiled(engine):
        raise NotLiveError("the model is compiled for its batch size")
    ranks = data_parallel_size(config)
    micro_batch = config.train_micro_batch_size_per_gpu if micro_batch is None else micro_batch
    if accumulation is not None:
        config.gradient_accumulation_steps = accumulation
        engine.micro_steps = 0
        if isinstance(getattr(engine.optimizer, "gradient_accumulation_steps", None), int):
            engine.optimizer.gradient_accumulation_steps = accumulation
    config.train_micro_batch_size_per_gpu = micro_batch
    config.train_batch_size = micro_batch * config.gradient_accumulation_steps * ranks
    if is_pipeline(engine):
        engine.micro_batch_size, engine.micro_batches = micro_batch, config.gradient_accumulation_steps
        forget_shapes(engine)


def _is_compiled(engine: Any) -> bool:
    """Return whether torch.compile has compiled for shapes: it recompiles a few times, then runs eagerly in silence."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    counters: Any = {} if dynamo is None else getattr(dynamo, "counters", {})
    graphs = bool(counters.get("stats", {}).get("unique_graphs"))
    if type(getattr(engine, "basic_optimizer", None)).__name__.startswith("Muon"):  # compiles its own update
        graphs = compiled_by_script(engine.module)
    return graphs or bool(getattr(engine, "is_compiled", False))


def _set(owner: Any, name: str, value: Any) -> None:
    if not hasattr(owner, name):
        raise NotLiveError(f"this DeepSpeed has no {type(owner).__name__}.{name.rpartition('__')[2] or name}")
    setattr(owner, name, value)


def _of_coordinator(name: str) -> Callable[[Any, Any], None]:
    return lambda optimizer, value: _set(_coordinator(optimizer), f"{_COORDINATOR}{name}", value)


def _offload(optimizer: Any) -> Any:
    return getattr(optimizer, "parameter_offload", optimizer)


def _coordinator(optimizer: Any) -> Any:
    get = _offload(optimizer).get_param_coordinator
    try:
        return get()
    except TypeError:  # DeepSpeed 0.14
        return get(training=True)


def _set_bucket_size(optimizer: Any, value: int) -> None:
    _set(optimizer, "reduce_bucket_size", value)
    _make_buckets(optimizer)


def _set_overlap(optimizer: Any, value: bool) -> None:
    if value and not getattr(optimizer, "_grad_acc_hooks", None):  # ZeRO 1 before DeepSpeed 0.16
        raise NotLiveError("this engine was built without the hooks that overlap_comm needs")
    _set(optimizer, "overlap_comm", value)


def _set_scatter(optimizer: Any, value: bool) -> None:
    _refuse_for_experts(optimizer, value)
    _set(optimizer, "reduce_scatter", value)


def _refuse_for_experts(optimizer: Any, value: bool) -> None:
    """Refuse what DeepSpeed refuses for a mixture of experts (``_configure_moe_settings``)."""
    if not value and getattr(optimizer, "has_moe_layers", False):
        raise NotLiveError("a mixture of experts needs reduce_scatter and contiguous_gradients")


def _set_contiguous(optimizer: Any, value: bool) -> None:
    _refuse_for_experts(optimizer, value)
    if getattr(optimizer, "cpu_offload", False) and not _is_stage_3(optimizer):
        return  # ZeRO 2 with offload is always contiguous
    _set(optimizer, "contiguous_gradients", value)
    _make_buckets(optimizer)


def _is_stage_3(optimizer: Any) -> bool:
    return hasattr(optimizer, "parameter_offload")


def _make_buckets(optimizer: Any) -> None:
    """Make the buckets of ZeRO 3 anew, which are otherwise made once; ZeRO 1 and 2 make theirs in every backward."""
    torch: Any = sys.modules["torch"]
    if not _is_stage_3(optimizer):
        for bucket in getattr(optimizer, "ipg_buckets", {}).values():
            bucket.buffer.clear()
        optimizer.grads_in_partition = optimizer.ipg_buffer = None  # the latter before DeepSpeed 0.17
        return
    device = sys.modules["deepspeed"].accelerator.get_accelerator().current_device_name()
    size = optimizer.reduce_bucket_size if optimizer.contiguous_gradients else None
    if hasattr(optimizer, "ipg_buckets"):
        for dtype, bucket in optimizer.ipg_buckets.items():
            bucket.buffer = None  # freed before its successor is made
            bucket.buffer = None if size is None else torch.empty(size, dtype=dtype, device=device)
        return
    setattr(optimizer, _OLD_BUFFER, None)
    if size is not None:
        setattr(optimizer, _OLD_BUFFER, torch.empty(size, dtype=optimizer.dtype, device=device))


def _set_persistence(optimizer: Any, value: int) -> None:
    """Choose the parameters that stay gathered anew: ``DeepSpeedZeRoOffload.mark_persistent_parameters``."""
    offload = _offload(optimizer)
    _coordinator(optimizer).release_and_reset_all(offload.module)
    for parameter in offload.module.parameters():
        if parameter.ds_persist and parameter.ds_status.name == "AVAILABLE":
            parameter.partition()
        parameter.ds_persist = False
    _set(offload, "param_numel_persistence_threshold", value)
    chosen = offload.mark_persistent_parameters(value, offload.model_persistence_threshold)
    offload.persistent_parameters = optimizer.persistent_parameters = chosen
    if chosen:
        chosen[0].all_gather(chosen)


def _forget_released_parameters(optimizer: Any) -> None:
    """Empty the cache of ``__params_to_release``, which otherwise keeps parameters that an earlier setting released."""
    function: Any = getattr(type(_coordinator(optimizer)), f"{_COORDINATOR}params_to_release", None)
    contents = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    caches = [each for each in (function, *contents) if hasattr(each, "cache_clear")]
    if not caches:
        raise NotLiveError("this DeepSpeed caches released parameters elsewhere")
    for cache in caches:
        cache.cache_clear()


SETTERS: Mapping[str, Callable[[Any, Any], None]] = {
    # zero/stage_1_and_2.py: setup_buckets, copy_grads_in_partition; zero/stage3.py: _setup_for_real_optimizer,
    # __add_grad_to_ipg_bucket
    "contiguous_gradients": _set_contiguous,
    # zero/stage_1_and_2.py: reduce_independent_p_g_buckets_and_remove_grads, average_tensor
    "overlap_comm": _set_overlap,
    # zero/stage_1_and_2.py and zero/stage3.py: reduce_independent_p_g_buckets_and_remove_grads
    "reduce_bucket_size": _set_bucket_size,
    # zero/stage_1_and_2.py: average_tensor; zero/stage3.py: __avg_scatter_contiguous_grads
    "reduce_scatter": _set_scatter,
    # zero/partitioned_param_coordinator.py: fetch_sub_module
    "stage3_max_live_parameters": _of_coordinator("max_n_available_params"),
    # zero/partitioned_param_coordinator.py: __params_to_release
    "stage3_max_reuse_distance": _of_coordinator("max_reuse_dist_in_numel"),
    # zero/parameter_offload.py: mark_persistent_parameters
    "stage3_param_persistence_threshold": _set_persistence,
    # zero/partitioned_param_coordinator.py: fetch_sub_module
    "stage3_prefetch_bucket_size": _of_coordinator("prefetch_bucket_sz"),
    # zero/stage_1_and_2.py: average_tensor
    "use_multi_rank_bucket_allreduce": lambda optimizer, value: _set(
        optimizer, "use_multi_rank_bucket_allreduce", value
    ),
}
"""Knob -> function that sets it in an optimizer of DeepSpeed 0.14.5 to 0.19.8, and the functions there that read it."""


class Transition:
    """Checks that the script follows the batch size and accumulation of each trial after the first."""

    def __init__(self) -> None:
        self._observed: int | None = None
        """Largest micro-batch of a trial's steps, as the last of an epoch may be smaller; None if not observed."""
        self._passes = Fraction(0)
        """Backward passes of the last step by the engine, as a forward pass may serve another model's; else forward."""
        self._expected_passes: Fraction | None = None
        """Passes of each step; None in the first trial."""
        self._awaited: int | None = None
        """Micro-batch of the next step that counts; None for any."""
        self._most_in_flight = 0
        """Steps that may still come with the earlier batch size."""
        self._realigns = False
        """Whether a step may come with other passes, until one has the expected."""
        self._is_ambiguous = False
        """As of the last step's ``InputSize``."""

    def begin(
        self,
        *,
        micro_batch: int | None,
        accumulated: Fraction,
        rescale: Callable[[Fraction], int],
        realigns: bool = False,
    ) -> None:
        """Begin another trial with another ``micro_batch`` (None for the same), if its inputs are observed.

        ``accumulated`` is the ratio of its accumulation steps to the previous trial's. ``rescale`` multiplies the batch
        size of the script's data and returns the number of batches still in flight. ``realigns`` is whether a step may
        come with fewer passes: a trainer counts them from the start of the epoch.

        Raises:
            NotLiveError: If the batch size is to change and was not observed, or may be another dimension.
        """
        self._expected_passes, self._realigns = self._passes * accumulated, realigns
        self._awaited = micro_batch
        if micro_batch is not None:
            if self._observed is None:
                raise NotLiveError("the engine's inputs have no tensors")
            if self._is_ambiguous:
                raise NotLiveError("two dimensions of the engine's inputs may be the batch size")
            self._most_in_flight = max(1, rescale(Fraction(micro_batch, self._observed)))
            self._observed = micro_batch

    def includes(self, micro_batch: int | None, passes: int, *, is_ambiguous: bool = False) -> bool:
        """Return whether a step, by its micro-batch (if observed) and passes, still belongs to the trial before.

        Raises:
            NotLiveError: If the script does not follow the trial's batch size or accumulation.
        """
        self._passes, self._is_ambiguous = Fraction(passes), is_ambiguous
        if self._awaited is not None and micro_batch != self._awaited:
            self._most_in_flight -= 1
            if self._most_in_flight < 0:
                raise NotLiveError(f"the batch size is {micro_batch}, not {self._awaited}")
            return True
        self._awaited = None
        self._observed = max(micro_batch or 0, self._observed or 0) or None
        realigns, self._realigns = self._realigns, False
        if self._expected_passes is not None and passes != self._expected_passes:
            if realigns:
                return True
            expected = self._expected_passes
            raise NotLiveError(f"the passes of a step are {passes}, not {expected}")
        return False


_ORDER = "next.json"
_PAUSE_S = 0.003
_LONGEST_WAIT_S = 600.0
"""Wait for an order after which a rank leaves: the tuner stands still."""


def order_next(root: Path, launch: Path | None) -> None:
    """Order the ranks of a launch to go on with the trial that ``launch`` describes; None to leave."""
    write_text_atomic(root / _ORDER, json.dumps({"launch": None if launch is None else str(launch)}))


def await_order(root: Path) -> Path | None:
    """Wait for the order to the ranks of a launch; return the next trial's launch description, None to leave."""
    deadline = monotonic() + _LONGEST_WAIT_S
    while monotonic() < deadline:
        try:
            launch = json.loads((root / _ORDER).read_text(encoding="utf-8"))["launch"]
            return None if launch is None else Path(launch)
        except FileNotFoundError:
            sleep(_PAUSE_S)
        except (OSError, ValueError, KeyError, TypeError):  # the script has put something else there
            return None
    return None
