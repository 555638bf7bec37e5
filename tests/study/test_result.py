from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest

from optuna_dsat.config.space_builder import SpaceRequest, build_space
from optuna_dsat.escape import shell
from optuna_dsat.runtime.agent.preload import Preload
from optuna_dsat.runtime.events import EngineReady
from optuna_dsat.script.batch_rule import BatchRule
from optuna_dsat.script.settings_file import SettingsCopy
from optuna_dsat.study.command import cluster_training_command, command_to_train, training_command
from optuna_dsat.study.config_changes import complete_config
from optuna_dsat.study.confirm.rounds import RoundLaunch, Rounds
from optuna_dsat.study.result import learning_rate_advice, write_settings
from optuna_dsat.study.spec import StudySpec, make_spec
from optuna_dsat.study.stored import StoredStudy
from optuna_dsat.trials import attributes
from tests.harness.small_model import profiled_of
from tests.harness.studies import spec_of

BEST = Path("/out/s/best_ds_config.json")
STORAGE = "sqlite:////out/study.db"


@pytest.fixture(autouse=True)
def _shell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the user's shell in the project's folder, with this environment's programs on its path."""
    stay_in("/project", monkeypatch)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:128")


def stay_in(folder: str | Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "_left", [Path(folder)])


def spec(*, is_module: bool = False, device: str = "cuda", typed: str = "", **script: Any) -> StudySpec:
    plain = {
        "script": "package.train" if is_module else "/project/train.py",
        "is_module": is_module,
        "args": ("--deepspeed_config", "ds.json"),
        "cwd": "/project",
        "config_path": "/project/ds.json",
    }
    result = make_spec(
        name="s", method="random", script=plain, ds_config={}, device=device, slots_per_trial=4, output_dir="/out"
    )
    changed = result.script.model_copy(update=script)
    return result.model_copy(update={"script": changed, **({"train_launcher": typed} if typed else {})})


@pytest.mark.parametrize(
    ("option", "end"),
    [
        ("batch_size=", f"run.yaml batch_size=8 trainer.deepspeed={BEST}"),
        ("--batch_size", "run.yaml --batch_size 8"),
    ],
)
def test_a_settings_file_whose_keys_arguments_override_is_told_the_config(
    tmp_path: Path, option: str, end: str
) -> None:
    own = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}
    (tmp_path / "ds.json").write_text(json.dumps(own))
    (tmp_path / "run.yaml").write_text("batch_size: 2\ndata: inputs\ntrainer: {deepspeed: ds.json}\n")
    (tmp_path / "inputs").mkdir()  # a copy of the file elsewhere may not find it
    result = spec(
        args=("run.yaml",),
        cwd=str(tmp_path),
        config_path=str(tmp_path / "ds.json"),
        arg_mappings={"train_micro_batch_size_per_gpu": option},
    )
    command, names_config = training_command(result, {**own, "train_micro_batch_size_per_gpu": 8}, BEST)
    assert names_config == option.endswith("=")
    assert set(command.partition("train.py ")[2].split()) == set(end.split())


def test_a_script_that_reads_its_rank_as_under_srun_is_trained_by_our_command_on_nodes_too(tmp_path: Path) -> None:
    as_srun = spec(environment={"SLURM_PROCID": "$RANK", "A": "1"})
    command = command_to_train(as_srun, {MICRO: 8}, profiled=profiled_of(), host_threads=None, storage=STORAGE)
    assert command == f"optuna-dsat train s --storage {STORAGE}"
    nodes = spec_of(tmp_path, on="slurm", nodes_per_trial=2, slots_per_trial=4)
    srun, inner = cluster_training_command(nodes, settings=["SLURM_PROCID=$RANK", "A=1"], words=["-m", "x"]).split(
        " bash -c "
    )
    assert "A=1" in srun.split()
    assert "SLURM" not in srun, "torchrun's node would be the last to know"
    script = shlex.split(f"bash -c {inner}")[2]
    assert "env 'SLURM_PROCID=$RANK' " in script
    assert " --node_rank $SLURM_PROCID " in script


TORCHRUN, DEEPSPEED = "torchrun --nproc_per_node 4", "deepspeed --num_gpus 4"
LAUNCH = "python -m torch.distributed.launch --nproc_per_node 4"
CONFIG = f"--deepspeed_config {BEST}"


@pytest.mark.parametrize(
    ("own", "facts", "command"),
    [
        # as its options expect
        ({}, {}, f"{TORCHRUN} /project/train.py {CONFIG}"),
        ({"is_module": True}, {}, f"{TORCHRUN} -m package.train {CONFIG}"),
        ({}, {"takes_local_rank": "--local_rank"}, f"{DEEPSPEED} /project/train.py {CONFIG}"),
        (*({"is_module": True}, {"takes_local_rank": "--local_rank"}), f"{DEEPSPEED} --module package.train {CONFIG}"),
        ({}, {"takes_local_rank": "--local-rank"}, f"{LAUNCH} /project/train.py {CONFIG}"),
        # with the launcher that was typed
        ({"typed": "torchrun"}, {"takes_local_rank": "--local_rank"}, f"{TORCHRUN} /project/train.py {CONFIG}"),
        ({"typed": "torchrun"}, {"takes_local_rank": "--local-rank"}, f"{TORCHRUN} /project/train.py {CONFIG}"),
        ({"typed": "deepspeed"}, {}, f"{DEEPSPEED} --no_local_rank /project/train.py {CONFIG}"),
        ({"typed": "deepspeed"}, {"takes_local_rank": "--local_rank"}, f"{DEEPSPEED} /project/train.py {CONFIG}"),
        # without one, where the script started its ranks
        ({}, {"takes_local_rank": True, "starts_ranks": True}, f"python /project/train.py {CONFIG}"),
        (*({"is_module": True}, {"starts_ranks": True}), f"python -m package.train {CONFIG}"),
        # past a separator, where torchrun takes an option of the script for two of its own
        ({"args": ("--run", "a")}, {}, f"{TORCHRUN} -- /project/train.py --run a"),
        ({"args": ("--log=b",)}, {}, f"{TORCHRUN} -- /project/train.py --log=b"),
        ({"args": ("--run_name", "a", "--log-dir", "b", "--tee")}, {}, f"{TORCHRUN} /project/train.py --run_name a"),
        # the best config takes the place of a name
        (
            *({"args": ("--deepspeed", "zero2", "--lr", "1"), "config_path": ""}, {"config_option": "--deepspeed"}),
            f"{TORCHRUN} /project/train.py --deepspeed {BEST} --lr 1",
        ),
    ],
)
def test_the_command_starts_the_script_as_it_expects(own: dict[str, Any], facts: dict[str, Any], command: str) -> None:
    result, names_config = training_command(spec(**own), {}, BEST, profiled=profiled_of(**facts))
    assert result.startswith(command)
    assert names_config == (str(BEST) in command)
    assert result == command or not names_config


def test_the_launcher_of_deepspeed_gives_ranks_their_own_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    bound, profiled = {"optuna_dsat": {"bind_cores": True}}, profiled_of(takes_local_rank="--local_rank")
    made = {}
    for found in (None, "/usr/bin/numactl"):
        monkeypatch.setattr("shutil.which", lambda *_, found=found, **__: found)
        own = spec().model_copy(update={"ds_config": bound})
        made[found] = command_to_train(own, bound, profiled=profiled, host_threads=None, storage="sqlite:///s.db")
    assert "optuna-dsat train s" in made[None]
    assert "deepspeed --num_gpus 4 --bind_cores_to_rank /project/train.py" in made["/usr/bin/numactl"]


@pytest.mark.parametrize(
    ("source", "start"),
    [
        ("import torch.multiprocessing as mp\nmp.spawn(print, nprocs=4)\n", "torchrun --nproc_per_node 4"),  # or may
        ("import os\nos.environ['MASTER_PORT'] = '29500'\n", "deepspeed --num_gpus 4 --no_local_rank"),
        ("import os\nprint(os.environ['MASTER_PORT'])\n", "torchrun --nproc_per_node 4"),
    ],
)
def test_a_script_that_says_where_its_ranks_meet_is_started_so_that_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, start: str
) -> None:
    stay_in(tmp_path, monkeypatch)
    (tmp_path / "train.py").write_text("import setup_ranks\n")
    (tmp_path / "setup_ranks.py").write_text(source)
    command, _ = training_command(spec(script=str(tmp_path / "train.py"), cwd=str(tmp_path)), {}, BEST)
    assert command.startswith(f"{start} {tmp_path}/train.py ")


def test_an_argument_that_the_script_does_not_read_names_no_config() -> None:
    command, names_config = training_command(
        spec(), {}, BEST, profiled=profiled_of(config_in_code=True, config_option="--deepspeed_config")
    )
    assert command.endswith(f"--deepspeed_config {BEST}")
    assert not names_config


def test_a_command_runs_in_its_folder_with_the_programs_of_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stay_in(tmp_path, monkeypatch)
    monkeypatch.setenv("PATH", "/usr/bin")
    command, _ = training_command(spec(), {}, BEST)
    torchrun = Path(sys.executable).with_name("torchrun")
    assert command == f"env -C /project {torchrun} --nproc_per_node 4 /project/train.py --deepspeed_config {BEST}"


MICRO = "train_micro_batch_size_per_gpu"
LOADER = BatchRule(kind="loader", own=4, file="/project/train.py", line=7)
OPEN = {"zero_optimization.stage": [1, "auto"]}


@pytest.mark.parametrize(
    ("facts", "own"),
    [
        pytest.param({}, True, id="the script reads the file"),
        pytest.param({"config_in_code": True}, False, id="its code names a file"),
        pytest.param({"joins_ranks": True}, False, id="accelerate selects no backend for its ranks"),
        pytest.param({"batch": LOADER}, False, id="the data loader sets the batch size"),
        pytest.param({"batch": BatchRule(kind="loader", own=8)}, True, id="the data loader's batch size is the best"),
        pytest.param({"batch": BatchRule(kind="option", own=4, option="--batch")}, True, id="an option sets it"),
        pytest.param({"config_differences": {"zero_optimization.stage": [1, 0]}}, False, id="code sets the stage"),
        pytest.param({"config_differences": {"zero_optimization.stage": [2, 0]}}, True, id="to the best one"),
        pytest.param({"config_differences": OPEN, "preload": Preload(modules=("accelerate",))}, True, id="if open"),
        pytest.param({"config_differences": OPEN}, False, id="perhaps also if it was not open"),
        pytest.param({"config_differences": {MICRO: [4, 8]}, "batch": BatchRule(kind="held", own=8)}, True, id="held"),
        pytest.param({"config_differences": {"gradient_accumulation_steps": [4, 1]}}, False, id="code accumulates"),
        pytest.param({"config_differences": {"autotuning.fast": [True, None]}}, True, id="no config keeps autotuning"),
        pytest.param(
            {"bf16_argument": "precision in Fabric", "precision": "fp16"}, False, id="code sets the precision"
        ),
        pytest.param({"bf16_argument": "precision in Fabric", "precision": "bf16"}, True, id="to bf16, as the best"),
    ],
)
def test_the_scripts_own_command_is_shown_where_it_trains_with_all_of_the_config(
    facts: dict[str, Any], own: bool
) -> None:
    best = {MICRO: 8, "gradient_accumulation_steps": 1, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    profiled = profiled_of(**facts)
    command = command_to_train(spec(), best, profiled=profiled, host_threads=None, storage=STORAGE)
    ours = f"optuna-dsat train s --storage {STORAGE}"
    assert command == (f"torchrun --nproc_per_node 4 /project/train.py --deepspeed_config {BEST}" if own else ours)
    advice = profiled.advice(best)
    needs_edits = facts.get("batch") is LOADER or "joins_ranks" in facts or facts.get("precision") == "fp16"
    assert advice.startswith("Without `optuna-dsat train`") == needs_edits, advice
    unused = command_to_train(spec(unused_micro_batch=1), best, profiled=profiled, host_threads=None, storage=STORAGE)
    assert unused == ours, "the script may need its own number in the file"


def test_the_file_for_all_engines_has_nothing_that_the_script_sets_for_one_of_them() -> None:
    """The schedule of a learning-rate finder, the script's first engine, was in the config of its training."""
    code = {"scheduler.type": ["LRRangeTest", None], "optimizer.lr": [1e-4, 1e-3], "zero_optimization.stage": [2, 0]}
    best = {"zero_optimization": {"stage": 2}, "scheduler": {"type": "LRRangeTest"}, "optimizer": {"lr": 1e-4}}
    profiled = profiled_of(config_differences=code)
    in_file = profiled.as_in_file(spec(), best, {MICRO: 8, **best})
    assert in_file == {"zero_optimization": {"stage": 2}, "optimizer": {"lr": 1e-3}}
    in_code = profiled_of(config_differences=code, config_in_code=True)
    assert in_code.as_in_file(spec(), best, {MICRO: 8, **best}) == best


@pytest.mark.parametrize(("stages", "loads"), [((1, 0), False), ((1, 2), True), ((2, 3), False), ((3, 3), True)])
def test_a_checkpoint_that_the_best_config_cannot_load_is_named(stages: tuple[int, int], loads: bool) -> None:
    own, best = ({MICRO: 8, "zero_optimization": {"stage": stage}} for stage in stages)
    request = spec().model_copy(update={"ds_config": own})
    assert profiled_of().checkpoint_advice(request, [best]) == ""
    advice = profiled_of(checkpoint="runs/a").checkpoint_advice(request, [own, best])
    assert (advice == "") == loads
    assert loads or f"runs/a. DeepSpeed does not load a checkpoint of ZeRO {stages[0]}" in advice


def test_an_allocator_that_the_user_does_not_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    command, _ = training_command(spec(), {}, BEST)
    assert command.startswith("env PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True torchrun ")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")
    command, _ = training_command(spec(), {}, BEST)
    assert command.startswith("torchrun ")


def test_on_the_cpu_deepspeed_is_told_so() -> None:
    command, _ = training_command(spec(device="cpu"), {}, BEST)
    assert shlex.split(command)[:3] == ["env", "DS_ACCELERATOR=cpu", "LOCAL_SIZE=4"]


@pytest.mark.parametrize(("device", "start"), [("cuda", "env OMP_NUM_THREADS=6 torchrun"), ("cpu", "env DS_")])
def test_training_computes_with_the_threads_that_were_measured(device: str, start: str) -> None:
    command, _ = training_command(spec(device=device), {}, BEST, host_threads=6)
    assert command.startswith(start)
    assert "OMP_NUM_THREADS=6" in shlex.split(command)


@pytest.mark.parametrize(
    ("optimizer", "factor"),
    [
        ({"type": "AdamW", "params": {"lr": 1e-3}}, "of 0.001 by 2 (the square root"),
        ({"type": "SGD", "params": {"lr": 0.1}}, "of 0.1 by 4 (the ratio"),
        ({"type": "AdamW", "params": {"lr": "auto"}}, "rate by 2 (the square root"),
        ({}, "or by 4 (the ratio"),
    ],
)
def test_a_changed_global_batch_suggests_a_learning_rate(optimizer: dict[str, Any], factor: str) -> None:
    advice = learning_rate_advice({"optimizer": optimizer}, batch=64, user_batch=16)
    assert advice is not None
    assert factor in advice
    assert "from 16 to 64" in advice
    assert advice.endswith("Keep the batch with --train-batch-size 16.")
    chosen = learning_rate_advice({"optimizer": optimizer}, batch=64, user_batch=16, is_chosen=True)
    assert chosen == advice.removesuffix(" Keep the batch with --train-batch-size 16.")
    assert learning_rate_advice({"optimizer": optimizer}, batch=16, user_batch=16) is None
    assert "Adam" not in str(learning_rate_advice({}, batch=64, user_batch=16, measured_with="SGD"))


def test_a_deepspeed_config_in_yaml_that_the_script_reads_is_in_the_command(tmp_path: Path) -> None:
    file = tmp_path / "ds.yml"
    file.write_text("train_micro_batch_size_per_gpu: 4\nzero_optimization: {stage: 1}\n")
    own = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}}
    source = {"kind": "setting", "file": str(file), "key": "train_micro_batch_size_per_gpu", "own": 4, "scale": 1}
    result = make_spec(
        name="s", method="random", ds_config=own, device="cuda", slots_per_trial=4, output_dir=str(tmp_path),
        script={
            "script": "/project/train.py", "args": (f"--config={file}",), "cwd": "/project", "config_path": "",
            "batch_source": source,
        },
    )  # fmt: skip
    command, names_config = training_command(result, {**own, "train_micro_batch_size_per_gpu": 8}, tmp_path / BEST.name)
    assert names_config
    assert command.endswith(f"/project/train.py --config={tmp_path}/best_ds.yml")


@pytest.mark.parametrize(
    ("optimizer", "device", "allowed"), [(None, "cpu", False), (None, None, None), ({"type": "AdamW"}, "cpu", None)]
)
def test_the_best_config_allows_the_scripts_own_optimizer_under_offload_as_its_launch_did(
    optimizer: dict[str, Any] | None, device: str | None, allowed: bool | None
) -> None:
    own: dict[str, Any] = {"train_micro_batch_size_per_gpu": 4} | ({"optimizer": optimizer} if optimizer else {})
    zero = {"stage": 1, **({"offload_optimizer": {"device": device}} if device else {})}
    trial = optuna.trial.create_trial(value=1.0, user_attrs={"config": {**own, "zero_optimization": zero}})
    space = build_space(SpaceRequest(ds_config=own, zero_stages=(1, 2)))
    assert complete_config(trial, slots=2, space=space).get("zero_force_ds_cpu_optimizer") is allowed


@pytest.mark.parametrize(("key", "mode"), [("${OPTUNA_DSAT_SECRET_TRACKER_KEY}", 0o600), ("none", 0o644)])
def test_a_copy_with_the_value_of_a_reference_is_read_by_nobody_else(tmp_path: Path, key: str, mode: int) -> None:
    copy = SettingsCopy(original=Path("ds.yml"), path=tmp_path / "best_ds.yml", text="tracker: {team: blue}\n")
    write_settings(copy, {"tracker": {"key": key}})
    assert copy.path.read_text() == copy.text
    assert copy.path.stat().st_mode & 0o777 == mode


def test_the_command_for_ray_names_the_interpreter_that_has_the_package(tmp_path: Path) -> None:
    command = cluster_training_command(spec_of(tmp_path, on="ray"), settings=["A=1"], words=["train.py"])
    assert shlex.split(command)[3:7] == ["A=1", sys.executable, "-m", "optuna_dsat.launch.places.ray_train"]


LR = "optimizer.params.lr"


def test_settings_that_the_script_computes_from_its_batch_are_those_of_the_trials_launch() -> None:
    """It was: the learning rate of the profile launch, at micro-batch 1, as the user's and in the exported config."""
    profiled = profiled_of(
        config_differences={LR: [0.1, 1.0], "seed": [1, 2], "zero_optimization.stage": [0, 2]}, config_in_code=True
    )
    ready = EngineReady(
        rank=0, time=0.0, zero_stage=0, train_batch_size=8, train_micro_batch_size_per_gpu=8, pipeline=False,
        gradient_accumulation_steps=1, data_parallel_size=1, device="cpu",
        config_differences={LR: [0.8, 1.0], "seed": [1, 2], "zero_optimization.stage": [1, 2], "other": [1, 2]},
    )  # fmt: skip
    assert profiled.values_at_batch(ready) == {LR: 0.8}
    assert profiled.values_at_batch(None) == {}
    attrs: list[dict[str, Any]] = [{attributes.SCRIPT_VALUES: {LR: 0.8}}, {}]
    searched, continued = (optuna.trial.create_trial(value=1.0, user_attrs=each) for each in attrs)
    searched.number, continued.number = 0, 1
    launch = RoundLaunch(
        round=1, number=1, value=1.0, low=1.0, high=1.0, metrics={}, steps=5, outcome="measured", message="",
        script_values={LR: 0.4},
    )  # fmt: skip
    record: Any = None
    study = StoredStudy(
        record=record, stored_spec=spec(), spec=spec(), trials=(searched, continued), profiled=profiled,
        attributes={attributes.CONFIRMATION: Rounds(launches=(launch,)).to_json()},
    )  # fmt: skip
    config: dict[str, Any] = {"optimizer": {"params": {"lr": 0.1}}}
    rates = [study.at_batch(config, number)["optimizer"]["params"]["lr"] for number in (0, 1, 2)]
    assert rates == [0.8, 0.4, 0.1]
    in_file = {"optimizer": {"params": {"lr": 1.0}}}
    assert study.at_batch(in_file, 0) == in_file, "which the script scales again"
    steps = "scheduler.params.total_num_steps"
    config = {**config, "optimizer": {"type": "Adam"}, "scheduler": {"params": {"total_num_steps": 10}}}
    advice = str(
        learning_rate_advice(config, batch=16, user_batch=4, computed=({LR: 0.1, steps: 40}, {LR: 0.4, steps: 10}))
    )
    assert "learning rate goes from 0.1 to 0.4. Consider 2 (" in advice
    assert "change" not in advice, "which the script has done"
    assert f"change {steps} from 10 to 2" in str(learning_rate_advice(config, batch=16, user_batch=4))
