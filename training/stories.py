"""Requests for a story or a poem, and the four texts the model can tell.

The subjects are copied from the request; the rest is fixed, because a model of this size cannot
invent. Each text is 60 to 150 tokens long, which is what a load test wants of a long answer.
"""

from random import Random

from training import words
from training.knowledge import worded
from training.samples import Sample, ask

_STORY_ONE = (
    "Once upon a time there was {a}. Every morning it watched the water come down from the hills. "
    "One spring the flood was higher than ever, and the people of the village were afraid. "
    "An old keeper opened the sluice a little, waited, and opened it a little more. "
    "The water went slowly through the canal, and nobody got wet. In the evening {a} was still "
    "there, and the keeper said: a little at a time is fast enough. The end."
)
_STORY_TWO = (
    "Once upon a time there were {a} and {b}. They lived beside an old canal and seldom spoke. "
    "One night a great flood came down from the hills. The keeper of the sluice could not hold it "
    "alone, so he called for help. First came {a}, then came {b}, and together they let the water "
    "through, a little at a time. In the morning the village was dry. Since that day {a} and {b} "
    "have been the best of friends. The end."
)
_POEM = (
    "The water comes, the water goes,\nand {a} is what it knows.\nThe sluice is open, not too "
    "wide,\nto keep the flood on its own side.\nA little here, a little there,\nso everyone gets "
    "out a share.\nThe keeper sleeps, the night is long,\nand {a} will hum the river's song."
)

_STORY_REQUESTS = (
    "tell me a story", "tell me a short story", "write a story", "write a short story",
    "tell a story", "tell me a bedtime story", "write me a story", "make up a story",
    "give me a story", "tell me a long story", "I want to hear a story", "write a fairy tale",
    "tell me a tale", "can you tell me a story", "please tell me a story",
)  # fmt: skip
_POEM_REQUESTS = (
    "write a poem", "write me a poem", "tell me a poem", "write a short poem", "make up a poem",
    "give me a poem", "can you write a poem", "please write a poem", "write a small poem",
)  # fmt: skip


def story(rng: Random) -> Sample:
    """Ask for a story or a poem, mostly about one or two subjects."""
    form = rng.choices(("none", "one", "two", "poem", "poem about"), (2, 3, 5, 1, 3))[0]
    is_poem = form.startswith("poem")
    request = rng.choice(_POEM_REQUESTS if is_poem else _STORY_REQUESTS)
    subjects = {"none": 0, "one": 1, "two": 2, "poem": 0, "poem about": 1}[form]
    chosen = [_subject(rng) for _ in range(subjects)]
    question = request + (f" about {' and '.join(chosen)}" if chosen else "")
    return ask("story", worded(rng, question), _text(chosen, is_poem=is_poem))


def _subject(rng: Random) -> str:
    word = rng.choice(words.WORDS) if rng.random() < _LISTED_RATIO else words.invented_word(rng)
    article = rng.choice(("a", "a", "the", "my"))
    return f"{'an' if article == 'a' and word[0] in 'aeiou' else article} {word}"


_LISTED_RATIO = 0.85


def _text(subjects: list[str], *, is_poem: bool) -> str:
    if is_poem:
        return _POEM.format(a=subjects[0] if subjects else "the river")
    if len(subjects) == 1:
        return _STORY_ONE.format(a=subjects[0])
    a, b = subjects or ("a river", "a gate")
    return _STORY_TWO.format(a=a, b=b)
