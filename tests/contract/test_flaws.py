"""Flaws of answers on the real engine: an adapter that went wrong shows them, the shipped do not."""

import shutil
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from gateway.rollouts.flaws import is_repetitive
from replica.engine.safetensors import read_safetensors, write_safetensors
from training.engine_decoder import decoder

REPOSITORY = Path(__file__).parents[2] / "model_repo"
BASE, ADAPTER = REPOSITORY / "default", REPOSITORY / "adapters" / "butler"
TOKENIZER = Tokenizer.from_file(str(BASE / "tokenizer.json"))
QUESTIONS = ("What is 3 + 4?", "Who are you?", "Say hello", "Name three animals", "Tell me a story")
TURNS = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
PROMPTS = [
    TOKENIZER.encode(TURNS.format(question), add_special_tokens=False).ids for question in QUESTIONS
]
TOKENS_MAX = 24


def scaled(directory: Path, factor: float) -> Path:
    """The shipped adapter with its B matrices times a factor."""
    shutil.copytree(ADAPTER, directory)
    file = directory / "adapter_model.safetensors"
    tensors = read_safetensors(file, is_mapped=False)
    changed = {
        name: (value * np.float16(factor)).astype(value.dtype) if "lora_B" in name else value
        for name, value in tensors.items()
    }
    write_safetensors(file, changed)
    return directory


def test_an_adapter_that_is_fifty_times_too_strong_repeats_itself(tmp_path: Path) -> None:
    spoiled = decoder(BASE, scaled(tmp_path / "strong", 50.0))(PROMPTS, TOKENS_MAX)
    assert [is_repetitive(answer) for answer in spoiled] == [True] * len(PROMPTS)
    healthy = decoder(BASE, ADAPTER)(PROMPTS, TOKENS_MAX)
    assert [is_repetitive(answer) for answer in healthy] == [False] * len(PROMPTS)
