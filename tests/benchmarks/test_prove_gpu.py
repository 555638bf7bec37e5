from __future__ import annotations

import importlib.metadata
import json
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.prove_gpu import __main__ as command
from benchmarks.prove_gpu import checks, install, machine, pack
from benchmarks.prove_gpu.context import Context
from benchmarks.prove_gpu.examples import EXAMPLES
from benchmarks.prove_gpu.filling import next_size
from benchmarks.prove_gpu.machine import Machine
from benchmarks.prove_gpu.page import page
from benchmarks.prove_gpu.proof import (
    ROOT,
    STAND_IN_NOTE,
    NotRunError,
    OverrunError,
    PartOverError,
    Proof,
    Status,
    Verdict,
)
from benchmarks.prove_gpu.runner import MOST_BEGINNINGS, Check, run_part
from benchmarks.prove_gpu.sizing import size_for
from benchmarks.prove_gpu.turns import losses_apart
from optuna_dsat.launch.machine.devices import Device, Devices

MACHINE = Machine(
    gpus=("NVIDIA H200",),
    driver="580.1",
    cuda="13.0",
    capability="9.0",
    memory_bytes=139 * 2**30,
    host_memory_bytes=128 * 2**30,
    cores=16,
    stand_in=False,
    versions={"torch": "2.11.0"},
)
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
    return run_part(found, proof, None, deadline=until, stand_in=stand_in, clock=clock, say=lambda _: None)


def lasting(clock: Clock, seconds: float, done: list[str], name: str) -> Check[Any]:
    def run(_: Any) -> Verdict:
        clock.now_s += seconds
        done.append(name)
        return PROVEN

    return Check(name=name, asked="", run=run, needs_s=seconds)


def test_a_part_stops_between_checks_and_the_next_one_goes_on_there(tmp_path: Path) -> None:
    clock, done = Clock(), list[str]()
    result = [lasting(clock, 40, done, name) for name in ("one", "two", "three")]
    path = tmp_path / "proof.json"
    assert part(Proof(path), *result, clock=clock) == 1
    assert done == ["one", "two"]
    assert part(Proof(path), *result, clock=clock, until=200) == 0
    assert done == ["one", "two", "three"]
    assert part(Proof(path), *result, clock=clock, until=200) == 0
    assert len(done) == 3
    assert [record.seconds for record in Proof(path).records.values()] == [40, 40, 40]


def test_a_check_that_gives_way_goes_on_in_the_next_part_with_its_time_added_up(tmp_path: Path) -> None:
    clock, turns = Clock(), [PartOverError(), None]

    def run(_: Any) -> Verdict:
        clock.now_s += 30
        if error := turns.pop(0):
            raise error
        return PROVEN

    path = tmp_path / "proof.json"
    assert part(Proof(path), check("search", run), check("next"), clock=clock) == 2
    assert not Proof(path).records
    assert part(Proof(path), check("search", run), check("next"), clock=clock) == 0
    assert Proof(path).records["search"].seconds == 60


def test_a_check_that_kills_its_part_again_and_again_is_given_up(tmp_path: Path) -> None:
    path = tmp_path / "proof.json"
    for _ in range(MOST_BEGINNINGS):
        Proof(path).begin("hangs")
    assert part(Proof(path), check("hangs", raising(AssertionError("begun once more"))), check("next")) == 0
    records = Proof(path).records
    assert records["hangs"].status is Status.FAILED
    assert "never came to an end" in records["hangs"].why
    assert records["next"].status is Status.PROVEN


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
    assert (proof.records["odd"].status, proof.records["odd"].why) == (status, why)


def test_a_stand_in_proves_nothing_about_values(tmp_path: Path) -> None:
    proof = Proof(tmp_path / "proof.json")
    short = check("short", lambda _: Verdict(status=Status.FELL_SHORT, why="slower"), values=True)
    part(proof, check("values", values=True), short, check("path"), stand_in=True)
    assert {name: record.status for name, record in proof.records.items()} == {
        "values": Status.RAN,
        "short": Status.RAN,
        "path": Status.PROVEN,
    }
    assert [record.note for record in proof.records.values()] == [STAND_IN_NOTE, STAND_IN_NOTE, ""]


def test_no_path_of_the_machine_gets_into_the_proof(tmp_path: Path) -> None:
    proof = Proof(tmp_path / "state" / "proof.json")
    words = (
        f"{sys.executable} {ROOT}/examples/gpt/train.py --storage sqlite:///{tmp_path}/state/x.db /usr/lib/x86/libc.so"
    )
    verdict = Verdict(status=Status.FAILED, why=words, figures={"log": [words]}, command=words)
    part(proof, check("doctor", lambda _: verdict))
    text = proof.path.read_text()
    assert not any(folder in text for folder in (str(tmp_path), str(ROOT), "/usr/lib", str(Path.home()) + "/"))
    assert json.loads(text)["records"][0]["command"] == (
        "python examples/gpt/train.py --storage sqlite:///STATE/x.db .../libc.so"
    )


def test_the_page_says_what_was_proven_on_which_gpu_and_what_fell_short(tmp_path: Path) -> None:
    proof = Proof(tmp_path / "proof.json")
    short = Verdict(status=Status.FELL_SHORT, why="24 fit | 30 were predicted")
    part(proof, check("doctor"), check("edge", lambda _: short), check("gpt", raising(NotRunError("no torch"))))
    text = page(MACHINE.to_json(), list(proof.records.values()), written="today", left=["landscape"])
    lines = text.splitlines()
    assert "1 x NVIDIA H200, 139.0 GiB each; driver 580.1, CUDA 13.0; 16 cores, 128 GiB of host memory." in lines
    assert "1 proven, 1 fell short, 1 not run." in lines
    assert any("1 checks are still to do (landscape)" in line for line in lines)
    assert lines[lines.index("## Fell short") + 4] == ("| edge | edge is shown. | 24 fit \\| 30 were predicted | 0 |")
    assert "stand-in" not in text
    assert STAND_IN_NOTE in page({**MACHINE.to_json(), "stand_in": True}, [], written="today", left=[])


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
    assert (done.exit_code, done.last_line, done.result()) == (1, "failed", {"value": 1})
    assert (tmp_path / "work" / "logs" / "x.err").read_text() == "it\nfailed\n\n"
    assert replace(done, stderr="optuna-dsat: no GPU\n\nFull log: log\n").last_line == "no GPU"
    with pytest.raises(ValueError, match="dsat y exited with 0 and no result: it said nothing"):
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
    assert isinstance(over.value, OverrunError) is not clean
    assert (tmp_path / "work" / "logs" / "search.out").read_text() == f"ready\n{signal_name}\n"


def test_every_check_has_its_own_name_and_every_example_a_check() -> None:
    names = [item.name for item in checks.all_checks()]
    assert len(set(names)) == len(names)
    assert {f"example-{name}" for name in EXAMPLES} <= set(names)
    assert sum(name.startswith("edge-") for name in names) == 6
    folders = {path.name.replace("_", "-") for path in (ROOT / "examples").iterdir() if path.is_dir()}
    assert folders - {"__pycache__"} <= set(EXAMPLES) | {"plain", "slurm"}


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
    assert 0.12 < 18 * size.params / (gib * 2**30) < 0.26
    assert size.hidden % size.heads == 0
    room = gib * 2**30 * 0.9 - 18 * size.params
    assert 16 < room / (34 * size.hidden * size.layers * size.sequence) < 64


def test_losses_that_are_no_numbers_or_missing_are_apart() -> None:
    assert losses_apart([1.0, 2.0], [1.0, 2.0]) == 0
    assert losses_apart([1.0, 2.0], [1.0, 1.0]) == 0.5
    assert losses_apart([float("nan")], [float("nan")]) == 0
    assert losses_apart([float("nan")], [1.0]) == float("inf")
    assert losses_apart([1.0], [1.0, 2.0]) == float("inf")
    assert losses_apart([None], [1.0]) == float("inf")


def test_wheels_are_collected_for_the_other_machine_not_for_this_one(tmp_path: Path) -> None:
    words = pack.download_command(["optuna", "numpy"], into=tmp_path, python_version="3.12", arch="x86_64", glibc=28)
    assert words[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:"} <= set(words)
    assert words[words.index("--python-version") + 1] == "3.12"
    assert words[-2:] == ["optuna", "numpy"]
    tags = [words[place + 1] for place, word in enumerate(words) if word == "--platform"]
    assert tags == pack.platforms(arch="x86_64", glibc=28)
    assert {"manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64"} <= set(tags)
    assert not any(name.startswith("torch") for name in pack.NEEDS)


def test_all_that_is_needed_is_packed_torch_aside() -> None:
    """What is packed has no needs of its own, as they are installed here, that are not packed."""
    packed = {*pack.NEEDS, *pack.FRAMEWORKS, "deepspeed", "optuna-dsat"}
    there = {"torch", "setuptools"}
    for name in packed:
        try:
            needs = [Requirement(line) for line in importlib.metadata.requires(name) or ()]
        except importlib.metadata.PackageNotFoundError:
            continue  # of another version of something
        needed = {canonicalize_name(need.name) for need in needs if need.marker is None or need.marker.evaluate()}
        assert needed - there <= packed, name


def test_packing_says_how_much_it_is_and_what_to_do_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[list[str]] = []

    def run(words: list[str], _: str) -> None:
        ran.append(words)
        folder = Path(words[words.index("--wheel-dir" if "wheel" in words else "--dest") + 1])
        folder.mkdir(exist_ok=True)
        (folder / f"p{len(ran)}-1.0-py3-none-any.whl").write_bytes(b"0" * 500_000)

    monkeypatch.setattr(pack, "_run", run)
    (tmp_path / "old-1.0-py3-none-any.whl").write_bytes(b"")
    assert pack.main(["--into", str(tmp_path)]) == 0
    assert [words[3] for words in ran] == ["wheel", "wheel", "download"]
    assert sorted(path.name[:2] for path in tmp_path.iterdir()) == ["p1", "p2", "p3"]
    out = capsys.readouterr().out
    assert "3 wheels, 1.5 MB, for Python 3.12 on x86_64." in out
    assert f"make prove-gpu WHEELS={tmp_path.name}" in out
    assert pack.main(["--into", str(tmp_path), "--limit-mb", "1"]) == 1


def test_what_the_machine_lacks_or_has_too_old_is_installed_and_what_is_proven(tmp_path: Path) -> None:
    wheels = [
        wheel(tmp_path, "numpy-9.9"),
        wheel(tmp_path, "no_such_thing-1.0", "psutil>=1.0", 'pytest>=9999; extra == "test"'),
        wheel(tmp_path, "pytest-9999.0"),
        wheel(tmp_path, "psutil-9.9"),
        wheel(tmp_path, "optuna-5.0.0", "SQLAlchemy (>=9999)", "numpy!=1.0"),
        wheel(tmp_path, "sqlalchemy-9999.0", "typing_extensions==4.0.0"),
        wheel(tmp_path, "typing_extensions-4.0.0"),
    ]
    result = [item.name.partition("-")[0] for item in install.missing(wheels)]
    assert result == ["no_such_thing", "optuna", "sqlalchemy", "typing_extensions"]
    with pytest.raises(install.InstallError, match="make pack-gpu"):
        install.install(tmp_path / "nothing", tmp_path / "site")


def wheel(folder: Path, name: str, *needs: str) -> Path:
    path = folder / f"{name}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        lines = ["Metadata-Version: 2.1", *(f"Requires-Dist: {need}" for need in needs)]
        archive.writestr(f"{name}.dist-info/METADATA", "\n".join(lines))
    return path
