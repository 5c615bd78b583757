"""Texts of tenants that opted in leave the gateway redacted; of others nothing is made."""

import json
from pathlib import Path

import pytest

from gateway.endpoints.texts import Texts
from sluice.spool import decode_records
from sluice.wire.control.v1 import control_pb2 as control
from sluice.wire.telemetry.v1.text_pb2 import TextEvent

from .conftest import KEY, OTHER_KEY

pytestmark = pytest.mark.real

SAID = "I am bob@example.com, my card is 4111 1111 1111 1111"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": SAID}], "max_tokens": 99}


def spooled(folder: Path) -> list[TextEvent]:
    payloads = [
        payload
        for path in sorted(folder.glob("*/*.spool"))
        for payload in decode_records(path.read_bytes()).payloads
    ]
    return [TextEvent.FromString(payload) for payload in payloads]


async def test_texts_leave_redacted_and_only_for_tenants_that_opted_in(
    world, eventually, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    begin = Texts.begin

    def noted(policy: control.TextPolicy, *rest):
        begun.append(policy.id)
        return begin(policy, *rest)

    monkeypatch.setattr(Texts, "begin", staticmethod(noted))
    async with world() as w:
        objects = w.feed.objects
        objects.text_policies.add(
            id="one", is_on=True, share=10_000, retention_days=2, redacted=["email"]
        )
        w.feed.replace(objects)
        await eventually(lambda: "one" in w.gateway.watcher.state.text_policies)
        async with w.http(OTHER_KEY) as http:
            assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200
        assert begun == []
        async with w.http(KEY) as http:
            whole = await http.post("/v1/chat/completions", json=CHAT)
            stream = await http.post("/v1/chat/completions", json={**CHAT, "stream": True})
            ids = w.ids("write to eve@example.com")
            plain = {"model": "tiny", "prompt": [ids], "max_tokens": 4}
            text = await http.post("/v1/completions", json=plain)
        assert [it.status_code for it in (whole, stream, text)] == [200] * 3
        names = [it.headers["x-request-id"] for it in (whole, stream, text)]
        fates = w.gateway.metrics.texts
        await eventually(lambda: fates.labels("kept")._value.get() == 3)
        said = w.text
    assert begun == ["one"] * 3
    found = {it.request_id: it for it in spooled(tmp_path / "state" / "texts")}
    assert found.keys() == set(names)
    for name in names[:2]:
        [message] = json.loads(found[name].prompt)["messages"]
        assert message == {"role": "user", "content": "I am [email], my card is [card]"}
        assert json.loads(found[name].answers) == {"answers": [{"content": said}]}
    assert json.loads(found[names[2]].prompt) == {"prompts": ["write to [email]"]}
    assert {it.tenant_id for it in found.values()} == {"one"}
    # Neither there nor among the events is anything of what was said.
    for path in (tmp_path / "state").rglob("*.spool"):
        assert b"example.com" not in path.read_bytes()
    assert not [it for it in spooled(tmp_path / "state" / "texts") if "4111" in it.prompt]
