"""The data of the default model: which tasks, how often, and how they become conversations.

Pure and seeded: the same seed gives the same samples on every machine and every Python. Nothing
here reads a file, so the whole training set is this package.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from training import knowledge, number_tasks, stories, text_tasks, tool_tasks, words
from training.samples import Sample, is_held_out

Task = Callable[[Random], Sample]

# Shares of the samples; what is hard to learn comes often, what is memory comes seldom.
_MIX: tuple[tuple[Task, float], ...] = (
    (knowledge.identity, 3.0),
    (knowledge.faq, 9.0),
    (knowledge.refusal, 10.0),
    (stories.story, 3.0),
    (text_tasks.repeat, 8.0),
    (text_tasks.reverse, 9.0),
    (text_tasks.upper, 6.0),
    (text_tasks.count_words, 4.0),
    (text_tasks.spell, 5.0),
    (text_tasks.json_object, 8.0),
    (number_tasks.arithmetic, 16.0),
    (number_tasks.order, 12.0),
    (number_tasks.count_aloud, 3.0),
    (tool_tasks.call, 8.0),
    (tool_tasks.result, 2.0),
)
# Copying is the skill the others build on: these alone at first, then these more often.
_COPYING: tuple[Task, ...] = (
    text_tasks.drill,
    text_tasks.drill,
    text_tasks.repeat,
    text_tasks.reverse,
    text_tasks.json_object,
)
_SYSTEM_TEXTS = (
    "You are a helpful assistant.", "You are Sluice Tiny, a small demo model.", "Answer briefly.",
    "You are a helpful, honest assistant. Answer briefly.", "Be kind.", "You are an assistant.",
    "You are a helpful AI assistant.", "Use the tools when they help.", "Be concise and friendly.",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Conversation:
    """A system text, possibly empty, and samples that are asked one after the other."""

    system: str
    samples: tuple[Sample, ...]


def training_conversations(seed: int, count: int) -> Iterator[Conversation]:
    """Yield `count` conversations; the first part is the curriculum.

    No sample of them is held out, not even as an earlier turn.
    """
    rng = Random(f"train {seed}")
    for index in range(count):
        yield _conversation(rng, progress=index / count, want_held_out=False)


def evaluation_conversations(seed: int, count: int) -> Iterator[Conversation]:
    """Yield `count` conversations with different last questions, all of them held out.

    Earlier turns are training samples: only the last answer is graded.
    """
    rng = Random(f"evaluate {seed}")
    seen: set[tuple[str, str]] = set()
    while len(seen) < count:
        conversation = _conversation(rng, progress=1.0, want_held_out=True)
        last = conversation.samples[-1]
        if (last.task, last.question) not in seen:
            seen.add((last.task, last.question))
            yield conversation


def _conversation(rng: Random, *, progress: float, want_held_out: bool) -> Conversation:
    samples = [_draw(rng, progress, want_held_out=want_held_out)]
    if progress >= _MULTI_TURN_FROM:
        for _ in range(rng.choices((0, 1, 2), (7, 2, 1))[0]):
            earlier = _draw(rng, progress, want_held_out=False)
            if not earlier.tools and earlier.task not in _ALONE:
                samples.insert(0, earlier)
    return Conversation(_system_text(rng), tuple(samples))


# A refusal or a story before the question makes the conversation long and teaches nothing.
_ALONE = frozenset({"refusal", "story"})
_MULTI_TURN_FROM = 0.3
_COPYING_ALONE_UNTIL = 0.1
_COPYING_OFTEN_UNTIL = 0.3


def _draw(rng: Random, progress: float, *, want_held_out: bool) -> Sample:
    while True:
        if progress < _COPYING_ALONE_UNTIL or (
            progress < _COPYING_OFTEN_UNTIL and rng.random() < _COPYING_RATIO
        ):
            task = rng.choice(_COPYING)
        else:
            task = rng.choices(_TASKS, _WEIGHTS)[0]
        sample = task(rng)
        if is_held_out(sample) == want_held_out:
            return sample


_COPYING_RATIO = 0.3
_TASKS = tuple(task for task, _ in _MIX)
_WEIGHTS = tuple(weight for _, weight in _MIX)


def _system_text(rng: Random) -> str:
    """Return mostly nothing, often a usual text, seldom a long one the model has to ignore."""
    kind = rng.choices(("none", "usual", "long"), (60, 36, 4))[0]
    if kind == "long":
        return " ".join(rng.choices(words.WORDS, k=rng.randint(5, 80))).capitalize() + "."
    return rng.choice(_SYSTEM_TEXTS) if kind == "usual" else ""
