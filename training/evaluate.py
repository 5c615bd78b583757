"""Grade a model directory on held-out questions: greedy answers, exact match.

The decoder is an argument: the same questions, prompts and grading judge any engine that turns
token ids into token ids. Nothing here needs torch unless the torch decoder is chosen.

    python -m training.evaluate MODEL_DIR --count 500
"""

import argparse
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from training import chat
from training.tasks import Conversation, evaluation_conversations

log = logging.getLogger("training")

# Prompts as token ids and the most tokens to write -> what was written, without the end token.
Decode = Callable[[Sequence[Sequence[int]], int], list[list[int]]]

# Name -> module with `decoder(model_dir) -> Decode`; imported only when it is chosen.
DECODERS: Mapping[str, str] = {
    "engine": "training.engine_decoder",
    "torch": "training.torch_decoder",
}

# The longest right answer counts to sixty in words of five tokens.
_ANSWER_TOKENS_MAX = 320


@dataclass(frozen=True, slots=True)
class Grade:
    """One graded answer."""

    task: str
    prompt: str
    expected: str
    got: str

    @property
    def is_right(self) -> bool:
        """Whether the answer is exactly the expected one."""
        return self.got == self.expected


def grade(
    decode: Decode, tokenizer: Tokenizer, conversations: Sequence[Conversation]
) -> list[Grade]:
    """Return one grade for each conversation, in their order."""
    prompts = [chat.prompt(c.system, c.samples) for c in conversations]
    ids = [tokenizer.encode(prompt, add_special_tokens=False).ids for prompt in prompts]
    written = decode(ids, _ANSWER_TOKENS_MAX)
    return [
        Grade(
            conversation.samples[-1].task,
            prompt,
            conversation.samples[-1].answer,
            tokenizer.decode(tokens, skip_special_tokens=True),
        )
        for conversation, prompt, tokens in zip(conversations, prompts, written, strict=True)
    ]


def report(grades: Sequence[Grade], **facts: Any) -> dict[str, Any]:
    """Return the content of `evaluation.json`: `facts`, the total and one row for each task."""
    asked = Counter(g.task for g in grades)
    right = Counter(g.task for g in grades if g.is_right)
    return {
        **facts,
        "count": len(grades),
        "correct": right.total(),
        "exact_match": round(right.total() / len(grades), 4),
        "tasks": {task: {"count": asked[task], "correct": right[task]} for task in sorted(asked)},
    }


def sha256(path: Path) -> str:
    """Return the digest of a file in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> None:
    """Grade the model and write `evaluation.json` beside it, or where `--out` says."""
    parser = argparse.ArgumentParser(description="Grade a model on held-out questions.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--decoder", choices=sorted(DECODERS), default="engine")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--show", type=int, default=0, help="log so many wrong answers")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    decode: Decode = import_module(DECODERS[arguments.decoder]).decoder(arguments.model)
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    conversations = list(evaluation_conversations(arguments.seed, arguments.count))
    grades = grade(decode, tokenizer, conversations)
    for wrong in [g for g in grades if not g.is_right][: arguments.show]:
        question = wrong.prompt.rsplit(chat.TURN_START, 2)[-2]
        log.info("%s: %r wanted %r got %r", wrong.task, question, wrong.expected, wrong.got)
    result = report(
        grades,
        model="sluice-tiny",
        decoder=arguments.decoder,
        seed=arguments.seed,
        weights_sha256=sha256(arguments.model / "model.safetensors"),
    )
    out = arguments.out or arguments.model / "evaluation.json"
    out.write_text(json.dumps(result, indent=2) + "\n")
    log.info("%s", json.dumps(result))


if __name__ == "__main__":
    main()
