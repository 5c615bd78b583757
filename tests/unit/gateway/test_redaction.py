"""What is taken out of texts, how, and that no text takes more than a bounded step at a time."""

import json
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.texts import redaction
from gateway.texts.documents import CUT, document
from gateway.texts.redaction import ALWAYS, Class, Redacted, Rules, is_iban, is_luhn, redacted

ALL = Rules(frozenset(Class))
KEY = "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nIBAAK\n-----END RSA PRIVATE KEY-----"


def run(steps: Any) -> Any:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def of(text: str, rules: Rules = ALL, most: int = 10**6) -> Redacted:
    return run(redacted(text, rules, most))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("mail bob.smith+x@mail.example.co.uk.", "mail [email]."),
        ("ask jürgen@müller.de, not me@home", "ask [email], not me@home"),
        ("card 4111 1111 1111 1111 12/26", "card [card] 12/26"),
        ("order 12 4111-1111-1111-1111", "order 12 [card]"),
        ("\uff14" + "\uff11" * 15, "[card]"),  # wide digits
        ("4111 1111 1111 1112", "4111 1111 1111 1112"),
        ("5500005555555559!", "[card]!"),
        ("to DE89 3704 0044 0532 0130 00 AND MORE", "to [iban] AND MORE"),
        ("gb29nwbk60161331926819", "[iban]"),
        ("GB29 NWBK 6016 1331 9268 18", "GB29 NWBK 6016 1331 9268 18"),
        ("10.0.0.255, 2001:db8::1 and 12:30", "[ip], [ip] and 12:30"),
        ("::ffff:10.1.2.3: up", "[ip]: up"),
        ("release 1.2.3.4.5 of 300.1.1.1", "release 1.2.3.4.5 of 300.1.1.1"),
        ("+49 30 1234567 or (555) 123-4567", "[phone] or [phone]"),
        ("0171 2345678 on 2024-01-02, 01-02-2024", "[phone] on 2024-01-02, 01-02-2024"),
        ("sk-abcdefghijklmnop1234", "[secret]"),
        ("Authorization: Bearer abc.def-ghi_jkl=", "Authorization: [secret]"),
        ("AKIAIOSFODNN7EXAMPLE and eyJhbGciOiJIUzI1NiJ9.eyJz.ab-_", "[secret] and [secret]"),
        ("password = 'hunter2hunter' next", "[secret]' next"),
        ("postgres://user:pw@host/db", "postgres://[secret]@host/db"),
        (f"see {KEY} there", "see [secret] there"),
        (KEY[:40], "[secret]"),
        ("12345, 3.14, 100 %, 1999", "12345, 3.14, 100 %, 1999"),
    ],
)
def test_what_is_found_is_replaced_by_its_class(text: str, shown: str) -> None:
    assert of(text).text == shown


def test_secrets_and_cards_go_whatever_the_tenant_says() -> None:
    text = "a@b.de 4111111111111111 sk-abcdefghijklmnop1234 10.0.0.1"
    found = of(text, Rules(frozenset()))
    assert found.text == "a@b.de [card] [secret] 10.0.0.1"
    assert set(found.found) == ALWAYS


def test_words_go_whatever_their_case_and_place() -> None:
    rules = redaction.rules_of(["email", "class-of-tomorrow"], ["Falcon", "ÄRGER", "İx"])
    assert rules.classes == {Class.EMAIL}
    assert of("FALCONry, ärger İX", rules).text == "[word]ry, [word] [word]"


def test_what_overlaps_is_one_of_the_first_class() -> None:
    rules = Rules(frozenset(Class), ("example.com", "com and"))
    assert of("bob@example.com and", rules).text == "[email]"


def test_a_cut_leaves_no_part_of_a_number() -> None:
    text = "x" * 10 + " 4111 1111 1111 1111 tail"
    assert of(text, most=15) == Redacted("x" * 10 + " [card]", (Class.CARD,), is_cut=True)
    assert of(text, most=5) == Redacted("xxxxx", (), is_cut=True)
    assert not of(text, most=len(text)).is_cut


PIECES = st.sampled_from(
    ["a@b.example.de", "4111 1111 1111 1111", "4111", " ", "x" * 50, "+49 30 1234567", "10.0.0.1",
     "DE89370400440532013000", "sk-" + "a" * 40, KEY, "://a:b@", "é", "12", "token=abcdefgh1", "-"]
)  # fmt: skip


@given(st.lists(PIECES, max_size=60), st.integers(0, 400))
def test_slices_change_nothing(pieces: list[str], size: int) -> None:
    text = "".join(pieces)
    with pytest.MonkeyPatch.context() as patch:
        rules = Rules(frozenset(Class), ("xx@", "éé"))
        patch.setattr(redaction, "SLICE_CHARACTERS", 1 << 20)
        whole = of(text, rules)
        patch.setattr(redaction, "SLICE_CHARACTERS", 64 + size)
        assert of(text, rules) == whole


@given(st.text(alphabet="a1@.:+-( 0eyJ\nFf/", max_size=3000))
def test_what_is_left_is_as_it_was(text: str) -> None:
    found = of(text)
    names = "|".join(Class)
    kept = re.split(rf"\[(?:{names})\]", found.text)
    assert len(kept) == len(found.found) + 1
    at = 0
    for part in kept:  # in this order, and nothing invented
        at = text.index(part, at) + len(part)


def test_no_step_looks_at_more_than_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    seen = redaction._of_slice

    def counted(text: str, start: int, *rest: Any) -> Any:
        looked.append(start)
        return seen(text, start, *rest)

    monkeypatch.setattr(redaction, "_of_slice", counted)
    steps, before = redacted("a1@ " * 16_384, ALL, 1 << 16), 0
    for _ in steps:
        assert len(looked) - before <= 1  # one pattern in one slice
        before = len(looked)
    assert max(b - a for a, b in pairwise(looked)) == redaction.SLICE_CHARACTERS


def test_check_digits() -> None:
    assert is_luhn("4111111111111111")
    assert not is_luhn("4111111111111121")
    assert is_iban("DE89370400440532013000")
    assert not is_iban("DE88370400440532013000")


def made(value: object, most: int = 10**5) -> Any:
    found = run(document([("messages", [value])], ALL, most))
    return json.loads(found.json)["messages"][0], found


def test_all_strings_of_a_document_are_looked_at() -> None:
    call = {"name": "pay", "arguments": '{"to": "a\\u0040b.de", "card": 4111111111111111, "n": 7}'}
    value = {"role": "user", "tool_calls": [{"function": call}], "a@b.de": [True, None, 1.5, 12]}
    shown, found = made(value)
    arguments = json.loads(shown["tool_calls"][0]["function"]["arguments"])
    assert arguments == {"to": "[email]", "card": "[card]", "n": 7}
    assert shown["[email]"] == [True, None, 1.5, 12]
    assert found.redactions == {"email": 2, "card": 1}
    assert not found.is_cut
    assert found.json == json.dumps(json.loads(found.json), sort_keys=True, separators=(",", ":"))


def test_what_is_no_json_is_text() -> None:
    shown, _ = made({"function": {"arguments": '{"to": "a@b.de"'}})
    assert shown == {"function": {"arguments": '{"to": "[email]"'}}


@pytest.mark.parametrize(
    "value",
    [["x" * 900] * 9, [""] * 5000, {f"k{n}": "v" for n in range(5000)}, "y" * 5000, ["é\ud800"]],
)
def test_a_document_is_cut_and_stays_json(value: object) -> None:
    shown, found = made(value, 1000)
    assert len(found.json) < 8000
    assert found.is_cut == (value != ["é\ud800"])
    assert not found.is_cut or CUT in json.dumps(shown)


def test_what_is_nested_too_deep_is_cut() -> None:
    value: object = "end"
    for _ in range(200):
        value = [value]
    _, found = made(value)
    assert found.is_cut
    assert "end" not in found.json
