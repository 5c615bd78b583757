"""Chains that are known: what they come to is what all of their turns come to."""

from typing import Any

import orjson
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.bodies.response_items import ItemTurns, messages_of, read_items
from gateway.responses.chain_memory import ChainMemory, KnownChain
from sluice.errors import BadRequestError
from sluice.wire.state.v1 import state_pb2 as wire

SAID = {"type": "message", "role": "user", "content": "hi"}
TOLD = {"type": "message", "role": "assistant", "content": "hello"}
THOUGHT = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "1"}
MADE = {"server_label": "s", "name": "f", "arguments": "{}"}
ASKED = {"type": "mcp_approval_request", "id": "a", **MADE}
AGREED = {"type": "mcp_approval_response", "approval_request_id": "a", "approve": True}
DONE: dict[str, Any] = {"output": "sunny", "error": None, "approval_request_id": "a"}
RAN = {"type": "mcp_call", "id": "m", **MADE, **DONE}
SUMMARY = {"type": "compaction", "encrypted_content": "x"}
ITEMS = st.lists(
    st.sampled_from([SAID, TOLD, THOUGHT, CALL, RESULT, ASKED, AGREED, RAN]), max_size=3
)


def stored(number: int, said: list[Any], told: list[Any], **more: Any) -> wire.StoredResponse:
    return wire.StoredResponse(
        id=f"resp_{number}",
        input_items=orjson.dumps(said),
        response=orjson.dumps({"output": told, **more}),
    )


def outcome(*arguments: Any, **named: Any) -> Any:
    try:
        return messages_of(*arguments, **named)
    except BadRequestError as error:
        return error.param, error.message


@given(st.lists(st.tuples(ITEMS, ITEMS), min_size=1, max_size=5), ITEMS)
@example([([], [RAN])], [ASKED, AGREED])  # the call is older than the approval that is sent again
@example([([], [ASKED, AGREED]), ([], [RAN])], [])  # the call runs in a turn after its approval
def test_messages_equal_the_messages_of_all_items(
    turns: list[tuple[Any, Any]], own: list[Any]
) -> None:
    chain, everything = KnownChain(), list[Any]()
    for number, (said, told) in enumerate(turns):
        chain = chain.extended([stored(number, said, told)])
        everything += read_items([*said, *told])
    assert list(chain.items) == everything
    items = read_items(own)
    found = outcome(items, chain.items, begun=chain.turns)
    if chain.turns is not None:
        assert found == outcome(items, everything)
    assert outcome(items, chain.items, begun=chain.turns) == found, "it can be continued again"


def test_a_summary_is_kept_together_with_its_source() -> None:
    chain = KnownChain().extended([stored(0, [SAID], [TOLD])])
    assert isinstance(chain.turns, ItemTurns)
    chain = chain.extended([stored(1, [SAID], [SUMMARY, TOLD])])
    assert chain.turns is None
    assert chain.extended([stored(2, [SAID], [TOLD])]).turns is None


def test_a_chain_is_its_tenants_and_takes_the_place_of_the_one_before() -> None:
    memory = ChainMemory()
    first = KnownChain().extended([stored(0, [SAID], [TOLD])])
    memory.keep("one", first, 0.0)
    assert memory.find("one", "resp_0", 1.0) is first
    assert memory.find("two", "resp_0", 1.0) is None
    second = first.extended([stored(1, [SAID], [TOLD], conversation=None)])
    memory.keep("one", second, 2.0)
    assert memory.find("one", "resp_0", 3.0) is None
    assert memory.held_bytes == second.size > first.size
    memory.expire(3600.0)
    assert memory.find("one", "resp_1", 3600.0) is None
    assert memory.held_bytes == 0


def test_the_oldest_chains_give_way_and_the_longest_are_not_kept() -> None:
    one = KnownChain().extended([stored(0, [SAID], [TOLD])])
    memory = ChainMemory(bytes_max=5 * one.size)
    for number in range(8):
        memory.keep("one", KnownChain([f"r{number}"], (), None, one.size), float(number))
    assert memory.held_bytes == 5 * one.size
    assert memory.find("one", "r2", 8.0) is None
    assert memory.find("one", "r3", 8.0) is not None
    memory.keep("one", KnownChain(["r9"], (), None, 2 * one.size), 9.0)
    assert memory.find("one", "r9", 9.0) is None
