"""Read ranks, nodes, GPUs and the DeepSpeed config of a launch from the options of its launcher."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from optuna_dsat.config.ds_config import AUTO, flatten
from optuna_dsat.config.user_file import near_key, read
from optuna_dsat.errors import ConfigError, UsageError
from optuna_dsat.script.command.interceptor import MOST_SLOTS

_DEVICES = frozenset({"auto", "cpu", "gpu", "xpu", "npu", "hpu", "mlu", "musa", "sdaa", "privateuseone"})
"""Device names accepted by ``--nproc-per-node`` instead of a number: torch's own, and third-party backends."""
_LONGEST_COUNT = 20


def facts_of(launcher: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of ``LaunchCommand`` from a launcher's options.

    Raises:
        UsageError: If the launcher accepts a value that its launch would reject.
    """
    try:
        return _READERS[launcher](options)
    except ValueError as error:
        raise UsageError(f"{launcher}: {error}.") from None


def _given(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the options that have a value in command-line form, from a mapping of name -> given value."""
    return tuple(f"{name} {value}" for name, value in options.items() if value not in (None, "", -1, False))


def _count(value: int, option: str) -> int:
    if value < 1:
        raise ValueError(f"{option} is at least 1; got {value}")
    return value


_WITHOUT_EFFECT = ("autotuning", "bind_core_list", "venv_script")


def _deepspeed(options: Mapping[str, Any]) -> dict[str, Any]:
    number, nodes = (
        None if options[name] == -1 else _count(options[name], f"--{name}") for name in ("num_gpus", "num_nodes")
    )
    if (number or nodes) and (options["include"] or options["exclude"]):
        raise ValueError("--num_gpus and --num_nodes go with neither --include nor --exclude")
    slots: dict[str, Sequence[int]] = options["slots"]
    hosts = tuple(slots)[:nodes] if options["has_hosts"] else ()
    here = slots.get(hosts[0] if hosts else "localhost", [])
    counts = [number or len(slots[host]) for host in hosts]
    notes = []
    if len(set(counts)) > 1:
        least = f"{min(counts)} of each are used"
        notes.append(f"{', '.join(hosts)} have {', '.join(map(str, counts))} slots: {least}.")
    if without_effect := [f"--{item}" for item in _WITHOUT_EFFECT if options.get(item)]:
        notes.append(f"{', '.join(without_effect)} applies neither to trials nor to the printed command.")
    several = len(hosts) > 1
    selects = (options["include"] and len(here) < MOST_SLOTS) or (options["exclude"] and hosts)
    return {
        "ranks": min(counts, default=number or (len(here) if selects and not hosts else None)),
        "nodes": len(hosts) or nodes or 1,
        "hosts": hosts if several else (),
        "elsewhere": _given(
            {"--num_nodes": nodes if nodes != 1 else None, "--hostfile": options["hostfile"] if hosts else None}
        ),
        "rendezvous": _given({"--master_addr": options["master_addr"]}),
        "gpus": _listed(here) if selects and not several else None,
        "without_gpus": _listed(set(range(MOST_SLOTS)) - set(here)) if options["exclude"] and not hosts else None,
        "launcher": "deepspeed",
        "binds_cores": bool(options.get("bind_cores_to_rank")),
        "notes": tuple(notes),
    }


def _listed(slots: Iterable[int]) -> str:
    return ",".join(map(str, sorted(slots)))


def _deepspeed_node(options: Mapping[str, Any]) -> dict[str, Any]:
    """Read the command that the ``deepspeed`` launcher starts on each node."""
    slots: dict[str, Sequence[int]] = options["slots"]
    hosts = tuple(slots) if options["has_hosts"] else ()
    return {
        "ranks": min(map(len, slots.values()), default=None),
        "nodes": max(1, len(slots)),
        "hosts": hosts,
        "elsewhere": (f"its nodes {', '.join(hosts)}",) if hosts else (),
        "gpus": None if hosts else _listed([slot for numbers in slots.values() for slot in numbers]) or None,
    }


def _torchrun(options: Mapping[str, Any]) -> dict[str, Any]:
    least, most = options["nodes"]
    if not 1 <= least <= most:
        raise ValueError(f"--nnodes is a number from 1, or LEAST:MOST; got {options['nnodes']!r}")
    return {
        "ranks": _ranks(str(options["nproc_per_node"])),
        "nodes": most,
        "launcher": "torchrun" if options.get("use_env", True) else None,  # torch.distributed.launch adds --local-rank
        "elsewhere": _given({"--nnodes": options["nnodes"] if most > 1 else None}),
        "rendezvous": _given({"--rdzv-endpoint": options["rdzv_endpoint"]}),
    }


def _ranks(text: str) -> int | None:
    """Return the ranks of ``--nproc-per-node``; None if it names a kind of device, which need not be here."""
    if text.lstrip("-").isdecimal() and len(text) < _LONGEST_COUNT:
        return _count(int(text), "--nproc-per-node")
    if text not in _DEVICES:
        raise ValueError(f"--nproc-per-node is a number, or auto, cpu, gpu or xpu; got {text[:_LONGEST_COUNT]!r}")
    return None


def _accelerate(options: Mapping[str, Any]) -> dict[str, Any]:
    asked: Mapping[str, Any] = options["asked"]
    for option, count in (("--num_processes", asked["num_processes"]), ("--num_machines", options["num_machines"])):
        if count is not None:
            _count(count, option)
    defaults: Mapping[str, Any] | None = options["defaults"]
    # Without a config file accelerate counts the devices that are here.
    ranks = asked["num_processes"] or (options["num_processes"] if defaults is not None else None)
    machines = options["num_machines"] or 1
    config = options["deepspeed_config_file"] if options["use_deepspeed"] else None
    fields: Mapping[str, Any] = (defaults or {}).get("deepspeed_config") or {}
    gpus = options["gpu_ids"]
    return {
        "ranks": None if not ranks else max(1, ranks // machines),
        "nodes": machines,
        "elsewhere": _given({"--num_machines": machines if machines > 1 else None}),
        "gpus": None if gpus in (None, "all") else _gpu_indices(str(gpus)),
        "config": config,
        "notes": (
            *_ignored_fields(fields),
            *((*_dropped_fields(fields, config), *_overruled_options(asked, config)) if config else ()),
        ),
    }


def _gpu_indices(text: str) -> str:
    """Return GPUs as given: indices, or identifiers such as ``GPU-...`` and ``MIG-...``."""
    for part in text.split(","):
        if not part.strip().isdecimal() and not part.strip().startswith(("GPU-", "MIG-")):
            raise ValueError(f"--gpu_ids is a list of GPUs as 0,1; got {text!r}")
    return text


def _ignored_fields(fields: Mapping[str, Any]) -> Iterator[str]:
    """Yield a note on each DeepSpeed setting in accelerate's YAML that accelerate ignores."""
    known = (*_OF_A_CONFIG, *_WITH_A_CONFIG)
    for name, value in fields.items():
        if name in known:
            continue
        of_file = "deepspeed_config_file" if str(value).endswith((".json", ".hjson")) else ""
        meant = of_file or near_key(name, known)
        remedy = f"{meant!r} is probably meant" if meant else "it has no such setting"
        yield f"accelerate ignores {name!r} of its deepspeed_config; {remedy}."


def _dropped_fields(fields: Mapping[str, Any], config: str) -> tuple[str, ...]:
    """Return a note on DeepSpeed settings in accelerate's YAML that are dropped in favour of the config file.

    An offload device ``none`` needs no note: dropping it changes nothing.
    """
    dropped = {name: value for name, value in fields.items() if name in _OF_A_CONFIG and _text(value) != "none"}
    named = ", ".join(f"{name} {value}" for name, value in dropped.items())
    if not named:
        return ()
    return (
        f"Dropped from accelerate's config: {named}. With deepspeed_config_file accelerate refuses them; "
        f"{config} counts alone. Move them there, or remove them.",
    )


def _text(value: object) -> str:
    return str(value).lower().removesuffix(".0")


def _overruled_options(asked: Mapping[str, Any], config: str) -> Iterator[str]:
    """Yield a note on DeepSpeed options of accelerate that the config file overrules: they fill in its ``"auto"``."""
    try:
        values = flatten(read(config))
    except ConfigError:  # reported where the config is loaded
        return
    named = [
        f"--{name} {asked[name]}"
        for name, (key, default) in _OF_A_CONFIG.items()
        if asked.get(name) is not None and _text(values.get(key, default)) not in (AUTO, _text(asked[name]))
    ]
    if named:
        yield f'Without effect: {", ".join(named)}. accelerate takes these where {config} has "auto", nowhere else.'


_OF_A_CONFIG: Mapping[str, tuple[str, object]] = {
    "gradient_accumulation_steps": ("gradient_accumulation_steps", 1),
    "gradient_clipping": ("gradient_clipping", 0.0),
    "zero_stage": ("zero_optimization.stage", 0),
    "zero3_save_16bit_model": ("zero_optimization.stage3_gather_16bit_weights_on_model_save", False),
    "offload_optimizer_device": ("zero_optimization.offload_optimizer.device", "none"),
    "offload_optimizer_nvme_path": ("zero_optimization.offload_optimizer.nvme_path", "none"),
    "offload_param_device": ("zero_optimization.offload_param.device", "none"),
    "offload_param_nvme_path": ("zero_optimization.offload_param.nvme_path", "none"),
}
"""Fields of accelerate's ``deepspeed_config`` that a config file excludes (``_deepspeed_config_checks``, 1.15), which
are options of ``accelerate launch``, too -> key in such a file, and its default.
"""
_WITH_A_CONFIG = (
    *("zero3_init_flag", "deepspeed_config_file", "deepspeed_hostfile", "deepspeed_moe_layer_cls_names"),
    *("deepspeed_exclusion_filter", "deepspeed_inclusion_filter", "deepspeed_multinode_launcher"),
)
"""Its other fields: options of ``accelerate launch``."""


_READERS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "deepspeed": _deepspeed,
    "deepspeed.launcher.launch": _deepspeed_node,
    "torchrun": _torchrun,
    "accelerate": _accelerate,
}
