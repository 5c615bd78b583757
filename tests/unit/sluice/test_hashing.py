from hypothesis import given
from hypothesis import strategies as st

from sluice.hashing import (
    BLOCK_TOKENS,
    HASH_BYTES,
    block_hashes,
    cache_root,
    chained_hashes,
    session_hash,
    shared_blocks,
)

TOKENS = st.lists(st.integers(0, 2**31 - 1), min_size=BLOCK_TOKENS, max_size=BLOCK_TOKENS * 4)
PARTS = st.tuples(st.text(max_size=80), st.text(max_size=80), st.binary(max_size=80))


@given(TOKENS)
def test_a_chain_grows_without_changing_its_earlier_hashes(tokens: list[int]) -> None:
    root = cache_root("base", "", b"salt")
    count = len(tokens) // BLOCK_TOKENS
    whole = block_hashes(tokens, root, count)
    for known in range(count + 1):
        assert block_hashes(tokens, root, count, whole[:known]) == whole
    assert all(len(h) == HASH_BYTES for h in whole)


@given(TOKENS, TOKENS)
def test_a_concatenated_chain_is_the_same_chain_and_grows_alike(
    tokens: list[int], more: list[int]
) -> None:
    root = cache_root("base", "", b"salt")
    begun = chained_hashes(tokens, root)
    assert begun == b"".join(block_hashes(tokens, root, len(tokens) // BLOCK_TOKENS))
    longer = [*tokens, *more]
    assert chained_hashes(longer, root, begun) == chained_hashes(longer, root)
    assert chained_hashes(tokens[: BLOCK_TOKENS - 1], root) == b""


@given(TOKENS, st.integers(0, BLOCK_TOKENS - 1))
def test_one_changed_token_changes_its_block_and_all_later_ones(
    tokens: list[int], index: int
) -> None:
    root = cache_root("base", "", b"salt")
    count = len(tokens) // BLOCK_TOKENS
    changed = [*tokens]
    changed[index] ^= 1
    before, after = block_hashes(tokens, root, count), block_hashes(changed, root, count)
    assert not set(before) & set(after)


@given(PARTS, PARTS)
def test_roots_are_equal_only_for_equal_parts(
    one: tuple[str, str, bytes], other: tuple[str, str, bytes]
) -> None:
    assert (cache_root(*one) == cache_root(*other)) == (one == other)


def test_parts_do_not_run_into_each_other() -> None:
    assert cache_root("ab", "c", b"") != cache_root("a", "bc", b"")


def test_the_hash_is_stable_over_versions() -> None:
    root = cache_root("base", "adapter", b"salt")
    assert root.hex() == "be8d37d4f5477e399c366b7096d75320"
    assert block_hashes(range(BLOCK_TOKENS), root, 1)[0].hex() == "79d5b8d8b692fd4a259efa45b4074ac8"


def test_sessions_of_tenants_with_long_ids_are_apart() -> None:
    long = "t" * 127
    hashes = {session_hash(tenant, "s") for tenant in ("t", long[:64], long + "a", long + "b")}
    assert len(hashes) == 4
    assert 0 not in hashes
    assert session_hash(long, "") == 0


@given(TOKENS, TOKENS, st.integers(0, 2**10))
def test_two_prompts_share_the_blocks_before_their_first_difference(
    one: list[int], rest: list[int], cut: int
) -> None:
    root = cache_root("base", "", b"salt")
    other = [*one[:cut], *rest]
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    least = min(len(one), len(other)) if same is None else same
    hashes = chained_hashes(one, root), chained_hashes(other, root)
    assert shared_blocks(*hashes) == least // BLOCK_TOKENS
