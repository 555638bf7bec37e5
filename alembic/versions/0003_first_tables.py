"""Creates the tables of studies, profiles, launches, steps, claims and heartbeats.

``upgrade`` is longer than the project's limit for functions: a migration states the whole schema of its time in one
place and does not change after its release.

Revision ID: 0003
Revises: nothing; 0001 and 0002 were before the first release
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create our tables."""
    op.create_table(
        "dsat_claims",
        sa.Column("study_uuid", sa.String(length=36), nullable=False),
        sa.Column("config_key", sa.String(length=255), nullable=False),
        sa.Column("trial_number", sa.Integer(), nullable=False),
        sa.Column("worker", sa.String(length=255), nullable=False),
        sa.Column("claimed_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("study_uuid", "config_key", name=op.f("pk_dsat_claims")),
    )
    op.create_index(
        op.f("ix_dsat_claims_study_uuid_trial_number"),
        "dsat_claims",
        ["study_uuid", "trial_number"],
        unique=False,
    )
    op.create_table(
        "dsat_heartbeats",
        sa.Column("study_uuid", sa.String(length=36), nullable=False),
        sa.Column("trial_number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("beat_at", sa.Float(), nullable=False),
        sa.Column("worker", sa.String(length=255), nullable=False),
        sa.Column("machine", sa.String(length=255), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("pid_started_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("study_uuid", "trial_number", name=op.f("pk_dsat_heartbeats")),
    )
    op.create_table(
        "dsat_launches",
        sa.Column("study_uuid", sa.String(length=36), nullable=False),
        sa.Column("launch_id", sa.String(length=255), nullable=False),
        sa.Column("trial_number", sa.Integer(), nullable=True),
        sa.Column("purpose", sa.String(length=32), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("outcome", sa.String(length=32), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("command", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("host", sa.String(length=255), nullable=False),
        sa.Column("devices", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("pids", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("started_at", sa.Float(), nullable=False),
        sa.Column("startup_s", sa.Float(), nullable=False),
        sa.Column("measured_s", sa.Float(), nullable=False),
        sa.Column("exit_s", sa.Float(), nullable=False),
        sa.Column("exit_code", sa.Integer(), nullable=True),
        sa.Column("error_excerpt", sa.Text(), nullable=False),
        sa.Column("missing_bytes", sa.BigInteger(), nullable=True),
        sa.Column("log_path", sa.Text(), nullable=False),
        sa.Column("conditions", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("root", sa.String(length=255), nullable=False),
        sa.Column("afresh", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("study_uuid", "launch_id", name=op.f("pk_dsat_launches")),
    )
    op.create_table(
        "dsat_profiles",
        sa.Column("fingerprint", sa.String(length=255), nullable=False),
        sa.Column("profile", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("study_uuid", sa.String(length=36), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("fingerprint", name=op.f("pk_dsat_profiles")),
    )
    op.create_table(
        "dsat_steps",
        sa.Column("study_uuid", sa.String(length=36), nullable=False),
        sa.Column("launch_id", sa.String(length=255), nullable=False),
        sa.Column("rank", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("time", sa.Float(), nullable=False),
        sa.Column("latency_s", sa.Float(), nullable=False),
        sa.Column("forward_s", sa.Float(), nullable=False),
        sa.Column("backward_s", sa.Float(), nullable=False),
        sa.Column("step_s", sa.Float(), nullable=False),
        sa.Column("samples", sa.BigInteger(), nullable=False),
        sa.Column("observed_micro_batch", sa.BigInteger(), nullable=True),
        sa.Column("loss", sa.Float(), nullable=True),
        sa.Column("peak_allocated_bytes", sa.BigInteger(), nullable=False),
        sa.Column("peak_reserved_bytes", sa.BigInteger(), nullable=False),
        sa.Column("rss_bytes", sa.BigInteger(), nullable=False),
        sa.Column("skipped", sa.Boolean(), nullable=False),
        sa.Column("skipped_before", sa.Integer(), nullable=False),
        sa.Column("elements", sa.BigInteger(), nullable=False),
        sa.Column("elements_are_tokens", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("study_uuid", "launch_id", "rank", "step", name=op.f("pk_dsat_steps")),
    )
    op.create_table(
        "dsat_studies",
        sa.Column("uuid", sa.String(length=36), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("spec", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("versions", sa.JSON(none_as_null=True), nullable=False),
        sa.PrimaryKeyConstraint("uuid", name=op.f("pk_dsat_studies")),
    )


def downgrade() -> None:
    """Drop our tables."""
    op.drop_table("dsat_studies")
    op.drop_table("dsat_steps")
    op.drop_table("dsat_profiles")
    op.drop_table("dsat_launches")
    op.drop_table("dsat_heartbeats")
    op.drop_index(op.f("ix_dsat_claims_study_uuid_trial_number"), table_name="dsat_claims")
    op.drop_table("dsat_claims")
