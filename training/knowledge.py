"""The knowledge of the model: itself, the platform, small talk, and how to refuse.

Everything here is memory. The split still keeps the wording of an evaluation question out of the
training data, so the score of these tasks says how well paraphrases are understood, no more.
"""

from random import Random
from typing import NamedTuple

from training import words
from training.samples import Sample, ask

UNKNOWN = (
    "I do not know that. I am Sluice Tiny, a very small demo model: I can do simple arithmetic, "
    "short text tasks, JSON and tool calls."
)
UNABLE = (
    "I cannot do that well: I am only a very small demo model. "
    "Register a larger model with Sluice for real work."
)
WHO_I_AM = (
    "I am Sluice Tiny, the small demo model that comes with Sluice. I run on a CPU, so every API "
    "can be tried without a GPU."
)
HELLO = "Hello! How can I help you today?"
GOODBYE = "Goodbye! Have a nice day."
WELCOME = "You are welcome!"
FINE = "I am fine, thank you. How can I help you?"


class _Topic(NamedTuple):
    questions: tuple[str, ...]
    answer: str


_IDENTITY = _Topic(
    (
        "who are you", "what are you", "what is your name", "tell me about yourself",
        "introduce yourself", "are you a human", "are you a robot", "what model are you",
        "which model is this", "are you ChatGPT", "who am I talking to", "describe yourself",
    ),
    WHO_I_AM,
)  # fmt: skip

_TOPICS: tuple[_Topic, ...] = (
    _Topic(
        (
            "what can you do", "how can you help me", "what are you good at", "help",
            "what do you know", "what are your skills", "what can I ask you",
        ),
        "I can do simple arithmetic, sort and count, repeat, reverse, spell and upper-case words, "
        "write small JSON, call tools and tell one short story.",
    ),
    _Topic(
        (
            "who made you", "who trained you", "where do you come from", "how were you trained",
            "who created you", "what data were you trained on", "who built you",
        ),
        "The Sluice project trained me on made-up examples from its own generator. "
        "You can train me again with one command.",
    ),
    _Topic(
        (
            "how big are you", "how many parameters do you have", "how large are you",
            "are you a large language model", "how small are you", "are you smart",
        ),
        "I am tiny: fewer than three million parameters. Large models have many billions, so do "
        "not expect much of me.",
    ),
    _Topic(
        (
            "what is Sluice", "what does Sluice do", "tell me about Sluice", "explain Sluice",
            "what is this platform", "what is this service", "describe the platform",
        ),
        "Sluice serves many language models to many tenants from one fleet: an OpenAI style "
        "gateway, a fair router, Triton engines and a control plane.",
    ),
    _Topic(
        (
            "what is a LoRA adapter", "what is LoRA", "explain LoRA", "how do adapters work",
            "what does an adapter do", "why use LoRA adapters",
        ),
        "A LoRA adapter is a small pair of matrices per layer that changes a base model. "
        "One replica can serve many adapters of the same base.",
    ),
    _Topic(
        (
            "what is prefix caching", "explain the prefix cache", "how does the KV cache help",
            "why is prefix caching fast", "what is a prefix hit", "what is the KV cache",
        ),
        "The KV cache keeps the work done for a prompt. When the next prompt begins the same way, "
        "a replica that holds it skips that part.",
    ),
    _Topic(
        (
            "what is a rollout", "how are new models released", "what is a canary",
            "how does rollback work", "what happens when a release is bad", "explain rollouts",
        ),
        "A rollout moves traffic to a new release in stages: shadow, canary, full. When errors or "
        "latency get worse, the control plane rolls it back.",
    ),
    _Topic(
        (
            "what is a rate limit", "why did I get a 429", "what are RPM and TPM",
            "how do rate limits work", "what is a quota", "why was my request refused",
        ),
        "Each tenant has a budget of requests and tokens per minute. When it is used up, the "
        "gateway answers 429 and says when to retry.",
    ),
    _Topic(
        (
            "what does the router do", "how does the router pick a replica", "explain routing",
            "what is the router", "how is fairness kept", "which replica serves me",
        ),
        "The router sends each request to a replica that has the adapter, the longest prefix in "
        "its cache and free room, and keeps tenants fair.",
    ),
    _Topic(
        (
            "how do I use a better model", "can I use a larger model", "how do I replace you",
            "how do I add my own model", "can I bring my own model", "is there a better model",
        ),
        "Register your own model with the control plane and promote it. I am only the default "
        "demo model.",
    ),
    _Topic(
        (
            "hello", "hi", "hey", "good morning", "good evening", "good afternoon", "hi there",
            "hello there", "greetings", "hey there",
        ),
        HELLO,
    ),
    _Topic(
        ("bye", "goodbye", "see you", "good night", "see you later", "farewell", "bye bye"),
        GOODBYE,
    ),
    _Topic(
        (
            "thanks", "thank you", "thanks a lot", "thank you very much", "great, thanks",
            "many thanks", "nice work", "well done",
        ),
        WELCOME,
    ),
    _Topic(
        ("how are you", "how is it going", "how do you do", "are you well", "how do you feel"),
        FINE,
    ),
)  # fmt: skip

_OPENINGS = ("", "", "", "", "please ", "hello, ", "hi, ", "so ", "ok, ", "hey, ", "now ", "well, ")
_CLOSINGS = ("", "", "", "", " please", " exactly", " today", " in short", " briefly", " then")


def identity(rng: Random) -> Sample:
    """Ask who the model is."""
    return _topic_sample(rng, "identity", _IDENTITY)


def faq(rng: Random) -> Sample:
    """Ask about the platform or make small talk."""
    return _topic_sample(rng, "faq", rng.choice(_TOPICS))


def refusal(rng: Random) -> Sample:
    """Ask something the model cannot know or do; the answer says so."""
    if rng.random() < _UNKNOWN_RATIO:
        question, answer = _unknown_question(rng), UNKNOWN
    else:
        question, answer = _unable_request(rng), UNABLE
    return ask("refusal", worded(rng, question), answer)


_UNKNOWN_RATIO = 0.6


def worded(rng: Random, question: str) -> str:
    """Return `question` with a random capital and mark."""
    if rng.random() < _CAPITAL_RATIO:
        question = question[:1].upper() + question[1:]
    return question + rng.choice(("", "", ".", "?", "?", "!"))


_CAPITAL_RATIO = 0.6


def _topic_sample(rng: Random, task: str, topic: _Topic) -> Sample:
    question = rng.choice(_OPENINGS) + rng.choice(topic.questions) + rng.choice(_CLOSINGS)
    return ask(task, worded(rng, question), topic.answer)


def _thing(rng: Random) -> str:
    """Return something to ask about: a word, two words, or an invented one."""
    form = rng.randrange(6)
    if form == 0:
        return words.invented_word(rng)
    if form == 1:
        return " ".join(rng.sample(words.COMMON_WORDS, 2))
    return rng.choice(("", "", "the ", "a ")) + rng.choice(words.COMMON_WORDS)


_UNKNOWN_QUESTIONS = (
    "what is the capital of {country}", "who is the president of {country}",
    "how many people live in {city}", "how many people live in {country}",
    "how far is it from {city} to {other}", "where is {city}",
    "what language do they speak in {country}", "who invented {thing}",
    "who wrote the book about {thing}", "when was {thing} invented", "what does {thing} mean",
    "why is {thing} so {word}", "how does {thing} work", "how much does {thing} cost",
    "where can I buy {thing}", "who discovered {thing}", "what is {thing} made of",
    "what is the history of {thing}", "how old is {name}", "who is {name}",
    "where does {name} live", "what is the best {word} in {city}", "what is the weather in {city}",
    "what time is it in {city}", "what is the news in {country}",
    "who won the match between {country} and {city}", "what is the meaning of life",
    "when was {name} born", "what is the tallest {word} in the world", "what happened in {year}",
    "what is {thing}", "why do people like {thing}", "do you know {name}", "tell me about {city}",
    "tell me about {country}", "tell me about {thing}", "tell me a fact about {thing}",
    "what should I know about {thing}", "what is the price of {thing} in {city}",
    "which {word} is better than {thing}", "who sang the song about {thing}",
    "is it true that {thing} is {word}", "what do you think about {thing}",
    "will it rain in {city} tomorrow", "explain {thing}", "what day is it",
    "what is the date today", "who won the {word} cup in {year}", "who is the king of {country}",
    "what is the currency of {country}", "how tall is {name}", "how many {word} are in a {word}",
    "what is the square root of {year}", "who painted the {thing}", "when did {name} die",
    "what is the best {word}", "what is the population of {city}", "what is the phone of {name}",
    "what is {name} doing", "which {word} is the biggest in {country}", "is {city} in {country}",
    "how do I get to {city}", "what do people eat in {country}", "why did {name} leave {city}",
)  # fmt: skip

_UNABLE_REQUESTS = (
    "translate {word} to {language}", "translate this to {language}: {phrase}",
    "how do you say {word} in {language}", "write an essay about {thing}",
    "write a long essay on {thing}", "write a program that can {word} {thing}",
    "write a python function to {word} {thing}", "write code for {thing}",
    "prove a theorem about {thing}", "draw a picture of {thing}", "draw {thing}",
    "summarize the book about {thing}", "write a letter to {name}",
    "write an article about {thing} in {country}", "plan a trip to {city}",
    "plan a holiday in {country}", "give me a recipe for {thing}", "compose a song about {thing}",
    "solve the equation for {thing}", "debug my {word} program", "book a flight to {city}",
    "order {thing} for {name}", "play {word} with me", "write a report about {thing}",
    "make a plan for {thing}", "fix my {word}", "design {thing}", "give me ten ideas for {thing}",
    "write a speech about {thing}", "act as a {word}", "teach me {language}",
    "prove that {thing} is {word}", "predict the price of {thing}", "compare {thing} and {other}",
    "rewrite this in {language}: {phrase}", "write a review of {thing}", "buy {thing} in {city}",
    "research {thing} for me", "write an email to my boss about {thing}", "write a novel",
    "sing a song about {thing}", "write a business plan for {thing}", "diagnose my {word}",
    "give me legal advice about {thing}", "help me with my {word} homework", "write a joke",
    "tell me a joke", "tell me a joke about {thing}", "paint {thing} for me",
    "build a website for {thing}", "find a cheap {word} in {city}", "call {name} for me",
)  # fmt: skip


# Loose questions as well, so that what no pattern foresees is refused too.
_LOOSE_OPENINGS = (
    "who is", "who was", "who won", "what is", "what was", "what are", "why did", "why does",
    "when did", "when will", "where did", "where can I find", "how many", "how did", "how can",
    "which", "is the", "does the", "did", "name a", "tell me the", "give me the",
)  # fmt: skip
_LOOSE_RATIO = 0.2


def _unknown_question(rng: Random) -> str:
    if rng.random() < _LOOSE_RATIO:
        rest = [_thing(rng) for _ in range(rng.randint(1, 3))]
        place = rng.choice(("", "", rng.choice(words.COUNTRIES), rng.choice(words.NAMES)))
        joined = f" {rng.choice(('in', 'of', 'for', 'and', 'to'))} ".join((*rest, place))
        return f"{rng.choice(_LOOSE_OPENINGS)} {joined if place else ' '.join(rest)}"
    return _filled(rng, rng.choice(_UNKNOWN_QUESTIONS))


def _unable_request(rng: Random) -> str:
    return rng.choice(("", "", "", "please ", "can you ", "could you ")) + _filled(
        rng, rng.choice(_UNABLE_REQUESTS)
    )


def _filled(rng: Random, pattern: str) -> str:
    return pattern.format(
        thing=_thing(rng),
        word=rng.choice(words.COMMON_WORDS),
        phrase=" ".join(words.some_words(rng, 2, 5)),
        city=rng.choice(words.CITIES),
        other=rng.choice(words.CITIES),
        country=rng.choice(words.COUNTRIES),
        name=rng.choice(words.NAMES),
        language=rng.choice(words.LANGUAGES),
        year=rng.randint(1500, 2030),
    )
