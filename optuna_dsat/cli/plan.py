"""``plan``: memory and throughput of each ZeRO stage and offload, predicted with one launch or none."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer

from optuna_dsat.cli.parsing.commands import with_options
from optuna_dsat.cli.tables import notify, print_table
from optuna_dsat.errors import UsageError
from optuna_dsat.escape.terminal import say_prose
from optuna_dsat.study.options.declaration import DEFAULT_OUTPUT_DIR, DEFAULT_STORAGE, OUTPUT_DIR_ENV, STORAGE_ENV
from optuna_dsat.study.options.parse import share
from optuna_dsat.tuning.options.tune_options import TuneOptions
from optuna_dsat.words import bytes_in_words, count_in_words, largest_in_words, slot_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optuna_dsat.plan.rows import AtCount, Plan, PlannedRow
    from optuna_dsat.plan.transformer import TransformerShape

_WITH, _WITHOUT = "With a launch", "Without a launch"
_model = partial(typer.Option, rich_help_panel=f"{_WITHOUT}: the model")
_machine = partial(typer.Option, rich_help_panel=f"{_WITHOUT}: the machine")
_launch = partial(typer.Option, rich_help_panel=_WITH)
_GPUS = 8
"""GPUs of a host if ``--gpus`` is not given and nothing is launched."""
_OPTIONAL = ("tokens/s", "tokens/s/{}", "MFU")
_HEADINGS = (
    *("structure", "memory at micro-batch 1", "micro-batch", "largest", "memory", "host memory", "step", "samples/s"),
    *(*_OPTIONAL, "bound by"),
)
"""Headings of the columns; ``{}`` is replaced by the kind of device. Optional columns are left out if unknown."""
_DROPPED = ("largest", "host memory", "memory at micro-batch 1", "step", "MFU", "samples/s", "tokens/s")
"""Columns that a narrow terminal leaves out, in this order."""
_SEQ_LENGTH = 2048
"""Tokens of a sample if ``--seq-length`` is not given and nothing is launched."""
_VOCAB = 50257
"""Size of the vocabulary if neither an option nor a config specifies it."""
_SUFFIXES = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Arguments and options of ``plan``."""

    script: Annotated[
        Path | None,
        typer.Argument(
            help="The training script: launched at micro-batch 1, then timed with your config.", show_default=False
        ),
    ] = None
    ds_config: Annotated[
        Path | None, typer.Argument(metavar="DS_CONFIG", help="Its DeepSpeed config (JSON).", show_default=False)
    ] = None
    script_args: Annotated[
        list[str] | None,
        typer.Argument(help="Arguments of the script, after --.", metavar="[-- SCRIPT_ARGS]", show_default=False),
    ] = None
    params: Annotated[str | None, _model(help="Parameters, such as 7e9 or 1.3B; then nothing is launched.")] = None
    hf_config: Annotated[
        Path | None,
        _model(
            "--model",
            "--hf-config",
            help="A model by name (llama-3.1-8b, gpt2-xl), the config.json of a Hugging Face model, its folder, or the "
            "id of one that was downloaded before, instead of --params and the shape.",
            metavar="NAME|PATH",
        ),
    ] = None
    trainable_share: Annotated[
        str | None, _model(help="Share of the parameters that is trained, such as 0.5% with LoRA.")
    ] = None
    hidden: Annotated[int | None, _model(help="Hidden size.  \\[default: by parameters and layers]")] = None
    layers: Annotated[int | None, _model(help="Layers.  \\[default: by parameters and hidden size]")] = None
    heads: Annotated[int | None, _model(help="Attention heads.  \\[default: of 128 each]")] = None
    seq_length: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a sample; with a launch, only for tokens/s.  \\[default: 2048 without a launch, or the "
            "longest that the model takes if that is less]"
        ),
    ] = None
    vocab: Annotated[int | None, _model(help="Size of the vocabulary.  \\[default: 50257]")] = None
    ffn: Annotated[int | None, _model(help="Width of the feed-forward block.  \\[default: 4 x hidden]")] = None
    gated: Annotated[bool, _model("--gated", help="Its feed-forward block is gated, as LLaMA's.")] = False
    dropout: Annotated[bool, _model("--dropout", help="It uses dropout.")] = False
    plain_attention: Annotated[bool, _model("--plain-attention", help="Attention keeps its score matrices.")] = False
    recompute: Annotated[str, _model(help="Activation checkpointing: none or full.")] = "none"
    gpu: Annotated[str | None, _machine(help="GPU by name, such as a100-80g, h100 or rtx4090.")] = None
    gpus: Annotated[int | None, typer.Option(help="GPUs of a host, or of the launch.  \\[default: 8, or all]")] = None
    nodes: Annotated[
        int,
        typer.Option(
            help="Hosts to plan for; a launch runs on this one, and the others are taken to be like it.", min=1
        ),
    ] = 1
    network: Annotated[
        float | None,
        typer.Option(
            help="Gbit/s of a host's network, of several hosts.  \\[default: 100 without a launch, else unknown]"
        ),
    ] = None
    host_memory: Annotated[str | None, _machine(help="Memory of a host, such as 1TiB.  \\[default: 128GiB a GPU]")] = (
        None
    )
    memory_margin: Annotated[
        str, typer.Option(help="Share of the device's memory to leave free, such as 5%.", metavar="SHARE")
    ] = "0.05"
    nvme_path: Annotated[
        str | None, typer.Option(help="Directory on NVMe, on every host: offloads to it are planned as well.")
    ] = None
    module: Annotated[bool, _launch("-m", "--module", help="SCRIPT is a module's name.")] = False
    python: Annotated[
        str | None, _launch(help="Python of the script; without it the one that a search would choose.")
    ] = None
    cpu_ranks: Annotated[int | None, _launch(help="Run on the CPU with this many ranks.")] = None
    device_memory: Annotated[str | None, _launch(help="What one rank may allocate, such as 2GiB.")] = None
    stall_timeout: Annotated[float, _launch(help="Seconds without activity after which the launch is ended.")] = (
        TuneOptions.stall_timeout
    )
    storage: Annotated[str, _launch(help="Where profiles are kept.", envvar=STORAGE_ENV)] = DEFAULT_STORAGE
    output_dir: Annotated[Path, _launch(help="Directory for the launch.", envvar=OUTPUT_DIR_ENV)] = Path(
        DEFAULT_OUTPUT_DIR
    )
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False


def _run(options: PlanOptions) -> None:
    """Print the plan for the given options."""
    if not 0 <= _memory_margin(options) < 1:
        raise UsageError(f"--memory-margin is {options.memory_margin}; it must be at least 0 and below 1 (100%).")
    shaped = options.params is not None or options.hf_config is not None
    result = _without_launch(options) if shaped else plan_with_launch(options)
    if options.json_output:
        _print_json(result)
    else:
        _print_text(result)


plan = with_options(
    _run,
    "Show memory, predicted speed and what bounds it for each ZeRO stage and offload; search nothing.",
)


def _count(text: str, option: str) -> int:
    """Parse a number such as 7e9, 1.3B or 350M."""
    factor = _SUFFIXES.get(text[-1:].lower(), 1.0)
    try:
        number = float(text[:-1] if factor != 1.0 else text) * factor
    except ValueError:
        number = 0.0
    if not 1 <= number < 1e16:
        raise UsageError(f"{option} is {text!r}; write a number such as 7e9 or 1.3B.")
    return round(number)


def _without_launch(options: PlanOptions) -> Plan:
    """Return the plan of a model described only by its shape, on a GPU from the table."""
    from optuna_dsat.config import user_file
    from optuna_dsat.cost.gpus import GPUS, find_gpu
    from optuna_dsat.plan.from_shape import Machine, plan_shape
    from optuna_dsat.study.spec import parse_bytes

    config_path = options.ds_config or options.script  # a single argument is the config
    given = "--params" if options.hf_config is None else "a model"
    if config_path is not None and config_path.suffix == ".py":
        raise UsageError(f"With {given} nothing is launched: give no script, a DS_CONFIG at most.")
    _refuse(options, _WITH, f"leave it out with {given}")
    shape = _shape(options)
    gpus = _GPUS if options.gpus is None else options.gpus
    if options.gpu is None:
        raise UsageError(f"With {given}, give --gpu; known are {', '.join(GPUS)}.")
    if gpus < 1:
        raise UsageError(f"--gpus is {gpus}; it must be at least 1.")
    machine = Machine(
        gpu=find_gpu(options.gpu),
        gpus_per_node=gpus,
        nodes=options.nodes,
        given_network_gbit_per_s=options.network,
        given_host_bytes=parse_bytes(options.host_memory) if options.host_memory else None,
    )
    config = None if config_path is None else user_file.load(config_path).raw
    return plan_shape(shape, machine, config=config, memory_margin=_memory_margin(options), nvme_path=options.nvme_path)


def _refuse(options: PlanOptions, panel: str, remedy: str) -> None:
    """Refuse a given option of a panel of the help; one that a variable may give for all commands is not counted."""
    for name, hint in get_type_hints(PlanOptions, include_extras=True).items():
        option = get_args(hint)[1]
        is_given = not option.envvar and getattr(options, name) != getattr(PlanOptions, name)
        if is_given and (option.rich_help_panel or "").startswith(panel):
            words = next((text for text in option.param_decls if text.startswith("--")), f"--{name.replace('_', '-')}")
            raise UsageError(f"{words} is for plans {panel[0].lower()}{panel[1:]}: {remedy}.")


def _shape(options: PlanOptions) -> TransformerShape:
    """Return the shape given by separate options, or of the model that a Hugging Face config describes."""
    from optuna_dsat.plan.hugging_face import shape_of_config
    from optuna_dsat.plan.transformer import shape_of

    text = options.trainable_share
    common: dict[str, Any] = {
        "dropout": options.dropout,
        "fused_attention": not options.plain_attention,
        "recompute": options.recompute,
        "trainable_share": 1.0 if text is None else share(text, option="--trainable-share"),
    }
    if options.hf_config is not None:
        for name in ("params", "hidden", "layers", "heads", "vocab", "ffn", "gated"):
            if getattr(options, name):
                raise UsageError(f"The model says the shape: leave out --{name}.")
        return shape_of_config(options.hf_config, seq_length=options.seq_length, **common)
    return shape_of(
        params=_count(options.params or "", "--params"),
        hidden=options.hidden,
        layers=options.layers,
        heads=options.heads,
        seq_length=_SEQ_LENGTH if options.seq_length is None else options.seq_length,
        vocab=_VOCAB if options.vocab is None else options.vocab,
        ffn=options.ffn,
        gated=options.gated,
        **common,
    )


def _memory_margin(options: PlanOptions) -> float:
    return share(options.memory_margin, option="--memory-margin")


def plan_with_launch(options: PlanOptions) -> Plan:
    """Return the plan of a script, from a stored or a new profile."""
    from contextlib import closing

    from optuna_dsat.launch.launcher import local_launcher
    from optuna_dsat.launch.machine.journal import LeftoverWatch
    from optuna_dsat.plan.from_script import plan_script
    from optuna_dsat.store import Store
    from optuna_dsat.tuning.spec_builder import build_spec, search_devices

    search = _search_options(options)
    devices = search_devices(search)
    for notice in devices.notices:
        notify(notice)
    spec = build_spec("guided", search, devices)
    spec = spec.model_copy(update={"name": f"{spec.name.removesuffix('-guided')}-plan"})
    LeftoverWatch(os.environ, on_notice=notify).begin()
    with Store.open(search.storage) as store:
        return plan_script(
            spec,
            store=store,
            device_names=tuple(device.name for device in devices.devices),
            launcher=lambda: closing(local_launcher(spec.study_dir, devices=devices, max_slots=spec.max_slots)),
            on_attempt=lambda attempt: notify(
                f"Profile launch at micro-batch {attempt.micro_batch}, {attempt.words} ..."
            ),
            memory_margin=_memory_margin(options),
            seq_length=options.seq_length,
            nodes=options.nodes,
            network_gbit_per_s=options.network if options.nodes > 1 else None,
            on_notice=notify,
        )


def _search_options(options: PlanOptions) -> TuneOptions:
    """Return the options of a search over all ZeRO stages with the launch of this plan."""
    if options.script is None or options.ds_config is None:
        raise UsageError("plan takes SCRIPT and DS_CONFIG, or --params or --model with --gpu and no script.")
    _refuse(options, _WITHOUT, "leave it out, as the launch shows the model and the machine")
    if options.seq_length is not None and options.seq_length < 1:
        raise UsageError(f"--seq-length is {options.seq_length}; it must be at least 1.")
    return TuneOptions(
        script=options.script,
        ds_config=options.ds_config,
        script_args=options.script_args,
        module=options.module,
        python=options.python,
        gpus_per_trial=options.gpus,
        cpu_ranks=options.cpu_ranks,
        device_memory=options.device_memory,
        stall_timeout=options.stall_timeout,
        storage=options.storage,
        output_dir=options.output_dir,
        nvme_path=options.nvme_path,
        zero_stages=[0, 1, 2, 3],
    )


def _scaling(plan: Plan) -> tuple[AtCount, ...]:
    """Return the fastest plan on 1, 2, 4, ... times the devices of a sample; empty if the plan has no more."""
    from optuna_dsat.plan.rows import counts_up_to, scaling

    sizes = counts_up_to(plan.subject.data_parallel_size)
    return scaling(plan.subject, [size * plan.subject.ranks_per_sample for size in sizes]) if len(sizes) > 1 else ()


def _print_scaling(result: Sequence[AtCount], *, whose: str) -> None:
    """Print the expected throughput at each number of devices."""
    headings = (f"{whose}s", "samples/s", f"samples/s per {whose}", "scaling", "with")
    rows: list[tuple[str, ...]] = []
    for row in result:
        if row.row is None:
            rows.append((str(row.devices), "does not fit", "", "", ""))
        else:
            rates = [count_in_words(row.row.samples_per_s / each, digits=3) for each in (1, row.devices)]
            rows.append(
                (
                    str(row.devices),
                    *rates,
                    f"{row.share_of_linear:.0%}",
                    f"{row.row.name}, micro-batch {row.row.micro_batch}",
                )
            )
    say_prose(f"\nHow many {whose}s are worth it, with the config to begin with:")
    print_table(headings, rows, right=headings[:-1])
    if all(item.row is None for item in result):
        print()
        return
    option = "--gpus-per-trial" if whose == "GPU" else "--cpu-ranks"
    counts = " ".join(str(item.devices) for item in result)
    say_prose(
        f"Scaling: samples/s per {whose}, relative to the smallest number that needs no offload. The global batch "
        f"grows with the {whose}s. Measure it: `{option} {counts}` with any search.\n"
    )


def _print_json(plan: Plan) -> None:
    from optuna_dsat.plan.advice import advise

    hardware = plan.subject.hardware
    link, network = (plan.subject.machine.get(name) for name in ("pcie", "network"))
    record = {
        "model": dict(plan.model),
        "world_size": hardware.world_size,
        "device_memory_bytes": hardware.device_memory_bytes,
        "usable_bytes": plan.subject.usable_bytes,
        "host_memory_bytes": hardware.host_memory_bytes,
        "expected_host_bytes_per_s_per_gpu": None if link is None else 1 / link[0],
        "expected_network_bytes_per_s": None if hardware.nodes == 1 or network is None else 1 / network[0],
        "assumed": list(plan.assumed),
        "recommended": None if plan.recommended is None else plan.recommended.name,
        "rows": [row.to_json() for row in plan.rows],
        "scaling": [row.to_json() for row in _scaling(plan)],
        "advice": list(advise(plan).values()),
    }
    print(json.dumps(record, indent=2))


def _print_text(plan: Plan) -> None:
    from optuna_dsat.plan.advice import advise

    for line in plan.about:
        say_prose(line)
    device = plan.subject.hardware.device
    whose = slot_name(device)
    rows = [_cells(row) for row in plan.rows]
    headings = [name for name in _HEADINGS if name not in _OPTIONAL or any(name in row for row in rows)]
    shown = [name.format(whose) for name in headings]
    print_table(shown, [[row.get(name) for name in headings] for row in rows], right=shown[1:-1], drop=_DROPPED)
    what = "what a rank takes" if device == "cpu" else "the peak of torch's allocator"
    say_prose(
        f"Memory is {what} at the micro-batch shown, of {bytes_in_words(plan.subject.usable_bytes)} that it may reach; "
        "ranges are 90% intervals."
    )
    if "MFU" in headings:
        counted = "counted FLOPs / peak FLOPs of the GPUs, including recomputation."
        if plan.subject.model_flops_per_sample is not None:
            counted = "FLOPs of the model / peak FLOPs of the GPUs, without recomputation."
        say_prose(f"MFU: {counted}")
    if counts := _scaling(plan):
        _print_scaling(counts, whose=whose)
    for text in advise(plan).values():
        say_prose(f"- {text}")


def _cells(row: PlannedRow) -> dict[str, str]:
    """Return the cells of a row by heading; a row that does not fit has few of them."""
    cells = {"structure": row.name, "memory at micro-batch 1": bytes_in_words(row.least_bytes)}
    cells |= {"micro-batch": "does not fit", "host memory": bytes_in_words(row.host_bytes) if row.host_bytes else ""}
    step = row.predicted
    if step is None:
        return {**cells, "bound by": f"memory of the {row.too_small.replace(' and ', ' and the ')}"}
    rates = {
        "samples/s": step.samples_per_s,
        "tokens/s": step.tokens_per_s,
        "tokens/s/{}": step.tokens_per_s_per_gpu,
    }
    factor, unit = (1.0, "s") if step.step_s >= 1 else (1000.0, "ms")
    middle, low, high = (count_in_words(value * factor, digits=3) for value in (step.step_s, step.low_s, step.high_s))
    return {
        **cells,
        "micro-batch": count_in_words(row.micro_batch),
        "largest": largest_in_words(row.largest),
        "memory": bytes_in_words(row.device_bytes),
        "step": f"{middle} {unit} ({low} to {high})",
        **{name: count_in_words(rate, digits=3) for name, rate in rates.items() if rate is not None},
        **({} if step.mfu is None else {"MFU": f"{step.mfu:.0%}"}),
        "bound by": f"{step.bound} {step.shares[step.bound]:.0%}",
    }
