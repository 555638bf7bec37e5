"""``plan``: what each ZeRO stage and offload would take and reach, with one launch or none."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optuna_dsat.errors import UsageError

if TYPE_CHECKING:
    from optuna_dsat.plan.advice import Setting
    from optuna_dsat.plan.structures import PlannedRow, Subject
    from optuna_dsat.plan.transformer import TransformerShape
    from optuna_dsat.tuning.options import TuneOptions

__all__ = ["plan"]

_MODEL = "Without a launch: the model"
_MACHINE = "Without a launch: the machine"
_LAUNCH = "With a launch"
_HOST_GIB_PER_GPU = 128
"""Assumed where --host-memory is not given."""
_WIDTH = 160
"""Columns of the table where it is piped."""
_SUFFIXES = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def plan(
    script: Annotated[
        Path | None,
        typer.Argument(help="The training script, launched once at micro-batch 1.", show_default=False),
    ] = None,
    ds_config: Annotated[
        Path | None,
        typer.Argument(metavar="DS_CONFIG", help="Its DeepSpeed config (JSON).", show_default=False),
    ] = None,
    script_args: Annotated[
        list[str] | None,
        typer.Argument(help="Arguments of the script, after --.", metavar="[-- SCRIPT_ARGS]", show_default=False),
    ] = None,
    params: Annotated[
        str | None,
        typer.Option(help="Parameters, such as 7e9 or 1.3B; then nothing is launched.", rich_help_panel=_MODEL),
    ] = None,
    hidden: Annotated[
        int | None, typer.Option(help="Hidden size.  \\[default: by parameters and layers]", rich_help_panel=_MODEL)
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="Layers.  \\[default: by parameters and hidden size]", rich_help_panel=_MODEL)
    ] = None,
    heads: Annotated[
        int | None, typer.Option(help="Attention heads.  \\[default: of 128 each]", rich_help_panel=_MODEL)
    ] = None,
    seq_length: Annotated[int, typer.Option(help="Tokens of a sample.", rich_help_panel=_MODEL)] = 2048,
    vocab: Annotated[int, typer.Option(help="Size of the vocabulary.", rich_help_panel=_MODEL)] = 50257,
    ffn: Annotated[
        int | None,
        typer.Option(help="Width of the feed-forward block.  \\[default: 4 x hidden]", rich_help_panel=_MODEL),
    ] = None,
    gated: Annotated[
        bool, typer.Option("--gated", help="Its feed-forward block is gated, as LLaMA's.", rich_help_panel=_MODEL)
    ] = False,
    dropout: Annotated[bool, typer.Option("--dropout", help="It uses dropout.", rich_help_panel=_MODEL)] = False,
    plain_attention: Annotated[
        bool,
        typer.Option("--plain-attention", help="Attention keeps its score matrices.", rich_help_panel=_MODEL),
    ] = False,
    recompute: Annotated[
        str, typer.Option(help="Activation checkpointing: none, selective or full.", rich_help_panel=_MODEL)
    ] = "none",
    gpu: Annotated[
        str | None, typer.Option(help="GPU by name, such as a100-80g, h100 or rtx4090.", rich_help_panel=_MACHINE)
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(help="GPUs of a host, or of the launch.  \\[default: 8, or all]", rich_help_panel=_MACHINE),
    ] = None,
    nodes: Annotated[int, typer.Option(help="Hosts.", min=1, rich_help_panel=_MACHINE)] = 1,
    network: Annotated[float, typer.Option(help="Gbit/s of a host's network.", rich_help_panel=_MACHINE)] = 100.0,
    host_memory: Annotated[
        str | None,
        typer.Option(help="Memory of a host, such as 1TiB.  \\[default: 128GiB a GPU]", rich_help_panel=_MACHINE),
    ] = None,
    memory_margin: Annotated[float, typer.Option(help="Share of the device's memory to leave free.")] = 0.05,
    module: Annotated[
        bool, typer.Option("-m", "--module", help="SCRIPT is a module's name.", rich_help_panel=_LAUNCH)
    ] = False,
    cpu_ranks: Annotated[
        int | None, typer.Option(help="Run on the CPU with this many ranks.", rich_help_panel=_LAUNCH)
    ] = None,
    device_memory: Annotated[
        str | None, typer.Option(help="What one rank may allocate, such as 2GiB.", rich_help_panel=_LAUNCH)
    ] = None,
    stall_timeout: Annotated[
        float,
        typer.Option(help="Seconds without a sign of life after which the launch is ended.", rich_help_panel=_LAUNCH),
    ] = 600.0,
    storage: Annotated[
        str,
        typer.Option(help="Where profiles are kept.", envvar="OPTUNA_DSAT_STORAGE", rich_help_panel=_LAUNCH),
    ] = "sqlite:///optuna-dsat.db",
    output_dir: Annotated[
        Path,
        typer.Option(help="Directory for the launch.", envvar="OPTUNA_DSAT_OUTPUT_DIR", rich_help_panel=_LAUNCH),
    ] = Path("optuna-dsat-output"),
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show memory, predicted speed and what bounds it for each ZeRO stage and offload; search nothing."""
    if not 0 <= memory_margin < 1:
        raise UsageError(f"--memory-margin is {memory_margin}; it must lie in [0, 1).")
    if params is not None:
        config = ds_config or script
        if config is not None and config.suffix == ".py":
            raise UsageError("With --params nothing is launched: give no script, a DS_CONFIG at most.")
        shape = _shape(
            params, hidden=hidden, layers=layers, heads=heads, seq_length=seq_length, vocab=vocab, ffn=ffn,
            gated=gated, dropout=dropout, fused_attention=not plain_attention, recompute=recompute,
        )  # fmt: skip
        shown = _without_launch(
            shape, config, gpu=gpu, gpus=8 if gpus is None else gpus, nodes=nodes, network=network,
            host_memory=host_memory, margin=memory_margin,
        )  # fmt: skip
    elif script is None or ds_config is None:
        raise UsageError("plan takes SCRIPT and DS_CONFIG, or --params with --gpu and no script.")
    else:
        from optuna_dsat.tuning.options import TuneOptions

        options = TuneOptions(
            script=script, ds_config=ds_config, script_args=script_args, module=module, gpus_per_trial=gpus,
            cpu_ranks=cpu_ranks, device_memory=device_memory, stall_timeout=stall_timeout, storage=storage,
            output_dir=output_dir,
            zero_stages=["0", "1", "2", "3"],
        )  # fmt: skip
        shown = _with_launch(options, nodes=nodes, margin=memory_margin)
    _show(shown, as_json=json_output)


@dataclass(frozen=True, kw_only=True)
class _Shown:
    """What is printed."""

    setting: Setting
    about: Sequence[str]
    """Lines on what the plan rests on."""
    model: Mapping[str, Any] = field(default_factory=dict)

    @property
    def subject(self) -> Subject:
        return self.setting.subject


def _count(text: str, option: str) -> int:
    """Return a number such as 7e9, 1.3B or 350M."""
    factor = _SUFFIXES.get(text[-1:].lower(), 1.0)
    try:
        number = float(text[:-1] if factor != 1.0 else text) * factor
    except ValueError:
        number = 0.0
    if not 1 <= number < 1e16:
        raise UsageError(f"{option} is {text!r}; write a number such as 7e9 or 1.3B.")
    return round(number)


def _shape(params: str, **numbers: Any) -> TransformerShape:
    from optuna_dsat.plan.transformer import shape_of

    return shape_of(params=_count(params, "--params"), **numbers)


def _without_launch(
    shape: TransformerShape,
    config_path: Path | None,
    *,
    gpu: str | None,
    gpus: int,
    nodes: int,
    network: float,
    host_memory: str | None,
    margin: float,
) -> _Shown:
    from dataclasses import asdict

    from optuna_dsat.config import ds_config
    from optuna_dsat.cost.gpus import GPUS, find_gpu, machine_priors
    from optuna_dsat.cost.memory import Hardware, ModelProfile
    from optuna_dsat.plan.advice import Setting
    from optuna_dsat.plan.structures import Subject, plan_rows
    from optuna_dsat.study.spec import parse_bytes

    if gpu is None:
        raise UsageError(f"--params needs --gpu; known are {', '.join(GPUS)}.")
    if gpus < 1:
        raise UsageError(f"--gpus is {gpus}; it must be at least 1.")
    spec = find_gpu(gpu)
    half = {"bf16" if spec.bf16 else "fp16": {"enabled": True}}
    config: Mapping[str, Any] = (
        {**half, "optimizer": {"type": "AdamW"}} if config_path is None else ds_config.load(config_path).raw
    )
    switches: list[Mapping[str, Any]] = [config.get(key) or {} for key in ("bf16", "fp16")]
    element = 2 if any(switch.get("enabled") for switch in switches) else 4
    host = parse_bytes(host_memory) if host_memory else _HOST_GIB_PER_GPU * gpus * 2**30
    profile = ModelProfile(
        params=shape.params,
        trainable_params=shape.params,
        largest_layer_params=shape.largest_layer_params,
        param_bytes=element,
        activation_bytes_per_sample=shape.activation_bytes(element=element),
        flops_per_sample=shape.flops_per_sample,
        device_memory_bytes=spec.memory_bytes,
        host_memory_bytes=host,
        peak_bytes=0,
        device_name=spec.name,
    )
    subject = Subject(
        profile=profile,
        hardware=Hardware(
            world_size=gpus * nodes,
            ranks_per_node=gpus,
            device_memory_bytes=spec.memory_bytes,
            host_memory_bytes=host,
        ),
        config=config,
        machine={**machine_priors(spec, ranks=gpus * nodes, nodes=nodes, network_gbit_per_s=network), **shape.priors()},
        memory_margin=margin,
    )
    attention = "" if shape.fused_attention else ", plain attention"
    about = [
        f"{shape.params / 1e9:.3g} B parameters: {shape.layers} layers, hidden size {shape.hidden}, "
        f"{shape.heads} heads, {shape.seq_length} tokens a sample, "
        f"vocabulary {shape.vocab}; recomputation: {shape.recompute}{attention}.",
        f"{nodes} x {gpus} {spec.name}: {_gib(spec.memory_bytes)} each, {_gib(host)} a host"
        f"{'' if host_memory else ' (assumed; --host-memory)'}, {spec.tflops:.4g} TFLOPS at its peak.",
        "Nothing was launched: times are by data sheets and may be off by what the range says; with a script, "
        "memory and FLOPs are measured.",
    ]
    setting = Setting(
        subject=subject,
        rows=plan_rows(subject),
        recomputes=shape.recompute != "none",
        bf16_hardware=spec.bf16,
        hidden=shape.hidden,
    )
    return _Shown(setting=setting, about=about, model=asdict(shape))


def _with_launch(options: TuneOptions, *, nodes: int, margin: float) -> _Shown:
    """Measure or find the profile, then plan with it.

    Raises:
        DsatError: As the tuning commands do.
    """
    from contextlib import closing

    from optuna_dsat.launch.processes import kill_leftovers
    from optuna_dsat.launch.torchrun import TorchrunLauncher
    from optuna_dsat.plan.advice import Setting
    from optuna_dsat.plan.from_script import plan_script
    from optuna_dsat.plan.structures import plan_rows
    from optuna_dsat.store import Store
    from optuna_dsat.tuning.prepare import make_devices, spec_of

    if nodes != 1:
        raise UsageError("--nodes is for plans without a launch (--params): a launch runs on this host.")
    devices = make_devices(options)
    for notice in devices.notices:
        print(notice, file=sys.stderr)
    spec = spec_of("guided", options, devices)
    spec = spec.model_copy(update={"name": f"{spec.name.removesuffix('-guided')}-plan"})
    kill_leftovers()
    with Store.open(options.storage) as store:
        found = plan_script(
            spec,
            store=store,
            device_names=tuple(device.name for device in devices.devices),
            launcher=lambda: closing(TorchrunLauncher(spec.study_dir, devices=devices, max_slots=spec.max_slots)),
            on_attempt=lambda one: print(f"Profile launch at micro-batch 1, {one.words} ...", file=sys.stderr),
            memory_margin=margin,
            on_notice=lambda text: print(text, file=sys.stderr),
        )
    setting = Setting(subject=found.subject, rows=plan_rows(found.subject), bf16_hardware=found.bf16_hardware)
    return _Shown(setting=setting, about=found.about, model=found.subject.profile.to_json())


def _gib(count: float) -> str:
    from optuna_dsat.words import bytes_in_words

    return bytes_in_words(count)


def _show(shown: _Shown, *, as_json: bool) -> None:
    from optuna_dsat.plan.advice import advise

    rows, advice = shown.setting.rows, advise(shown.setting)
    if as_json:
        hardware = shown.subject.hardware
        record = {
            "model": dict(shown.model),
            "world_size": hardware.world_size,
            "device_memory_bytes": hardware.device_memory_bytes,
            "usable_bytes": shown.subject.usable_bytes,
            "host_memory_bytes": hardware.host_memory_bytes,
            "rows": [row.to_json() for row in rows],
            "advice": advice,
        }
        print(json.dumps(record, indent=2))
        return
    for line in shown.about:
        print(line)
    _print_table(rows)
    print(
        "Memory is the peak of torch's allocator at the micro-batch shown, of "
        f"{_gib(shown.subject.usable_bytes)} that it may reach; nine steps of ten are expected within the range."
    )
    for text in advice:
        print(f"- {text}")


def _print_table(rows: Sequence[PlannedRow]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_edge=False, pad_edge=False)
    headings = ("", "GPU at 1", "micro-batch", "largest", "GPU", "host", "step", "samples/s", "bound by")
    for heading in headings:
        table.add_column(heading, overflow="fold", justify="left" if heading in ("", "bound by") else "right")
    for row in rows:
        table.add_row(*_cells(row))
    Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH).print(table)


def _cells(row: PlannedRow) -> tuple[str, ...]:
    host = _gib(row.host_bytes) if row.host_bytes else ""
    if row.outlook is None:
        return row.name, _gib(row.least_bytes), "does not fit", "", "", host, "", "", f"memory of the {row.why_not}"
    look = row.outlook
    step = f"{look.step_s:.3g} s ({look.low_s:.3g} to {look.high_s:.3g})"
    bound = f"{look.bound} {look.shares[look.bound]:.0%}"
    return (
        row.name,
        _gib(row.least_bytes),
        str(row.micro_batch),
        str(row.largest),
        _gib(row.device_bytes),
        host,
        step,
        f"{look.samples_per_s:.3g}",
        bound,
    )
