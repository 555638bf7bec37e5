"""The version of the package, for its metadata, ``--version`` and reports."""

from __future__ import annotations

__version__ = "0.1.0"
