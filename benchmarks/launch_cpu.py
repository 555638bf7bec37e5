"""CPU time of a warm launch on this machine, by two versions of optuna-dsat in turns, and whether they run the same.

    git worktree add /tmp/before COMMIT
    python -m benchmarks.launch_cpu /tmp/before [--launches 10]; git worktree remove /tmp/before

Both versions launch ``examples/gpt`` of their own checkout in turns, warm, on two ranks of the CPU. CPU time is that of
all processes of the launch and of the launcher, in user and in kernel mode; unlike wall time it hardly depends on
what else the machine does. Compared besides: the commands that the launches ran, apart from paths.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
_SUBREAPER = 36
"""``PR_SET_CHILD_SUBREAPER`` of ``linux/prctl.h``: orphans become this process's children, and count as such."""


def _cpu_s() -> float:
    """Return the CPU time of this process and of all that it or its children have started, ended ones too."""
    total = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            own = child.cpu_times()
            if child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, 0)
            total += own.user + own.system + own.children_user + own.children_system
    return total


def serve() -> None:
    """Launch once for each line of input; print CPU seconds and command as JSON."""
    from benchmarks.launch_overhead import EXAMPLES, request, run
    from optuna_dsat.launch.devices import cpu_devices
    from optuna_dsat.launch.preload import Preload
    from optuna_dsat.launch.torchrun import TorchrunLauncher
    from optuna_dsat.runtime.events import ModulesImported

    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    with tempfile.TemporaryDirectory() as folder:
        launcher = TorchrunLauncher(Path(folder) / "out", devices=cpu_devices(2), warm=True)
        asked = {"example": EXAMPLES["gpt"], "slots": 2, "cwd": folder}
        try:
            profile = run(launcher, request(launch_id="profile", purpose="profile", **asked))  # type: ignore[arg-type]
            launcher.prepare(Preload.learned(next(e for e in profile.events if isinstance(e, ModulesImported))))
            for number, _ in enumerate(sys.stdin):
                name, before = f"launch-{number}", _cpu_s()
                run(launcher, request(launch_id=name, purpose="trial", **asked))  # type: ignore[arg-type]
                used = _cpu_s() - before
                command = json.loads((Path(folder) / "out" / name / "command.json").read_text())
                print(json.dumps({"cpu_s": used, "command": _plain(command, folder)}), flush=True)
        finally:
            launcher.close()


def _plain(command: object, folder: str) -> str:
    """Return a command without what names a checkout, a run directory or a moment."""
    text = json.dumps(command, sort_keys=True)
    for path, name in ((sys.executable, "PYTHON"), (folder, "FOLDER"), (str(Path.cwd()), "CHECKOUT")):
        text = text.replace(path, name)
    return re.sub(r"launch-\d+|\d{9,}(\.\d+)?", "N", text)


def main() -> None:
    """Compare this checkout with another."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("--launches", type=int, default=10)
    given = parser.parse_args()
    found: dict[str, list[float]] = {"before": [], "now": []}
    commands: dict[str, str] = {}
    workers = {}
    for name, checkout in (("before", given.before.resolve()), ("now", ROOT)):
        environ = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
        words = [sys.executable, __file__, "--serve"]
        workers[name] = subprocess.Popen(
            words, cwd=checkout, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    for number in range(given.launches + 1):  # the first waits for the imports
        for name in ("before", "now") if number % 2 else ("now", "before"):
            stdin, stdout = workers[name].stdin, workers[name].stdout
            assert stdin is not None
            assert stdout is not None
            stdin.write("go\n")
            stdin.flush()
            answer = json.loads(stdout.readline())
            commands[name] = answer["command"]
            if number:
                found[name].append(answer["cpu_s"])
    for worker in workers.values():
        worker.communicate()
    print("| version | median CPU s | least | largest | launches |\n|---|--:|--:|--:|--:|")
    for name, all_s in found.items():
        print(f"| {name} | {statistics.median(all_s):.3f} | {min(all_s):.3f} | {max(all_s):.3f} | {len(all_s)} |")
    ratio = statistics.median(now / before for before, now in zip(found["before"], found["now"], strict=True))
    print(f"\nA launch now takes {ratio - 1:+.1%} CPU time (median of the pairs).")
    same = commands["before"] == commands["now"]
    print("The commands are the same." if same else f"The commands differ:\n{commands['before']}\n{commands['now']}")


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["--serve"] else main()
