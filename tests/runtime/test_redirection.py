"""Redirected writes do not change the user's files, and a script still sees a consistent file system."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.ranks import ROOT, other_python

REDIRECT = """
import bz2, sys, tarfile  # as libraries that were imported before
from pathlib import Path
from optuna_dsat.runtime.isolation.redirection import redirect_writes
if sys.argv[1]:
    redirect_writes(Path(sys.argv[1]), folders=[sys.argv[2]], passed=[sys.argv[2] + "/passed"])
"""
OPERATIONS = """
import json, os, random, shutil, stat, tempfile
os.chdir(sys.argv[2])
draw, log = random.Random(int(sys.argv[3])), []
names = ["a", "b", "d", "d/a", "d/b", "d/e", "d/e/a", "n", "n/a", "n/m"]

def read(path):
    with open(path) as file:
        return file.read()

def write(path, mode):
    with open(path, mode) as file:
        if mode == "r+":
            file.seek(0, 2)
        return file.write("+")

def walk():
    return sorted((root, sorted(folders), sorted(files)) for root, folders, files in os.walk("."))

def status(path):
    found = os.stat(path)
    return stat.S_IFMT(found.st_mode), found.st_size if stat.S_ISREG(found.st_mode) else 0

def copytree(a, b):
    if os.path.realpath(b).startswith(os.path.realpath(a)):
        raise OSError("it would copy into itself without end")
    return shutil.copytree(a, b, symlinks=True)

one = {
    "read": read, "status": status, "remove": os.remove, "mkdir": os.mkdir, "rmdir": os.rmdir,
    "list": lambda p: sorted(os.listdir(p)), "exists": os.path.exists, "tree": shutil.rmtree,
    "write": lambda p: write(p, "w"), "append": lambda p: write(p, "a"), "update": lambda p: write(p, "r+"),
    "exclusive": lambda p: write(p, "x"), "mode": lambda p: os.chmod(p, 0o700),
    "makedirs": lambda p: os.makedirs(p, exist_ok=True), "islink": os.path.islink, "readlink": os.readlink,
    "temporary": lambda p: tempfile.NamedTemporaryFile(dir=p).close(),
    "truncate": lambda p: os.truncate(p, 1), "glob": lambda p: sorted(str(found) for found in Path(p).glob("*")),
}
two = {
    "rename": os.rename, "replace": os.replace, "copy": shutil.copyfile, "copytree": copytree,
    "symlink": os.symlink, "move": lambda a, b: shutil.move(a, b),
}
for _ in range(400):
    name = draw.choice([*one, *two])
    paths = [draw.choice(names) for _ in range(2 if name in two else 1)]
    try:
        result = (one.get(name) or two[name])(*paths)
        result = "" if name in two else result
    except (OSError, shutil.Error) as error:
        result = "error" if name in (*two, "tree") else type(error).__name__  # of several paths, any may be at fault
    log.append([name, paths, result])
contents = {}
for root, _, files in os.walk("."):
    for file in files:
        path = os.path.join(root, file)
        contents[path] = os.readlink(path) if os.path.islink(path) else read(path)
print(json.dumps([log, walk(), contents]))
"""


def tree(folder: Path) -> dict[str, tuple[int, int, str]]:
    """Return mode, time and content of everything below a folder."""
    result = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content = str(path.readlink()) if path.is_symlink() else path.read_text() if path.is_file() else ""
        result[str(path)] = (status.st_mode, status.st_mtime_ns, content)
    return result


def users(folder: Path) -> Path:
    (folder / "d" / "e").mkdir(parents=True)
    for name in ("a", "d/a", "d/e/a"):
        (folder / name).write_text(f"content of {name}")
    return folder


def run(code: str, *arguments: str, python: str = sys.executable) -> str:
    ended = subprocess.run(
        [python, "-c", REDIRECT + code, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT / "optuna_dsat" / "on_path")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.parametrize(
    ("seed", "version"),  # their libraries copy different functions of ``os``
    [*((seed, "") for seed in range(6)), *enumerate(["3.9", "3.10", "3.11", "3.12", "3.13"])],
)
def test_a_script_cannot_tell_redirected_writers_from_real_ones(tmp_path: Path, seed: int, version: str) -> None:
    python = other_python(version) if version else sys.executable
    real, redirected = users(tmp_path / "real"), users(tmp_path / "redirected")
    before = tree(redirected)
    expected = json.loads(run(OPERATIONS, "", str(real), str(seed), python=python))
    result = json.loads(run(OPERATIONS, str(tmp_path / "upper"), str(redirected), str(seed), python=python))
    for number, (first, other) in enumerate(zip(expected[0], result[0], strict=True)):
        assert other == first, f"operation {number} after {result[0][max(0, number - 12) : number]}"
    assert result[1:] == expected[1:]
    assert tree(redirected) == before


def test_libraries_that_open_files_by_name_are_redirected(tmp_path: Path) -> None:
    folder = users(tmp_path / "users")
    (folder / "passed").mkdir()
    (folder / "array.npy").write_bytes(b"none")
    os.setxattr(folder / "d" / "e" / "a", b"user.epoch", b"7")
    before = tree(folder)
    code = """
import os, sqlite3
os.chdir(sys.argv[2])
import numpy, torch
from safetensors.torch import load_file, save_file
torch.save({"w": torch.ones(3)}, "a"); assert torch.load("a")["w"].sum() == 3
torch.jit.trace(torch.nn.Linear(2, 1), torch.ones(1, 2)).save("m.pt"); torch.jit.load("m.pt")
torch.jit.save(torch.jit.script(torch.nn.ReLU()), Path("r.pt")); assert os.path.exists("r.pt")
save_file({"w": torch.ones(3)}, "d/a"); assert load_file("d/a")["w"].sum() == 3
with torch.profiler.profile(on_trace_ready=torch.profiler.tensorboard_trace_handler("traces")): torch.ones(3).sum()
assert os.listdir("traces")
from tokenizers import Tokenizer, models
os.mkdir("t"); Tokenizer(models.BPE({"a": 0}, [])).save("t/a"); Tokenizer.from_file(path="t/a").save(path="d/e/a")
assert models.BPE({"a": 0}, []).save("t", "x") == ["t/x-vocab.json", "t/x-merges.txt"] and open("t/x-vocab.json").read()
numpy.save("array.npy", numpy.ones(4)); mapped = numpy.load("array.npy", mmap_mode="r+"); mapped[0] = 5; mapped.flush()
assert numpy.load("array.npy")[0] == 5
numpy.savetxt("d/t", numpy.ones(2)); numpy.savetxt("a", numpy.ones(2)); assert numpy.loadtxt("a").sum() == 2
import io; raw = io.FileIO("d/b", "w"); raw.write(b"x"); raw.close(); assert open("d/b", "rb").read() == b"x"
assert isinstance(open("d/b", "rb").raw, io.FileIO) and isinstance(raw, io.FileIO) and isinstance(raw, io.RawIOBase)
base = sqlite3.connect("rows.sqlite"); base.execute("create table t (a)"); base.commit()
assert os.path.exists("rows.sqlite")
bz2.open("a.bz2", "wb").write(b"a"); tarfile.open("d/a.tar", "w").add("a.bz2")
os.chmod("d/e/a", 0o600); assert os.getxattr("d/e/a", "user.epoch") == b"7"
open("passed/real", "w").write("real")
"""
    run(code, str(tmp_path / "upper"), str(folder))
    assert (folder / "passed" / "real").read_text() == "real"
    shutil.rmtree(folder / "passed")
    after = tree(folder)
    assert after == {name: value for name, value in before.items() if not name.endswith("/passed")}


def test_processes_of_a_launch_share_one_view(tmp_path: Path) -> None:
    folder, upper = users(tmp_path / "users"), str(tmp_path / "upper")
    run("import os; os.chdir(sys.argv[2]); os.remove('a'); open('new', 'w').write('n')", upper, str(folder))
    seen = run(
        "import os; os.chdir(sys.argv[2]); print(sorted(os.listdir('.')), open('new').read())", upper, str(folder)
    )
    assert seen == "['d', 'new'] n\n"
    assert sorted(path.name for path in folder.iterdir()) == ["a", "d"]


def test_names_may_be_as_long_as_the_file_system_allows(tmp_path: Path) -> None:
    folder, name = users(tmp_path / "users"), "训练数据" * 21
    (folder / name).write_text("kept")
    code = f"""
import os; os.chdir(sys.argv[2]); name = {name!r}
open("log", "w").close(); assert open(name).read() == "kept"
os.remove(name); assert sorted(os.listdir(".")) == ["a", "d", "log"] and not os.path.exists(name)
open("x" * 255, "w").close(); os.rename("x" * 255, name); print(os.listdir(".").count(name))
"""
    assert run(code, str(tmp_path / "upper"), str(folder)) == "1\n"
    assert (folder / name).read_text() == "kept"


def test_a_process_starts_in_a_folder_that_the_script_made(tmp_path: Path) -> None:
    folder = users(tmp_path / "users")
    code = """
import os, subprocess; os.chdir(sys.argv[2])
os.mkdir("made"); open("made/in", "w").close()
for place in ("made", Path("d")):
    print(subprocess.run("ls", cwd=place, capture_output=True, text=True).stdout.split())
subprocess.run(["touch", "new"], cwd="made", check=True); print(os.path.exists("made/new"))
"""
    assert run(code, str(tmp_path / "upper"), str(folder)) == "['in']\n['a', 'e']\nTrue\n"
    assert not (folder / "made").exists()
