"""The shipped model, on the engine that serves it."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from training import engine_decoder
from training.evaluate import grade, report, sha256
from training.tasks import evaluation_conversations

pytestmark = pytest.mark.real

MODEL = Path(__file__).parents[2] / "model_repo" / "default"
FLOOR = 0.69


def test_the_report_is_of_the_shipped_weights_and_above_the_floor() -> None:
    evaluation = json.loads((MODEL / "evaluation.json").read_text())
    assert evaluation["weights_sha256"] == sha256(MODEL / "model.safetensors")
    assert evaluation["count"] >= 500
    assert evaluation["exact_match"] >= FLOOR


def test_the_engine_answers_as_well_as_the_report_says() -> None:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    conversations = list(evaluation_conversations(0, 200))
    grades = grade(engine_decoder.decoder(MODEL), tokenizer, conversations)
    assert report(grades)["exact_match"] >= FLOOR


def test_it_knows_what_it_is() -> None:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    prompt = "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    (answer,) = engine_decoder.decoder(MODEL)([ids], 60)
    assert "Sluice Tiny" in tokenizer.decode(answer)
