"""What the classifier that ships is trained and graded on."""

import json
from pathlib import Path

from training.moderation import grade
from training.moderation_texts import CATEGORIES, LabelledText, texts
from training.moderation_written import WRITTEN

_SHIPPED = Path("gateway/guard/classifiers")


def test_sentences_have_no_open_places_and_the_same_seed_gives_the_same() -> None:
    found = texts(500, held_out=False, seed=3)
    assert found == texts(500, held_out=False, seed=3)
    assert not any("{" in it.text for it in found)
    assert {it.category for it in found} == {"", *CATEGORIES}
    known = {it.text for it in found}
    assert known.isdisjoint(it.text for it in texts(500, held_out=True, seed=3))


def test_the_shipped_weights_are_as_good_as_their_evaluation_says() -> None:
    model = json.loads((_SHIPPED / "shipped.json").read_text())
    told = json.loads((_SHIPPED / "evaluation.json").read_text())
    assert told["features"] == len(model["weights"])
    assert grade(model, [LabelledText(*it) for it in WRITTEN]) == told["written_by_hand"]
