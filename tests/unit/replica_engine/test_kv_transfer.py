"""Tests pins, exports and imports of cached blocks."""

from dataclasses import replace

import pytest

from replica.engine.blocks import PIN_S
from replica.engine.types import RefusedError, SequenceRequest
from sluice.hashing import BLOCK_TOKENS, block_hashes

ROOT = b"r" * 16


def hashes_of(prompt: list[int]) -> list[bytes]:
    return block_hashes(prompt, ROOT, len(prompt) // BLOCK_TOKENS)


def request(key: int, prompt: list[int], count: int = 4) -> SequenceRequest:
    return SequenceRequest(key, prompt, count, ignore_eos=True)


def prompt_of(seed: int, blocks: int) -> list[int]:
    return [(seed * 31 + i * 7) % 190 for i in range(blocks * BLOCK_TOKENS)]


@pytest.fixture
def filled(make_engine, run_to_end, clock):
    """An engine whose cache has the 3 blocks of `prompt_of(1, 3)`."""

    def fill(blocks: int = 12, **options):
        engine = make_engine(blocks=blocks, clock=clock, **options)
        engine.add(request(1, prompt_of(1, 3)))
        run_to_end(engine)
        return engine

    return fill


def flood(engine, run_to_end, count: int = 6) -> None:
    """Use every block that is not held or pinned."""
    for key in range(100, 100 + count):
        engine.add(request(key, prompt_of(key, 2)))
    run_to_end(engine)


def test_an_import_is_cached_told_and_used(
    filled, make_engine, run_to_end, expected_output
) -> None:
    prompt = prompt_of(1, 3)
    source, target = filled(), make_engine()
    exported = source.export_blocks([*hashes_of(prompt), b"unknown hash...."])
    assert exported.hashes == tuple(hashes_of(prompt))
    assert target.import_blocks(exported) == 3
    assert target.has_work
    assert target.step().kv == dict.fromkeys(hashes_of(prompt), True)
    assert not target.has_work
    admitted = []
    longer = [*prompt, 5]
    target.add(request(1, longer))
    out = run_to_end(target, lambda events: admitted.extend(events.admitted))
    assert admitted[0].cached_tokens == 96
    assert out[1] == expected_output(longer, 4, stop=frozenset())
    assert target.import_blocks(exported) == 3
    assert target.load().kv_blocks_used == 0


def test_an_import_takes_unused_blocks_and_reports_their_number(filled, make_engine, clock) -> None:
    source = filled()
    exported = source.export_blocks(hashes_of(prompt_of(1, 3)))
    target = make_engine(blocks=4, clock=clock)
    target.add(request(1, prompt_of(2, 2), 30))
    target.step()
    while target.load().kv_blocks_used < 3:
        target.step()
    assert target.import_blocks(exported) == 1
    assert target.cached_blocks().count(exported.hashes[0]) == 1
    target.scheduler.pool.check()
    assert target.load().running == 1


def test_an_import_keeps_its_blocks_that_are_there(make_engine, run_to_end) -> None:
    prompt = prompt_of(1, 4)
    source, target = make_engine(), make_engine(blocks=4)
    source.add(request(1, prompt))
    run_to_end(source)
    exported = source.export_blocks(hashes_of(prompt))
    target.add(request(1, prompt[:64], 1))
    run_to_end(target)
    target.add(request(2, prompt_of(2, 1), 1))
    run_to_end(target)
    # One block is free. The oldest idle block belongs to the import, so it must not be evicted.
    written = []
    write = target._backend.write_blocks
    target._backend.write_blocks = lambda blocks, data: (written.extend(data), write(blocks, data))
    assert target.import_blocks(exported) == 4
    assert written == list(exported.data[2:])
    assert set(target.cached_blocks()) == set(exported.hashes)
    assert target.export_blocks(exported.hashes) == exported


def test_blocks_that_could_not_be_written_are_not_cached(filled, make_engine) -> None:
    exported = filled().export_blocks(hashes_of(prompt_of(1, 3)))
    target = make_engine(blocks=4)

    def fail(blocks, data) -> None:
        raise OSError("no memory")

    target._backend.write_blocks = fail
    with pytest.raises(OSError, match="no memory"):
        target.import_blocks(exported)
    assert target.cached_blocks() == []
    assert target.scheduler.pool.available == 4
    target.scheduler.pool.check()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"layout": "64 ids"}, "'64 ids', those of this engine '32 ids'"),
        ({"hashes": (b"a" * 16,)}, "1 different hashes of 1 for 3 blocks"),
        ({"hashes": (b"a" * 16,) * 3}, "1 different hashes of 3"),
        ({"hashes": (b"a" * 16, b"b" * 16, b"c")}, "not 16 bytes"),
        ({"data": (b"1", b"2", b"33")}, r"\[1, 2\] bytes"),
    ],
)
def test_foreign_blocks_are_refused(filled, make_engine, changes, text) -> None:
    exported = filled().export_blocks(hashes_of(prompt_of(1, 3)))
    with pytest.raises(RefusedError, match=text) as caught:
        make_engine().import_blocks(replace(exported, **changes))
    assert caught.value.code == "invalid_request"


def test_engines_that_cannot_transfer_say_so(filled, make_engine) -> None:
    engine = filled()
    exported = engine.export_blocks(hashes_of(prompt_of(1, 3)))
    engine._backend.capabilities = replace(engine.capabilities, has_kv_transfer=False)
    uncached = make_engine(prefix_cache=False)
    for other, text in ((engine, "neither"), (uncached, "prefix_cache")):
        with pytest.raises(RefusedError, match=text) as caught:
            other.import_blocks(exported)
        assert caught.value.code == "unsupported_parameter"
        with pytest.raises(RefusedError, match=text):
            other.export_blocks(exported.hashes)


def test_pinned_blocks_stay_until_their_time_is_over(filled, run_to_end, clock) -> None:
    engine, hashes = filled(), hashes_of(prompt_of(1, 3))
    assert (
        engine.scheduler.pool.pin([*hashes, b"unknown hash...."], clock.now_s + 10, clock.now_s)
        == 3
    )
    assert engine.load().kv_blocks_pinned == 3
    flood(engine, run_to_end)
    assert set(hashes) <= set(engine.cached_blocks())
    clock.sleep(10)
    flood(engine, run_to_end)
    assert not set(hashes) & set(engine.cached_blocks())


def test_the_beginning_of_a_prompt_is_pinned_from_its_first_token_on(
    filled, run_to_end, clock
) -> None:
    engine, prompt = filled(), prompt_of(2, 3)
    engine.add(replace(request(2, [*prompt, 5]), pinned_blocks=2))
    run_to_end(engine)
    assert engine.load().kv_blocks_pinned == 2
    flood(engine, run_to_end)
    assert set(hashes_of(prompt)[:2]) <= set(engine.cached_blocks())
    clock.sleep(PIN_S - 1)
    engine.add(replace(request(3, [*prompt, 6]), pinned_blocks=2))  # this request renews the pin
    run_to_end(engine)
    clock.sleep(PIN_S - 1)
    flood(engine, run_to_end)
    assert set(hashes_of(prompt)[:2]) <= set(engine.cached_blocks())
    clock.sleep(2)
    flood(engine, run_to_end)
    assert engine.load().kv_blocks_pinned == 0
    assert not set(hashes_of(prompt)) & set(engine.cached_blocks())


def test_a_new_pin_replaces_the_old_one(filled, run_to_end, clock) -> None:
    engine, hashes = filled(), hashes_of(prompt_of(1, 3))
    engine.scheduler.pool.pin(hashes, clock.now_s + 100, clock.now_s)
    assert engine.scheduler.pool.pin(hashes[:2], clock.now_s + 10, clock.now_s) == 2
    clock.sleep(50)
    assert engine.load().kv_blocks_pinned == 1
    assert engine.scheduler.pool.pin([*hashes, *hashes], clock.now_s, clock.now_s) == 0
    assert engine.load().kv_blocks_pinned == 0
    flood(engine, run_to_end)
    assert not set(hashes) & set(engine.cached_blocks())


def test_at_most_half_of_the_pool_is_pinned(filled, run_to_end, clock) -> None:
    engine, hashes = filled(blocks=5), hashes_of(prompt_of(1, 3))
    assert engine.scheduler.pool.pin(hashes, clock.now_s + 10, clock.now_s) == 2
    assert engine.scheduler.pool.pin(hashes, clock.now_s + 20, clock.now_s) == 2
    assert engine.load().kv_blocks_pinned == 2


def test_blocks_in_use_can_be_pinned_and_pinned_ones_used(filled, run_to_end, clock) -> None:
    engine, prompt = filled(), prompt_of(1, 3)
    engine.scheduler.pool.pin(hashes_of(prompt)[:2], clock.now_s + 100, clock.now_s)
    engine.add(request(2, [*prompt, 5], 20))
    (event,) = engine.step().admitted
    assert event.cached_tokens == 96
    assert engine.scheduler.pool.pin(hashes_of(prompt), clock.now_s + 100, clock.now_s) == 3
    run_to_end(engine)
    flood(engine, run_to_end)
    assert set(hashes_of(prompt)) <= set(engine.cached_blocks())
    engine.scheduler.pool.check()


def test_pins_give_way_when_nothing_could_run_otherwise(
    filled, run_to_end, expected_output, clock
) -> None:
    engine = filled(blocks=6)
    engine.scheduler.pool.pin(hashes_of(prompt_of(1, 3)), clock.now_s + 1000, clock.now_s)
    large = prompt_of(5, 5)
    engine.add(request(7, large))  # needs all six blocks
    assert run_to_end(engine)[7] == expected_output(large, 4, stop=frozenset())
    assert engine.load().kv_blocks_pinned == 0


def test_pins_give_way_to_the_last_one_that_runs(
    filled, run_to_end, expected_output, clock
) -> None:
    engine = filled(blocks=6)
    engine.scheduler.pool.pin(hashes_of(prompt_of(1, 3)), clock.now_s + 1000, clock.now_s)
    engine.add(request(7, [1, 2, 3], 180))  # grows to six blocks
    engine.add(request(8, [1, 2, 3], 40))
    out = run_to_end(engine)
    assert out[7] == expected_output([1, 2, 3], 180, stop=frozenset())
    assert out[8] == expected_output([1, 2, 3], 40, stop=frozenset())
