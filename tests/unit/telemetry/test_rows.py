"""Tests that every valid message becomes a row, and that ClickHouse would refuse no row."""

from hypothesis import given
from hypothesis import strategies as st

from sluice.wire.telemetry.v1.telemetry_pb2 import Attempt, RequestEvent, ToolCall
from telemetry import attempts, auto_rows, rows, text_rows, tool_rows
from telemetry.migrations import load, migrations_folder
from telemetry.rows import BrokerMessage, PoisonReason

RECEIVED_MS = 1_790_000_000_000


def event(event_id: str = "evt_1", **fields: object) -> RequestEvent:
    values = {"schema_version": 1, "received_at_unix_ms": RECEIVED_MS, **fields}
    return RequestEvent(event_id=event_id, **values)  # type: ignore[arg-type]


def source(payload: bytes, offset: int = 0) -> BrokerMessage:
    return BrokerMessage("sluice.requests.v1", 0, offset, payload)


def test_every_field_of_the_event_is_a_column() -> None:
    names = {field.name for field in RequestEvent.DESCRIPTOR.fields}
    own = {field.name for field in Attempt.DESCRIPTOR.fields}
    assert own == attempts.COLUMNS.keys() - {"event_id", "received_at", "tenant_id"}
    calls = {field.name for field in ToolCall.DESCRIPTOR.fields}
    assert calls == tool_rows.COPIED.keys()
    # fields that have separate tables
    elsewhere = {"count", "attempts", "auto", "feedback", "tool_call"}
    for_spans = {"parent_span_id", "is_sampled", "tracestate"}
    columns = {rows._RENAMED.get(column, column) for column in rows.CLOSING_COLUMNS}
    assert names == columns | elsewhere | for_spans


def test_the_columns_equal_the_table() -> None:
    first, *later = load(migrations_folder())
    table = first.statements[0]
    changes = [it for found in later for it in found.statements if "ALTER TABLE requests" in it]
    for column, kind in rows.COLUMNS.items():
        is_added = any(f"ADD COLUMN IF NOT EXISTS {column} {kind} " in it for it in changes)
        assert is_added != (f"    {column} {kind}" in table)


def test_a_row_holds_the_fields_of_the_event() -> None:
    one = event(tenant_id="ten_a", session_hash=2**64 - 1, prompt_tokens=7, is_stream=True)
    row = dict(zip(rows.COLUMNS, (column[0] for column in rows.event_columns([one])), strict=True))
    assert row["event_id"] == "evt_1"
    assert row["received_at"] == RECEIVED_MS
    assert row["session_hash"] == 2**64 - 1
    assert row["is_stream"] is True
    assert (row["tenant_id"], row["prompt_tokens"], row["ttft_us"]) == ("ten_a", 7, 0)


def test_the_first_of_equal_event_ids_stays() -> None:
    messages = [
        source(event("a", prompt_tokens=1).SerializeToString()),
        source(event("b").SerializeToString()),
        source(event("a", prompt_tokens=2).SerializeToString()),
    ]
    batch = rows.decode(messages)
    assert [(e.event_id, e.prompt_tokens) for e in batch.events] == [("a", 1), ("b", 0)]
    assert batch.duplicates == 1


def test_closings_are_kept_apart() -> None:
    messages = [
        source(event("a").SerializeToString()),
        source(event("a", schema_version=2, part=1, output_tokens=4).SerializeToString()),
        source(event("a", schema_version=2).SerializeToString()),
    ]
    batch = rows.decode(messages)
    assert [e.event_id for e in batch.events] == ["a"]
    columns = dict(zip(rows.CLOSING_COLUMNS, rows.closing_columns(batch.closings), strict=True))
    assert (columns["part"], columns["output_tokens"]) == ([1, 0], (4, 0))
    assert (batch.duplicates, batch.poisons) == (0, [])


def test_each_kind_of_poison_is_parked_with_its_reason() -> None:
    payloads = [
        b"\xff\xff\xff",
        b"",
        event(schema_version=9).SerializeToString(),
        event("").SerializeToString(),
        event(received_at_unix_ms=0).SerializeToString(),
        event(status=70_000).SerializeToString(),
        event(arm=-1).SerializeToString(),
    ]
    batch = rows.decode(source(payload, index) for index, payload in enumerate(payloads))
    assert not batch.events
    assert [poison.reason for poison in batch.poisons] == [
        PoisonReason.UNDECODABLE,
        PoisonReason.UNKNOWN_SCHEMA,
        PoisonReason.UNKNOWN_SCHEMA,
        PoisonReason.INVALID,
        PoisonReason.INVALID,
        PoisonReason.INVALID,
        PoisonReason.INVALID,
    ]
    assert [poison.source.offset for poison in batch.poisons] == list(range(7))


def test_a_message_that_no_process_of_ours_made_is_dropped_and_counted() -> None:
    forged = source(event().SerializeToString())._replace(is_genuine=False)
    batch = rows.decode([forged])
    assert batch == rows.RowBatch(forged=1)
    assert text_rows.decode([forged]) == rows.RowBatch(forged=1)


def test_a_huge_poison_is_cut() -> None:
    batch = rows.decode([source(b"\xff" * 1_000_000)])
    columns = dict(zip(rows.POISON_COLUMNS, rows.poison_columns(batch.poisons), strict=True))
    assert len(columns["payload"][0]) == 65_536


@given(st.lists(st.one_of(st.binary(max_size=40), st.sampled_from("abc")), max_size=20))
def test_every_message_ends_as_exactly_one_thing(contents: list[bytes | str]) -> None:
    messages = [
        source(event(content).SerializeToString() if isinstance(content, str) else content, index)
        for index, content in enumerate(contents)
    ]
    batch = rows.decode(messages)
    assert len(batch.events) + len(batch.poisons) + batch.duplicates == len(messages)
    assert len({e.event_id for e in batch.events}) == len(batch.events)


def test_a_choice_of_auto_is_a_row_of_its_own_and_so_is_a_judgement() -> None:
    chosen = event("chosen", tenant_id="acme", request_id="r")
    chosen.auto.scheme, chosen.auto.cluster, chosen.auto.reason = 1, 4, "cheapest"
    chosen.auto.model = "small"
    for name, chance in (("small", 0.99), ("large", 0.01)):
        chosen.auto.options.add(model=name, release="1", cost=0.5, quality=0.7, propensity=chance)
    judged = event("fbk_1", schema_version=rows.FEEDBACK_VERSION, tenant_id="acme")
    judged.feedback.answer, judged.feedback.good = "evt_chosen", 1.0
    messages = [source(it.SerializeToString()) for it in (chosen, event("other"), judged)]
    batch = rows.decode(messages)
    assert [it.event_id for it in batch.events] == ["chosen", "other"]
    columns = auto_rows.choice_columns(batch.events)
    [row] = zip(*columns, strict=True)
    told = dict(zip(auto_rows.CHOICE_COLUMNS, row, strict=True))
    assert (told["event_id"], told["cluster"], told["model"]) == ("chosen", 4, "small")
    assert (told["models"], told["propensities"]) == (["small", "large"], [0.99, 0.01])
    assert auto_rows.feedback_columns(batch.judgements) == [
        ["acme"],
        ["evt_chosen"],
        [1.0],
        [RECEIVED_MS],
    ]


def test_calls_of_tools_have_a_table_of_their_own() -> None:
    call = ToolCall(name="weather", label="http", duration_us=7, outcome="answered")
    one = event("evt_c", schema_version=5, tool_call=call, tenant_id="t", request_id="r")
    batch = rows.decode([source(one.SerializeToString())] * 2)
    assert (len(batch.tool_calls), batch.duplicates, batch.events) == (1, 1, [])
    columns = tool_rows.columns(batch.tool_calls)
    row = dict(zip(tool_rows.COLUMNS, (column[0] for column in columns), strict=True))
    assert (row["name"], row["duration_us"], row["request_id"]) == ("weather", 7, "r")
    table = next(
        found.statements[0] for found in load(migrations_folder()) if "tool_calls" in str(found)
    )
    assert all(f"    {name} {kind}" in table for name, kind in tool_rows.COLUMNS.items())
