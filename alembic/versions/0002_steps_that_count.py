"""Adds to a step whether it was skipped and the size of its inputs, and to a launch what went on beside it.

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns; older steps were not skipped as far as is known, and their inputs were not looked at."""
    op.add_column("dsat_steps", sa.Column("skipped", sa.Boolean(), server_default=sa.false(), nullable=False))
    op.add_column("dsat_steps", sa.Column("skipped_before", sa.Integer(), server_default="0", nullable=False))
    op.add_column("dsat_steps", sa.Column("elements", sa.BigInteger(), server_default="0", nullable=False))
    op.add_column(
        "dsat_steps", sa.Column("elements_are_tokens", sa.Boolean(), server_default=sa.false(), nullable=False)
    )
    op.add_column("dsat_launches", sa.Column("conditions", sa.JSON(none_as_null=True), nullable=True))


def downgrade() -> None:
    """Remove the columns."""
    op.drop_column("dsat_launches", "conditions")
    for name in ("elements_are_tokens", "elements", "skipped_before", "skipped"):
        op.drop_column("dsat_steps", name)
