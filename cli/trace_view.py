"""Shows a request's trace as text, with its stages on one time axis, and notes. It has no I/O.

An event has the lengths of stages, not their begins. Stages follow one another, so each begin is a
sum of lengths. If a request had several attempts, each attempt has its own bars below the
gateway's. An event of an older gateway has no attempts. Then the lengths of a resumed answer
belong to its last attempt, whose begin is unknown, so they are shown in a note.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]

_NAME_WIDTH = 13
_TIME_WIDTH = 10
_BAR_MIN = 10  # narrower bars show too little
_BAR_MAX = 100
_HTTP_ERROR = 400


@dataclass(frozen=True, slots=True)
class TraceStage:
    """A time range of a request, in microseconds since the gateway received the request."""

    name: str
    start_us: int
    end_us: int


def stages(row: Row) -> list[TraceStage]:
    """Return the stages of an event in order, which cover its whole time without gaps."""
    total_us = max(row["total_us"], row["ttft_us"], row["gateway_us"])
    gateway_us = row["gateway_us"]
    if not gateway_us:  # the request ended in the gateway
        return [TraceStage("gateway", 0, total_us)] if total_us else []
    # Without streaming, the first bytes are sent with the whole answer.
    is_first_known = row["is_stream"] and row["ttft_us"] > 0
    first_us = row["ttft_us"] if is_first_known else total_us
    lengths = [("gateway", gateway_us)]
    if not row["replica_id"]:
        rest = "not placed"
    elif row["resumes"]:
        rest = "first token" if is_first_known else "attempts"
    else:
        rest = "first token" if is_first_known else "decode"
        lengths += [
            ("queue", row["queue_us"]),
            *_engine_lengths(row),
            ("prefill", row["prefill_us"]),
        ]
    found: list[TraceStage] = []
    at_us = 0
    for name, length_us in lengths:
        end_us = min(at_us + length_us, first_us)
        if end_us > at_us:
            found.append(TraceStage(name, at_us, end_us))
        at_us = end_us
    if first_us > at_us:
        found.append(TraceStage(rest, at_us, first_us))
    if total_us > first_us:
        found.append(TraceStage("decode", first_us, total_us))
    return found


def attempt_stages(row: Row, attempts: Sequence[Row]) -> list[TraceStage]:
    """Return the stages of the gateway and of each attempt, which may overlap in time."""
    total_us = max(row["total_us"], row["ttft_us"], *(it["ended_us"] for it in attempts))
    found = [
        TraceStage("gateway", 0, min(row["gateway_us"], attempts[0]["submitted_us"], total_us))
    ]
    for name, attempt in zip(_labels(attempts), attempts, strict=True):
        at_us = attempt["submitted_us"]
        last_us = max(at_us, attempt["ended_us"])
        found.append(TraceStage(name, at_us, last_us))
        first_us = attempt["first_us"] and max(at_us, min(attempt["first_us"], last_us))
        until_us = first_us or last_us
        lengths = [("queue", attempt["queue_us"] if attempt["replica_id"] else last_us - at_us)]
        if attempt["replica_id"]:
            lengths += [*_engine_lengths(attempt), ("prefill", attempt["prefill_us"])]
        for stage, length_us in lengths:
            end_us = min(at_us + length_us, until_us)
            if end_us > at_us:
                found.append(TraceStage(f"  {stage}", at_us, end_us))
            at_us = max(at_us, end_us)
        if until_us > at_us:
            found.append(TraceStage("  first token" if first_us else "  no token", at_us, until_us))
        if first_us and last_us > first_us:
            found.append(TraceStage("  decode", first_us, last_us))
    return found


def _engine_lengths(row: Row) -> list[tuple[str, int]]:
    """Return a sequence's waits in its engine, first for its adapter, then for a batch place."""
    load_us = row.get("load_us", 0)  # absent in answers of an older service
    return [("load", load_us), ("batch", max(0, row["engine_queue_us"] - load_us))]


def _labels(attempts: Sequence[Row]) -> list[str]:
    has_parts = any(it["part"] for it in attempts)
    return [
        f"answer {it['part']}.{it['number']}" if has_parts else f"attempt {it['number']}"
        for it in attempts
    ]


def attempt_text(attempt: Row, row: Row) -> str:
    """Return the router and replica of an attempt, its tokens, and the reason of its end."""
    label = f"answer {attempt['part']}, " if row["choices"] > 1 else ""
    where = attempt["replica_id"] or "no replica"
    text = (
        f"{label}attempt {attempt['number']}: {where}, router {attempt['router_id']}, cell "
        f"{attempt['cell_id']}; {attempt['output_tokens']} tokens, {attempt['cached_tokens']} "
        f"prompt tokens cached; {attempt['outcome']}"
    )
    return f"{text}: {attempt['reason']}" if attempt["reason"] else text


def reality(attempt: Row) -> str:
    """Return a comparison of a router's prediction for an attempt with the measured times."""
    decision = attempt["decision"]
    waited_us = attempt["first_us"] - attempt["submitted_us"] - attempt["queue_us"]
    came = f"came after {time_text(max(0, waited_us))}" if attempt["first_us"] else "never came"
    predicted_ms = decision.get("predicted_ttft_ms", 0)
    was = f"was predicted {predicted_ms} ms after it was placed" if predicted_ms else ""
    queued = f"it was placed after {time_text(attempt['queue_us'])} in the queue"
    return f"{queued}; the first token {' and '.join(filter(None, (was, came)))}"


def _notes_of_one(attempts: Sequence[Row]) -> list[str]:
    return [f"{it['outcome']}: {it['reason']}" for it in attempts if it["reason"]]


def bar(stage: TraceStage, total_us: int, width: int) -> str:
    """Return a bar of `width` characters, filled over the stage's time (at least one character)."""
    begin = min(width - 1, stage.start_us * width // total_us)
    end = min(width, max(begin + 1, -(-stage.end_us * width // total_us)))
    return (" " * begin + "█" * (end - begin)).ljust(width)


def waterfall(found: Sequence[TraceStage], width: int) -> Iterator[str]:
    """Yield a line per stage with name, bar to scale, begin and length.

    There are no bars if the width is too small.
    """
    total_us = max((stage.end_us for stage in found), default=0) or 1
    bar_width = min(_BAR_MAX, width - _NAME_WIDTH - 2 * _TIME_WIDTH - 3)
    head = ("", "", "from", "takes")
    for name, shown, start, length in (
        head,
        *(
            (
                stage.name,
                bar(stage, total_us, bar_width) if bar_width >= _BAR_MIN else "",
                time_text(stage.start_us),
                time_text(stage.end_us - stage.start_us),
            )
            for stage in found
        ),
    ):
        middle = f" {shown:<{bar_width}}" if bar_width >= _BAR_MIN else ""
        yield f"{name:<{_NAME_WIDTH}}{middle} {start:>{_TIME_WIDTH}} {length:>{_TIME_WIDTH}}"


def lines(trace: Mapping[str, Any], width: int) -> Iterator[str]:
    """Yield all lines of text for an answer of `GET /v1/requests/{id}`."""
    row, attempts = trace["request"], trace.get("attempts") or []
    yield from _head(row)
    has_several = len(attempts) > 1
    found = attempt_stages(row, attempts) if has_several else stages(row)
    if found:
        yield ""
        yield from waterfall(found, width)
    told = [attempt_text(it, row) for it in attempts] if has_several else _notes_of_one(attempts)
    notes = [*told, *_notes(row, has_several), *_closings(trace), *_relatives(trace)]
    if notes:
        yield ""
        yield from notes


def time_text(micros: int) -> str:
    """Return a duration for people, with about three digits."""
    if micros < 1_000_000:
        return f"{micros / 1000:.2f} ms" if micros < 100_000 else f"{micros / 1000:.0f} ms"
    return f"{micros / 1e6:.2f} s"


def _head(row: Row) -> Iterator[str]:
    ended = f"{row['outcome']} ({row['status']})" if row["status"] else row["outcome"]
    after = f" after {time_text(row['total_us'])}" if row["total_us"] else ""
    yield f"{row['request_id']}: {ended}{after}, received {row['received_at']}"
    yield _pairs(
        ("tenant", row["tenant_id"]),
        ("key", row["key_id"]),
        ("tier", row["tier_id"]),
        ("endpoint", row["endpoint"] + (" (streamed)" if row["is_stream"] else "")),
    )
    asked = row["requested_model"]
    yield _pairs(
        ("model", row["model"]),
        ("asked for", asked if asked != row["model"] else ""),
        ("release", row["release"]),
        ("adapter", row["adapter_digest"][:12]),
        ("rollout", " ".join(filter(None, (row["rollout_id"], row["arm"])))),
    )
    places = ("gateway", "router", "cell", "pool", "replica")
    yield _pairs(*((name, row[f"{name}_id"]) for name in places))
    yield _pairs(
        ("prompt", f"{row['prompt_tokens']} tokens, {row['cached_tokens']} cached"),
        ("answer", f"{row['output_tokens']} tokens{_speed(row)}"),
        ("longest pause", time_text(row["itl_max_us"]) if row["itl_max_us"] else ""),
    )
    yield _pairs(("trace", row["trace_id"]), ("event", row["event_id"]))


def _speed(row: Row) -> str:
    decode_us = row["total_us"] - row["ttft_us"]
    if not row["is_stream"] or not row["ttft_us"] or row["output_tokens"] < 2 or decode_us <= 0:
        return ""
    return f", {(row['output_tokens'] - 1) / decode_us * 1e6:.0f}/s after the first"


def _pairs(*pairs: tuple[str, str]) -> str:
    return "  " + "; ".join(f"{name} {value}" for name, value in pairs if value)


def _notes(row: Row, has_attempts: bool) -> Iterator[str]:
    """Yield notes on facts that the bars cannot show."""
    if row["resumes"] and not has_attempts:
        yield (
            f"resumed {row['resumes']} x; of the last attempt, on {row['replica_id']}: "
            f"queue {time_text(row['queue_us'])}, load and batch "
            f"{time_text(row['engine_queue_us'])}, prefill {time_text(row['prefill_us'])}"
        )
    if row["choices"] > 1 and not has_attempts:
        yield f"{row['choices']} answers: stages are those of the first"
    if row["status"] >= _HTTP_ERROR and not row["replica_id"]:
        yield "this request went to no replica"
    if not row["is_stream"] and row["replica_id"]:
        yield "not streamed: the time of the first token is unknown"
    if row["is_copy"]:
        yield "a copy for a shadow stage: no client waited for it"


def _closings(trace: Mapping[str, Any]) -> Iterator[str]:
    if not trace["is_settled"]:
        yield "its gateway was lost; only routers have reported it so far, stages are unknown"
    for it in trace["closings"]:
        yield (
            f"closed by {it['router_id']}: answer {it['part']}, {it['output_tokens']} tokens on "
            f"{it['replica_id'] or 'no replica'}, told {it['ingested_at']}"
        )


def _relatives(trace: Mapping[str, Any]) -> Iterator[str]:
    for copy in trace["copies"]:
        yield (
            f"copy for a shadow stage: {copy['model']} {copy['release']}, {copy['outcome']} after "
            f"{time_text(copy['total_us'])}"
        )
    if trace["others"]:
        latest = trace["others"][0]["received_at"]
        yield f"earlier requests with the same id: {len(trace['others'])}, the last {latest}"
