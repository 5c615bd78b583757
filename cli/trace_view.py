"""A request's trace as text: its stages on one time axis, and what is said around them; pure.

An event holds lengths of stages, not their begins. They follow one another, so the begins are
sums. Where an answer was resumed, lengths are those of its last attempt and belong nowhere on the
axis: then they are told apart.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]

_NAME_WIDTH = 13
_TIME_WIDTH = 10
_BAR_MIN = 10  # narrower bars say nothing
_BAR_MAX = 100
_HTTP_ERROR = 400


@dataclass(frozen=True, slots=True)
class Stage:
    """A span of a request's time, in microseconds since the gateway received it."""

    name: str
    start_us: int
    end_us: int


def stages(row: Row) -> list[Stage]:
    """Return the stages of an event in order; they cover its time without gaps."""
    total_us = max(row["total_us"], row["ttft_us"], row["gateway_us"])
    gateway_us = row["gateway_us"]
    if not gateway_us:  # it ended in the gateway
        return [Stage("gateway", 0, total_us)] if total_us else []
    # Without streaming, the first bytes are those of the whole answer.
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
            ("load, batch", row["engine_queue_us"]),
            ("prefill", row["prefill_us"]),
        ]
    found: list[Stage] = []
    at_us = 0
    for name, length_us in lengths:
        end_us = min(at_us + length_us, first_us)
        if end_us > at_us:
            found.append(Stage(name, at_us, end_us))
        at_us = end_us
    if first_us > at_us:
        found.append(Stage(rest, at_us, first_us))
    if total_us > first_us:
        found.append(Stage("decode", first_us, total_us))
    return found


def bar(stage: Stage, total_us: int, width: int) -> str:
    """Return `width` characters, full where the stage is; a stage has at least one."""
    begin = min(width - 1, stage.start_us * width // total_us)
    end = min(width, max(begin + 1, -(-stage.end_us * width // total_us)))
    return (" " * begin + "█" * (end - begin)).ljust(width)


def waterfall(found: Sequence[Stage], width: int) -> Iterator[str]:
    """Yield a line per stage: name, bar to scale, begin, length; without bars where too narrow."""
    total_us = found[-1].end_us if found else 0
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
    """Yield all that is shown of what `GET /v1/requests/{id}` tells."""
    row = trace["request"]
    yield from _head(row)
    found = stages(row)
    if found:
        yield ""
        yield from waterfall(found, width)
    notes = [*_notes(row), *_closings(trace), *_relatives(trace)]
    if notes:
        yield ""
        yield from notes


def time_text(micros: int) -> str:
    """Return a length of time for people, to three digits or so."""
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


def _notes(row: Row) -> Iterator[str]:
    """Yield what the bars cannot show."""
    if row["resumes"]:
        yield (
            f"resumed {row['resumes']} x; of the last attempt, on {row['replica_id']}: "
            f"queue {time_text(row['queue_us'])}, load and batch "
            f"{time_text(row['engine_queue_us'])}, prefill {time_text(row['prefill_us'])}"
        )
    if row["choices"] > 1:
        yield f"{row['choices']} answers: stages are those of the first"
    if row["status"] >= _HTTP_ERROR and not row["replica_id"]:
        yield "no replica was given this request"
    if not row["is_stream"] and row["replica_id"]:
        yield "not streamed: when the first token was made is not known"
    if row["is_copy"]:
        yield "a copy for a shadow stage: no client waited for it"


def _closings(trace: Mapping[str, Any]) -> Iterator[str]:
    if not trace["is_settled"]:
        yield "its gateway was lost; only routers have told of it so far, stages are not known"
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
