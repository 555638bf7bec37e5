from __future__ import annotations

import json
import site
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.prove_gpu import __main__ as command
from benchmarks.prove_gpu import checks, machine, pack
from benchmarks.prove_gpu.context import Context
from benchmarks.prove_gpu.filling import next_size, size_for
from benchmarks.prove_gpu.proof import (
    MOST_BEGINNINGS,
    ROOT,
    STAND_IN_NOTE,
    Check,
    NotRunError,
    PartOverError,
    Proof,
    Status,
    Verdict,
    page,
    run_part,
)
from optuna_dsat.launch.machine.devices import Device, Devices

MACHINE = {
    "gpus": ["NVIDIA H200"],
    "driver": "580.1",
    "cuda": "13.0",
    "capability": "9.0",
    "memory_bytes": 139 * 2**30,
    "host_memory_bytes": 128 * 2**30,
    "cores": 16,
    "stand_in": False,
    "versions": {"torch": "2.11.0"},
}
DEVICES = Devices(
    kind="cuda",
    devices=(Device(index=0, visible_id="0", name="NVIDIA H200", memory_bytes=139 * 2**30),),
    host_memory_bytes=128 * 2**30,
)
PROVEN = Verdict(status=Status.PROVEN, why="it did")


class Clock:
    """Time that passes only where a check says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def check(
    name: str, run: Callable[[Any], Verdict] = lambda _: PROVEN, *, needs_s: float = 1, values: bool = False
) -> Any:
    return Check(name=name, asked=f"{name} is shown.", run=run, needs_s=needs_s, values=values)


def raising(error: BaseException) -> Callable[[Any], Verdict]:
    def run(_: Any) -> Verdict:
        raise error

    return run


def part(
    proof: Proof, *found: Check[Any], clock: Clock | None = None, until: float = 100.0, stand_in: bool = False
) -> int:
    clock = Clock() if clock is None else clock
    return len(run_part(found, proof, None, deadline=until, stand_in=stand_in, clock=clock, say=lambda _: None))


def test_a_part_stops_between_checks_and_the_next_one_goes_on_there(tmp_path: Path) -> None:
    clock, done, path = Clock(), list[str](), tmp_path / "proof.json"

    def lasting(name: str) -> Any:
        def run(_: Any) -> Verdict:
            clock.now_s += 40
            done.append(name)
            return PROVEN

        return check(name, run, needs_s=40)

    result = [lasting(name) for name in ("one", "two", "three")]
    assert part(Proof(path), *result, clock=clock) == 1
    assert done == ["one", "two"]
    assert part(Proof(path), *result, clock=clock, until=200) == 0
    assert part(Proof(path), *result, clock=clock, until=200) == 0
    assert done == ["one", "two", "three"]
    assert Proof(path).seconds == dict.fromkeys(done, 40)


def test_a_check_that_gives_way_goes_on_in_the_next_part_with_its_time_added_up(tmp_path: Path) -> None:
    clock, turns = Clock(), [PartOverError(), None]

    def run(_: Any) -> Verdict:
        clock.now_s += 30
        if error := turns.pop(0):
            raise error
        return PROVEN

    path = tmp_path / "proof.json"
    assert part(Proof(path), check("search", run), check("next"), clock=clock) == 2
    assert not Proof(path).verdicts
    assert part(Proof(path), check("search", run), check("next"), clock=clock) == 0
    assert Proof(path).seconds["search"] == 60


def test_a_check_that_kills_its_part_again_and_again_is_given_up(tmp_path: Path) -> None:
    path = tmp_path / "proof.json"
    for _ in range(MOST_BEGINNINGS - 1):
        Proof(path).begin("hangs")
    assert part(Proof(path), check("hangs", raising(PartOverError(cut_off=True))), check("next")) == 2
    assert part(Proof(path), check("hangs", raising(AssertionError("begun once more"))), check("next")) == 0
    verdicts = Proof(path).verdicts
    assert verdicts["hangs"].status is Status.FAILED
    assert "never came to an end" in verdicts["hangs"].why
    assert verdicts["next"].status is Status.PROVEN


@pytest.mark.parametrize(
    ("error", "status", "why"),
    [
        (NotRunError("lightning is not installed"), Status.NOT_RUN, "not run: lightning is not installed"),
        (ValueError("no result\nand more"), Status.FAILED, "ValueError: no result"),
        (SystemExit("launch-1: rank 0 died"), Status.FAILED, "SystemExit: launch-1: rank 0 died"),
    ],
)
def test_whatever_a_check_raises_is_its_result(tmp_path: Path, error: BaseException, status: Status, why: str) -> None:
    proof = Proof(tmp_path / "proof.json")
    assert part(proof, check("odd", raising(error)), check("next")) == 0
    assert (proof.verdicts["odd"].status, proof.verdicts["odd"].why) == (status, why)


def test_a_stand_in_proves_nothing_about_values(tmp_path: Path) -> None:
    proof = Proof(tmp_path / "proof.json")
    short = check("short", lambda _: Verdict(status=Status.FELL_SHORT, why="slower"), values=True)
    part(proof, check("values", values=True), short, check("path"), stand_in=True)
    statuses = [verdict.status for verdict in proof.verdicts.values()]
    assert statuses == [Status.RAN, Status.RAN, Status.PROVEN]


def test_no_path_of_the_machine_gets_into_the_proof(tmp_path: Path) -> None:
    proof = Proof(tmp_path / "state" / "proof.json")
    words = (
        f"/opt/conda/bin/python {ROOT}/examples/gpt/train.py --storage sqlite:///{tmp_path}/state/x.db /usr/lib/libc.so"
    )
    verdict = Verdict(status=Status.FAILED, why=words, figures={"log": [words]}, command=words)
    part(proof, check("doctor", lambda _: verdict))
    text = proof.path.read_text()
    assert not any(folder in text for folder in (str(tmp_path), str(ROOT), "/usr/lib", str(Path.home()) + "/"))
    expected = ".../python examples/gpt/train.py --storage .../x.db .../libc.so"
    assert json.loads(text)["verdicts"]["doctor"]["command"] == expected


def test_a_proof_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "proof.json").write_text('{"format": 1}')
    with pytest.raises(ValueError, match="format 1"):
        Proof(tmp_path / "proof.json")


def test_the_page_says_what_was_proven_on_which_gpu_and_what_fell_short(tmp_path: Path) -> None:
    proof = Proof(tmp_path / "proof.json")
    proof.machine = MACHINE
    short = Verdict(status=Status.FELL_SHORT, why="24 fit | 30 were predicted")
    found = [check("doctor"), check("edge", lambda _: short), check("gpt", raising(NotRunError("no torch")))]
    part(proof, *found)
    text = page(proof, [*found, check("landscape")])
    lines = text.splitlines()
    assert "1 x NVIDIA H200, 139.0 GiB each; driver 580.1, CUDA 13.0; 16 cores, 128 GiB of host memory." in lines
    assert "1 proven, 1 fell short, 1 not run." in lines
    assert any("1 checks are still to do (landscape)" in line for line in lines)
    assert lines[lines.index("## Fell short") + 4] == ("| edge | edge is shown. | 24 fit \\| 30 were predicted | 0 |")
    assert "stand-in" not in text
    proof.machine = {**MACHINE, "stand_in": True}
    assert STAND_IN_NOTE in page(proof, found)


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def use(*found: Check[Context], devices: Devices = DEVICES) -> None:
        monkeypatch.setattr(checks, "all_checks", lambda: list(found))
        monkeypatch.setattr(machine, "first_devices", lambda _: devices)
        monkeypatch.setattr(machine, "look", lambda _: MACHINE)

    return use


def test_the_command_ends_with_75_until_everything_is_over(
    tmp_path: Path, on_a_gpu: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    turns = [PartOverError(), None]

    def run(context: Context) -> Verdict:
        assert (context.machine, context.devices) == (MACHINE, DEVICES)
        if error := turns.pop(0):
            raise error
        return PROVEN

    on_a_gpu(check("one"), check("two", run))
    words = ["--state", str(tmp_path)]
    assert command.main(words) == 75
    assert "part done, 1 of 2 checks; run the same command again" in capsys.readouterr().out
    assert "still to do (two)" in (tmp_path / "proof.md").read_text()
    assert command.main(words) == 0
    assert "2 proven." in (tmp_path / "proof.md").read_text()
    assert json.loads((tmp_path / "proof.json").read_text())["machine"]["gpus"] == ["NVIDIA H200"]


def test_a_check_can_be_run_alone_and_anew(tmp_path: Path, on_a_gpu: Callable[..., None]) -> None:
    ran: list[str] = []

    def noted(name: str) -> Any:
        def run(context: Context) -> Verdict:
            kept = context.folder(name) / "kept"
            ran.append(f"{name} anew" if not kept.exists() else name)
            kept.touch()
            return PROVEN

        return check(name, run)

    on_a_gpu(noted("one"), noted("two"))
    words = ["--state", str(tmp_path), "--only", "two"]
    assert [command.main(words), command.main(words), command.main([*words, "--again"])] == [0, 0, 0]
    assert ran == ["two anew", "two anew"]
    assert command.main(["--state", str(tmp_path), "--only", "three"]) == 2


def test_without_a_gpu_nothing_is_proven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert command.main(["--state", str(tmp_path)]) == 3
    assert "No GPU was found" in capsys.readouterr().err


@pytest.fixture
def context(tmp_path: Path) -> Context:
    """Return the context of a part that is over."""
    return Context(state=tmp_path, machine=MACHINE, devices=DEVICES, deadline=time.monotonic())


def test_a_command_leaves_its_output_behind_and_its_result_is_read(context: Context, tmp_path: Path) -> None:
    whole = replace(context, deadline=time.monotonic() + 100)
    words = [sys.executable, "-c", "import sys; print('told'); print('{\"value\": 1}'); sys.exit('it\\nfailed\\n')"]
    done = whole.run(words, cwd=tmp_path, shown="dsat x", log="x")
    assert (done.why, done.result()) == ("It exited with 1: failed", {"value": 1})
    assert (tmp_path / "work" / "logs" / "x.err").read_text() == "it\nfailed\n\n"
    assert replace(done, stderr="optuna-dsat: no GPU\n\nFull log: log\n").why.endswith(": no GPU")
    with pytest.raises(ValueError, match=r"no result\. It exited with 0: no message"):
        whole.run([sys.executable, "-c", ""], cwd=tmp_path, shown="dsat y", log="y").result()


@pytest.mark.parametrize(("clean", "signal_name"), [(True, "SIGINT"), (False, "SIGTERM")])
def test_the_end_of_a_part_ends_a_command_as_it_can_be_ended(
    context: Context, tmp_path: Path, clean: bool, signal_name: str
) -> None:
    script = (
        "import os, signal, sys, time\n"
        "def told(number, _):\n"
        "    print(signal.Signals(number).name, flush=True)\n"
        "    os._exit(0)\n"
        "signal.signal(signal.SIGINT, told), signal.signal(signal.SIGTERM, told)\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    words = [sys.executable, "-S", "-c", script]
    short = replace(context, deadline=time.monotonic() + (37 if clean else 7))
    with pytest.raises(PartOverError) as over:
        short.run(words, cwd=tmp_path, shown="dsat", log="search", clean_stop=clean)
    assert over.value.cut_off is not clean
    assert (tmp_path / "work" / "logs" / "search.out").read_text() == f"ready\n{signal_name}\n"


def test_every_check_has_its_own_name_and_every_example_a_check() -> None:
    names = [item.name for item in checks.all_checks()]
    assert len(set(names)) == len(names)
    assert names[:3] == ["doctor", "example-gpt", "example-huggingface"]
    assert sum(name.startswith("edge-") for name in names) == 6
    folders = {path.name for path in (ROOT / "examples").iterdir() if path.is_dir()}
    assert folders - {"__pycache__", "slurm", "ci"} == {folder for folder, _ in checks.EXAMPLES.values()}


@pytest.mark.parametrize("predicted", [1, 15, 300])
@pytest.mark.parametrize("share", [0.2, 0.8, 1.0, 1.4])
def test_the_walk_from_the_prediction_comes_to_the_edge(predicted: int, share: float) -> None:
    edge = max(1, round(predicted * share))
    known: dict[int, bool] = {}
    while (size := next_size(known, predicted=predicted)) is not None:
        assert size >= 1
        assert size not in known
        known[size] = size <= edge
    fits = max((size for size, fitted in known.items() if fitted), default=0)
    assert fits <= edge < min(size for size, fitted in known.items() if not fitted)
    assert edge - fits <= max(1, round(edge * 0.03))
    if 0.9 <= share <= 1.1:
        assert len(known) <= 7


@pytest.mark.parametrize("gib", [2, 80, 288])
def test_a_model_is_as_large_as_the_gpu_asks_for(gib: int) -> None:
    size = size_for(gib * 2**30)
    params = 12 * size["layers"] * size["hidden"] ** 2
    assert 0.12 < 18 * params / (gib * 2**30) < 0.26
    assert size["hidden"] % size["heads"] == 0
    room = gib * 2**30 * 0.9 - 18 * params
    assert 16 < room / (34 * size["hidden"] * size["layers"] * size["seq"]) < 64


def test_losses_that_are_no_numbers_or_missing_are_apart() -> None:
    assert checks.losses_apart([1.0, 2.0], [1.0, 2.0]) == 0
    assert checks.losses_apart([1.0, 2.0], [1.0, 1.0]) == 0.5
    assert checks.losses_apart([float("nan")], [float("nan")]) == 0
    assert checks.losses_apart([float("nan")], [1.0]) == float("inf")
    assert checks.losses_apart([1.0], [1.0, 2.0]) == float("inf")
    assert checks.losses_apart([None], [1.0]) == float("inf")


def test_packing_collects_wheels_for_the_other_machine_and_says_how_much_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[list[str]] = []

    def run(words: list[str]) -> None:
        ran.append(words)
        folder = Path(words[words.index("--wheel-dir" if "wheel" in words else "--dest") + 1])
        folder.mkdir(exist_ok=True)
        (folder / f"p{len(ran)}-1.0-py3-none-any.whl").write_bytes(b"0" * 500_000)

    monkeypatch.setattr(pack, "_run", run)
    (tmp_path / "old-1.0-py3-none-any.whl").write_bytes(b"")
    assert pack.main(["--into", str(tmp_path), "--without", "numpy"]) == 0
    assert [words[3] for words in ran] == ["wheel", "wheel", "download"]
    download = ran[-1]
    assert {"--no-deps", "--only-binary=:all:"} <= set(download)
    assert download[download.index("--python-version") + 1] == "3.12"
    assert {"optuna", "sqlalchemy", "mako", "typer", "nvidia-ml-py"} <= set(download)
    assert not {"numpy", "torch", "transformers"} & set(download)
    tags = [download[place + 1] for place, word in enumerate(download) if word == "--platform"]
    assert {"manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64"} <= set(tags)
    assert sorted(path.name[:2] for path in tmp_path.iterdir()) == ["p1", "p2", "p3"]
    out = capsys.readouterr().out
    assert "3 wheels, 1.5 MB, for Python 3.12 on x86_64." in out
    assert f"make prove-gpu WHEELS={tmp_path.name}" in out
    assert pack.main(["--into", str(tmp_path), "--limit-mb", "1"]) == 1


def test_the_tested_packages_are_installed_from_the_wheels_before_those_of_the_machine_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[str]] = []

    def run(words: list[str], *, check: bool) -> None:
        assert check
        ran.append(words)
        (tmp_path / "env" / "lib" / "python3.12" / "site-packages").mkdir(parents=True, exist_ok=True)

    monkeypatch.setattr("subprocess.run", run)
    python = command.environment(tmp_path / "wheels", tmp_path / "env")
    made, tested, needs = ran
    assert made[1:3] == ["-m", "venv"]
    pip = [str(python), "-m", "pip", "install", "--no-index", "--find-links", str(tmp_path / "wheels"), "--quiet"]
    packages = ["deepspeed", "optuna", "optuna-dsat"]
    assert tested == [*pip, "--ignore-installed", "--no-deps", *packages], "also where the machine has them"
    assert needs == [*pip, *packages], "those that it lacks or has too old"
    shown = "".join(path.read_text() for path in tmp_path.glob("env/lib/*/site-packages/machine-*.pth"))
    assert all(path in shown for path in site.getsitepackages())
    assert command.environment(tmp_path / "nothing", tmp_path / "env") == python
    assert len(ran) == 3
