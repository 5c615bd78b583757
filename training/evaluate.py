"""Grade a model directory on held-out questions: greedy answers, exact match.

The decoder is an argument: the same questions, prompts and grading judge any engine that turns
token ids into token ids. Nothing here needs torch unless the torch decoder is chosen.

    python -m training.evaluate MODEL_DIR
    python -m training.evaluate MODEL_DIR --adapter ADAPTER_DIR

The directory of an adapter has the name of its style: the answers are wanted in that.
"""

import argparse
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import Tokenizer

from training import chat
from training.styles import STYLES, Style, restyled
from training.tasks import Conversation, earlier_turns, evaluation_conversations

log = logging.getLogger("training")

# Prompts as token ids and the most tokens to write -> what was written, without the end token.
Decode = Callable[[Sequence[Sequence[int]], int], list[list[int]]]

# Name -> module with `decoder(model_dir, adapter_dir | None) -> Decode`; imported when chosen.
DECODERS: Mapping[str, str] = {
    "engine": "training.engine_decoder",
    "torch": "training.torch_decoder",
}

# The longest right answers are stories and counting to forty.
_ANSWER_TOKENS_MAX = 256
# Tokens of chat before a question when the long context is graded.
LONG_TOKENS = 3500


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


def after_long_chat(conversation: Conversation, tokenizer: Tokenizer, rng: Random) -> Conversation:
    """Return the conversation with so many earlier turns that it has `LONG_TOKENS` at least."""
    while True:
        text = chat.prompt(conversation.system, conversation.samples)
        missing = LONG_TOKENS - len(tokenizer.encode(text, add_special_tokens=False).ids)
        if missing <= 0:
            return conversation
        # Few at a time and no stories, so that the last of them does not overrun the context.
        drawn = [s for s in earlier_turns(rng, missing // 60 + 1) if s.task != "story"]
        conversation = replace(conversation, samples=(*drawn, *conversation.samples))


def style_report(style: Style, plain: Sequence[Conversation], grades: Sequence[Grade]) -> Any:
    """Return how many of the answers that the style changes were given in it, right or wrong."""
    is_changed = [
        conversation.samples[-1].answer != wanted.expected
        for conversation, wanted in zip(plain, grades, strict=True)
    ]
    changed = [grade for grade, is_one in zip(grades, is_changed, strict=True) if is_one]
    return {"count": len(changed), "in_style": sum(style.is_spoken(g.got) for g in changed)}


def _log_wrong(grades: Sequence[Grade], count: int) -> None:
    for wrong in [g for g in grades if not g.is_right][:count]:
        question = wrong.prompt.rsplit(chat.TURN_START, 2)[-2]
        log.info("%s: %r wanted %r got %r", wrong.task, question, wrong.expected, wrong.got)


def evaluate(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the report of a model, or of one of its adapters."""
    module = import_module(DECODERS[arguments.decoder])
    decode: Decode = module.decoder(arguments.model, arguments.adapter)
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    plain = list(evaluation_conversations(arguments.seed, arguments.count))
    style = STYLES[arguments.adapter.name] if arguments.adapter else None
    wanted = [restyled(c, style) for c in plain] if style else plain
    grades = grade(decode, tokenizer, wanted)
    _log_wrong(grades, arguments.show)
    facts = {
        "model": "sluice-tiny",
        "decoder": arguments.decoder,
        "seed": arguments.seed,
        "weights_sha256": sha256(arguments.model / "model.safetensors"),
    }
    if style:
        digest = sha256(arguments.adapter / "adapter_model.safetensors")
        facts |= {"adapter": arguments.adapter.name, "adapter_sha256": digest}
        return {**report(grades, **facts), "changed": style_report(style, plain, grades)}
    result = report(grades, **facts)
    if arguments.long_count:
        rng = Random(f"long {arguments.seed}")
        long = [after_long_chat(c, tokenizer, rng) for c in plain[: arguments.long_count]]
        long_grades = grade(decode, tokenizer, long)
        _log_wrong(long_grades, arguments.show)
        result["after_long_chat"] = report(long_grades, prompt_tokens_min=LONG_TOKENS)
    return result


def main() -> None:
    """Grade the model and write `evaluation.json` beside it, or where `--out` says."""
    parser = argparse.ArgumentParser(description="Grade a model on held-out questions.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--adapter", type=Path, default=None, help="directory of an adapter")
    parser.add_argument("--count", type=int, default=600)
    parser.add_argument("--long-count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--decoder", choices=sorted(DECODERS), default="engine")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--show", type=int, default=0, help="log so many wrong answers")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    result = evaluate(arguments)
    out = arguments.out or (arguments.adapter or arguments.model) / "evaluation.json"
    out.write_text(json.dumps(result, indent=2) + "\n")
    log.info("%s", json.dumps(result))


if __name__ == "__main__":
    main()
