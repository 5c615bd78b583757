"""Items that stand for others: what a model is shown in their place."""

from typing import Any

import pytest

from gateway.bodies.chat_compaction import (
    CompactedChat,
    expanded_chat,
    split_chat,
    summed_up,
)
from gateway.bodies.compaction import Compacted, expanded, has_compaction, last_turn
from gateway.bodies.messages import CompactedHistory, Message
from gateway.bodies.response_items import messages_of, read_items
from gateway.content.seals import ContentSeals
from gateway.responses.compaction_seal import CompactionSeals
from sluice.errors import BadRequestError
from sluice.shared_secret import SharedSecret
from sluice.watch import ControlState
from tests.support.content import content_keys

SECRET = SharedSecret(["x" * 32])


def seals_of(secret: SharedSecret, state: ControlState | None = None) -> CompactionSeals:
    return CompactionSeals(secret, ContentSeals(state or ControlState(), secret))


def said(*pairs: tuple[str, str]) -> list[Any]:
    return read_items([{"role": role, "content": text} for role, text in pairs])


def texts(items: Any) -> list[tuple[str, str]]:
    return [(it.role, it.text()) for it in items]


def compaction(text: str = "sealed") -> Any:
    (item,) = read_items([{"type": "compaction", "encrypted_content": text}])
    return item


def test_a_summary_becomes_part_of_the_next_user_message() -> None:
    kept = said(("user", "third"), ("system", "dropped"))
    items = [*said(("system", "rules"), ("user", "first")), compaction(), *said(("assistant", "a"))]
    shown = expanded(items, lambda _, __: Compacted("short", kept[:1]))
    assert texts(shown) == [
        ("system", "rules"),
        ("user", "Summary of our conversation so far:\nshort\n\nthird"),
        ("assistant", "a"),
    ]
    bare = expanded([compaction(), *said(("assistant", "a"))], lambda _, __: Compacted("s", ()))
    assert texts(bare)[0] == ("user", "Summary of our conversation so far:\ns")
    assert texts(expanded([compaction()], lambda _, __: Compacted("s", kept)))[0][0] == "system"


def test_only_the_last_one_is_opened() -> None:
    opened: list[int] = []

    def open_one(index: int, item: Any) -> Compacted:
        opened.append(index)
        return Compacted(item.encrypted_content, ())

    items = [compaction("a"), *said(("user", "x")), compaction("b"), *said(("user", "y"))]
    assert has_compaction(items)
    assert texts(expanded(items, open_one)) == [
        ("user", "Summary of our conversation so far:\nb\n\ny")
    ]
    assert opened == [2]
    assert expanded(items[1:2], open_one) == items[1:2]


@pytest.mark.parametrize(
    ("roles", "start"), [("uaua", 2), ("uauu", 2), ("suau", 3), ("a", 0), ("", 0), ("uas", 0)]
)
def test_the_last_turn_begins_with_a_user_message(roles: str, start: int) -> None:
    names = {"u": "user", "a": "assistant", "s": "system"}
    assert last_turn(said(*((names[it], "x") for it in roles))) == start


def test_an_item_opens_for_its_tenant_alone_and_unchanged() -> None:
    seals = seals_of(SECRET)
    call: Any = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    result: Any = {"type": "function_call_output", "call_id": "c", "output": "1"}
    kept = [*said(("user", "x")), *read_items([call, result])]
    item = seals.sealed("one", "cmp_1", "short", kept)
    found = seals.opened("one", item, "p")
    assert found.summary == "short"
    assert messages_of(found.kept) == messages_of(kept)
    other = seals_of(SharedSecret(["y" * 32]))
    for opener, tenant in ((seals, "two"), (other, "one")):
        with pytest.raises(BadRequestError) as caught:
            opener.opened(tenant, item, "p")
        assert caught.value.param == "p"
    replaced = seals_of(SharedSecret(["y" * 32, "x" * 32]))
    assert replaced.opened("one", item, "p").summary == "short"
    with pytest.raises(BadRequestError):
        seals.sealed("one", "cmp_1", "short", said(("user", "x" * (3 << 20))))


def test_an_item_of_a_tenant_with_a_key_goes_with_the_key() -> None:
    state = ControlState()
    state.content_keys["one"] = content_keys("one", SECRET, 1)
    seals = seals_of(SECRET, state)
    item = seals.sealed("one", "cmp_1", "short", said(("user", "x")))
    assert seals.opened("one", item, "p").summary == "short"
    for keys in (content_keys("one", SECRET, 2), content_keys("one", SECRET, 1)):
        state.content_keys["one"] = keys
        with pytest.raises(BadRequestError):
            seals.opened("one", item, "p")
    for text in ("2.", "2.AAAA", "2.%"):
        with pytest.raises(BadRequestError):
            seals.opened("one", compaction(text), "p")


def chat(*pairs: tuple[str, str], **last: Any) -> list[Message]:
    messages = [Message(role=role, content=text) for role, text in pairs]
    return [*messages[:-1], messages[-1].model_copy(update=last)]


STOOD_FOR = CompactedHistory(type="compaction", encrypted_content="x")


def test_a_chat_is_cut_before_its_last_turn_and_keeps_instructions() -> None:
    turns = [("user", "one"), ("assistant", "a"), ("user", "two"), ("user", "more")]
    messages = chat(("system", "rules"), *turns)
    split = split_chat(messages)
    assert split is not None
    assert texts(split.said) == [("system", "rules"), ("user", "one"), ("assistant", "a")]
    assert texts(split.kept) == [("user", "two"), ("user", "more")]
    shown = summed_up(messages, "short", split.kept)
    assert texts(shown) == [
        ("system", "rules"),
        ("user", "Summary of our conversation so far:\nshort\n\ntwo"),
        ("user", "more"),
    ]
    for bare in ([("user", "one")], [("system", "rules"), ("user", "one")]):
        assert split_chat(chat(*bare)) is None


def test_a_chat_begins_with_its_last_compaction() -> None:
    first = chat(("system", "rules"), ("user", "one"), ("assistant", "a"), compaction=STOOD_FOR)
    later = chat(("user", "two"), ("assistant", "b"), compaction=STOOD_FOR)
    opened: list[int] = []

    def open_one(index: int, _: CompactedHistory) -> CompactedChat:
        opened.append(index)
        return CompactedChat("short", chat(("user", "two")))

    messages = [*first, *later, *chat(("user", "three"))]
    shown = expanded_chat(messages, open_one)
    assert opened == [4]
    assert texts(shown) == [
        ("system", "rules"),
        ("user", "Summary of our conversation so far:\nshort\n\ntwo"),
        ("assistant", "b"),
        ("user", "three"),
    ]
    # The messages in place of which the summary stands may be left out.
    assert texts(expanded_chat([*later[1:], *chat(("user", "three"))], open_one))[0][0] == "user"
    plain = chat(("user", "one"))
    assert expanded_chat(plain, open_one) is plain


def test_a_compaction_of_a_chat_opens_for_its_tenant_alone_and_is_no_item() -> None:
    seals = seals_of(SECRET)
    kept = chat(("user", "two"))
    item = seals.sealed_chat("one", "cmp_1", "short", kept)
    content = seals.opened_chat("one", item, "x")
    assert (content.summary, texts(content.kept)) == ("short", texts(kept))
    as_item = compaction(item.encrypted_content)
    for tenant_id, opened in (("two", seals.opened_chat), ("one", seals.opened)):
        with pytest.raises(BadRequestError):
            opened(tenant_id, item if tenant_id == "two" else as_item, "x")  # pyright: ignore[reportArgumentType]
