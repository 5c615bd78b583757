"""Rows of golden prompts, answers, right answers, ejections by routers, and quarantines."""

from typing import Any

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Column,
    DateTime,
    Double,
    ForeignKey,
    Identity,
    Index,
    Integer,
    Table,
    Text,
    func,
    text,
)

from control_plane.tables import count_column, flag_column, metadata, object_column, words_column


def _ids(name: str) -> Column[list[int]]:
    """Return a column of token ids."""
    return Column(name, ARRAY(Integer), nullable=False, server_default=text("'{}'"))


def _logprobs() -> Column[list[float]]:
    return Column("logprobs", ARRAY(Double), nullable=False, server_default=text("'{}'"))


def _moment(name: str) -> Column[Any]:
    return Column(name, DateTime(timezone=True), nullable=False, server_default=func.now())


# Golden prompts of models' releases. The default prompts of bases have no rows.
golden_prompts = Table(
    "golden_prompts",
    metadata,
    Column("id", Text, primary_key=True),
    Column(
        "model_id", Text, ForeignKey("models.id", ondelete="CASCADE"), nullable=False, index=True
    ),
    _ids("token_ids"),
    count_column("output_tokens_max"),
    count_column("every_s"),
    # tokens with which an answer must begin, or none if any answer is accepted
    _ids("expected_token_ids"),
    words_column("prompt_text"),  # shown to operators
    words_column("expected_text"),  # shown to operators
    _moment("created_at"),
)

# The latest answers of each replica to each asking (a prompt for a base with an adapter).
golden_answers = Table(
    "golden_answers",
    metadata,
    Column("id", BigInteger, Identity(), primary_key=True),
    Column("replica_id", Text, ForeignKey("replicas.id", ondelete="CASCADE"), nullable=False),
    Column("pool_id", Text, nullable=False),
    Column("asking_id", Text, nullable=False),
    _ids("token_ids"),
    _logprobs(),
    words_column("error"),  # reason for a missing answer, otherwise empty
    Column("asked_at_unix_ms", BigInteger, nullable=False),
    flag_column("is_judged"),
)
Index(
    "ix_golden_answers_pool_id",
    *(golden_answers.c[name] for name in ("pool_id", "asking_id", "replica_id")),
)
Index(
    "ix_golden_answers_new",
    golden_answers.c.pool_id,
    golden_answers.c.asking_id,
    postgresql_where=text("NOT is_judged"),
)

# The answer of a pool to an asking when its replicas last agreed.
golden_truths = Table(
    "golden_truths",
    metadata,
    Column("pool_id", Text, ForeignKey("pools.id", ondelete="CASCADE"), primary_key=True),
    Column("asking_id", Text, primary_key=True),
    _ids("token_ids"),
    _logprobs(),
    Column("source", Text, nullable=False),
    _moment("since"),
)

# Number of runs of prompts with expected answers, and of mismatches, by second.
golden_runs = Table(
    "golden_runs",
    metadata,
    Column("model_id", Text, primary_key=True),
    Column("base_digest", Text, primary_key=True),
    Column("adapter_digest", Text, primary_key=True),
    Column("second", BigInteger, primary_key=True),  # Unix time in seconds
    count_column("runs"),
    count_column("mismatches"),
)

# Replicas that routers ejected for wrong answers. The guard sends prompts to these replicas first.
ejections = Table(
    "ejections",
    metadata,
    Column("replica_id", Text, primary_key=True),
    Column("router_id", Text, primary_key=True),
    Column("ejected_at_unix_ms", BigInteger, primary_key=True),  # Unix time by the router's clock
    Column("cell_id", Text, nullable=False),
    Column("epoch", BigInteger, nullable=False),  # epoch of the cell
    Column("evidence", Text, nullable=False),  # an `EvidenceKind` of sluice.detector
    count_column("wrong"),
    count_column("asked"),
    # Askings of the platform that the replica has answered correctly since the ejection.
    Column("right_askings", ARRAY(Text), nullable=False, server_default=text("'{}'")),
    _moment("heard_at"),
    Column("ended_at", DateTime(timezone=True)),
    # `confirmed` or `cleared`, empty if the ejection is open or was never settled
    words_column("outcome"),
)
Index(
    "ix_ejections_open",
    ejections.c.heard_at,
    postgresql_where=text("ended_at IS NULL"),
)

# Replicas that answer wrongly but must stay in service, because their pool is small.
suspicions = Table(
    "suspicions",
    metadata,
    Column("replica_id", Text, primary_key=True),
    _moment("suspected_at"),
)

# Replicas that were removed from service for wrong answers. Rows outlive their replicas.
quarantines = Table(
    "quarantines",
    metadata,
    Column("id", Text, primary_key=True),
    Column("replica_id", Text, nullable=False, index=True),
    Column("pool_id", Text, nullable=False, index=True),
    Column("node_id", Text, nullable=False),
    words_column("base_digest"),
    words_column("adapter_digest"),
    words_column("prompt_id"),
    words_column("reason"),
    object_column("evidence"),
    _moment("created_at"),
    Column("released_at", DateTime(timezone=True)),
    words_column("released_by"),
)
