"""`sluice explain`: shows the routers' reasons for the placement of a request, real or supposed."""

import asyncio
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.admin import AsJson, ask, take_secret
from cli.api import ApiClient, ApiError
from cli.render import console, show_json, show_table, table
from cli.stack_commands import fail
from sluice.deadlines import admission_ms
from sluice.hashing import HASH_BYTES, chained_hashes, session_hash
from sluice.priority import queue_priority
from sluice.wire.router.v1 import router_pb2 as wire

_TIMEOUT_S = 5.0
_BYTES_PER_TOKEN = 4  # estimate for a text without counted tokens
_TOKENS_MAX = 4_000_000
_NUMBERS = ("cost", "owed", "prefill", "adapter", "cached", "active", "kv_free")
_KEPT_TIMES = 2  # number of durations, cost and owed, that a router stores of a past decision
_CHANNEL = (("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", 64 << 20))


@dataclass(frozen=True, slots=True)
class Question:
    """A hypothetical request whose placement the routers explain.

    Attributes:
        model: Public name of the model.
        prompt: Token ids, of which only the number matters without a `cache_root`.
        cache_root: Root of the tenant's prefix cache, by which the routers find cached blocks.
    """

    model: str
    prompt: list[int]
    output_tokens: int = 0
    session: str = ""
    tenant: str = ""
    cell: str = ""
    cache_root: bytes = b""


def explain(
    request_id: Annotated[str, typer.Argument(help="Id of a request that waits or runs.")] = "",
    *,
    model: Annotated[
        str, typer.Option(help="Instead of an id: the model of a request that might come.")
    ] = "",
    prompt: Annotated[str, typer.Option(help="Text of its prompt; 4 bytes count as a token.")] = "",
    prompt_tokens: Annotated[
        int, typer.Option(min=0, max=_TOKENS_MAX, help="Or the number of tokens of its prompt.")
    ] = 0,
    tokens_file: Annotated[
        Path | None, typer.Option(help="Or a JSON file with the token ids of its prompt.")
    ] = None,
    cache_root: Annotated[
        str, typer.Option(help="Root of its prefix cache in hexadecimals, with --tokens-file.")
    ] = "",
    output_tokens: Annotated[int, typer.Option(min=0, help="Most tokens of the answer.")] = 0,
    session: Annotated[str, typer.Option(help="Session of the request.")] = "",
    tenant: Annotated[
        str, typer.Option(help="Tenant of the request; sets tier, weight, deadline.")
    ] = "",
    cell: Annotated[str, typer.Option(help="One cell; default: all of the model's pool.")] = "",
    as_json: AsJson = False,
) -> None:
    """Explain the placement of a request, or of one that might come now."""
    if bool(request_id) == bool(model):
        raise fail("give either the id of a request or --model", 2)
    take_secret()
    if request_id:
        answers, silent = ask(lambda api: find_request(api, request_id))
    else:
        ids = _prompt(prompt, prompt_tokens, tokens_file)
        question = Question(
            model, ids, output_tokens, session, tenant, cell, _root(cache_root, tokens_file)
        )
        answers, silent = ask(lambda api: _suppose(api, question))
    for line in silent:
        console(stderr=True).print(f"sluice: {line}", markup=False, soft_wrap=True)
    if as_json:
        show_json([plain(answer) for answer in answers])
        return
    show_answer(answers[0])
    if len(answers) > 1:
        _show_others(answers[1:])


# --- request --------------------------------------------------------------------------


def _prompt(text: str, tokens: int, path: Path | None) -> list[int]:
    if sum((bool(text), bool(tokens), path is not None)) != 1:
        raise fail("give the prompt: --prompt, --prompt-tokens or --tokens-file", 2)
    if path is None:
        return [0] * (tokens or -(-len(text.encode()) // _BYTES_PER_TOKEN))
    try:
        ids = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise fail(f"{path} cannot be read as JSON: {error}", 2) from None
    if not isinstance(ids, list) or not ids or not all(_is_token(token) for token in ids):
        raise fail(f"{path} is no list of token ids", 2)
    return ids


def _is_token(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 32


def _root(text: str, path: Path | None) -> bytes:
    if not text:
        return b""
    try:
        root = bytes.fromhex(text)
    except ValueError:
        root = b""
    if len(root) != HASH_BYTES or path is None:
        raise fail(f"--cache-root has {2 * HASH_BYTES} hexadecimals and needs --tokens-file", 2)
    return root


async def find_request(api: ApiClient, request_id: str) -> tuple[list[wire.Explanation], list[str]]:
    """Return the explanation of the router that has a request, and the silent routers."""
    addresses = {cell["router_address"]: None for cell in await _cells(api)}
    request = wire.ExplainRequest(request_id=request_id)
    answers, silent = await _ask_all([(address, request) for address in addresses])
    known = [answer for answer in answers if answer.state != "unknown"]
    if known:
        return known, silent
    text = f"no router knows request {request_id}; it may have ended (see: sluice requests)"
    raise ApiError("; ".join([text, *silent]))


async def _suppose(api: ApiClient, question: Question) -> tuple[list[wire.Explanation], list[str]]:
    """Return the explanations of all cells that could serve a request, the best first."""
    model = await _model(api, question.model)
    submit = await _submit(api, question, model)
    asked: list[tuple[str, wire.ExplainRequest]] = []
    for cell in await _cells(api):
        if cell["pool_id"] == model["pool_id"] and question.cell in {"", cell["id"]}:
            submit.cell_id = cell["id"]
            asked.append((cell["router_address"], wire.ExplainRequest(submit=submit)))
    if not asked:
        which = f"cell {question.cell}" if question.cell else "any cell"
        raise ApiError(f"no router owns {which} of pool {model['pool_id']}; see: sluice status")
    answers, silent = await _ask_all(asked)
    if not answers:
        raise ApiError("; ".join(silent))
    answers.sort(key=lambda answer: (answer.state == "rejected", answer.predicted_ttft_ms))
    return answers, silent


async def _model(api: ApiClient, name: str) -> dict[str, Any]:
    """Return the model or release that a public name resolves to."""
    alias = await api.find(f"/v1/aliases/{name}")
    target = name if alias is None else str(alias["target"])
    for kind in ("models", "releases"):
        if (found := await api.find(f"/v1/{kind}/{target}")) is not None:
            return found
    raise ApiError(f"there is no model {name}; see: sluice models list")


async def _submit(api: ApiClient, question: Question, model: Mapping[str, Any]) -> wire.Submit:
    submit = wire.Submit(
        request_id="hypothetical",
        tenant_id=question.tenant,
        prompt=question.prompt,
        output_tokens_max=question.output_tokens,
        adapter_digest=model["adapter_digest"] or "",
        session_hash=session_hash(question.tenant, question.session),
    )
    if question.cache_root:
        submit.block_hashes = chained_hashes(question.prompt, question.cache_root)
    if question.tenant:
        tenant = await api.find(f"/v1/tenants/{question.tenant}")
        if tenant is None:
            raise ApiError(f"there is no tenant {question.tenant}; see: sluice tenants list")
        tier = await api.call("GET", f"/v1/tiers/{tenant['tier_id']}")
        submit.tenant_weight = tenant["weight"]
        submit.tier_priority = queue_priority(tier["priority"])
        submit.is_preemptible = tier["is_preemptible"]
        submit.admission_ms = admission_ms(
            tier["ttft_deadline_ms"], is_preemptible=submit.is_preemptible
        )
        submit.tier_reserved_permille = round(10 * tier["reserved_percent"])
    return submit


async def _cells(api: ApiClient) -> list[dict[str, Any]]:
    """Return the cells that a router owns."""
    cells: list[dict[str, Any]] = []
    after = ""
    while True:
        page = await api.call("GET", "/v1/cells", query={"after": after})
        cells += page["data"]
        if not page["has_more"]:
            break
        after = page["data"][-1]["id"]
    owned = [cell for cell in cells if cell["router_address"]]
    if not owned:
        raise ApiError("no router owns a cell; see: sluice status")
    return owned


async def _ask_all(
    asked: list[tuple[str, wire.ExplainRequest]],
) -> tuple[list[wire.Explanation], list[str]]:
    """Return the answers of the routers, and for each missing answer the reason."""
    replies = await asyncio.gather(*(_ask_router(*question) for question in asked))
    answers = [reply for reply in replies if isinstance(reply, wire.Explanation)]
    return answers, [reply for reply in replies if isinstance(reply, str)]


async def _ask_router(address: str, request: wire.ExplainRequest) -> wire.Explanation | str:
    import grpc.aio  # costs 0.2 s, which other commands need not spend

    from sluice.channels import channel_to
    from sluice.identity import CertificateRole
    from sluice.wire.router.v1.router_pb2_grpc import RouterServiceStub

    try:
        link = channel_to(address, CertificateRole.ROUTER, options=_CHANNEL)
    except RuntimeError:
        return f"cannot call the router at {address}: set INSTALLATION__SECRET to its own"
    async with link as channel:
        try:
            return await RouterServiceStub(channel).Explain(request, timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            what = (error.details() or error.code().name).partition("\n")[0]
            return f"the router at {address} does not answer: {what}"


# --- output ---------------------------------------------------------------------------------


def plain(answer: wire.Explanation) -> dict[str, Any]:
    """Return a message as JSON values, with all its fields."""
    values = {field.name: getattr(answer, field.name) for field in answer.DESCRIPTOR.fields}
    values["candidates"] = [
        {field.name: getattr(candidate, field.name) for field in candidate.DESCRIPTOR.fields}
        for candidate in answer.candidates
    ]
    return values


def show_answer(answer: wire.Explanation) -> None:
    """Print a router's explanation of one request."""
    out = console()
    for line in _lines(answer):
        out.print(line, markup=False, soft_wrap=True)
    columns = ("replica", *_NUMBERS, "health", "note")
    rows = [_row(candidate, answer.chosen) for candidate in answer.candidates]
    if rows:
        out.print(table(columns, rows, right=" ".join(_NUMBERS)))


def _lines(answer: wire.Explanation) -> Iterator[str]:
    """Yield the lines above the table."""
    where = f"cell {answer.cell_id}, router {answer.router_id}"
    end = f" ({answer.code})" if answer.code else ""
    yield f"{answer.request_id}: {answer.state}{end} in {where}"
    yield answer.reason
    if answer.retry_after_ms:
        yield f"try again in {_seconds(answer.retry_after_ms)}"
    if answer.predicted_ttft_ms and answer.state != "rejected":
        queue = f", {_seconds(answer.predicted_queue_ms)} of it in the queue"
        wait = queue if answer.predicted_queue_ms else ""
        left = f"; deadline in {_seconds(answer.deadline_left_ms)}"
        yield f"first token in {_seconds(answer.predicted_ttft_ms)}{wait}{left}"


def _row(candidate: wire.Candidate, chosen: str) -> list[str]:
    notes = (
        "chosen" if candidate.replica_id == chosen else "",
        "its session" if candidate.is_session_home else "",
        f"no: {candidate.excluded_by}" if candidate.excluded_by else "",
    )
    times = (
        *(candidate.cost_us, candidate.backlog_us),
        *(candidate.prefill_us, candidate.adapter_us),
    )
    is_known = bool(candidate.health)  # otherwise the router has stored few fields
    return [
        candidate.replica_id,
        *(
            f"{micros / 1000:.1f} ms" if is_known or place < _KEPT_TIMES else "-"
            for place, micros in enumerate(times)
        ),
        str(candidate.cached_tokens),
        str(candidate.active) if is_known else "-",
        str(candidate.kv_free_blocks) if is_known else "-",
        candidate.health,
        ", ".join(note for note in notes if note),
    ]


def _show_others(answers: list[wire.Explanation]) -> None:
    rows = [
        [
            *(answer.cell_id, answer.router_id, answer.state),
            "-" if answer.state == "rejected" else _seconds(answer.predicted_ttft_ms),
            answer.reason,
        ]
        for answer in answers
    ]
    columns = ("other cell", "router", "state", "first token", "reason")
    show_table(columns, rows)


def _seconds(millis: int) -> str:
    return f"{millis / 1000:.2f} s" if millis >= 1000 else f"{millis} ms"
