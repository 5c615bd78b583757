"""`sluice golden`: commands for golden prompts, which test every replica, and for quarantines."""

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.admin import AsJson, ask, delete_one, setting, show_one
from cli.api import ApiClient, Json
from cli.golden_texts import decode, readable_quarantine, readable_result, token_ids_of
from cli.render import show_fields, show_json, show_objects
from cli.stack_commands import fail

golden = typer.Typer(
    help="Golden prompts, which find replicas with wrong answers.", no_args_is_help=True
)

_SHOWN = ("id", "model_id", "prompt_text", "expected_text", "every_s", "output_tokens_max")
_RESULTS = ("pool_id", "asking_id", "replica_id", "differs_in", "deviations", "answer", "right")
_QUARANTINES = (
    *("id", "replica_id", "pool_id", "node_id", "prompt_id", "reason", "created_at"),
    "released_at",
)
_EJECTIONS = (
    *("replica_id", "router_id", "cell_id", "evidence", "wrong", "asked", "heard_at"),
    *("ended_at", "outcome"),
)
_EVERY = re.compile(r"(\d{1,6})(s|m|h)?")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}

Model = Annotated[str, typer.Argument(help="Public name of a model.")]
Quarantine = Annotated[
    str, typer.Argument(help="Id of a quarantine; see: sluice fleet quarantines.")
]


@golden.command("add")
def add_prompt(
    model: Model,
    *,
    prompt: Annotated[
        str | None, typer.Option(help="Text of the prompt, without a chat template.")
    ] = None,
    messages: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="JSON list of messages of a chat."),
    ] = None,
    expect: Annotated[str, typer.Option(help="Beginning of a right answer.")] = "",
    every: Annotated[
        str, typer.Option(help="Time between two runs on a replica: 30s, 5m.")
    ] = "60s",
    tokens: Annotated[int, typer.Option(min=1, max=64, help="Most tokens of an answer.")] = 16,
    as_json: AsJson = False,
) -> None:
    """Send a golden prompt to all releases of a model, on every replica, from now on.

    The gateway at OPENAI_BASE_URL tokenizes the text, for the key OPENAI_API_KEY.
    """
    if (prompt is None) == (messages is None):
        raise typer.BadParameter("give one of them", param_hint="--prompt, --messages")
    asked: Json = {"prompt": prompt} if prompt is not None else {"messages": _read(messages)}
    every_s = _seconds(every)

    async def tokenized(_: ApiClient) -> tuple[list[int], list[int]]:
        async with ApiClient(setting("OPENAI_BASE_URL"), setting("OPENAI_API_KEY")) as gateway:
            return await _tokenized(gateway, model, asked, expect)

    token_ids, expected = ask(tokenized)
    body = {
        "token_ids": token_ids,
        "output_tokens_max": max(tokens, len(expected)),
        "every_s": every_s,
        "expected_token_ids": expected,
        "prompt_text": prompt if prompt is not None else json.dumps(asked["messages"]),
        "expected_text": expect,
    }
    made = ask(lambda api: api.call("POST", f"/v1/models/{model}/golden-prompts", body))
    show_objects([made], _SHOWN, as_json=as_json)


@golden.command("list")
def list_prompts(
    model: Annotated[str | None, typer.Argument(help="Only prompts of this model.")] = None,
    *,
    as_json: AsJson = False,
) -> None:
    """List the golden prompts. Every base has one more, which the platform generates."""
    path = "/v1/golden-prompts" if model is None else f"/v1/models/{model}/golden-prompts"
    found = ask(lambda api: api.list(path))
    show_objects(found, _SHOWN, as_json=as_json)


@golden.command("show")
def show_prompt(
    prompt: Annotated[str, typer.Argument(help="Id of a golden prompt; see: sluice golden list.")],
    *,
    as_json: AsJson = False,
) -> None:
    """Show a golden prompt, with the token ids that replicas receive."""
    show_one(f"/v1/golden-prompts/{prompt}", as_json=as_json)


@golden.command("remove")
def remove_prompt(prompt: Annotated[str, typer.Argument(help="Id of a golden prompt.")]) -> None:
    """Remove a golden prompt, which replicas then no longer receive."""
    delete_one(f"/v1/golden-prompts/{prompt}", f"golden prompt {prompt}")


@golden.command("results")
def list_results(
    *,
    pool: Annotated[str | None, typer.Option(help="Only answers of this pool.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the last answers of replicas, and the wrong ones among them.

    The gateway at OPENAI_BASE_URL decodes the token ids, for the key OPENAI_API_KEY.
    """
    only = {} if pool is None else {"pool_id": pool}

    async def work(api: ApiClient) -> list[Json]:
        found = await api.list("/v1/golden-results", **only)
        if as_json:
            return found
        ids = [(one["pool_id"], one[name]) for one in found for name in ("token_ids", "right")]
        texts = await decode(api, ids)
        return [readable_result(one, texts) for one in found]

    show_objects(ask(work), _RESULTS, as_json=as_json)


@golden.command("forget")
def forget_answers(pool: Annotated[str, typer.Argument(help="Id of a pool.")]) -> None:
    """Delete the recorded answers of a pool, so that its next answers count as right.

    Use the command for a pool whose new engine rounds numbers in another way.
    """
    ask(lambda api: api.call("POST", f"/v1/pools/{pool}/forget-answers"))
    typer.echo(f"forgot the answers of pool {pool}")


def quarantines(*, as_json: AsJson = False) -> None:
    """List replicas in quarantine because of their differing answers, the newest first."""
    found = ask(lambda api: api.list("/v1/quarantines"))
    show_objects(found, _QUARANTINES, as_json=as_json)


def ejections(*, as_json: AsJson = False) -> None:
    """List replicas that routers ejected for their answers, the newest first."""
    found = ask(lambda api: api.list("/v1/ejections"))
    show_objects(found, _EJECTIONS, as_json=as_json)


def show_quarantine(quarantine: Quarantine, *, as_json: AsJson = False) -> None:
    """Show a quarantine, and the answers that led to it."""

    async def work(api: ApiClient) -> Json:
        found = await api.call("GET", f"/v1/quarantines/{quarantine}")
        if as_json:
            return found
        return readable_quarantine(found, await decode(api, token_ids_of(found)))

    found = ask(work)
    if as_json:
        show_json(found)
    else:
        show_fields(found)


def release_replica(
    quarantine: Quarantine,
    *,
    reason: Annotated[str, typer.Option(help="Reason, for the audit log.")] = "",
    as_json: AsJson = False,
) -> None:
    """End a quarantine that was a false alarm. The replica, if present, serves again."""
    path = f"/v1/quarantines/{quarantine}/release"
    found: Any = ask(lambda api: api.call("POST", path, {"reason": reason}))
    if as_json:
        show_json(found)
    else:
        shown = (*_QUARANTINES, "released_by", "is_serving_again")
        show_fields({name: found[name] for name in shown})


async def _tokenized(
    gateway: ApiClient, model: str, asked: Json, expect: str
) -> tuple[list[int], list[int]]:
    """Return the token ids of a prompt, and of the expected answer after the prompt."""

    async def ids(**text: Any) -> list[int]:
        found = await gateway.call("POST", "/tokenize", {"model": model, **text})
        return list(found["tokens"])

    prompt = await ids(**asked)
    if not expect:
        return prompt, []
    if "prompt" in asked:  # a token may extend over the end of the prompt into the answer
        both = await ids(prompt=f"{asked['prompt']}{expect}")
        if len(both) > len(prompt) and both[: len(prompt)] == prompt:
            return prompt, both[len(prompt) :]
    return prompt, await ids(prompt=expect, add_special_tokens=False)


def _read(path: Path | None) -> Any:
    assert path is not None
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise fail(f"{path}: {error}") from None


def _seconds(text: str) -> int:
    """Return the seconds of a duration like `30s`, `5m` or `1h`."""
    found = _EVERY.fullmatch(text)
    if found is None:
        raise typer.BadParameter(f"{text!r} is no time such as 30s or 5m", param_hint="--every")
    return int(found[1]) * _SECONDS[found[2] or ""]
