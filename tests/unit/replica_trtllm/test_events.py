from hypothesis import given
from hypothesis import strategies as st

from replica.drivers.trtllm_events import BlockTranslator
from sluice.hashing import block_hashes

ROOT_A, ROOT_B = b"a" * 16, b"b" * 16
PROMPT = list(range(100, 200))


def stored(parent, *blocks: tuple[int, list[int]], window: int = 0) -> dict:
    return {
        "event_id": 1,
        "window_size": window,
        "data": {
            "type": "stored",
            "parent_hash": parent,
            "blocks": [
                {
                    "type": "stored_block",
                    "block_hash": their,
                    "tokens": [{"token_id": token, "token_extra_id": 0} for token in tokens],
                    "cache_level": 0,
                }
                for their, tokens in blocks
            ],
        },
    }


def removed(*hashes, window: int = 0) -> dict:
    data = {"type": "removed", "block_hashes": list(hashes)}
    return {"event_id": 2, "window_size": window, "data": data}


def parts(prompt: list[int], first: int = 1) -> list[tuple[int, list[int]]]:
    """Return (TensorRT-LLM's hash, tokens) of all blocks, of which the last may be partial."""
    starts = range(0, len(prompt), 32)
    return [(first + index, prompt[at : at + 32]) for index, at in enumerate(starts)]


def test_chains_get_the_hashes_that_routers_compute() -> None:
    translator = BlockTranslator()
    translator.expect(PROMPT, ROOT_A)
    changed = translator.apply([stored(None, *parts(PROMPT))])
    assert changed == dict.fromkeys(block_hashes(PROMPT, ROOT_A, 3), True)


def test_a_chain_may_arrive_in_pieces_and_be_removed_from_its_end() -> None:
    translator = BlockTranslator()
    translator.expect(PROMPT, ROOT_A)
    own = block_hashes(PROMPT, ROOT_A, 3)
    one, two, three, rest = parts(PROMPT)
    assert translator.apply([stored(None, one)]) == {own[0]: True}
    assert translator.apply([stored(1, two), stored(2, three, rest)]) == {
        own[1]: True,
        own[2]: True,
    }
    assert translator.apply([removed(4, 3)]) == {own[2]: False}
    assert translator.apply([removed(3), removed(99)]) == {}
    assert translator.apply([stored(2, (7, three[1]))]) == {own[2]: True}


def test_equal_beginnings_of_two_tenants_are_told_apart_by_their_order() -> None:
    translator = BlockTranslator()
    for root in (ROOT_A, ROOT_A, ROOT_B):
        translator.expect(PROMPT, root)
    a, b = (block_hashes(PROMPT, root, 1)[0] for root in (ROOT_A, ROOT_B))
    assert translator.apply([stored(None, (1, PROMPT[:32]))]) == {a: True}
    assert translator.apply([stored(None, (2, PROMPT[:32]))]) == {b: True}
    assert translator.apply([removed(1)]) == {a: False}
    assert translator.apply([stored(None, (3, PROMPT[:32]))]) == {a: True}


def test_windows_of_one_block_count_together() -> None:
    translator = BlockTranslator()
    translator.expect(PROMPT, ROOT_A)
    own = block_hashes(PROMPT, ROOT_A, 1)[0]
    block = (1, PROMPT[:32])
    assert translator.apply([stored(None, block), stored(None, block, window=7)]) == {own: True}
    assert translator.apply([removed(1)]) == {}
    assert translator.apply([removed(1, window=7)]) == {own: False}


def test_events_of_unknown_blocks_are_skipped() -> None:
    translator = BlockTranslator()
    # no request with these tokens was submitted
    assert translator.apply([stored(None, *parts(PROMPT))]) == {}
    translator.expect([1, 2, 3], ROOT_A)
    assert translator.apply([stored(None, (50, [1, 2, 3]))]) == {}  # the block is not full
    # the event of its parent was missed
    assert translator.apply([stored(123, (51, PROMPT[:32]))]) == {}
    odd = [{"event_id": 0, "data": {"type": "created", "num_blocks_per_cache_level": [9, 0]}}, {}]
    assert translator.apply(odd) == {}


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=60))
def test_the_reported_changes_add_up_to_the_held_blocks(actions) -> None:
    """Chains of three blocks are stored and evicted at random, completely or from the end."""
    translator = BlockTranslator()
    prompts = {index: [index * 50 + 1 + i for i in range(96)] for index in range(6)}
    held: dict[int, int] = {}
    told: set[bytes] = set()
    for is_stored, index in actions:
        blocks = parts(prompts[index], first=index * 10 + 1)
        if is_stored:
            translator.expect(prompts[index], ROOT_A)
            changed = translator.apply([stored(None, *blocks)])
            held[index] = 3
        else:
            last = held.get(index, 0)
            if not last:
                continue
            changed = translator.apply([removed(blocks[last - 1][0])])
            held[index] = last - 1
        for key, is_cached in changed.items():
            (told.add if is_cached else told.discard)(key)
        expected = {
            key
            for which, count in held.items()
            for key in block_hashes(prompts[which], ROOT_A, count)
        }
        assert told == expected
