from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from replica.engine.speculation import NGRAM_TOKENS, READ_TOKENS_MAX, PredictedText, PromptLookup
from replica.engine.types import Grammar, GrammarKind, Sampling, SequenceRequest


def naive_draft(tokens: list[int], count: int) -> list[int]:
    """Return the tokens after the previous occurrence of the last n-gram, repeated if few."""
    tail = tokens[-NGRAM_TOKENS:]
    for start in range(len(tokens) - NGRAM_TOKENS - 1, -1, -1):
        if tokens[start : start + NGRAM_TOKENS] == tail:
            draft = list(tokens)
            while len(draft) < len(tokens) + count:
                draft.append(draft[start + NGRAM_TOKENS + len(draft) - len(tokens)])
            return draft[len(tokens) :]
    return []


@settings(max_examples=200)
@given(
    tokens=st.lists(st.integers(0, 3), max_size=60),
    chunks=st.lists(st.integers(1, 20), min_size=1, max_size=8),
    room=st.integers(1, 20),
    prompt_tokens=st.integers(0, 30),
)
def test_drafts_follow_the_last_tokens_of_the_context(tokens, chunks, room, prompt_tokens) -> None:
    end = min(prompt_tokens, len(tokens))
    drafter = PromptLookup(16, end)
    for chunk in chunks:
        end = min(end + chunk, len(tokens))
        if end < NGRAM_TOKENS:
            continue
        known = tokens[:end]
        assert drafter.propose(known, room) == naive_draft(known, min(room, drafter.width))


class CountingList(list):
    """A list of tokens that counts the accesses to each token."""

    def __init__(self, tokens) -> None:
        super().__init__(tokens)
        self.looks = 0

    def __getitem__(self, at):
        self.looks += isinstance(at, int)
        return super().__getitem__(at)


def test_a_long_prompt_is_read_in_parts_and_once_for_all_siblings() -> None:
    prompt = [*range(3 * READ_TOKENS_MAX), 5, 6, 7]
    drafters = [PromptLookup(4, len(prompt))]
    drafters += [PromptLookup(4, len(prompt), drafters[0]) for _ in range(3)]
    sequences = [CountingList([*prompt, 8 + i, 9 + i]) for i in range(4)]
    looks = [0]
    drafts = []
    for _ in range(2):
        for drafter, tokens in zip(drafters, sequences, strict=True):
            drafts.append(drafter.propose(tokens, 4))
            looks.append(sum(sequence.looks for sequence in sequences))
    assert max(after - before for before, after in pairwise(looks)) <= READ_TOKENS_MAX + 2
    assert looks[-1] == len(prompt) + 4 * 2
    # 7 8 9 is in the prompt. 7 9 10 would only exist if siblings shared their answers.
    assert drafts[4] == [10, 11, 12, 13]
    assert drafts[5:] == [[], [], []]


def test_the_newest_output_counts_for_more_than_the_prompt() -> None:
    prompt = [1, 2, 3, 4, 5, 6]
    drafter = PromptLookup(1, len(prompt))
    assert drafter.propose([*prompt, 1, 2, 3], 1) == [4]
    assert drafter.propose([*prompt, 1, 2, 3, 9, 1, 2, 3], 1) == [9]


def test_ids_that_look_alike_when_packed_are_told_apart() -> None:
    drafter = PromptLookup(4)
    assert drafter.propose([0, 1, 0, 9, 1, 0, 0], 4) == []
    assert drafter.propose([0, 1, 0, 9, 1, 0, 0, 1 << 23, 1, 0, 0], 4) == [1 << 23, 1, 0, 0]


def test_width_follows_accepted_drafts() -> None:
    drafter = PromptLookup(16)
    widths = []
    for tried, right in ((4, 4), (8, 8), (16, 16), (16, 5), (5, 5), (10, 0)):
        drafter.observe(tried, right)
        widths.append(drafter.width)
    assert widths == [8, 16, 16, 5, 10, 1]


def test_after_wrong_drafts_it_pauses_longer_and_longer() -> None:
    drafter = PromptLookup(8)
    tokens = [1, 2, 3] * 5
    tried_at = []
    for chance in range(150):
        if drafter.propose(tokens, 8):
            tried_at.append(chance)
            drafter.observe(1, 0)
    gaps = [later - sooner for sooner, later in pairwise(tried_at)]
    assert gaps == [3, 5, 9, 17, 33, 33, 33]
    while not drafter.propose(tokens, 8):
        pass
    drafter.observe(1, 1)
    assert drafter.propose(tokens, 8)


def draft_request(key: int, prompt: list[int], count: int, **options) -> SequenceRequest:
    return SequenceRequest(
        key, prompt, count, **{"ignore_eos": True, "draft_tokens_max": 8, **options}
    )


def test_the_answer_is_the_same_in_fewer_steps(make_engine, run_to_end, expected_output) -> None:
    prompt = [i % 11 for i in range(50)]
    wanted = expected_output(prompt, 200, stop=frozenset())
    steps = {}
    for width in (0, 8):
        engine = make_engine()
        engine.add(draft_request(1, prompt, 200, draft_tokens_max=width))
        runs = []
        assert run_to_end(engine, lambda events, runs=runs: runs.append(events.has_runs)) == {
            1: wanted
        }
        steps[width] = len(runs)
        assert any(runs) == bool(width)
    assert steps[0] == 200
    assert steps[8] < 180
    load = engine.load()
    assert load.accepted_tokens == 200 - steps[8]
    assert load.draft_tokens >= load.accepted_tokens


def test_a_stop_token_inside_a_run_ends_it(make_engine, run_to_end, expected_output) -> None:
    prompt = [i % 11 for i in range(50)]
    free = expected_output(prompt, 200, stop=frozenset())
    for stop in range(11):
        engine = make_engine()
        engine.add(
            draft_request(1, prompt, 200, stop_token_ids=frozenset({stop}), ignore_eos=False)
        )
        wanted = expected_output(prompt, 200, stop=frozenset({stop, 7}))
        finished = []
        assert run_to_end(engine, lambda events, f=finished: f.extend(events.finished))[1] == wanted
        assert finished[0].output_tokens == len(wanted)
        assert wanted == free[: len(wanted)]


def test_logprobs_of_a_run_stand_in_its_order(
    make_engine, run_to_end, expected_output, expected_logprobs
) -> None:
    prompt = [i % 11 for i in range(50)]
    engine = make_engine()
    engine.add(draft_request(1, prompt, 61, sampling=Sampling(logprobs=2)))
    engine.add(draft_request(2, [1, 2], 61, draft_tokens_max=0))
    found = []
    out = run_to_end(engine, lambda events: found.extend(events.logprobs))
    assert {entry.key for entry in found} == {1}
    assert [entry.logprob for entry in found] == expected_logprobs(prompt + out[1], len(prompt))


def test_grammars_get_no_drafts(make_engine, run_to_end) -> None:
    engine = make_engine()
    grammar = Sampling(grammar=Grammar(GrammarKind.JSON))
    engine.add(draft_request(1, [1, 2, 3] * 10, 100, sampling=grammar))
    run_to_end(engine)
    assert engine.load().draft_tokens == 0


def test_drafts_take_only_the_rest_of_the_step_and_the_pool(make_engine, run_to_end) -> None:
    prompt = [1, 2, 3] * 10
    narrow = make_engine(sequences=2, step_tokens=2)
    for key, count in ((1, 10), (2, 60)):
        narrow.add(draft_request(key, prompt, count))
    run_to_end(narrow)
    drafting = [plan for plan in narrow._backend.plans if plan.drafts]
    assert drafting
    assert {plan.tokens for plan in drafting} == {2}


def test_drafts_leave_the_last_blocks_to_waiting_sequences(make_engine) -> None:
    drafts = []
    for seed in range(10):
        engine = make_engine(blocks=3, sequences=2)
        options = {"draft_tokens_max": 16, "sampling": Sampling(seed=seed)}
        engine.add(draft_request(1, [1, 2, 3] * 9 + [1, 2], 30, **options))
        engine.add(draft_request(2, [5] * 20, 10, draft_tokens_max=0))
        engine.step()
        engine.step()
        assert engine.scheduler.pool.available == 1
        drafts += engine._backend.plans[-1].drafts.values()
    # The prompt of 29 tokens and its first new token leave room for two tokens in the block.
    assert {len(draft) for draft in drafts} == {2}


def test_a_prediction_is_tried_from_the_first_token_on_and_again_behind_a_difference() -> None:
    text = list(range(100, 160))
    predicted = PredictedText(text, 5, 16)
    tokens = [1, 2, 3, 4, 5]
    assert predicted.propose(tokens, 16) == text[:16]
    tokens += text[:20]
    assert predicted.propose(tokens, 4) == text[20:24]
    tokens += [7, 8]  # the answer differs from text[20:23]
    assert predicted.propose(tokens, 16) == []
    tokens += text[23:25]
    assert predicted.propose(tokens, 16) == []  # only two tokens are equal, which may be chance
    tokens += text[25:26]
    assert predicted.propose(tokens, 16) == text[26:42]
    tokens += text[26:]
    assert predicted.propose(tokens, 16) == []


def test_of_equal_parts_of_a_prediction_the_next_one_is_tried() -> None:
    line = [1, 2, 3, 4]
    text = [*line, 50, *line, 60, *line, 70]
    predicted = PredictedText(text, 0, 1)
    tokens = [*line, 50, 9]  # the answer differs in the second line
    assert predicted.propose(tokens, 1) == []
    tokens += [2, 3, 4]
    assert predicted.propose(tokens, 1) == [60]
    assert predicted.propose([*tokens, 60, *line], 1) == [70]
    # the position moves back to the start
    assert predicted.propose([*tokens, 60, *line, 80, 1, 2, 3], 1) == [4]


def test_a_long_prediction_is_read_in_parts() -> None:
    text = CountingList([*range(3 * READ_TOKENS_MAX), 5, 6, 7])
    predicted = PredictedText(text, 0, 4)
    tokens, looks = [9, 1 << 22], [0]
    for token in (*range(100, 103), *range(5000, 5006)):
        tokens.append(token)
        predicted.propose(tokens, 4)
        looks.append(text.looks)
    assert max(after - before for before, after in pairwise(looks)) <= READ_TOKENS_MAX + 4
    assert predicted.propose([*tokens, 5006], 4) == [5007, 5008, 5009, 5010]


def test_a_prediction_counts_apart_from_a_lookup() -> None:
    drafter = PromptLookup(4, 3, None, PredictedText([7, 8], 3, 16))
    tokens = [1, 2, 3]
    assert drafter.propose(tokens, 4) == [7, 8]
    drafter.observe(2, 1)
    tokens += [7, 1, 2, 3]
    assert drafter.propose(tokens, 4) == [7, 1, 2, 3]
    drafter.observe(4, 3)
    assert drafter.counts == (6, 4, 2, 1)


def steps_of(answer: list[int], prediction: list[int]) -> tuple[int, int, int]:
    """Return the number of steps for an answer, and of its tried and accepted tokens."""
    drafter = PromptLookup(0, 1, None, PredictedText(prediction, 1, 16))
    tokens, steps = [1], 0
    while len(tokens) <= len(answer):
        draft, rest = drafter.propose(tokens, 16), answer[len(tokens) - 1 :]
        right = 0
        while right < min(len(draft), len(rest)) and draft[right] == rest[right]:
            right += 1
        if draft:
            drafter.observe(len(draft), right)
        tokens += rest[: right + 1]
        steps += 1
    return steps, drafter.counts.tried, drafter.counts.accepted


def test_a_predicted_token_that_was_wrong_is_not_tried_again_at_once() -> None:
    answer = [5] * 120
    edited = [6 if index % 40 == 39 else 5 for index in range(120)]
    steps, tried, accepted = steps_of(answer, edited)
    assert steps < 20
    assert accepted > tried / 2


def test_a_prediction_that_is_wrong_again_and_again_is_tried_less_and_less() -> None:
    answer = [position % 7 for position in range(400)]
    # Each occurrence of the same three tokens is followed by another token.
    wrong = [token for at in range(7) for token in (at, (at + 1) % 7, (at + 2) % 7, 99)]
    _, tried, accepted = steps_of(answer, wrong)
    assert tried - accepted < 60
