"""Quality: golden prompts, their answers, and quarantine."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def _text(name: str, *, primary_key: bool = False) -> sa.Column:
    return sa.Column(name, sa.Text, primary_key=primary_key, nullable=False)


def _words(name: str) -> sa.Column:
    return sa.Column(name, sa.Text, server_default="", nullable=False)


def _list(name: str, kind: sa.types.TypeEngine) -> sa.Column:
    return sa.Column(name, sa.ARRAY(kind), server_default=sa.text("'{}'"), nullable=False)


def _moment(name: str) -> sa.Column:
    return sa.Column(
        name, sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False
    )


def _count(table: str, name: str) -> tuple[sa.Column, sa.CheckConstraint]:
    column = sa.Column(name, sa.Integer, server_default="0", nullable=False)
    return column, sa.CheckConstraint(f"{name} >= 0", name=op.f(f"ck_{table}_{name}"))


def _of(table: str, name: str, *, primary_key: bool = False, index: bool = False) -> sa.Column:
    reference = sa.ForeignKey(f"{table}.id", ondelete="CASCADE")
    return sa.Column(name, sa.Text, reference, primary_key=primary_key, nullable=False, index=index)


def _answers() -> None:
    op.create_table(
        "golden_answers",
        sa.Column("id", sa.BigInteger, sa.Identity(), primary_key=True),
        _of("replicas", "replica_id"),
        _text("pool_id"),
        _text("asking_id"),
        _list("token_ids", sa.Integer()),
        _list("logprobs", sa.Double()),
        _words("error"),
        sa.Column("asked_at_unix_ms", sa.BigInteger, nullable=False),
        sa.Column("is_judged", sa.Boolean, server_default=sa.text("false"), nullable=False),
    )
    op.create_index(
        "ix_golden_answers_pool_id", "golden_answers", ["pool_id", "asking_id", "replica_id"]
    )
    op.create_index(
        "ix_golden_answers_new",
        "golden_answers",
        ["pool_id", "asking_id"],
        postgresql_where=sa.text("NOT is_judged"),
    )


def upgrade() -> None:
    op.create_table(
        "golden_prompts",
        _text("id", primary_key=True),
        _of("models", "model_id", index=True),
        _list("token_ids", sa.Integer()),
        *_count("golden_prompts", "output_tokens_max"),
        *_count("golden_prompts", "every_s"),
        _list("expected_token_ids", sa.Integer()),
        _words("prompt_text"),
        _words("expected_text"),
        _moment("created_at"),
    )
    _answers()
    op.create_table(
        "golden_truths",
        _of("pools", "pool_id", primary_key=True),
        _text("asking_id", primary_key=True),
        _list("token_ids", sa.Integer()),
        _list("logprobs", sa.Double()),
        _text("source"),
        _moment("since"),
    )
    op.create_table(
        "golden_runs",
        *(_text(name, primary_key=True) for name in ("model_id", "base_digest", "adapter_digest")),
        sa.Column("second", sa.BigInteger, primary_key=True),
        *_count("golden_runs", "runs"),
        *_count("golden_runs", "mismatches"),
    )
    op.create_table(
        "quarantines",
        _text("id", primary_key=True),
        sa.Column("replica_id", sa.Text, nullable=False, index=True),
        sa.Column("pool_id", sa.Text, nullable=False, index=True),
        _text("node_id"),
        *(_words(name) for name in ("base_digest", "adapter_digest", "prompt_id", "reason")),
        sa.Column(
            "evidence",
            postgresql.JSONB(),
            server_default=sa.text("'{}'::jsonb"),
            nullable=False,
        ),
        _moment("created_at"),
        sa.Column("released_at", sa.DateTime(timezone=True)),
        _words("released_by"),
    )


def downgrade() -> None:
    for table in ("quarantines", "golden_runs", "golden_truths", "golden_answers"):
        op.drop_table(table)
    op.drop_table("golden_prompts")
