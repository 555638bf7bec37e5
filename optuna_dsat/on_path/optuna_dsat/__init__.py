"""The package in the interpreter of a script: the folder above is on its path, and holds nothing else.

So none of the tuner's libraries can shadow the script's.
"""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[2]
__path__ = [str(_PACKAGE)]
__file__ = str(_PACKAGE / "__init__.py")
exec(compile(Path(__file__).read_text(encoding="utf-8"), __file__, "exec"))
