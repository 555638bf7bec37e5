"""Commands as a search prints them train to their end, as they stand, with the configuration that was found."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.harness.commands import PLAIN_CONFIG, ROOT, Command

SCRIPTS = ROOT / "tests" / "scripts" / "printed"
pytestmark = pytest.mark.torchrun


PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
"""The programs of this environment first, as in a shell where it is activated."""


def run(folder: Path, command: str, environ: Mapping[str, str] | None = None) -> str:
    """Run a command in a shell, as its user would, and return its output."""
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env={**os.environ, "PATH": PATH, **(environ or {})}, capture_output=True,
        text=True, input="", check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@dataclass(frozen=True, kw_only=True)
class Search:
    """A search, and what the command that it prints has to train with."""

    name: str
    folder: str
    """Folder of the repository that the search runs in a copy of."""
    words: str
    """What follows the method: options, script, arguments."""
    stage: int = 1
    """ZeRO stage, the only one to try."""
    micro_batch: int = 3
    """The only micro-batch to try."""
    rows: int | None = 3
    """Rows of the first input that the engine gets; None if it is not asked for forward passes."""
    ranks: int = 2
    is_always_run: bool = False
    """Whether it represents the others in the suite."""


EXAMPLES, PRINTED, FIRST_TRY = "examples/", "tests/scripts/printed", "tests/scripts/first_try"
TRAINER = "--output_dir out --report_to none --max_steps 6 --per_device_train_batch_size 4"
SEARCHES = (
    Search(name="a default of the script's option", folder=EXAMPLES + "gpt", stage=3,
           words="--cpu-ranks 2 train.py ds_config.json -- --steps 3 --layers 1"),
    Search(name="a launcher's command, the config in code", folder=EXAMPLES + "gpt",
           words="torchrun --nproc_per_node 2 train.py --steps 3 --layers 1"),
    Search(name="accelerate, a config file", folder=EXAMPLES + "accelerate",
           words="--cpu-ranks 2 --arg-mapping train_micro_batch_size_per_gpu=--batch-size train.py ds_config.json"
           " -- --config ds_config.json --batch-size 8 --samples 256"),
    Search(name="accelerate, a plugin in code", folder=EXAMPLES + "accelerate",
           words="torchrun --nproc_per_node 2 train.py --zero-stage 2 --batch-size 8 --samples 256"),
    Search(name="an engine behind a wrapper", folder=EXAMPLES + "core_api",
           words="--cpu-ranks 2 train.py ds_config.json"),
    Search(name="a DeepSpeedTrial", folder=EXAMPLES + "deepspeed_trial",
           words="--cpu-ranks 2 model_def:MyTrial ds_config.json --hparams hparams.yaml"),
    Search(name="an experiment of Determined", folder=EXAMPLES + "deepspeed_trial",
           words="--cpu-ranks 2 experiment.yaml ."),
    Search(name="the Trainer", folder=EXAMPLES + "huggingface",
           words="--cpu-ranks 2 train.py ds_config.json -- --deepspeed ds_config.json --output_dir out --do_train"
           " --max_steps 4 --samples 64"),
    Search(name="the Trainer, told to use the CPU", folder=EXAMPLES + "huggingface",
           words="--cpu-ranks 2 train.py ds_config.json -- --deepspeed ds_config.json --output_dir out --do_train"
           " --max_steps 4 --samples 64 --use_cpu"),
    Search(name="Lightning, a config by an option", folder=EXAMPLES + "lightning",
           words="--cpu-ranks 2 train.py ds_config.json -- --config ds_config.json --samples 200"),
    Search(name="Lightning, a launcher's command", folder=EXAMPLES + "lightning",
           words="torchrun --nproc_per_node 2 train.py --samples 200"),
    Search(name="a module", folder=EXAMPLES + "module",
           words="--cpu-ranks 2 -m trainer.train ds_config.json -- --deepspeed_config ds_config.json --steps 4"),
    Search(name="a pipeline", folder=EXAMPLES + "pipeline", stage=0, rows=None,
           words="--cpu-ranks 2 train.py ds_config.json -- --deepspeed_config ds_config.json --steps 4"),
    Search(name="DeepSpeed's own flags", folder=EXAMPLES + "plain", stage=2,
           words="--cpu-ranks 2 by_flag.py ds_config.json -- --deepspeed --deepspeed_config ds_config.json --steps 4"),
    Search(name="the config's path", folder=EXAMPLES + "plain", stage=3,
           words="--cpu-ranks 2 by_path.py ds_config.json -- --deepspeed ds_config.json --steps 4"),
    Search(name="a config in code, its batch size an option", folder=EXAMPLES + "plain", stage=2,
           words="--cpu-ranks 2 --arg-mapping train_micro_batch_size_per_gpu=--micro-batch in_code.py ds_config.json"
           " -- --steps 4"),
    Search(name="two engines", folder=EXAMPLES + "plain", stage=2,
           words="--cpu-ranks 2 two_engines.py ds_config.json -- --deepspeed_config ds_config.json --steps 4"),
    Search(name="everything in code", folder=PRINTED, words="torchrun --nproc_per_node 2 in_code.py"),
    Search(name="two rows a sample", folder=PRINTED, rows=6, words="deepspeed --num_gpus 2 views.py"),
    Search(name="an engine of the script's own class", folder=PRINTED, stage=0,
           words="torchrun --nproc_per_node 2 subclass.py"),
    Search(name="a scheduler of torch", folder=PRINTED, stage=0, words="torchrun --nproc_per_node 2 own_parts.py"),
    Search(name="settings that a run keeps", folder=PRINTED,
           words="torchrun --nproc_per_node 2 kept_settings.py runs/a settings.yaml"),
    Search(name="an optimizer that reads shapes", folder=PRINTED, stage=0,
           words="deepspeed --num_gpus 2 own_optimizer.py --deepspeed --deepspeed_config bare.json"),
    Search(name="a schedule of fixed length, on the CPU by an option", folder=PRINTED,
           words=f"deepspeed --num_gpus 2 trainer.py --deepspeed trainer.json --use_cpu {TRAINER}"),
    Search(name="the Trainer, a config of the autotuning tutorial", folder=PRINTED,
           words="deepspeed --autotuning run --num_nodes=1 --num_gpus=2 trainer.py --deepspeed tutorial.json"
           f" --use_cpu --gradient_accumulation_steps 1 {TRAINER}"),
    Search(name="accelerate launch", folder=PRINTED, ranks=1, is_always_run=True,
           words="accelerate launch --use_deepspeed --num_processes 1 --num_machines 1 --mixed_precision no"
           " --dynamo_backend no --zero_stage 2 --gradient_accumulation_steps 1 --deepspeed_config_file open.json"
           " backend.py"),
    Search(name="accelerate launch, a file of settings", folder=PRINTED,
           words="accelerate launch --config_file accelerate.yaml backend.py"),
    Search(name="settings of strings", folder=PRINTED, stage=2,
           words="--cpu-ranks 2 plain.py strings.json -- --deepspeed_config strings.json"),
    Search(name="an option for the batch size", folder=FIRST_TRY, ranks=1,
           words="torchrun --nproc_per_node 1 option.py"),
    Search(name="a constant", folder=FIRST_TRY, ranks=1, rows=None,
           words="--cpu-ranks 1 constant.py plain.json"),
    Search(name="accelerate that names no DeepSpeed", folder=FIRST_TRY,
           words="--cpu-ranks 2 accelerated.py plain.json"),
    Search(name="a Trainer that names no config", folder=FIRST_TRY,
           words="--cpu-ranks 2 trainer_plain.py plain.json -- out"),
    Search(name="a Trainer whose arguments are built twice", folder=FIRST_TRY, ranks=1,
           words="--cpu-ranks 1 trainer_twice.py twice.json -- out twice.json"),
    Search(name="a Trainer whose arguments are in a file", folder=FIRST_TRY, ranks=1,
           words="--cpu-ranks 1 python trainer_file.py trainer.yaml twice.json"),
    Search(name="a Trainer whose batch sizes are options of another name", folder=FIRST_TRY, ranks=1,
           words="--cpu-ranks 1 python trainer_clicked.py --train-batch-size 4 --deepspeed twice.json"),
    Search(name="an option that sets the stage", folder=FIRST_TRY, ranks=1,
           words="torchrun --nproc_per_node 1 staged.py --stage 3"),
    Search(name="a batch size that cannot change", folder=FIRST_TRY, ranks=1, micro_batch=2, rows=2,
           words="--cpu-ranks 1 fixed.py plain.json -- plain.json"),
    Search(name="an application of Hydra", folder=FIRST_TRY, ranks=1, words="--cpu-ranks 1 hydra_app.py"),
    Search(name="a function that Python Fire calls", folder=FIRST_TRY, ranks=1,
           words="torchrun --nproc_per_node 1 fired.py train"),
)  # fmt: skip
AUTO = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
SCHEDULE = {"warmup_min_lr": 0, "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": 48}
OPEN = {
    **AUTO,
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
    "zero_optimization": {"stage": 2},
}
FILES: dict[str, dict[str, Any]] = {
    "plain.json": PLAIN_CONFIG,
    "bare.json": {"train_micro_batch_size_per_gpu": 1},
    "twice.json": OPEN,
    "trainer.json": {**OPEN, "scheduler": {"type": "WarmupDecayLR", "params": SCHEDULE}},
    "tutorial.json": {
        "train_micro_batch_size_per_gpu": "auto",
        "fp16": {"enabled": False},
        "autotuning": {
            "enabled": True,
            "arg_mappings": {
                "train_micro_batch_size_per_gpu": "--per_device_train_batch_size",
                "gradient_accumulation_steps ": "--gradient_accumulation_steps",
            },
        },
    },
    "open.json": {
        **AUTO,
        "bf16": {"enabled": "auto"},
        "gradient_clipping": "auto",
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": "auto", "offload_optimizer": {"device": "auto"}},
    },
    "accelerate.yaml": {
        "compute_environment": "LOCAL_MACHINE",
        "deepspeed_config": {"deepspeed_config_file": "open.json", "zero3_init_flag": False},
        "distributed_type": "DEEPSPEED",
        "mixed_precision": "no",
        "num_machines": 1,
        "num_processes": 2,
    },
    "settings.yaml": {"batch_size": 4},
    "trainer.yaml": {
        "output_dir": "out",
        "per_device_train_batch_size": 4,
        "max_steps": 2,
        "learning_rate": 1e-3,
        "report_to": "none",
    },
    "strings.json": {
        **PLAIN_CONFIG,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": "false"},
        "fp16": {"enabled": "false"},
        "zero_optimization": {"stage": "2", "overlap_comm": "true", "reduce_bucket_size": "20000"},
    },
}
"""Name -> content; a YAML reader takes JSON, too."""

ALL = os.environ.get("OPTUNA_DSAT_PRINTED_COMMANDS") == "all"


@pytest.mark.parametrize(
    "search", [pytest.param(search, id=search.name) for search in SEARCHES if ALL or search.is_always_run]
)
def test_the_command_that_a_search_prints_trains_with_the_best_config(tmp_path: Path, search: Search) -> None:
    folder = tmp_path / "work"
    shutil.copytree(ROOT / search.folder, folder, ignore=shutil.ignore_patterns("__pycache__", "sitecustomize.py"))
    for name, content in FILES.items():
        folder.joinpath(name).write_text(json.dumps(content))
    options = (
        *("--zero-stages", str(search.stage), "--fix", f"train_micro_batch_size_per_gpu={search.micro_batch}"),
        *("--no-tune", "offload_optimizer", "--no-tune", "offload_param", "--no-enqueue-user-config"),
        *("--max-trials", "1", "--confirm", "0", "--start-profile-step", "2", "--end-profile-step", "3"),
    )
    tuned = Command(folder, "random", *options, *shlex.split(search.words), environ={"PATH": PATH})
    output, _ = tuned.finish()
    shown = output.partition("Train with it:\n")[2].splitlines()
    command = textwrap.dedent("\n".join(line for line in shown if line.startswith("  ")))
    [path] = folder.rglob("best_ds_config.json")
    best = json.loads(path.read_text())
    assert best["train_micro_batch_size_per_gpu"] == search.micro_batch
    assert best.get("zero_optimization", {}).get("stage", 0) == search.stage

    notes = tmp_path / "notes"
    notes.mkdir()
    run(folder, command, {"ENGINE_NOTES": str(notes), "PYTHONPATH": str(SCRIPTS)})
    for file in notes.iterdir():
        notes_of_rank = [json.loads(line) for line in file.read_text().splitlines()]
        engine, inputs = notes_of_rank[0], [facts for facts in notes_of_rank if "rows" in facts]
        assert engine["stage"] == search.stage, file.name
        assert engine["micro_batch"] == search.micro_batch, file.name
        assert engine["accumulation"] == best.get("gradient_accumulation_steps", engine["accumulation"]), file.name
        batch = engine["micro_batch"] * engine["accumulation"] * engine["ranks"]
        assert batch == best.get("train_batch_size", batch), file.name
        assert search.rows is None or inputs[0] == {"rows": search.rows}, file.name
    assert len(list(notes.iterdir())) == search.ranks
