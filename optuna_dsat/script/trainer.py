"""Trainers that set batch sizes themselves, as detected in the user's script: they follow each configuration.

The Hugging Face Trainer takes its batch sizes from ``TrainingArguments`` and rejects a DeepSpeed config with others.
The runtime sets them in every launch. This module serves the tuner: the values of ``"auto"`` in the user's config, and
the options of the command that trains with the best config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from optuna_dsat.config import ds_config
from optuna_dsat.config.record import Record
from optuna_dsat.runtime.adapt.parsers import names_training_batch
from optuna_dsat.runtime.adapt.trainers import BF16_ENABLED, SCHEDULE_LENGTH_KEYS, TRAINER_FIELDS, TRAINER_PRECISION
from optuna_dsat.runtime.events import BatchSourcesFound, TrainerFound
from optuna_dsat.runtime.overlay import is_bf16
from optuna_dsat.script.batch_rule import guesses

_FIELDS = {
    "transformers": TRAINER_FIELDS,
    "lightning": {ds_config.GRADIENT_ACCUMULATION: "accumulate_grad_batches"},
}
"""Framework -> key of the DeepSpeed config -> name of the trainer's argument."""

_IN_BF16: Mapping[str, Mapping[str, Any]] = {
    "transformers": TRAINER_PRECISION,
    "lightning": {"precision": '"bf16-mixed"'},
}
"""Framework -> arguments of its trainer that agree with a config in bf16."""

_NAMES = {
    "transformers": ("the Hugging Face Trainer", "TrainingArguments"),
    "lightning": ("Lightning's Trainer", "Trainer"),
}
"""Framework -> display name of its trainer, and the class that takes its arguments."""


@dataclass(frozen=True, kw_only=True)
class ScriptTrainer(Record):
    """A trainer that ran in the profile launch."""

    framework: str
    """``transformers`` or ``lightning``."""
    micro_batch: int | None
    """Samples per rank and forward pass that the script itself sets; None if not observed."""
    gradient_accumulation_steps: int | None
    """The number that the script itself sets; None if not observed."""
    options: Mapping[str, str]
    """Key of the DeepSpeed config -> equivalent option of the script; without keys that the code sets."""
    source: Mapping[str, Any] = field(default_factory=dict)
    """Number in a settings file that sets the micro-batch, as in ``BatchRule.source``; empty without one."""

    @classmethod
    def from_event(cls, event: TrainerFound) -> ScriptTrainer:
        """Build from a rank's event."""
        return cls(
            framework=event.framework,
            micro_batch=event.micro_batch,
            gradient_accumulation_steps=event.gradient_accumulation_steps,
            options=dict(event.options),
        )

    def announcement(self) -> str:
        """Return one line for the user: which settings follow each configuration, and their current values."""
        trainer, _ = _NAMES[self.framework]
        parts = []
        for key, its_name in _FIELDS[self.framework].items():
            value, name = self.script_value(key), self.options.get(key, its_name)
            if key == ds_config.MICRO_BATCH and self.source:
                name = f"{self.source['key']} in {Path(self.source['file']).name}"
            parts.append(name + ("" if value is None else f" (now {value})"))
        follow = "follow" if len(parts) > 1 else "follows"
        return f"The script trains with {trainer}: {' and '.join(parts)} {follow} each configuration."

    def advice(self, config: Mapping[str, Any], *, settings_written: bool = False, precision: str = "") -> str:
        """Return what to change in the script before it trains with a config; empty if its options set everything.

        ``precision`` is the precision of the script's engine without a search; empty if unknown.
        """
        fields = {
            key: field
            for key, field in _FIELDS[self.framework].items()
            if key not in self.options and config[key] != self.script_value(key)
        }
        in_file = fields.pop(ds_config.MICRO_BATCH, None) if self.source else None
        if ds_config.GRADIENT_ACCUMULATION in fields and ds_config.TRAIN_BATCH in self.options:
            fields = {}
        values = {field: config[key] for key, field in fields.items()}
        if is_bf16(config) and precision in ("fp16", "fp32") and BF16_ENABLED not in self.options:
            values |= _IN_BF16[self.framework]
        settings = " and ".join(f"{field}={value}" for field, value in values.items())
        places = [f"{settings} in the script's {_NAMES[self.framework][1]}"] if values else []
        if in_file is not None and not settings_written:
            size = config[ds_config.MICRO_BATCH]
            places.insert(0, f"{self.source['key']} in {self.source['file']} to {size}")
        return f"Set {' and '.join(places)}: it has to agree with the config." if places else ""

    def trainable(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``config`` as the trainer accepts it.

        Lightning rejects a config with gradient accumulation steps. Hugging Face compares the schedule lengths with the
        lengths that it computes from its batch sizes: if these differ from the script's, the lengths become ``"auto"``.
        """
        refused = ds_config.GRADIENT_ACCUMULATION if self.framework == "lightning" else None
        result = {key: value for key, value in config.items() if key != refused}
        is_scripts = all(config.get(key) == self.script_value(key) for key in _FIELDS[self.framework])
        scheduler = config.get("scheduler") or {}
        if self.framework == "transformers" and not is_scripts and isinstance(scheduler.get("params"), Mapping):
            computed = {key: ds_config.AUTO for key in SCHEDULE_LENGTH_KEYS if key in scheduler["params"]}
            result["scheduler"] = {**scheduler, "params": {**scheduler["params"], **computed}}
        return result

    def script_value(self, key: str) -> int | None:
        """Return the micro-batch or the accumulation steps that the script itself sets; None if not observed."""
        return self.micro_batch if key == ds_config.MICRO_BATCH else self.gradient_accumulation_steps

    def proof_steps(self) -> tuple[int, int | None]:
        """Return the accumulation steps of a launch that verifies ``options``, and the script's own value there."""
        steps = self.gradient_accumulation_steps
        asked = 2 if steps == 1 and ds_config.GRADIENT_ACCUMULATION in self.options else 1
        follows = not {ds_config.GRADIENT_ACCUMULATION, ds_config.TRAIN_BATCH}.isdisjoint(self.options)
        return asked, asked if follows else steps


def trainer_guesses(trainer: ScriptTrainer, sources: BatchSourcesFound, *, ranks: int) -> list[ScriptTrainer]:
    """Return variants of a trainer with candidate sources of its batch sizes, likeliest first.

    Candidates are options of the script's own parser, under any name, whose value equals the trainer's: for the
    micro-batch, optionally combined with the accumulation steps or with the global batch from which the script computes
    them. Numbers in settings files that the script read come last, for the micro-batch only.
    """
    rows, steps = trainer.micro_batch, trainer.gradient_accumulation_steps
    if trainer.framework != "transformers" or ds_config.MICRO_BATCH in trainer.options or rows is None or steps is None:
        return []
    rules = guesses(sources, fed=rows, ranks=1)
    sizes = [rule.option for rule in rules if names_training_batch(rule.option)]
    settings = [rule for rule in rules if rule.kind == "setting" and names_training_batch(rule.key)]
    total = rows * steps * ranks
    companions = [
        *({ds_config.GRADIENT_ACCUMULATION: name} for name, value in sources.options.items()
          if value == steps and "accum" in name.lower()),
        *({ds_config.TRAIN_BATCH: name} for name, value in sources.options.items()
          if value == total != rows and names_training_batch(name)),
    ]  # fmt: skip
    options = [{ds_config.MICRO_BATCH: size, **more} for size in sizes for more in (*companions[:1], {})]
    return [
        *(replace(trainer, options=option) for option in options),
        *(replace(trainer, source=rule.source(ranks=1)) for rule in settings),
    ]
