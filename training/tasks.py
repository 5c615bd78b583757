"""The data of the default model: which tasks, how often, and how they become conversations.

Pure and seeded: the same seed gives the same samples on every machine and every Python. Nothing
here reads a file, so the whole training set is this package.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from random import Random

from training import knowledge, number_tasks, stories, text_tasks, tool_tasks, words
from training.samples import Sample, is_held_out

Task = Callable[[Random], Sample]

# Shares of the samples. Hard tasks are frequent, and tasks of memory are rare.
_MIX: Mapping[str, tuple[Task, float]] = {
    "identity": (knowledge.identity, 2.5),
    "faq": (knowledge.faq, 9.0),
    "refusal": (knowledge.refusal, 11.0),
    "story": (stories.story, 2.5),
    "repeat": (text_tasks.repeat, 8.0),
    "reverse": (text_tasks.reverse, 8.0),
    "upper": (text_tasks.upper, 6.0),
    "count": (text_tasks.count_words, 4.0),
    "spell": (text_tasks.spell, 6.0),
    "json": (text_tasks.json_object, 8.0),
    "arithmetic": (number_tasks.arithmetic, 18.0),
    "order": (number_tasks.order, 13.0),
    "counting": (number_tasks.count_aloud, 5.0),
    "tool call": (tool_tasks.call, 7.5),
    "tool result": (tool_tasks.result, 2.0),
}
TASK_NAMES = tuple(_MIX)
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


def training_conversation(rng: Random, progress: float) -> Conversation:
    """Return a conversation for the moment of training `progress`, from 0 to 1.

    The first part is the curriculum. No sample is held out, not even as an earlier turn.
    """
    last = _draw(rng, _task_for(rng, progress), want_held_out=False)
    if progress >= _LONG_FROM and rng.random() < _LONG_RATIO:
        earlier = earlier_turns(rng, rng.randint(*_LONG_TURNS))
    elif progress >= _MULTI_TURN_FROM:
        drawn = earlier_turns(rng, rng.choices((0, 1, 2), (7, 2, 1))[0])
        earlier = [sample for sample in drawn if sample.task not in _ALONE]
    else:
        earlier = []
    return Conversation(_system_text(rng), (*earlier, last))


def training_conversations(seed: int, count: int) -> Iterator[Conversation]:
    """Yield `count` conversations at even steps from the beginning of the training to its end."""
    rng = Random(f"train {seed}")
    for index in range(count):
        yield training_conversation(rng, index / count)


def evaluation_conversations(seed: int, count: int) -> Iterator[Conversation]:
    """Yield `count` conversations with different last questions, all of them held out.

    The tasks take turns, so each has the same number of questions. Earlier turns are training
    samples: only the last answer is graded.
    """
    rng = Random(f"evaluate {seed}")
    seen: set[tuple[str, str]] = set()
    while len(seen) < count:
        task = TASK_NAMES[len(seen) % len(TASK_NAMES)]
        last = _draw(rng, _MIX[task][0], want_held_out=True)
        if (task, last.question) not in seen:
            seen.add((task, last.question))
            earlier = earlier_turns(rng, rng.choices((0, 1, 2), (7, 2, 1))[0])
            yield Conversation(_system_text(rng), (*earlier, last))


def earlier_turns(rng: Random, count: int) -> list[Sample]:
    """Return at most `count` training samples that can come before another question."""
    drawn = (_draw(rng, _task_for(rng, 1.0), want_held_out=False) for _ in range(count))
    return [sample for sample in drawn if not sample.tools]


# In a short conversation a refusal or a story before the question costs much and teaches nothing.
_ALONE = frozenset({"refusal", "story"})
_MULTI_TURN_FROM = 0.3
# Few, because attention over thousands of tokens is slow; enough to answer after them.
_LONG_FROM = 0.65
_LONG_RATIO = 0.008
_LONG_TURNS = (10, 90)
_COPYING_ALONE_UNTIL = 0.08
_COPYING_OFTEN_UNTIL = 0.3
_COPYING_RATIO = 0.3


def _task_for(rng: Random, progress: float) -> Task:
    if progress < _COPYING_ALONE_UNTIL or (
        progress < _COPYING_OFTEN_UNTIL and rng.random() < _COPYING_RATIO
    ):
        return rng.choice(_COPYING)
    return rng.choices(_TASKS, _WEIGHTS)[0]


def _draw(rng: Random, task: Task, *, want_held_out: bool) -> Sample:
    while is_held_out(sample := task(rng)) != want_held_out:
        pass
    return sample


_TASKS = tuple(task for task, _ in _MIX.values())
_WEIGHTS = tuple(weight for _, weight in _MIX.values())


def _system_text(rng: Random) -> str:
    """Return mostly nothing, often a usual text, seldom a long one the model has to ignore."""
    kind = rng.choices(("none", "usual", "long"), (60, 36, 4))[0]
    if kind == "long":
        return " ".join(rng.choices(words.WORDS, k=rng.randint(5, 80))).capitalize() + "."
    return rng.choice(_SYSTEM_TEXTS) if kind == "usual" else ""
