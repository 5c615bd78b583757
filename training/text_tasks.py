"""Tasks on words: copy, reverse, upper case, count, spell, and small JSON."""

from random import Random

from training import words
from training.chat import to_json
from training.samples import Sample, ask


def _asked(rng: Random, task: str, forms: tuple[str, ...], subject: str, answer: str) -> Sample:
    return ask(task, rng.choice(forms).format(subject), answer)


def repeat(rng: Random) -> Sample:
    """Ask for the same words again."""
    text = " ".join(words.copyable_words(rng, 1, 8))
    forms = (
        "Repeat after me: {}", "Say: {}", "Repeat: {}", "Repeat these words: {}", "Echo: {}",
        "Please repeat: {}", "Copy this: {}", 'Say "{}"', "Say exactly: {}", "Write: {}",
    )  # fmt: skip
    return _asked(rng, "repeat", forms, text, text)


def drill(rng: Random) -> Sample:
    """Ask for a long list again, words or numbers: the densest lesson in copying there is."""
    if rng.random() < _NUMBERS_RATIO:
        text = ", ".join(str(rng.randint(0, 99)) for _ in range(rng.randint(6, 16)))
    else:
        text = " ".join(words.copyable_words(rng, 8, 28))
    return _asked(rng, "drill", ("Repeat: {}", "Say: {}", "Copy this: {}"), text, text)


_NUMBERS_RATIO = 0.3


def reverse(rng: Random) -> Sample:
    """Ask for words in the opposite order."""
    chosen = words.copyable_words(rng, 2, 6)
    forms = (
        "Reverse the words: {}", "Reverse the order of these words: {}", "Reverse: {}",
        "Say backwards: {}", "Reverse these words: {}", "Write in reverse order: {}",
    )  # fmt: skip
    return _asked(rng, "reverse", forms, " ".join(chosen), " ".join(reversed(chosen)))


def upper(rng: Random) -> Sample:
    """Ask for upper case."""
    text = " ".join(rng.sample(words.WORDS, rng.randint(1, 4)))
    forms = (
        "Uppercase: {}", "Convert to upper case: {}", "Make this upper case: {}", "Shout: {}",
        "Write in capital letters: {}", "Upper case: {}", "Put in uppercase: {}",
    )  # fmt: skip
    return _asked(rng, "upper", forms, text, text.upper())


def count_words(rng: Random) -> Sample:
    """Ask how many words there are."""
    chosen = words.some_words(rng, 1, 10)
    forms = (
        "How many words are in: {}", "Count the words: {}", "How many words: {}",
        "Count these words: {}", "How many words are there in: {}",
    )  # fmt: skip
    number = len(chosen)
    answer = "There is 1 word." if number == 1 else f"There are {number} words."
    return _asked(rng, "count", forms, " ".join(chosen), answer)


def spell(rng: Random) -> Sample:
    """Ask for the letters of a word, or of a name."""
    word = rng.choice(words.WORDS) if rng.random() < _PLAIN_RATIO else rng.choice(words.NAMES)
    forms = (
        "Spell {}", "Spell the word {}.", "How do you spell {}?", "Can you spell {}?",
        "Please spell {}", "Spell {} for me.", "Spell out {}", "What are the letters of {}?",
    )  # fmt: skip
    return _asked(rng, "spell", forms, word, "-".join(word))


_PLAIN_RATIO = 0.85


def json_object(rng: Random) -> Sample:
    """Ask for a JSON object with facts from a sentence, or for a JSON list."""
    build = rng.choice((_person, _person, _words_list, _key_values))
    question, answer = build(rng)
    return ask("json", question, answer)


def _person(rng: Random) -> tuple[str, str]:
    facts: dict[str, str | int] = {
        "name": rng.choice(words.NAMES),
        "age": rng.randint(5, 99),
        "city": rng.choice(words.CITIES),
    }
    fields = rng.choice((("name", "age"), ("name", "city"), ("name", "age", "city")))
    name, age, city = facts["name"], facts["age"], facts["city"]
    sentence = {
        ("name", "age"): (f"{name} is {age} years old.", f"{name} is {age}."),
        ("name", "city"): (f"{name} lives in {city}.", f"{name} is from {city}."),
        ("name", "age", "city"): (
            f"{name} is {age} years old and lives in {city}.",
            f"{name} from {city} is {age}.",
        ),
    }[fields]
    listed = f"{', '.join(fields[:-1])} and {fields[-1]}"
    request = rng.choice(
        (
            "Extract JSON with {}: {}", "Return JSON with {}. {}", "Give me JSON with {}: {}",
            "Write JSON with {}. {}", "Answer in JSON with {}: {}",
        )
    )  # fmt: skip
    return (
        request.format(listed, rng.choice(sentence)),
        to_json({key: facts[key] for key in fields}),
    )


def _words_list(rng: Random) -> tuple[str, str]:
    chosen = words.copyable_words(rng, 1, 5)
    form = rng.choice(
        ("Return a JSON list of these words: {}", "Write as a JSON list: {}", "JSON list of {}")
    )
    return form.format(" ".join(chosen)), to_json(chosen)


def _key_values(rng: Random) -> tuple[str, str]:
    keys = words.some_words(rng, 1, 3)
    values = [rng.choice((rng.randint(0, 99), rng.choice(words.WORDS))) for _ in keys]
    listed = ", ".join(f"{key} is {value}" for key, value in zip(keys, values, strict=True))
    form = rng.choice(("Write JSON where {}", "Make a JSON object: {}", "Return JSON: {}"))
    return form.format(listed), to_json(dict(zip(keys, values, strict=True)))
