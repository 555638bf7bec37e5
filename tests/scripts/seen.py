"""Prints what a script sees of its surroundings, and ends as its first argument says."""

import json
import sys
from pathlib import Path

print(
    json.dumps(
        {
            "name": __name__,
            "file": __file__,
            "argv": sys.argv,
            "path0": sys.path[0],
            "cwd": str(Path.cwd()),
            "main": sys.modules["__main__"].__dict__ is globals(),
        }
    )
)
print("without a line break", end="")
heavy = {"optuna", "pydantic", "sqlalchemy", "torch", "deepspeed", "typer"} & sys.modules.keys()
print(f"imported: {sorted(heavy)}", file=sys.stderr)
end = sys.argv[1] if len(sys.argv) > 1 else ""
if end.startswith("exit"):
    sys.exit(int(end.removeprefix("exit")))
if end == "silent":
    sys.stdout = None  # as on all ranks but the first
if end == "text":
    sys.exit("that is all")
if end == "raise":
    raise KeyError("missing")
