"""Alembic environment: runs our migrations on the given connection, limited to our own tables."""

from __future__ import annotations

from typing import Any

from alembic import context

from optuna_dsat.store.migrate import VERSION_TABLE
from optuna_dsat.store.tables import Base


def is_ours(name: str | None, kind: str, _parents: Any) -> bool:
    """Return whether autogeneration and comparison include an object; Optuna's tables are excluded."""
    return kind != "table" or (name is not None and name.startswith("dsat_") and name != VERSION_TABLE)


context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    version_table=VERSION_TABLE,
    include_name=is_ours,
    render_as_batch=True,
    compare_type=True,
    transaction_per_migration=True,
)
with context.begin_transaction():
    context.run_migrations()
