import itertools

from replica.engine.types import AdmittedEvent
from replica.host import sequences as sequences_module
from sluice.wire.engine.v1 import engine_pb2 as wire


def sequence(number: int, **options) -> wire.Sequence:
    return wire.Sequence(id=number, **{"prompt": [5, 6, 7], "output_tokens_max": 4, **options})


def test_forks_are_sequences_with_ends_and_tokens_of_their_own(make_bench, expected_tokens) -> None:
    bench = make_bench()
    forks = [wire.Fork(id=2, seed=77), wire.Fork(id=3)]
    bench.submit(sequence(1, sampling=wire.Sampling(seed=5), forks=forks))
    bench.run()
    assert bench.finished.keys() == {1, 2, 3}
    assert {f.reason for f in bench.finished.values()} == {wire.FINISH_REASON_LENGTH}
    drawn = bench.driver.requests[0].forks[1].seed
    wanted = {1: 5, 2: 77, 3: drawn}
    assert bench.tokens == {key: expected_tokens(seed, 4) for key, seed in wanted.items()}


def test_a_fork_can_be_cancelled_alone(make_bench) -> None:
    bench = make_bench()
    bench.submit(sequence(1, forks=[wire.Fork(id=2)]))
    bench.step()
    bench.core.cancel(1, [2])
    bench.run()
    assert bench.finished[2].reason == wire.FINISH_REASON_CANCELLED
    assert bench.finished[1].reason == wire.FINISH_REASON_LENGTH


def test_forks_without_ids_of_their_own_are_refused(make_bench) -> None:
    bench = make_bench()
    bench.submit(sequence(1))
    bench.submit(sequence(2, forks=[wire.Fork(id=1), wire.Fork(id=3)]))
    bench.submit(sequence(4, forks=[wire.Fork(id=4)]))
    bench.submit(sequence(5, forks=[wire.Fork(id=6), wire.Fork(id=6)]))
    bench.run()
    assert {n for n, f in bench.finished.items() if f.code == "invalid_request"} == {2, 3, 4, 5, 6}
    assert bench.finished[1].reason == wire.FINISH_REASON_LENGTH
    assert bench.core.sequences.__len__() == 0


def test_more_answers_than_the_engine_runs_are_refused_and_too_many_now_are_busy(
    make_bench,
) -> None:
    bench = make_bench(sequences_max=3, waiting_max=1)
    bench.submit(sequence(1, forks=[wire.Fork(id=number) for number in (2, 3, 4)]))
    bench.submit(sequence(5, forks=[wire.Fork(id=6), wire.Fork(id=7)]))
    bench.submit(sequence(8, forks=[wire.Fork(id=9)]))
    bench.step()
    assert {bench.finished[n].code for n in (1, 2, 3, 4)} == {"invalid_request"}
    assert {bench.finished[n].code for n in (8, 9)} == {"engine_busy"}
    assert {bench.finished[n].reason for n in (8, 9)} == {wire.FINISH_REASON_BUSY}
    assert set(bench.tokens) == {5, 6, 7}


def test_one_sequence_of_garbage_leaves_the_others_alone(make_bench) -> None:
    bench = make_bench()
    bad = [
        sequence(1, prompt=[]),
        sequence(2, sampling=wire.Sampling(grammar=wire.Grammar(kind=99))),
        sequence(3, sampling=wire.Sampling(bias_token=[1])),
        sequence(4, adapter_digest="../../etc"),
    ]
    bench.submit(*bad, sequence(9))
    bench.run()
    assert {bench.finished[n].code for n in (1, 2, 3, 4)} == {"invalid_request"}
    assert all(bench.finished[n].message for n in (1, 2, 3, 4))
    assert bench.finished[2].prompt_tokens == 3
    assert bench.finished[9].reason == wire.FINISH_REASON_LENGTH


def test_logprobs_of_tokens_and_prompt_come_on_request(make_bench) -> None:
    bench = make_bench()
    asked = wire.Sampling(seed=4, logprobs=2)
    bench.submit(
        sequence(1, sampling=asked), sequence(2), sequence(3, prompt=[1, 2, 3], prompt_logprobs=1)
    )
    frame = bench.step()
    assert list(frame.sequence) == [1, 2, 3]
    assert list(frame.logprobs.sequence) == [1]
    assert list(frame.logprobs.top_count) == [2]
    assert frame.logprobs.top_token[0] == frame.token[0]
    (prompt,) = frame.prompt_logprobs
    assert (prompt.sequence, prompt.first, list(prompt.logprob)) == (3, 1, [-1.0, -2.0])


def test_runs_of_tokens_stay_together(make_bench, expected_tokens) -> None:
    bench = make_bench()
    bench.submit(
        sequence(1, output_tokens_max=7, draft_tokens_max=2, sampling=wire.Sampling(seed=1)),
        sequence(2, output_tokens_max=3, sampling=wire.Sampling(seed=2, logprobs=0)),
        sequence(
            3, output_tokens_max=4, draft_tokens_max=1, sampling=wire.Sampling(seed=3, logprobs=1)
        ),
    )
    frame = bench.step()
    assert list(frame.count) == [3, 1, 2]
    assert list(frame.logprobs.sequence) == [2, 3, 3]
    bench.run()
    assert bench.tokens == {
        1: expected_tokens(1, 7),
        2: expected_tokens(2, 3),
        3: expected_tokens(3, 4),
    }


def test_routers_with_equal_ids_get_their_own_tokens(make_bench, expected_tokens) -> None:
    bench = make_bench()
    other, _ = bench.attach("r2", 7)
    bench.submit(sequence(1, sampling=wire.Sampling(seed=1)))
    bench.submit(sequence(1, sampling=wire.Sampling(seed=2), output_tokens_max=6), epoch=7)
    bench.core.cancel(7, [99])
    bench.run()
    assert bench.tokens == {1: expected_tokens(1, 4)}
    told = []
    while (news := other.outbox.take(0)[0]) is not None:
        told += [tokens for _, tokens in news.columns]
    assert list(itertools.chain(*told)) == expected_tokens(2, 6)


def test_a_probe_among_sequences_takes_no_tokens_of_theirs(make_bench, expected_tokens) -> None:
    bench = make_bench()
    answers: list[wire.HostFrame] = []
    bench.submit(sequence(1, sampling=wire.Sampling(seed=1), output_tokens_max=6))
    bench.step()
    bench.core.sequences.probe(wire.Probe(prompt=[1], tokens=3), answers.append, bench.now_s)
    bench.run()
    assert bench.tokens == {1: expected_tokens(1, 6)}
    (answer,) = answers
    assert (list(answer.probe.tokens), answer.probe.active) == (expected_tokens(0, 3), 1)


def test_a_probe_may_name_an_adapter_and_a_cache_and_want_logprobs(
    make_bench, make_adapter
) -> None:
    bench = make_bench()
    digest, root = make_adapter("a"), bytes(range(16))
    answers: list[wire.HostFrame] = []

    def ask(**options) -> None:
        message = wire.Probe(prompt=[1], tokens=3, **options)
        bench.core.sequences.probe(message, answers.append, bench.now_s)
        if bench.background.jobs:
            bench.background.finish()
        bench.run()

    ask(adapter_digest=digest, cache_root=root, wants_logprobs=True)
    ask(adapter_digest=digest)
    ask(adapter_digest="ff" * 32)
    asked = bench.driver.requests
    assert [request.adapter_digest for request in asked] == [digest, digest]
    assert asked[0].cache_root == root
    assert asked[1].cache_root not in {b"", root}, "an adapter's own root"
    assert [len(answer.probe.logprobs) for answer in answers] == [3, 0, 0]
    assert answers[2].refused.code == "adapter_not_found"


def test_a_probe_with_a_root_longer_than_a_root_can_be_is_refused(make_bench) -> None:
    bench = make_bench()
    answers: list[wire.HostFrame] = []
    message = wire.Probe(prompt=[1], tokens=3, cache_root=b"x" * 100)
    bench.core.sequences.probe(message, answers.append, bench.now_s)
    assert [answer.refused.code for answer in answers] == ["invalid_request"]
    assert not len(bench.core.sequences)


def test_an_engine_without_logprobs_answers_probes_without(make_bench) -> None:
    bench = make_bench(logprobs_max=0)
    answers: list[wire.HostFrame] = []
    message = wire.Probe(prompt=[1], tokens=3, wants_logprobs=True)
    bench.core.sequences.probe(message, answers.append, bench.now_s)
    bench.run()
    assert (len(answers[0].probe.tokens), len(answers[0].probe.logprobs)) == (3, 0)


def test_events_of_a_detached_router_are_dropped(make_bench) -> None:
    """A driver may still report a sequence that was cancelled while a step ran."""
    bench = make_bench()
    other, _ = bench.attach("r2", 7)
    bench.submit(sequence(1), epoch=7)
    bench.submit(sequence(2, output_tokens_max=2))
    bench.step()
    events = bench.core.step()
    key = next(key for key in events.keys if key == other.sequences[1].key)
    bench.core.detach(7)
    events.admitted.append(AdmittedEvent(key, 0.0, 0))
    bench.core.publish(events, bench.now_s)
    bench.step()
    assert set(bench.tokens) == {2}
    assert len(bench.core.sequences) == 0


def test_the_adapters_of_the_engine_are_told_at_the_attach_and_when_they_change(make_bench) -> None:
    bench = make_bench()
    bench.driver.resident = ("a" * 64,)
    attachment, attached = bench.attach("r2", 7)
    assert attached.state.adapters_changed
    assert list(attached.state.adapters_resident) == ["a" * 64]
    assert attachment.adapters_told == ("a" * 64,)
    assert bench.attached.state.adapters_changed
    assert attached.limits.adapter_slots == 8
    assert attached.limits.adapter_rank_max == 16
    assert attached.limits.logprobs_max == 20
    assert list(attached.limits.features) == [
        "draft",
        "grammar",
        "kv_transfer",
        "penalties",
        "prompt_ids",
        "prompt_logprobs",
        "prompt_spans",
    ]
    bench.submit(sequence(1))
    bench.step()
    assert bench.frames[0].state.adapters_changed
    assert bench.core.counters.adapter_loads == 1
    bench.driver.resident = ()
    assert bench.step().state.adapters_changed
    assert bench.core.counters.adapter_evictions == 1


def bound(number: int, text: str, **options) -> wire.Sequence:
    grammar = wire.Grammar(kind=wire.Grammar.KIND_REGEX, text=text)
    return sequence(number, sampling=wire.Sampling(grammar=grammar), **options)


def test_grammars_are_compiled_beside_the_steps_and_hold_up_only_their_own(make_bench) -> None:
    bench = make_bench()
    bench.submit(bound(1, "good"), bound(2, "bad"), bound(3, "bug"), sequence(4))
    bench.submit(bound(5, "other", forks=[wire.Fork(id=6)]))
    bench.run()
    assert set(bench.finished) == {4}
    bench.core.cancel(1, [5])
    while bench.compilers.jobs:
        bench.compilers.finish()
    bench.run()
    assert [grammar.text for grammar in bench.driver.compiled] == ["good", "bad", "bug", "other"]
    reasons = {number: finished.reason for number, finished in bench.finished.items()}
    assert reasons == {
        1: wire.FINISH_REASON_LENGTH,
        2: wire.FINISH_REASON_REFUSED,
        3: wire.FINISH_REASON_FAILED,
        4: wire.FINISH_REASON_LENGTH,
        5: wire.FINISH_REASON_CANCELLED,
        6: wire.FINISH_REASON_LENGTH,
    }
    assert bench.finished[2].message == "the grammar is bad"


def test_too_many_grammars_at_once_are_busy(make_bench) -> None:
    bench = make_bench()
    bench.compilers.is_full = True
    bench.submit(bound(1, "good"))
    bench.step()
    assert bench.finished[1].code == "engine_busy"


def test_a_request_larger_than_any_sequence_is_refused_before_it_is_decoded(
    make_bench, monkeypatch
) -> None:
    decoded = []
    decode = sequences_module.decode_sequence

    def note(message: wire.Sequence, *args, **options):
        decoded.append(message.id)
        return decode(message, *args, **options)

    monkeypatch.setattr(sequences_module, "decode_sequence", note)
    bench = make_bench()
    many = [300] * 200_000
    bench.submit(
        sequence(1, prompt=many),
        sequence(2, stop_token_ids=many, forks=[wire.Fork(id=3)]),
        sequence(4, sampling=wire.Sampling(logit_bias=[1.0] * 200_000)),
        sequence(5, sampling=wire.Sampling(grammar=wire.Grammar(text="x" * 300_000))),
        sequence(6, prompt=[400] * 4000),
    )
    bench.run()
    assert decoded == [6]
    assert bench.finished.keys() == {1, 2, 3, 4, 5, 6}
    assert {bench.finished[n].code for n in range(1, 6)} == {"request_too_large"}
    assert bench.finished[6].reason == wire.FINISH_REASON_LENGTH


def test_a_probe_with_a_departed_caller_is_dropped(make_bench) -> None:
    bench, answers = make_bench(), []
    bench.submit(sequence(1, output_tokens_max=3))
    probe = wire.Probe(prompt=[1], tokens=1000, timeout_ms=1500)
    bench.core.sequences.probe(probe, answers.append, bench.now_s)
    bench.step()
    assert not answers
    bench.now_s += 2.0
    bench.step()
    bench.run()
    (answer,) = answers
    assert answer.refused.code == "deadline_exceeded"
    assert len(bench.tokens[1]) == 3, "the others go on"
    assert len(bench.core.sequences) == 0


def test_a_probe_that_waits_for_its_adapter_is_dropped_in_time_too(make_bench) -> None:
    bench, answers = make_bench(), []
    bench.core.sequences._equip = lambda _: None  # the adapter never arrives
    probe = wire.Probe(prompt=[1], tokens=1, timeout_ms=1500)
    bench.core.sequences.probe(probe, answers.append, bench.now_s)
    bench.step()
    assert not answers
    bench.now_s += 2.0
    bench.step()
    (answer,) = answers
    assert answer.refused.code == "deadline_exceeded"
