"""What a conversation is about: all of it, not its last line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.auto.features import CLUSTERS, PromptKind, features_of, kind_of

CODE = """Please review this:
```python
def add(a, b):
    return a + b
```
and add a unit test."""
LOOP = """How is this made faster?
total = 0
for row in rows:
    self.total = total + row.price * row.count
    rate = 2 * self.total
"""
SUM = (
    "Ann has 12 pears and gives 3 of them to each of her 2 brothers. She buys 5 more on Sunday."
    " How many pears does she have now?"
)
MATHS = "A train does 60 km per hour. How many km does it do in 3 hours? Calculate 60 * 3 = ?"


@pytest.mark.parametrize(
    ("texts", "kind"),
    [
        (["What is the capital of France, and how large is it?"], PromptKind.TEXT),
        ([CODE], PromptKind.CODE),
        ([LOOP], PromptKind.CODE),
        ([MATHS], PromptKind.MATHS),
        ([SUM], PromptKind.MATHS),
        (["She was born in 1912 , moved in 1931 and died in 1990 ; who was she?"], PromptKind.TEXT),
        (["Which vitamins does each cell need to grow up?"], PromptKind.TEXT),
        (
            ["Wie komme ich am schnellsten vom Bahnhof zum Museum in der Altstadt?"],
            PromptKind.FOREIGN,
        ),
        (["Где находится ближайшая библиотека?"], PromptKind.FOREIGN),
        (["Hi"], PromptKind.TEXT),
        ([""], PromptKind.TEXT),
    ],
)
def test_the_kind_of_a_conversation(texts: list[str], kind: PromptKind) -> None:
    assert features_of(texts).kind is kind


def test_the_last_line_does_not_decide() -> None:
    conversation = [
        CODE,
        "```python\ndef test_add() -> None:\n    assert add(1, 2) == 3\n```",
        "commit it",
    ]
    assert features_of(conversation).kind is PromptKind.CODE
    assert features_of(conversation[-1:]).kind is PromptKind.TEXT


def test_tools_need_a_model_that_calls_them() -> None:
    assert features_of([CODE], tools=1).kind is PromptKind.TOOLS


@given(
    texts=st.lists(st.text(max_size=400), max_size=60),
    tools=st.integers(0, 3),
    ids=st.integers(0, 100_000),
)
def test_every_conversation_has_a_cluster(texts: list[str], tools: int, ids: int) -> None:
    features = features_of(texts, tools=tools, prompt_tokens=ids)
    assert 0 <= features.cluster < CLUSTERS
    assert kind_of(features.cluster) is features.kind
    assert features == features_of(texts, tools=tools, prompt_tokens=ids)
    assert features.tokens * 4 >= sum(map(len, texts)) + 4 * ids
    assert features.tokens <= sum(map(len, texts)) + ids + 1  # four bytes at most a character
