"""Knobs: the one table of DeepSpeed settings that the search may change, with all facts about each.

The condition of a knob is from DeepSpeed's source (``used_by`` names the place), and doubtful cases were tested. A
knob is sampled only if it changes DeepSpeed's behaviour; otherwise it would multiply equivalent configurations.

``tests/config/test_knobs.py`` compares keys, defaults and first versions with the installed versions of DeepSpeed.
"""

from __future__ import annotations

from optuna_dsat.config.conditions import (
    BF16,
    BF16_MASTER,
    BF16_STATES,
    NVME,
    OFFLOAD_OPTIMIZER,
    OFFLOAD_PARAM,
    PREFETCH,
    REUSE,
    ZERO_STAGE,
    ZERO_STAGES,
    Knob,
    bf16_master_applies,
    bf16_states_apply,
    contiguous_applies,
    may_be_shared,
    may_lack_hooks,
    offloads,
    offloads_params,
    overlap_applies,
    reduces_gradients,
    scatter_applies,
    stage_of,
    swaps_params,
)
from optuna_dsat.runtime.overlay import BIND_CORES as BIND_CORES
from optuna_dsat.runtime.overlay import CHECKPOINT_EVERY as CHECKPOINT_EVERY
from optuna_dsat.runtime.overlay import COMPILE as COMPILE
from optuna_dsat.runtime.overlay import LEAF_MODULE as LEAF_MODULE
from optuna_dsat.runtime.overlay import MODEL as MODEL
from optuna_dsat.runtime.overlay import ZERO

DEEPCOMPILE = "deepcompile"
QUANTIZED = ("zero_quantized_weights", "zero_quantized_gradients")
QUANTIZED_FROZEN = "zero_quantized_nontrainable_weights"
ZENFLOW = "zenflow"
ZENFLOW_SECTION = {"topk_ratio": 0.1, "select_strategy": "step", "select_interval": 4, "update_interval": 4}
"""ZenFlow's settings where the config has none. Steps between updates on the host are as in DeepSpeed's tutorial; the
automatic strategy needs DeepSpeed's own data loader.
"""
OFFLOAD_RATIO = "offload_optimizer_ratio"
PIN_MEMORY = "offload_pin_memory"
PARTITION_COPY = "zero_hpz_partition_size"

_BUCKETS = tuple(n * 10**m for m in range(6, 10) for n in (1, 5))
"""dsat's defaults: n * 10^m elements for n in (1, 5), m in 6..9."""

KNOBS: tuple[Knob, ...] = (
    Knob(
        name=ZERO_STAGE,
        path=(ZERO, "stage"),
        kind="stage",
        choices=ZERO_STAGES,
        default=0,
        stages=ZERO_STAGES,
        where="always; 0 and 1 with pipeline parallelism",
        used_by="engine.DeepSpeedEngine._configure_zero_optimizer; pipe.engine.PipelineEngine asserts stage < 2.",
        source="arXiv:1910.02054",
    ),
    Knob(
        name=OFFLOAD_OPTIMIZER,
        path=(ZERO, OFFLOAD_OPTIMIZER, "device"),
        kind="device",
        choices=("none", "cpu"),
        default="none",
        stages=(1, 2, 3),
        condition=lambda params, site: stage_of(params) == 3 or not site.nvme_only,
        where="ZeRO 1, 2, 3",
        used_by=(
            "zero.stage_1_and_2.DeepSpeedZeroOptimizer.__init__ (cpu_offload) for stages 1 and 2, "
            "zero.stage3.DeepSpeedZeroOptimizer_Stage3._configure_offloading. Stage 0 has no ZeRO optimizer to offload."
        ),
        source="arXiv:2101.06840",
    ),
    Knob(
        name=NVME,
        path=(ZERO, OFFLOAD_OPTIMIZER, "device"),
        stages=(3,),
        condition=lambda params, _site: offloads(params),
        where="ZeRO 3 with optimizer offload, where an NVMe path is given",
        used_by=(
            "zero.stage3.DeepSpeedZeroOptimizer_Stage3._configure_tensor_swapping. Stages 1 and 2 take nvme and "
            "offload to the CPU. A knob of its own, because an Optuna parameter has the same choices at every stage."
        ),
        source="arXiv:2104.07857",
    ),
    Knob(
        name=OFFLOAD_PARAM,
        path=(ZERO, OFFLOAD_PARAM, "device"),
        kind="device",
        choices=("none", "cpu"),
        default="none",
        stages=(3,),
        where="ZeRO 3",
        used_by="zero.stage3.DeepSpeedZeroOptimizer_Stage3._configure_offloading; stages below 3 never look at it.",
        source="arXiv:2104.07857",
    ),
    Knob(
        name="contiguous_gradients",
        path=(ZERO, "contiguous_gradients"),
        default=True,
        stages=(1, 2, 3),
        condition=contiguous_applies,
        where="ZeRO 1 and 2 without optimizer offload, ZeRO 3",
        used_by=(
            "stage_1_and_2.DeepSpeedZeroOptimizer.setup_buckets and copy_grads_in_partition; its __init__ sets it with "
            "optimizer offload, whatever the config says. stage3._setup_for_real_optimizer allocates the bucket by it."
        ),
        source="arXiv:1910.02054, section 6.3",
        live=(2, 3),
    ),
    Knob(
        name="overlap_comm",
        path=(ZERO, "overlap_comm"),
        default=None,
        stages=(1, 2, 3),
        condition=overlap_applies,
        where="ZeRO 1, 2, 3; not with pipeline parallelism, and on one rank ZeRO 1 and 2 with optimizer offload only",
        used_by=(
            "stage_1_and_2.DeepSpeedZeroOptimizer.process_gradients, average_tensor; "
            "stage3.reduce_and_partition_stream and DeepSpeedZeRoOffload's all-gather stream. "
            "engine._configure_zero_optimizer turns it off for pipelines. On one rank copies of gradients to the host "
            "still overlap with the backward pass, and at stage 3 partition_parameters.NoGatherHandle.wait waits for "
            "all that the stream of the gathers has to do."
        ),
        live=(1, 2),
        static_if=may_lack_hooks,
    ),
    Knob(
        name="reduce_scatter",
        path=(ZERO, "reduce_scatter"),
        default=True,
        stages=(1, 2, 3),
        condition=scatter_applies,
        where="ZeRO 1, 2, 3 with contiguous gradients, on several ranks",
        used_by=(
            "stage_1_and_2.DeepSpeedZeroOptimizer.average_tensor and stage3.__reduce_and_partition_ipg_grads read it "
            "for contiguous buckets only. Stages 2 and 3 refuse it with prescale_gradients or a predivide factor. One "
            "rank has nothing to scatter, and yet a config may need its own value, as Muon does at stage 3."
        ),
        several_ranks=True,
        source="arXiv:1910.02054, section 7",
        live=(1, 2, 3),
    ),
    Knob(
        name="use_multi_rank_bucket_allreduce",
        path=(ZERO, "use_multi_rank_bucket_allreduce"),
        default=True,
        stages=(1, 2),
        condition=lambda params, site: scatter_applies(params, site) and params.get("reduce_scatter", True),
        where="ZeRO 1 and 2 with reduce_scatter, on several ranks",
        used_by=(
            "stage_1_and_2.DeepSpeedZeroOptimizer.average_tensor: a bucket is all-reduced in one message, or reduced "
            "to each owner of its parts, which moves half the bytes in more messages."
        ),
        source="DeepSpeed pull request 4695",
        live=(1, 2),
        effect=0.5,
        several_ranks=True,
    ),
    Knob(
        name="round_robin_gradients",
        path=(ZERO, "round_robin_gradients"),
        stages=(1, 2),
        condition=lambda params, _site: offloads(params),
        where="ZeRO 1 and 2 with optimizer offload, on several ranks; a checkpoint resumes with the same value only",
        used_by=(
            "stage_1_and_2.DeepSpeedZeroOptimizer._round_robin_reorder: gradients that follow each other belong to "
            "different ranks, which copy them to the host at the same time."
        ),
        source="DeepSpeed pull request 1067",
        effect=0.5,
        several_ranks=True,
    ),
    Knob(
        name="reduce_bucket_size",
        path=(ZERO, "reduce_bucket_size"),
        kind="size",
        choices=_BUCKETS,
        default=500_000_000,
        stages=(1, 2, 3),
        condition=reduces_gradients,
        where="ZeRO 1, 2, 3",
        used_by=(
            "stage_1_and_2.reduce_independent_p_g_buckets_and_remove_grads, stage3.reduce_independent_p_g_buckets. "
            "ZeRO 1 with bf16 and fp32 gradient accumulation runs BF16_Optimizer, which has no buckets."
        ),
        source="arXiv:1910.02054, section 6.2",
        live=(1, 2, 3),
    ),
    Knob(
        name="allgather_bucket_size",
        path=(ZERO, "allgather_bucket_size"),
        kind="size",
        choices=_BUCKETS,
        default=500_000_000,
        stages=(1, 2),
        where="nowhere with torch 1.13 or newer; where you list values, ZeRO 1 and 2",
        used_by=(
            "runtime.utils.all_gather_dp_groups shards by it only if the backend lacks all_gather_into_tensor, which "
            "every torch since 1.13 has (comm.torch.TorchBackend.has_all_gather_into_tensor)."
        ),
        inert=True,
    ),
    Knob(
        name="allgather_partitions",
        path=(ZERO, "allgather_partitions"),
        default=True,
        stages=(1, 2),
        where="nowhere; where you list values, ZeRO 1 and 2",
        used_by="engine.DeepSpeedEngine.zero_allgather_partitions reads it, and nothing calls that.",
        inert=True,
    ),
    Knob(
        name=PREFETCH,
        path=(ZERO, PREFETCH),
        kind="size",
        choices=(5_000_000, 50_000_000, 500_000_000),
        default=50_000_000,
        stages=(3,),
        condition=lambda params, site: not site.sequential and not swaps_params(params),
        where="ZeRO 3; 0 with parameters on NVMe",
        used_by=(
            "zero.partitioned_param_coordinator.PartitionedParameterCoordinator.fetch_sub_module; "
            "stage3_allgather_sequential sets it to 1 (engine._configure_zero_optimizer)."
        ),
        source="arXiv:2104.07857, section 6.2",
        live=(3,),
    ),
    Knob(
        name="stage3_max_live_parameters",
        path=(ZERO, "stage3_max_live_parameters"),
        kind="size",
        choices=(100_000_000, 1_000_000_000),
        default=1_000_000_000,
        stages=(3,),
        condition=lambda params, _site: params.get(PREFETCH, 1) > 0 and not swaps_params(params),
        where="ZeRO 3, but for parameters on NVMe",
        used_by="PartitionedParameterCoordinator.fetch_sub_module: bounds what is prefetched.",
        live=(3,),
    ),
    Knob(
        name=REUSE,
        path=(ZERO, REUSE),
        kind="size",
        choices=(100_000_000, 1_000_000_000),
        default=1_000_000_000,
        stages=(3,),
        condition=lambda params, _site: not swaps_params(params),
        where="ZeRO 3; 0 with parameters on NVMe",
        used_by="PartitionedParameterCoordinator.__params_to_release: keeps what is used again within the distance.",
        live=(3,),
    ),
    Knob(
        name="stage3_param_persistence_threshold",
        path=(ZERO, "stage3_param_persistence_threshold"),
        kind="size",
        choices=(10_000, 100_000, 1_000_000),
        default=100_000,
        stages=(3,),
        where="ZeRO 3",
        used_by="zero.parameter_offload.DeepSpeedZeRoOffload.mark_persistent_parameters.",
        live=(3,),
        static_if=offloads_params,
    ),
    Knob(
        name="sub_group_size",
        path=(ZERO, "sub_group_size"),
        kind="size",
        choices=(100_000_000, 1_000_000_000),
        default=1_000_000_000,
        stages=(3,),
        where="ZeRO 3",
        used_by="stage3.DeepSpeedZeroOptimizer_Stage3._create_fp16_sub_groups: elements updated at a time.",
    ),
    Knob(
        name=OFFLOAD_RATIO,
        path=(ZERO, OFFLOAD_OPTIMIZER, "ratio"),
        kind="share",
        choices=(0.25, 0.5, 0.75, 1.0),
        default=1.0,
        stages=(3,),
        condition=may_be_shared,
        where="ZeRO 3 with the optimizer on the CPU, DeepSpeed's Adam or AdamW and four sub-groups in each partition",
        used_by=(
            "stage3.DeepSpeedZeroOptimizer_Stage3._create_fp32_partitions: whole sub-groups stay on the device, where "
            "torch.optim.AdamW updates them, so that it acts if a partition has several. Only DeepSpeedCPUAdam is "
            "allowed, and its adam_w_mode must be on for the update to be the same."
        ),
        source="ZeRO-Offload++, DeepSpeed pull request 4636",
    ),
    Knob(
        name=PIN_MEMORY,
        path=(ZERO, OFFLOAD_OPTIMIZER, "pin_memory"),
        default=True,
        stages=(1, 2, 3),
        condition=lambda params, _site: offloads(params) or offloads_params(params),
        where="offloads to a host whose memory is short on a GPU; elsewhere where you name it, and true",
        used_by=(
            "zero.offload_config: host memory of both offloads is page-locked. CUDA rounds page-locked blocks up to "
            "powers of two (DeepSpeed's estimators count half as much again), and copies from other memory are slower."
        ),
        effect=0.5,
        on_demand=True,
    ),
    Knob(
        name=PARTITION_COPY,
        path=(ZERO, PARTITION_COPY),
        kind="ranks",
        choices=(1,),
        default=1,
        stages=(3,),
        condition=lambda params, _site: not swaps_params(params),
        where="ZeRO 3 on several nodes, but for parameters on NVMe",
        used_by=(
            "zero.partition_parameters.Init._partition_param_sec: so many ranks, those of a node, hold a second copy "
            "of the parameters, from which they gather but once a step. Its device is that of the parameters, and "
            "there is no tensor on NVMe."
        ),
        several_nodes=True,
        source="arXiv:2306.10209, section 3.2",
    ),
    Knob(
        name=LEAF_MODULE,
        path=(ZERO, LEAF_MODULE),
        kind="modules",
        choices=(False, True),
        default=False,
        stages=(3,),
        where="ZeRO 3, always true, for modules with experts or that route samples among their parts",
        used_by=(
            "engine.DeepSpeedEngine._configure_distributed_model: the module is gathered as a whole. Otherwise ranks "
            "that route to different experts gather different parameters at once: they hang, or train on wrong ones "
            "(tests/runtime/test_exact_knobs.py). The profile launch has it for modules with lists of experts, by name."
        ),
        source="DeepSpeed pull request 7604",
        since="0.18.0",
        on_demand=True,
    ),
    Knob(
        name=CHECKPOINT_EVERY,
        path=(MODEL, CHECKPOINT_EVERY),
        kind="blocks",
        choices=(0, 1, 2),
        default=0,
        stages=ZERO_STAGES,
        where="models of repeated blocks: where memory is short, the script checkpoints, or you name it",
        used_by="No key of DeepSpeed: optuna_dsat.checkpoint_blocks changes the model before deepspeed.initialize.",
        source="arXiv:1604.06174",
        on_demand=True,
    ),
    Knob(
        name=BIND_CORES,
        path=(MODEL, BIND_CORES),
        stages=ZERO_STAGES,
        condition=lambda params, _site: offloads(params),
        where="optimizer offload, on several GPUs of a host with several NUMA nodes, or where you name it",
        used_by="No key of DeepSpeed: its launcher's --bind_cores_to_rank gives each rank its share of the cores.",
        source="DeepSpeed pull request 7474",
        on_demand=True,
    ),
    Knob(
        name=COMPILE,
        path=(MODEL, COMPILE),
        stages=ZERO_STAGES,
        condition=lambda _params, site: not site.pipeline,
        where="with --allow compile, for models that the script does not compile; not pipelines",
        used_by=(
            "engine.DeepSpeedEngine.compile, which nothing calls by the config alone. Each shape of inputs is compiled "
            "anew, so that a launch has one micro-batch."
        ),
        source="docs.pytorch.org/docs/stable/torch.compiler.html",
        since="0.14.4",
        effect=2.0,
    ),
    Knob(
        name=DEEPCOMPILE,
        path=(COMPILE, DEEPCOMPILE),
        stages=(1, 2, 3),
        condition=lambda params, _site: bool(params.get(COMPILE)) and not params.get(CHECKPOINT_EVERY),
        where="with --allow compile, at ZeRO 1, 2, 3 on GPUs, for compiled models without activation checkpointing",
        used_by=(
            "engine.DeepSpeedEngine.get_deepcompile_backend, which falls back to torch.compile at stage 0. It needs "
            "CUDA (compile.util.is_deepcompile_supported). Activation checkpointing with it is untested."
        ),
        source="arXiv:2504.09983",
        since="0.16.6",
    ),
    Knob(
        name=BF16,
        path=(BF16, "enabled"),
        stages=ZERO_STAGES,
        where="with --allow lossy, for fp32 or fp16 set by the config, or by a Trainer of Hugging Face or Lightning",
        used_by="engine.DeepSpeedEngine._configure_distributed_model converts the module; Trainers follow.",
        is_exact=False,
        effect=2.0,
    ),
    Knob(
        name=BF16_STATES,
        path=(BF16, BF16_STATES),
        stages=(1, 2, 3),
        condition=bf16_states_apply,
        where="with --allow lossy, at ZeRO 1, 2, 3 in bf16; an offloaded optimizer must be DeepSpeed's Adam",
        used_by=(
            "base_optimizer.ZeROOptimizer._configure_master_weights. It is refused without "
            "bf16_master_weights_and_grads, which is set with it."
        ),
        source="DeepSpeed pull request 7700",
        since="0.18.3",
        is_exact=False,
    ),
    Knob(
        name=BF16_MASTER,
        path=(BF16, BF16_MASTER),
        stages=(1, 2, 3),
        condition=bf16_master_applies,
        where="with --allow lossy, at ZeRO 1, 2, 3 in bf16 with DeepSpeed's Adam offloaded",
        used_by="base_optimizer.ZeROOptimizer._configure_master_weights asserts the offload if states stay in fp32.",
        source="DeepSpeed pull request 7700",
        since="0.18.3",
        is_exact=False,
    ),
    Knob(
        name=QUANTIZED[0],
        path=(ZERO, QUANTIZED[0]),
        stages=(3,),
        where="with --allow lossy, at ZeRO 3 on several GPUs",
        used_by="partition_parameters.Init: parameters are gathered as int8. Its kernels exist for CUDA only.",
        source="arXiv:2306.10209, section 3.1",
        is_exact=False,
        several_ranks=True,
    ),
    Knob(
        name=QUANTIZED[1],
        path=(ZERO, QUANTIZED[1]),
        stages=(3,),
        condition=lambda params, _site: params.get("reduce_scatter", True),
        where="with --allow lossy, at ZeRO 3 with reduce_scatter, on several nodes with GPUs",
        used_by="stage3.__avg_scatter_grads uses it if there are more ranks than devices of a node.",
        source="arXiv:2306.10209, section 3.3",
        is_exact=False,
        several_nodes=True,
    ),
    Knob(
        name=QUANTIZED_FROZEN,
        path=(ZERO, QUANTIZED_FROZEN),
        stages=(3,),
        where="with --allow lossy, at ZeRO 3 on GPUs, for models in fp16 with frozen parameters",
        used_by="partition_parameters.quantize_dstensor, which asserts fp16.",
        source="arXiv:2306.10209, section 3.1",
        is_exact=False,
    ),
    Knob(
        name=ZENFLOW,
        path=(ZERO, ZENFLOW),
        kind="section",
        stages=(1, 2),
        condition=lambda params, site: offloads(params) and site.cpu_adam and params.get("reduce_scatter", True),
        where="with --allow lossy, at ZeRO 1 and 2 with DeepSpeed's Adam offloaded from GPUs, without accumulation",
        used_by=(
            "zenflow.zenflow_stage_1_and_2.ZenFlowZeroOptimizer: most gradients are applied late, on the host. "
            "zenflow.engine.configure_zenflow replaces gradient_accumulation_steps. Stage 3 lost a rank when tried."
        ),
        source="arXiv:2505.12242",
        since="0.17.5",
        is_exact=False,
    ),
)
"""All knobs in the order of suggestion: a condition reads only preceding knobs."""
