"""Log events are named `<noun>_<participle>` in the field's words: see docs/style.md."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("gateway", "router", "replica", "control_plane", "telemetry", "cli", "sluice")
LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}
EVENT = re.compile(r"[a-z]+(_[a-z]+)+")
# Words of glossary rows are known; these are the code's.
NOUNS = set(
    re.findall(
        r"\w+",
        """
    accusations admin alert alerts answer answers attach attachment attempt background batch
    caller certificate chunk chunks claim classifier closings completion confirmation connection content
    consumer database demand departure desired distribution embedder event events evidence
    faults fingerprint fleet gpu gpus grammars graph group guard handler import inspection
    inspector judging leftovers loop manifest message messages migration offset partitions peer
    pin placement priority probe process quality query refusal reply request responses retention
    rolling rule run scaling score secret series shadow shared sign sink socket spans stack
    state store table telemetry text texts tool tracestore transfer trial trtllm turn upload
    valkey watcher worker
        """,
    )
)
# States and participles that do not end in -ed or -ing.
STATES = set(
    re.findall(
        r"\w+",
        """
    begun broken built corrupt cut found frozen held hung incomplete ineffective invalid kept lost
    made missing read ready run sent set silent stuck swept unknown unreadable woken written
        """,
    )
)
VERB_PARTICLES = ("timed_out", "rolled_back")
NO_WORD = {"again", "ask", "do", "does", "heard", "told", "what", "who", "with", "without"}
# One event that two modules log.
SAME_IN_TWO = {"caller_refused", "certificate_loaded", "certificate_not_loaded"}


def literals(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value.split(":")[0]
    elif isinstance(node, ast.IfExp):
        yield from literals(node.body)
        yield from literals(node.orelse)


def events_of(file: Path) -> Iterator[str]:
    """Yield the names of events that a module logs; free text ends an event after a colon."""
    for node in ast.walk(ast.parse(file.read_text())):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in LEVELS
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "log"
            and node.args
        ):
            yield from literals(node.args[0])


@cache
def events() -> dict[str, set[str]]:
    """Return the modules that log each event."""
    found = defaultdict[str, set[str]](set)
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            for event in events_of(file):
                found[event].add(str(file.relative_to(ROOT)))
    return dict(found)


def glossary() -> set[str]:
    rows = re.findall(r"^\| ([a-z, ]+) \|", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)
    words = {word for row in rows for word in re.split(r"[, ]+", row)}
    return words | {f"{word}s" for word in words}


def is_named(event: str) -> bool:
    first, *rest = event.split("_")
    last = rest[-1] if rest else ""
    is_participle = last.endswith(("ed", "ing")) or last in STATES
    is_participle |= event.endswith(VERB_PARTICLES)
    is_noun = first in NOUNS | glossary()
    return bool(EVENT.fullmatch(event)) and is_noun and is_participle and NO_WORD.isdisjoint(rest)


def test_an_event_is_a_noun_with_its_participle() -> None:
    found = {event: files for event, files in events().items() if not is_named(event)}
    assert not found, f"name the thing, then its state (`router_reconnected`): {found}"


def test_an_event_is_logged_by_one_module() -> None:
    found = {
        event: files
        for event, files in events().items()
        if len(files) > 1 and event not in SAME_IN_TWO
    }
    assert not found, f"add the noun that tells them apart: {found}"


def test_the_rule_knows_a_good_name_from_a_bad_one() -> None:
    assert is_named("router_reconnected")
    bad = ("gpus_do_not_answer", "goodbye_not_heard", "router_answers_again", "started", "loading")
    assert not [event for event in bad if is_named(event)]
