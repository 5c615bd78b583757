"""What a router is told: at first, and when an answer goes on after a loss."""

from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.hermes import HermesParser
from gateway.dispatch.generation import Generation, GenerationSpec, WholeGeneration
from gateway.dispatch.pace import AttemptPace
from gateway.dispatch.router_link import RouterLink
from gateway.text.logprobs import LogprobFormat, LogprobLine, chat_logprobs
from gateway.text.pipe import TextPipe
from sluice.hashing import chained_hashes
from sluice.token_ids import unpacked_ids
from sluice.wire.router.v1 import router_pb2 as wire
from tests.support.scripted_router import NeverLags
from tests.unit.gateway.test_streamed import SPEC, TABLE, TOKENIZER

_ROOT = b"r" * 16
_IDS = st.lists(st.integers(0, 200), max_size=150)


def logprobs() -> tuple[LogprobLine, LogprobFormat]:
    return LogprobLine(frozenset()), partial(chat_logprobs, TABLE)


def _generation(spec: GenerationSpec) -> Generation:
    return WholeGeneration(spec)


@given(_IDS, st.lists(_IDS, max_size=3))
def test_the_hashes_belong_to_the_prompt_that_is_sent(prompt, emitted) -> None:
    spec = SPEC._replace(
        prompt=prompt, cache_root=_ROOT, block_hashes=chained_hashes(prompt, _ROOT)
    )
    generation = _generation(spec)
    for tokens in emitted:
        submit = generation.submit_message(1, "c", 0)
        sent = unpacked_ids(submit.prompt_ids)
        assert list(sent) == [*prompt, *generation.emitted]
        assert submit.block_hashes == chained_hashes(sent, _ROOT)
        assert submit.resumed_tokens == len(generation.emitted)
        generation.push(tokens, 1.0)


def test_the_tier_is_told_and_the_session_decides_about_the_cell() -> None:
    spec = SPEC._replace(tier_reserved_permille=250, is_preemptible=True, session_hash=7)
    submit = _generation(spec).submit_message(1, "c", 0)
    assert (submit.tier_reserved_permille, submit.is_preemptible) == (250, True)
    assert (spec.wish.session, len(spec.wish.hashes), spec.wish.prompt_tokens) == (7, 0, 1)


def test_sent_tokens_count_until_the_routers_next_report() -> None:
    changes: list[None] = []
    link = RouterLink("a:1", "g", lambda: changes.append(None), AttemptPace(NeverLags()))
    link._connect(wire.ConnectResponse(welcome=wire.Welcome(router_id="r")))
    told = wire.CellState(cell_id="c", replicas_ready=2, tokens_owed=50, wait_ms=9)
    link.deliver(wire.ConnectResponse(cells=[told]), 1.0)
    assert len(changes) == 2, "it came up, and later owned a cell"
    link.submit(_generation(SPEC._replace(prompt=[1] * 30)), "c", 0, 0)
    view = link.cells["c"]
    assert (view.tokens_owed, view.replicas_ready, view.wait_ms) == (80, 2, 9)
    told.is_draining = True
    link.deliver(wire.ConnectResponse(cells=[told]), 1.0)
    assert (link.cells["c"].tokens_owed, link.cells["c"].is_refusing) == (50, True)
    assert len(changes) == 2


@given(st.integers(1, 60), st.booleans(), st.booleans())
def test_tokens_behind_the_end_are_not_counted(
    group: int, has_stop: bool, has_logprobs: bool
) -> None:
    text = 'so <tool_call>{"name": "f", "arguments": {}}STOP and on </tool_call>'
    tokens = TOKENIZER.encode(text, add_special_tokens=False).ids
    parser = None if has_stop else HermesParser(lambda: "1", is_parallel=False)
    pipe = TextPipe(TABLE, ("STOP",) if has_stop else (), parser)
    spec = SPEC._replace(new_pipe=lambda: pipe, new_logprobs=logprobs if has_logprobs else None)
    generation = WholeGeneration(spec)
    for start in range(0, len(tokens), group):
        generation.push(tokens[start : start + group], 1.0)
    assert generation.ending is not None
    end = text.index("STOP") + 4 * has_stop
    assert list(generation.emitted) == tokens[:end]


@given(
    st.text(alphabet="abc é😀", max_size=30),
    st.integers(2, 5),
    st.sampled_from([(), ("ab", "c c")]),
)
def test_log_probabilities_do_not_depend_on_the_steps(text: str, group: int, stops) -> None:
    tokens = TOKENIZER.encode(text, add_special_tokens=False).ids
    answers = []
    for size in (1, group):
        spec = SPEC._replace(new_pipe=lambda: TextPipe(TABLE, stops), new_logprobs=logprobs)
        generation = WholeGeneration(spec)
        for start in range(0, len(tokens), size):
            step = tokens[start : start + size]
            for token in step:
                generation.learn_logprobs(-float(token), ())
            generation.push(step, 1.0)
        generation.finish()
        assert all(entry.logprob == -entry.token for entry in generation.answer.logprobs)
        answers.append((generation.answer.content, generation.answer.logprobs))
    assert answers[0] == answers[1]
