"""Stored content of tenants, encrypted with their own keys, on a real Valkey and PostgreSQL."""

from pathlib import Path
from typing import Any

import openai
import pytest
from sqlalchemy import text

from control_plane.database import Database
from gateway.bases.grown_prompts import GrownPrompt, GrownPrompts
from sluice.response_ids import created_unix_ms
from sluice.shared_secret import ours
from tests.integration.gateway.test_response_store import created, second_gateway
from tests.support.content import content_keys

pytestmark = pytest.mark.real

WORD = "falcon"


async def _stored_bytes(w: Any, database: Database) -> bytes:
    """Return all that Valkey and PostgreSQL have."""
    call = w.gateway.stateful.responses.commands.call
    found = [b""]
    for key in await call((b"KEYS", b"*")):
        kind = await call((b"TYPE", key))
        read = {b"string": (b"GET", key), b"list": (b"LRANGE", key, 0, -1)}.get(kind)
        value = None if read is None else await call(read)
        found += value if isinstance(value, list) else [value or b""]

    async def rows(connection: Any) -> list[bytes]:
        parts = list[bytes]()
        for query in (
            "SELECT input_items || response || coalesce(prompt, '') FROM responses",
            "SELECT content FROM records",
            "SELECT content FROM record_items",
        ):
            parts += (await connection.execute(text(query))).scalars()
        return parts

    return b"\0".join([*found, *(await database.run(rows))])


async def _read_elsewhere(
    w: Any, home: Path, eventually: Any, ids: tuple[str, str, str], said: str
) -> None:
    """Continue and read what was stored at a gateway that has not stored it."""
    first, in_background, talk = ids
    async with (
        second_gateway(w, home / "two", eventually) as url,
        openai.AsyncOpenAI(base_url=url, api_key="sk-one", max_retries=0) as far,
    ):
        more = {"previous_response_id": first, "instructions": WORD}
        assert (await created(far, input="go on", **more)).store
        assert (await far.responses.retrieve(in_background)).output_text == said
        events = await far.responses.retrieve(in_background, stream=True)
        assert [it async for it in events][-1].type == "response.completed"
        page: Any = await far.conversations.items.list(talk)
        assert page.data[0].content[0].text == WORD


def _restored_tokens(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the tokens of each prompt that is restored, 0: it was rendered."""
    restored, restore = list[int](), GrownPrompts.restored

    def note(*told: Any) -> GrownPrompt | None:
        found = restore(*told)
        restored.append(0 if found is None else len(found.ids))
        return found

    monkeypatch.setattr(GrownPrompts, "restored", note)
    return restored


async def _rotated(w: Any, objects: Any, eventually: Any) -> int:
    """Give the tenant a second key; return the number of its keys."""
    both = content_keys("one", ours(), 2)
    both.keys.append(objects.content_keys[0].keys[0])
    objects.content_keys[0].CopyFrom(both)
    w.feed.replace(objects)
    state = w.gateway.watcher.state
    await eventually(lambda: len(state.content_keys["one"].keys) == 2)
    return len(state.content_keys["one"].keys)


async def test_stored_content_needs_its_tenants_key(
    stateful: Any,
    service: Any,
    database_url: str,
    tmp_path: Path,
    eventually: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    database = Database(database_url)
    async with stateful() as w, w.sdk() as sdk, w.sdk("sk-two") as other:
        objects = w.objects(w.router_address)
        objects.content_keys.append(content_keys("one", ours(), 1))
        w.feed.replace(objects)
        await eventually(lambda: "one" in w.gateway.watcher.state.content_keys)
        said = w.text = f"{WORD} said"
        first = await created(sdk, input=WORD, instructions=WORD)
        in_background = await created(sdk, input=WORD, background=True)
        talk = await sdk.conversations.create(items=[{"role": "user", "content": WORD}])
        chat = await sdk.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": WORD}], store=True
        )
        w.text = "sparrow said"
        plain = await created(other, input="sparrow")
        responses = w.gateway.stateful.responses
        await eventually(lambda: not responses.waiting and service.kept >= 3)
        assert (await sdk.chat.completions.retrieve(chat.id)).choices[0].message.content == said
        stored = await _stored_bytes(w, database)
        assert WORD.encode() not in stored
        assert b"sparrow" in stored, "a tenant without a key is stored in the clear"

        ids = first.id, in_background.id, talk.id
        restored = _restored_tokens(monkeypatch)
        await _read_elsewhere(w, tmp_path, eventually, ids, said)
        assert len(restored) == 1
        assert restored[0], "the other gateway has appended to the stored tokens"
        assert await _rotated(w, objects, eventually) == 2
        second = await created(sdk, input=WORD, previous_response_id=first.id)
        assert second.store
        del objects.content_keys[0].keys[1]
        w.feed.replace(objects)
        await eventually(lambda: len(w.gateway.watcher.state.content_keys["one"].keys) == 1)
        for looked in (
            sdk.responses.retrieve(first.id),
            sdk.responses.retrieve(in_background.id),
            sdk.responses.retrieve(in_background.id, stream=True),
            sdk.conversations.items.list(talk.id),
            sdk.conversations.retrieve(talk.id),
            sdk.chat.completions.retrieve(chat.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await looked
        assert (await sdk.responses.retrieve(second.id)).output_text == w.text
        assert (await other.responses.retrieve(plain.id)).id == plain.id
    await database.close()


async def test_a_response_older_than_its_tenants_retention_is_not_found(
    stateful: Any, eventually: Any
) -> None:
    async with stateful() as w, w.sdk() as sdk:
        first = await created(sdk)
        second = await created(sdk, previous_response_id=first.id)
        objects = w.objects(w.router_address)
        erased_ms = created_unix_ms(first.id) + 1
        objects.content_keys.append(content_keys("one", ours(), erased_at_unix_ms=erased_ms))
        w.feed.replace(objects)
        await eventually(lambda: "one" in w.gateway.watcher.state.content_keys)
        assert (await sdk.responses.retrieve(second.id)).id == second.id
        for looked in (
            sdk.responses.retrieve(first.id),
            created(sdk, previous_response_id=first.id),
            created(sdk, previous_response_id=second.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await looked
