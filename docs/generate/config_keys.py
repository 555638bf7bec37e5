"""Writes ``docs/reference/config-keys.md``: what a search reads in and writes into a DeepSpeed config.

python -m docs.generate.config_keys
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from optuna_dsat.config.autotuning_section import IGNORED, Autotuning
from optuna_dsat.config.conditions import Knob
from optuna_dsat.config.knobs import KNOBS, MODEL
from optuna_dsat.study.options.declaration import options_in
from optuna_dsat.tuning.options.tune_options import AutotuningOptions

PAGE = Path(__file__).resolve().parents[1] / "reference" / "config-keys.md"

_HEAD = """# Config keys

<!-- Written by `python -m docs.generate.config_keys`; do not edit. -->

How a search treats the keys of your DeepSpeed config. All other keys are passed on unchanged.

## Knobs

These are searched where they change what DeepSpeed does. Hold one with `--fix NAME=VALUE`, leave it as your config has
it with `--no-tune NAME`, tune it alone with `--only NAME`, or give a list in the config
(`"reduce_bucket_size": [5e7, 5e8]`) to choose among its values.
Bucket sizes are capped by the model's size after the profile launch. None of them changes what training computes, up to
rounding, except the knobs of `--allow lossy` ([permission](../explanation/result.md#with-your-permission)).
`optuna_dsat/config/knobs.py` has the places in DeepSpeed 0.19.8 from which the conditions were read, and the
papers. On CPU ranks the device is the host: what `offload_optimizer_ratio` and `offload_pin_memory` gain on a GPU is
not measured yet. A knob that is *live* at the ZeRO stage of a running engine changes without a new launch.

| name | key | searched | by default among | live at ZeRO | since DeepSpeed |
|---|---|---|---|---|---|
"""
_BATCH = """
## Batch sizes

| key | |
|---|---|
| `train_micro_batch_size_per_gpu` | always searched, from 1 to what memory allows; a list, or `--fix`, restricts it |
| `gradient_accumulation_steps` | stays, unless the search keeps a global batch or reaches the largest |
| `train_batch_size` | follows from the two and the number of ranks |

## The `autotuning` section

Written for DeepSpeed's own autotuner, read by every command for options that are not given otherwise.

| key | stands for |
|---|---|
"""
_MEANINGS = {
    "enabled": "with `tune`, `run` and `optuna_dsat.tune`: knobs that the config gives one value keep it",
    "fast": "only ZeRO stage and micro-batch are tuned",
    "arg_mappings": "`--arg-mapping`",
    "metric": "`--metric`",
    "tuner_type": "the method of `tune` and `run`: `random`, `gridsearch` (`binary`), `model_based` (`asha`)",
    "num_gpus": "`--gpus-per-trial`, on a cluster `--gpus-per-node`; a list is a search at each number",
    "num_nodes": "`--nodes-per-trial` on a cluster (`--on`), a list a search at each number; not used on one machine",
    "min_train_micro_batch_size_per_gpu": "least micro-batch",
    "max_train_micro_batch_size_per_gpu": "largest micro-batch",
    "max_train_batch_size": "`--max-train-batch-size`",
}
"""Key -> meaning, where no option declares it."""


def page() -> str:
    """Return the page."""
    return _HEAD + "".join(_knobs()) + _BATCH + "".join(_autotuning())


def _knobs() -> Iterator[str]:
    for knob in KNOBS:
        key = "no key of DeepSpeed" if knob.path[0] == MODEL else f"`{'.'.join(knob.path)}`"
        live = ", ".join(map(str, knob.live)) or "none"
        yield f"| `{knob.name}` | {key} | {knob.where} | {_choices(knob)} | {live} | {knob.since} |\n"


def _choices(knob: Knob) -> str:
    if knob.inert:
        return "only what you list"
    numbers = [f"{one:.0e}".replace("e+0", "e") if isinstance(one, int) and one > 9999 else one for one in knob.choices]
    own = ", the ranks of a node" if knob.several_nodes else ""
    return ", ".join(f"`{str(one).lower() if isinstance(one, bool) else one}`" for one in numbers) + own


def _autotuning() -> Iterator[str]:
    declared = {one.autotuning: name for name, one in options_in(AutotuningOptions).items() if one.autotuning}
    for one in fields(Autotuning):
        if one.name in ("ignored", "unknown", "gpu_counts", "node_counts"):
            continue
        option = f"`--{declared[one.name].replace('_', '-')}`" if one.name in declared else "not used: a line says so"
        yield f"| `{one.name}` | {_MEANINGS.get(one.name, option)} |\n"
    for name, instead in sorted(IGNORED.items()):
        yield f"| `{name}` | not used: {instead} |\n"


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
