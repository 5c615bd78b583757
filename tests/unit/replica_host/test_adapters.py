from pathlib import Path
from typing import Any

from replica.engine.types import RefusedError
from replica.host import adapters as adapters_module
from sluice.errors import ErrorCode
from sluice.wire.engine.v1 import engine_pb2 as wire

A, B = "a" * 64, "b" * 64


def sequence(number: int, adapter: str = A, **options) -> wire.Sequence:
    values = {"prompt": [5, 6], "output_tokens_max": 2, **options}
    return wire.Sequence(id=number, adapter_digest=adapter, **values)


def test_sequences_wait_for_one_read_and_start_in_their_order(make_bench, make_adapter) -> None:
    bench = make_bench()
    make_adapter("a")
    bench.now_s = 7.0
    bench.submit(sequence(1), sequence(2))
    bench.submit(sequence(3, adapter=""), sequence(4))
    bench.run()
    assert set(bench.finished) == {3}
    assert len(bench.core.sequences) == 3
    bench.background.finish()
    assert bench.background.jobs == []
    bench.run()
    assert bench.driver.reads == [A]
    assert [request.submitted_at_s for request in bench.driver.requests] == [7.0] * 4
    assert set(bench.finished) == {1, 2, 3, 4}
    ids = [sequence for frame in bench.frames for sequence in frame.sequence]
    assert ids == [3, 3, 1, 2, 4, 1, 2, 4]
    bench.submit(sequence(5))
    bench.run()
    assert bench.background.jobs == []  # the adapter is in memory now, so no read starts
    assert 5 in bench.finished


def test_it_is_told_how_long_a_sequence_waited_for_its_adapter(make_bench, make_adapter) -> None:
    bench = make_bench()
    make_adapter("a")
    bench.submit(sequence(1), sequence(2, adapter=""))
    bench.step()
    bench.now_s += 0.25
    bench.submit(sequence(3))  # this sequence joins a read that has already begun
    bench.now_s += 0.5
    bench.background.finish()
    bench.submit(sequence(4))
    bench.run()
    told = {it.sequence: it.load_us for frame in bench.frames for it in frame.admitted}
    assert told == {1: 751_000, 2: 0, 3: 500_000, 4: 0}
    assert [round(it, 3) for it in bench.core.counters.adapter_waits_s] == [0.751, 0.5]


def test_another_adapter_does_not_wait(make_bench, make_adapter) -> None:
    bench = make_bench()
    make_adapter("a")
    make_adapter("b")
    bench.submit(sequence(1, A), sequence(2, B))
    bench.background.finish(1)
    bench.run()
    assert set(bench.finished) == {2}
    bench.background.finish()
    bench.run()
    assert set(bench.finished) == {1, 2}


def test_a_missing_adapter_is_reported_with_the_fix_and_may_come_later(
    make_bench, make_adapter
) -> None:
    bench = make_bench()
    bench.submit(sequence(1), sequence(2))
    bench.background.finish()
    bench.step()
    for number in (1, 2):
        finished = bench.finished[number]
        assert (finished.reason, finished.code) == (
            wire.FINISH_REASON_REFUSED,
            "adapter_not_found",
        )
        assert "import it" in finished.message
        assert finished.prompt_tokens == 2
    make_adapter("a")
    bench.submit(sequence(3))
    bench.background.finish()
    bench.run()
    assert bench.finished[3].reason == wire.FINISH_REASON_LENGTH
    assert bench.core.counters.adapter_failures == 1


def test_without_an_artifact_folder_it_names_the_setting(make_bench) -> None:
    bench = make_bench(has_artifacts=False)
    bench.submit(sequence(1))
    bench.background.finish()
    bench.step()
    assert "SLUICE_ARTIFACTS_DIR" in bench.finished[1].message


def test_an_adapter_that_cannot_be_served_is_read_once(make_bench, make_adapter) -> None:
    bench = make_bench()
    make_adapter("a", "bad")
    bench.submit(sequence(1))
    bench.background.finish()
    bench.submit(sequence(2))
    bench.background.finish()
    bench.step()
    for number in (1, 2):
        assert bench.finished[number].code == "adapter_invalid"
        assert bench.finished[number].message == "its rank is 99; at most 16"
    assert bench.driver.reads == [A]


def test_an_adapter_that_is_put_there_anew_is_read_again(
    make_bench, make_adapter, tmp_path
) -> None:
    bench = make_bench()
    make_adapter("a", "bad")
    bench.submit(sequence(1))
    bench.background.finish()
    (tmp_path / A).rename(tmp_path / "away")
    bench.submit(sequence(2))
    bench.background.finish()
    make_adapter("a")
    bench.submit(sequence(3))
    bench.background.finish()
    bench.run()
    assert bench.finished[1].code == "adapter_invalid"
    assert bench.finished[2].code == "adapter_not_found"
    assert bench.finished[3].reason == wire.FINISH_REASON_LENGTH


def test_a_failure_unrelated_to_the_adapter_is_not_remembered(make_bench, make_adapter) -> None:
    bench = make_bench()
    make_adapter("a", "busy")
    for number in (1, 2):
        bench.submit(sequence(number))
        bench.background.finish()
        bench.step()
        assert bench.finished[number].reason == wire.FINISH_REASON_BUSY
    assert bench.driver.reads == [A, A]


def test_a_read_that_fails_by_accident_may_be_tried_elsewhere(make_bench, make_adapter) -> None:
    bench = make_bench()
    make_adapter("a", "bug")
    bench.submit(sequence(1))
    bench.background.finish()
    bench.step()
    finished = bench.finished[1]
    assert (finished.reason, finished.code) == (wire.FINISH_REASON_FAILED, "engine_failed")
    assert "ZeroDivisionError" in finished.message


def test_a_full_memory_for_adapters_is_busy(make_bench, make_adapter) -> None:
    bench = make_bench(adapters_max=0)
    make_adapter("a")
    bench.submit(sequence(1))
    bench.background.finish()
    bench.step()
    finished = bench.finished[1]
    assert (finished.reason, finished.code) == (wire.FINISH_REASON_BUSY, "engine_busy")


def test_reads_are_bounded(make_bench, monkeypatch) -> None:
    monkeypatch.setattr(adapters_module, "READS_MAX", 1)
    bench = make_bench()
    bench.submit(sequence(1, A), sequence(2, B))
    bench.step()
    assert bench.finished[2].code == "engine_busy"
    assert set(bench.finished) == {2}
    bench = make_bench()
    bench.background.is_full = True
    bench.submit(sequence(1))
    bench.step()
    assert bench.finished[1].code == "engine_busy"


def test_names_that_are_no_digests_never_reach_the_file_system(make_bench) -> None:
    bench = make_bench()
    names = ("../" + "a" * 61, "A" * 64, "a" * 63, "a" * 64 + "\n", "/" * 64)
    bench.submit(*(sequence(number, name) for number, name in enumerate(names)))
    bench.step()
    assert bench.background.jobs == []
    assert {finished.code for finished in bench.finished.values()} == {"invalid_request"}
    assert len(bench.finished) == len(names)


def test_waiting_sequences_can_be_cancelled_also_one_fork_of_several(
    make_bench, make_adapter
) -> None:
    bench = make_bench()
    make_adapter("a")
    forks = [wire.Fork(id=2, seed=22), wire.Fork(id=3, seed=33)]
    bench.submit(sequence(1, forks=forks, sampling=wire.Sampling(seed=11)), sequence(4))
    bench.core.cancel(1, [1, 3, 4])
    bench.step()
    assert set(bench.finished) == {1, 3, 4}
    assert {f.reason for f in bench.finished.values()} == {wire.FINISH_REASON_CANCELLED}
    bench.background.finish()
    bench.run()
    (request,) = bench.driver.requests
    assert (request.sampling.seed, request.forks) == (22, ())
    assert bench.finished[2].reason == wire.FINISH_REASON_LENGTH


def test_waiting_sequences_of_a_departed_router_are_not_started(make_bench, make_adapter) -> None:
    bench = make_bench()
    make_adapter("a")
    bench.submit(sequence(1))
    bench.core.detach(1)
    bench.background.finish()
    assert bench.driver.requests == []
    assert len(bench.core.sequences) == 0


def test_waiting_sequences_move_with_their_router(make_bench, make_adapter) -> None:
    bench = make_bench()
    make_adapter("a")
    bench.submit(sequence(1))
    bench.core.orphan(1, bench.now_s)
    bench.attachment, attached = bench.attach("r1", 2, resumed=1)
    assert [(r.sequence, list(r.output)) for r in attached.resumed] == [(1, [])]
    bench.background.finish()
    bench.run()
    assert set(bench.finished) == {1}
    assert len(bench.tokens[1]) == 2


def test_where_no_adapter_can_be_served_the_driver_says_so(make_bench) -> None:
    bench = make_bench(adapter_slots=0)
    bench.submit(sequence(1))
    bench.step()
    assert bench.finished[1].code == "unsupported_parameter"
    assert bench.background.jobs == []


def test_a_request_loads_unloads_and_lists(make_bench, make_adapter) -> None:
    bench = make_bench()
    make_adapter("a")
    answers: list[wire.HostFrame] = []
    control = bench.core.control
    control.adapters(wire.Adapters(load=[A, B, A]), answers.append)
    assert answers == []
    bench.background.finish()
    bench.background.finish()
    (answer,) = answers
    assert [info.digest for info in answer.adapters.adapters] == [A]
    assert answer.adapters.adapters[0].rank == 8
    (problem,) = answer.adapters.problems
    assert (problem.digest, problem.code) == (B, "adapter_not_found")
    control.adapters(wire.Adapters(unload=[A, B]), answers.append)
    assert answers[1].adapters == wire.AdapterList()
    control.adapters(wire.Adapters(load=["x"] * 300), answers.append)
    assert answers[2].refused.code == "invalid_request"


class ManualShelf:
    """A node's agent whose answers the test determines."""

    def __init__(self) -> None:
        self.wanted: dict[str, Any] = {}
        self.uses: list[str] = []
        self.is_full = False

    def want(self, digest: str, done: Any) -> bool:
        assert digest not in self.wanted
        if not self.is_full:
            self.wanted[digest] = done
        return not self.is_full

    def note_use(self, digest: str) -> None:
        self.uses.append(digest)


def test_requests_wait_for_an_adapter_that_the_node_gets(make_bench, make_adapter) -> None:
    shelf = ManualShelf()
    bench = make_bench(shelf=shelf)
    bench.submit(sequence(1), sequence(2))
    bench.background.finish()
    bench.submit(sequence(3))
    assert bench.background.jobs == []  # no thread waits for the fetch
    bench.run()
    assert bench.finished == {}
    make_adapter("a")
    shelf.wanted.pop(A)(None)
    bench.background.finish()
    bench.run()
    assert set(bench.finished) == {1, 2, 3}
    assert {f.reason for f in bench.finished.values()} == {wire.FINISH_REASON_LENGTH}
    assert shelf.uses == [A, A, A]
    assert bench.driver.reads == [A]


def test_an_artifact_the_node_cannot_get_is_reported_to_all_waiters(make_bench) -> None:
    shelf = ManualShelf()
    bench = make_bench(shelf=shelf)
    bench.submit(sequence(1), sequence(2))
    bench.background.finish()
    shelf.wanted.pop(A)(RefusedError(ErrorCode.ADAPTER_NOT_FOUND, "nobody has it"))
    bench.step()
    assert [bench.finished[n].code for n in (1, 2)] == ["adapter_not_found"] * 2
    bench.submit(sequence(3))  # the adapter may have arrived meanwhile
    bench.background.finish()
    assert list(shelf.wanted) == [A]


def test_an_adapter_that_is_gone_again_is_asked_for_a_few_times(make_bench) -> None:
    shelf = ManualShelf()
    bench = make_bench(shelf=shelf)
    bench.submit(sequence(1))
    bench.background.finish()
    for _ in range(3):
        assert bench.finished == {}
        shelf.wanted.pop(A)(None)
        bench.background.finish()
        bench.step()
    assert bench.finished[1].code == "engine_busy"
    assert shelf.wanted == {}


def test_an_adapter_that_makes_way_while_it_is_read_is_fetched_again(
    make_bench, make_adapter, tmp_path
) -> None:
    shelf = ManualShelf()
    bench = make_bench(shelf=shelf)
    make_adapter("a")
    read = bench.driver.read_adapter

    def read_too_late(digest: str, directory: Path) -> object:
        (tmp_path / A).rename(tmp_path / "away")
        return read(digest, directory)

    bench.driver.read_adapter = read_too_late
    bench.submit(sequence(1))
    bench.background.finish()
    bench.driver.read_adapter = read
    make_adapter("a")
    shelf.wanted.pop(A)(None)
    bench.background.finish()
    bench.run()
    assert bench.finished[1].reason == wire.FINISH_REASON_LENGTH


def test_waiting_for_the_node_is_bounded_and_hinders_no_reads(
    make_bench, make_adapter, monkeypatch
) -> None:
    monkeypatch.setattr(adapters_module, "READS_MAX", 1)
    shelf = ManualShelf()
    bench = make_bench(shelf=shelf)
    bench.submit(sequence(1, A))
    bench.background.finish()
    make_adapter("b")
    bench.submit(sequence(2, B))
    bench.background.finish()
    bench.run()
    assert set(bench.finished) == {2}
    monkeypatch.setattr(adapters_module, "WAITERS_MAX", 1)
    bench.submit(sequence(3, A))
    bench.step()
    assert bench.finished[3].code == "engine_busy"
    shelf.is_full = True
    bench = make_bench(shelf=shelf)
    bench.submit(sequence(1, "c" * 64))
    bench.background.finish()
    bench.step()
    assert bench.finished[1].code == "engine_busy"


def test_one_adapter_does_not_keep_out_requests_for_another(
    make_bench, make_adapter, monkeypatch
) -> None:
    monkeypatch.setattr(adapters_module, "WAITERS_EACH_MAX", 2)
    bench = make_bench()
    make_adapter("a")
    make_adapter("b")
    bench.submit(sequence(1), sequence(2), sequence(3), sequence(4, B))
    bench.step()
    assert bench.finished[3].code == "engine_busy"
    assert set(bench.finished) == {3}
    bench.core.cancel(1, [1])
    bench.submit(sequence(5))  # takes the place of the sequence that stopped waiting
    bench.background.finish()
    bench.background.finish()
    bench.run()
    assert {n for n, f in bench.finished.items() if f.reason == wire.FINISH_REASON_LENGTH} == {
        2,
        4,
        5,
    }
