"""That the search for the cheapest replica finds the one that the formula says."""

from functools import partial
from random import Random

import pytest

from router.core.decide import placement
from router.core.fleet.replica import ReplicaBook
from router.core.fleet.speed import MeanSpeed
from router.core.types.plan import EngineLimits
from router.core.types.request import Request

LIMITS = EngineLimits(
    kv_blocks=2000,
    sequences_max=64,
    step_tokens_max=2048,
    context_tokens_max=20_000,
    block_tokens=32,
)
NOW = 100.0
PROMPT = 3000
OUTPUT = 100
SIZE = 16


def make_book(random: Random, number: int) -> ReplicaBook:
    """Return a replica that does nothing, or computes or decodes something, at some speed."""
    book = ReplicaBook(f"replica-{number}", "cell", 0.1)
    book.attach(1, LIMITS, NOW)
    speed, engine_model = book.speed, book.engine_model
    speed.decode_step_s = random.choice((0.005, 0.02))
    speed.token_s = random.choice((1e-5, 5e-5))
    speed.attention_s = random.choice((0.0, 1e-9))
    book.is_draining = random.random() < 0.1
    book.refresh(is_healthy=random.random() < 0.9)
    if random.random() < 0.7:
        sizes = [random.randint(1, 3000) for _ in range(random.randint(0, 3))]
        prompts = [(NOW - 1, float(size), size * speed.token_s) for size in sizes]
        begun = [random.uniform(0.0, 0.1) for _ in range(random.randint(0, 4))]
        for slack_s in begun:
            engine_model.began(slack_s)
        at, slack_s = NOW - random.uniform(0.0, 0.1), random.uniform(0.0, 0.1)
        engine_model.anchor(at, prompts, len(begun), slack_s, pauses=0)
    return book


def make_matches(random: Random, names: list[str]) -> dict[str, int]:
    """Return that nobody, some or all hold a part of the prompt, and others than may be chosen."""
    holders = random.sample([*names, "drained"], len(names) + 1)
    share = random.choice((0.0, 0.5, 1.0))
    return {name: random.choice((3, 3, 31, 200)) for name in holders if random.random() < share}


@pytest.mark.parametrize("number", range(500))
def test_the_choice_is_the_least_of_all_costs(number: int):
    random = Random(number)
    books = {book.replica_id: book for book in map(partial(make_book, random), range(SIZE))}
    names = random.sample(list(books), random.randint(0, SIZE))
    books = {name: books[name] for name in names}
    owed_until = {name: book.engine_model.owed_until for name, book in books.items()}
    for name in names:
        if random.random() < 0.2:  # some have been looked at since their last frame
            books[name].engine_model.advance(NOW - random.uniform(0.0, 0.1))
    matches = make_matches(random, names)
    adapter_s = {name: random.choice((0.0, 0.02, float("inf"))) for name in names}
    if random.random() < 0.5:
        adapter_s = {}
    home = random.choice((None, "drained", *names))
    without = [name for name in names if random.random() < random.choice((0.0, 0.2))]
    mean_speed = MeanSpeed([book.speed for book in books.values()])
    request = Request(handle=1, cell_id="cell", prompt_tokens=PROMPT, output_max=OUTPUT)

    choice = placement.choose(
        books,
        request,
        matches,
        owed_until=owed_until,
        mean_speed=mean_speed,
        output=OUTPUT,
        home=home,
        adapter_waits_s=adapter_s,
        without=without,
        is_only=False,
        now=NOW,
    )

    costs: dict[str, float] = {}
    for name, book in books.items():
        cached = placement.cached_tokens(book, request, matches)
        uncached, wait_s = PROMPT - cached, adapter_s.get(name, 0.0)
        cost_s = placement.cost_s(
            book, mean_speed, uncached, cached, wait_s, NOW, is_home=name == home
        )
        reason = placement.excluded_by(book, request, OUTPUT, cached, is_only=False)
        if not reason and name not in without and cost_s < float("inf"):
            costs[name] = cost_s
    if not costs:
        assert choice is None
    else:
        assert choice is not None
        assert choice.cost_s == min(costs.values())
        assert choice.book.replica_id == min(costs, key=costs.__getitem__), "the first of equals"
        assert choice.cached_tokens == placement.cached_tokens(choice.book, request, matches)
