"""Searches with scripts in environments of their own: DeepSpeed from 0.14.5 on, and nothing of optuna-dsat.

``make .cache/environments/deepspeed-VERSION/.installed`` makes such an environment. Here one search in each that is
there; ``make test-versions`` makes them all, runs every job in each and writes the table of the documentation.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from optuna_dsat.script.interpreter import examined
from tests.harness.commands import ROOT, Command

pytestmark = pytest.mark.torchrun

ENVIRONMENTS = sorted(path.parent for path in (ROOT / ".cache" / "environments").glob("*/.installed"))
EVERYTHING = os.environ.get("OPTUNA_DSAT_VERSIONS") == "all"
RESULTS = ROOT / ".cache" / "environments" / "results"
BUDGET = "--max-trials 1 --confirm 0 --no-enqueue-user-config --quiet"
OFFLOAD = {
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "zero_allow_untested_optimizer": True,
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """A search of an example."""

    name: str
    example: str
    words: str
    """Method, options and command; ``{bin}`` is the environment's folder of programs."""
    config: dict[str, object] | None = None
    """Changes of the example's config."""
    needs: str = "deepspeed"
    """Package that the environment must have."""
    is_always_run: bool = False


GPT = "{bin}/torchrun --nproc_per_node 2 train.py --deepspeed_config ds_config.json --steps 50 --layers 1"
JOBS = (
    Job(name="random, ZeRO 1", example="gpt", words=f"random --zero-stages 1 {BUDGET} {GPT}", is_always_run=True),
    Job(name="asha, ZeRO 2", example="gpt", words=f"asha --zero-stages 2 {BUDGET} {GPT}"),
    Job(name="binary, ZeRO 3", example="gpt", words=f"binary --zero-stages 3 {BUDGET} {GPT}"),
    Job(name="guided, ZeRO 0", example="gpt", words=f"guided --zero-stages 0 {BUDGET} {GPT}"),
    Job(name="offload", example="gpt", words=f"random --zero-stages 2 {BUDGET} {GPT}", config=OFFLOAD),
    Job(
        name="pipeline",
        example="pipeline",
        words=f"random --zero-stages 1 {BUDGET} {{bin}}/deepspeed --num_gpus 2 train.py "
        "--deepspeed_config ds_config.json",
    ),
    Job(
        name="DeepSpeedTrial",
        example="deepspeed_trial",
        words=f"random --zero-stages 1 {BUDGET} --cpu-ranks 2 --python {{bin}}/python "
        "model_def:MyTrial ds_config.json --hparams hparams.yaml",
        needs="yaml",
    ),
    Job(
        name="Hugging Face",
        example="huggingface",
        words=f"random --zero-stages 1 {BUDGET} {{bin}}/torchrun --nproc_per_node 2 train.py "
        "--deepspeed ds_config.json --output_dir out --do_train --max_steps 50 --samples 64 --use_cpu",
        needs="transformers",
    ),
)


def has(environment: Path, package: str) -> bool:
    return any(environment.glob(f"lib/python3*/site-packages/{package}"))


def contents(environment: Path) -> dict[str, str]:
    """Return the files of an environment with digests; bytecode, which any import may add, is left out."""
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for folder in (environment / "bin", *environment.glob("lib/python3*/site-packages/deepspeed"))
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    } | {str(path): "" for path in environment.glob("lib/python3*/site-packages/*")}


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=lambda path: path.name)
@pytest.mark.parametrize("job", [job for job in JOBS if EVERYTHING or job.is_always_run], ids=lambda job: job.name)
def test_a_script_of_another_environment_is_tuned(tmp_path: Path, job: Job, environment: Path) -> None:
    if not has(environment, job.needs):
        pytest.skip(f"{environment.name} has no {job.needs}")
    before = contents(environment)
    folder = tmp_path / job.example
    shutil.copytree(ROOT / "examples" / job.example, folder)
    if job.config is not None:
        path = folder / "ds_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **job.config}))
    words = shlex.split(job.words.format(bin=environment / "bin"))
    storage = f"sqlite:///{tmp_path}/study.db"
    options = ["--study", "s", "--storage", storage, "--output-dir", str(tmp_path / "out")]
    # Versions of DeepSpeed have different operators of the same name, none of which is needed on CPUs.
    extensions = {"TORCH_EXTENSIONS_DIR": str(environment.parent / f"extensions-{environment.name}")}
    compilers = {} if EVERYTHING else {"CXX": "none"}
    command = Command(folder, words[0], *options, *words[1:], environ={**extensions, **compilers})
    result = "failed"
    try:
        _, errors = command.finish()
        result = "warm" if "plain torchrun" not in errors else "torchrun"
    finally:
        if EVERYTHING:
            RESULTS.mkdir(exist_ok=True)
            versions = examined(str(environment / "bin" / "python")).all_versions
            record = {"job": job.name, "result": result, **versions}
            (RESULTS / f"{environment.name}-{job.name}.json").write_text(json.dumps(record))
    metrics = json.loads((tmp_path / "out" / "s" / "best_ds_metrics.json").read_text())
    assert metrics["metrics"]["throughput"] > 0
    assert contents(environment) == before
    assert result == "warm", errors
