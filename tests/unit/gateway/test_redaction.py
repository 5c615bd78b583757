"""What is taken out of texts, how, and that no text takes more than a bounded step at a time."""

import json
import re
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.texts import redaction
from gateway.texts.documents import CUT, document
from gateway.texts.patterns import LOOKS, Class, Look, is_iban, is_luhn, is_secret_name
from gateway.texts.redaction import ALWAYS, Redacted, RedactionRules, redacted

ALL = RedactionRules(frozenset(Class))
KEY = "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nIBAAK\n-----END RSA PRIVATE KEY-----"


def run(steps: Any) -> Any:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def of(text: str, rules: RedactionRules = ALL, most: int = 10**6) -> Redacted:
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
        (
            "Invoice RE20240117 IBAN GB82 WEST 1234 5698 7654 32 thanks",
            "Invoice RE20240117 IBAN [iban] thanks",
        ),
        ("4111 1111 1111 1112 5500 0055 5555 5559", "4111 1111 1111 1112 [card]"),
        ("1 " * 250 + "4111 1111 1111 1111 x", "1 " * 250 + "[card] x"),
        ("10.0.0.255, 2001:db8::1 and 12:30", "[ip], [ip] and 12:30"),
        ("::ffff:10.1.2.3: up", "[ip]: up"),
        ("release 1.2.3.4.5 of 300.1.1.1", "release 1.2.3.4.5 of 300.1.1.1"),
        ("+49 30 1234567 or (555) 123-4567", "[phone] or [phone]"),
        ("0171 2345678 on 2024-01-02, 01-02-2024", "[phone] on 2024-01-02, 01-02-2024"),
        ("call +49 170 1234567 2024-05-01", "call [phone] 2024-05-01"),
        ("call +49 30 1234567 2024-05-01", "call [phone]-05-01"),
        ("(415)555-2671, 4155552671, 1 (415) 555-2671", "[phone], [phone], [phone]"),
        ("01701234567 or 01.23.45.67.89 or 0049 170 1234567", "[phone] or [phone] or [phone]"),
        ("at 1700000000, 01.02.2024 10:30", "at 1700000000, 01.02.2024 10:30"),
        ("sk-abcdefghijklmnop1234", "[secret]"),
        ("Authorization: Bearer abc.def-ghi_jkl=", "Authorization: [secret]"),
        ("AKIAIOSFODNN7EXAMPLE and eyJhbGciOiJIUzI1NiJ9.eyJz.ab-_", "[secret] and [secret]"),
        ("password = 'hunter2hunter' next", "[secret]' next"),
        ("password: hunter2", "[secret]"),
        ("userPassword=hunter2hunter2", "user[secret]"),
        ("accessToken: abc123def456", "access[secret]"),
        ("x-api-key: abc123def456", "x-[secret]"),
        ("password: pa,ss;word12345678 next", "[secret] next"),
        ('{"password": "pa ss, \\"word\\"", "n": 1}', '{"[secret]", "n": 1}'),
        ('{\\"password\\":\\"hunter2 hunter2\\",\\"n\\":1}', '{\\"[secret]",\\"n\\":1}'),
        ("2 tokens: 123456789, a secretary: Barbara", "2 tokens: 123456789, a secretary: Barbara"),
        ("https://u:p@ss/w@host/x", "https://[secret]@host/x"),
        ("http://localhost:8080/@vite", "http://localhost:8080/@vite"),
        ("postgres://user:pw@host/db", "postgres://[secret]@host/db"),
        (f"see {KEY} there", "see [secret] there"),
        (KEY[:40], "[secret]"),
        ("12345, 3.14, 100 %, 1999", "12345, 3.14, 100 %, 1999"),
    ],
)
def test_a_finding_is_replaced_by_its_class(text: str, shown: str) -> None:
    assert of(text).text == shown


def test_secrets_and_cards_are_redacted_for_every_tenant() -> None:
    text = "a@b.de 4111111111111111 sk-abcdefghijklmnop1234 10.0.0.1"
    found = of(text, RedactionRules(frozenset()))
    assert found.text == "a@b.de [card] [secret] 10.0.0.1"
    assert set(found.found) == ALWAYS


def test_words_are_redacted_in_any_case_and_place() -> None:
    rules = redaction.rules_of(["email", "class-of-tomorrow"], ["Falcon", "ÄRGER", "İx"])
    assert rules.classes == {Class.EMAIL}
    assert of("FALCONry, ärger İX", rules).text == "[word]ry, [word] [word]"


def test_small_letters_stand_where_the_large_ones_stood() -> None:
    # Also those whose small form is longer (one only), or goes by what stands beside them.
    changed = [c for c in map(chr, range(sys.maxunicode + 1)) if len(redaction.lowered(c)) != 1]
    assert changed == []
    rules = redaction.rules_of([], ["ΔΣ", "İstanbul"])
    assert of("ΔΣx δς istanbul ISTANBUL", rules).text == "[word]x [word] [word] [word]"
    assert of("aaaaaaaa", redaction.rules_of([], ["aaa"])) == Redacted(
        "[word]", (Class.WORD,), False
    )


def test_overlapping_findings_get_the_first_class() -> None:
    rules = RedactionRules(frozenset(Class), ("example.com", "com and"))
    assert of("bob@example.com and", rules).text == "[email]"


def test_a_cut_leaves_no_part_of_a_number() -> None:
    text = "x" * 10 + " 4111 1111 1111 1111 tail"
    assert of(text, most=15) == Redacted("x" * 10 + " [card]", (Class.CARD,), is_cut=True)
    assert of(text, most=5) == Redacted("xxxxx", (), is_cut=True)
    assert not of(text, most=len(text)).is_cut


PIECES = st.sampled_from(
    ["a@b.example.de", "4111 1111 1111 1111", "4111", " ", "x" * 50, "+49 30 1234567", "10.0.0.1",
     "DE89370400440532013000", "sk-" + "a" * 40, KEY, "://a:b@", "é", "12", "token=abcdefgh1", "-",
     'password: "', "\\", "GB82 WEST 1234 5698 7654 32", "2 3 4 5 6 ", "+1 2 3 ", "Σ", "ς", "01 "]
)  # fmt: skip


@given(st.lists(PIECES, max_size=60), st.integers(0, 400))
def test_slices_change_nothing(pieces: list[str], size: int) -> None:
    text = "".join(pieces)
    with pytest.MonkeyPatch.context() as patch:
        rules = RedactionRules(frozenset(Class), ("xx@", "éé", "xxxx", redaction.lowered("Σς")))
        patch.setattr(redaction, "SLICE_CHARACTERS", 1 << 20)
        whole = of(text, rules)
        patch.setattr(redaction, "SLICE_CHARACTERS", 64 + size)
        assert of(text, rules) == whole


@given(st.text(alphabet="a1@.:+-( 0eyJ\nFf/", max_size=3000))
def test_the_rest_of_a_text_stays_unchanged(text: str) -> None:
    found = of(text)
    names = "|".join(Class)
    kept = re.split(rf"\[(?:{names})\]", found.text)
    assert len(kept) == len(found.found) + 1
    at = 0
    for part in kept:  # in this order, and nothing invented
        at = text.index(part, at) + len(part)


HOSTILE = [
    "a1@ ", "2 3 4 5 6 7 ", "aa11 ", "AA11 1 1 1 1 ", "+1 2 ", "00 1 ", "01-", "://a:b", "token=",
    "pwd:'", 'password:"', "-----BEGIN A", "x", "4", "İ", "Σ", "eyJ", "(555) 5", "::1 ", "1.1.",
    "passwd ", "-----BEGIN PRIVATE KEY-----",
]  # fmt: skip


@pytest.mark.parametrize("piece", HOSTILE)
def test_no_step_looks_at_more_than_a_slice(piece: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checked, slices = [0], [0]

    def counted(look: Look) -> Look:
        def check(found: str) -> Any:
            checked[0] += 1
            return look.check(found)

        return look._replace(check=check)

    seen = redaction.Scan.slice

    def sliced(scan: Any, start: int, end: int) -> Any:
        slices[0] += 1
        assert end - start == redaction.SLICE_CHARACTERS
        return seen(scan, start, end)

    monkeypatch.setattr(redaction, "LOOKS", [counted(it) for it in LOOKS])
    monkeypatch.setattr(redaction.Scan, "slice", sliced)
    text = (piece * 65_536)[:65_536]
    steps, before = (
        redacted(text, RedactionRules(frozenset(Class), ("falcon", "aaa")), 1 << 16),
        (0, 0),
    )
    for _ in steps:
        assert checked[0] - before[0] <= redaction.FINDS_AT_ONCE
        assert slices[0] - before[1] <= 1  # one pattern in one slice
        before = checked[0], slices[0]
    assert checked[0] <= len(text) * len(LOOKS)


@pytest.mark.parametrize("look", LOOKS, ids=lambda look: look.kind)
def test_no_group_is_possessive(look: Look) -> None:
    """Python before 3.11.5 goes wrong in those; this test may run on a later one."""
    assert not re.search(r"\)(?:[*+?]|\{[\d,]+\})\+", look.pattern.pattern)


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


def test_broken_json_is_redacted_as_text() -> None:
    shown, _ = made({"function": {"arguments": '{"to": "a@b.de"'}})
    assert shown == {"function": {"arguments": '{"to": "[email]"'}}


def arguments(text: str, rules: RedactionRules = ALL, most: int = 10**5) -> Any:
    steps = document([("m", [{"function": {"arguments": text}}])], rules, most)
    return json.loads(run(steps).json)["m"][0]["function"]["arguments"]


def test_a_field_named_as_a_secret_holds_one() -> None:
    given = {
        "user": "bob",
        "password": "hunter2hunter2",
        "api_key": "a8f5f167f44f",
        "userPassword": 1234,
        "X-Api-Key": ["a", {"b": "c"}],
        "accessToken": {"token": "abc"},
        "secret": None,
        "max_tokens": 12,
        "tokens": "many",
    }
    shown = json.loads(arguments(json.dumps(given)))
    hidden = ("password", "api_key", "userPassword", "X-Api-Key", "accessToken")
    assert shown == given | dict.fromkeys(hidden, "[secret]")
    plain, found = made(given)
    assert plain == shown
    assert found.redactions == {"secret": 5}
    assert all(
        map(
            is_secret_name,
            ["pwd", "client_secret", "privateKey", "password_2", "a" * 999 + "token"],
        )
    )
    assert not any(map(is_secret_name, ["token_type", "secretary", "keyboard", "content"]))


def test_the_description_of_a_secret_is_no_secret() -> None:
    password = {"type": "string", "description": "of the user", "minLength": 8}
    tool = {"parameters": {"properties": {"password": password}, "required": ["password"]}}
    assert made(tool)[0] == tool
    tool["parameters"] = {"properties": {"password": password | {"default": "hunter2"}}}
    assert made(tool)[0] == {"parameters": {"properties": {"password": "[secret]"}}}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('{"to":"john\\u0040example.com","x":"abc', '{"to":"[email]","x":"abc'),
        ('{"x":"a\\nDE89370400440532013000","y":"\\/\\"', '{"x":"a\n[iban]","y":"/"'),
        ('{"password":"hunter2', '{"[secret]'),
        ('["\\u00e9\\ud83d\\ude00 ok', '["é\U0001f600 ok'),
    ],
)
def test_arguments_that_are_cut_are_kept_as_they_are_meant(text: str, shown: str) -> None:
    assert arguments(text) == shown


def test_arguments_without_room_are_looked_at_as_well() -> None:
    text = json.dumps({"to": "john@example.com", "x": "y" * 300}).replace("@", "\\u0040")
    assert arguments(text, most=200).startswith('{"to": "[email]", "x": "yyy')
    escaped = '{"x":"' + "\\u0061" * 20_000
    found = run(document([("m", [{"arguments": escaped}])], ALL, 100))
    assert found.is_cut
    assert "aaaa" in found.json
    assert len(found.json) < 300


def test_all_numbers_are_looked_at() -> None:
    shown = json.loads(
        arguments('{"a":4111111111111111.0,"b":4155552671,"c":123456,"d":1.5,"e":4e15}')
    )
    assert shown == {"a": "[card].0", "b": "[phone]", "c": 123456, "d": 1.5, "e": 4e15}
    rules = redaction.rules_of([], ["123456", "3.14"])
    assert json.loads(arguments('{"c":123456,"d":3.14,"e":7,"f":true}', rules)) == {
        "c": "[word]", "d": "[word]", "e": 7, "f": True,
    }  # fmt: skip


def test_pieces_of_a_message_are_looked_at_as_one() -> None:
    content = [{"type": "text", "text": it} for it in ("4111 1111 ", "1111 1111", " ok")]
    other = {"type": "refusal", "refusal": "no"}
    shown, found = made({"role": "user", "content": [*content, other, *content[2:]]})
    one = {"type": "text", "text": "[card] ok"}
    assert shown["content"] == [one, other, {"type": "text", "text": " ok"}]
    assert not found.is_cut
    shown, found = made([{"type": "text", "text": "ab"}] * 5000, 1000)
    assert found.is_cut
    assert len(found.json) < 2000


@pytest.mark.parametrize(
    "value",
    [["x" * 900] * 9, [""] * 5000, {f"k{n}": "v" for n in range(5000)}, "y" * 5000, ["é\ud800"]],
)
def test_a_document_is_cut_and_stays_json(value: object) -> None:
    shown, found = made(value, 1000)
    assert len(found.json) < 8000
    assert found.is_cut == (value != ["é\ud800"])
    assert not found.is_cut or CUT in json.dumps(shown)


def test_deep_nesting_is_cut() -> None:
    value: object = "end"
    for _ in range(200):
        value = [value]
    _, found = made(value)
    assert found.is_cut
    assert "end" not in found.json
