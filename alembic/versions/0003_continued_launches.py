"""Adds to a launch whose processes it used, and whether it failed as a continued one.

Revision ID: 0003
Revises: 0002
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns; older launches started their own processes."""
    op.add_column("dsat_launches", sa.Column("root", sa.String(255), server_default="", nullable=False))
    op.add_column("dsat_launches", sa.Column("afresh", sa.Boolean(), server_default=sa.false(), nullable=False))


def downgrade() -> None:
    """Remove the columns."""
    for name in ("afresh", "root"):
        op.drop_column("dsat_launches", name)
