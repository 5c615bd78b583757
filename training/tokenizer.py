"""Train the byte-level BPE tokenizer of the default model on its own training data.

Every text can be encoded, digits are single tokens, and the tool marks are single tokens that
survive decoding, because a server has to find them in the output.

    python -m training.tokenizer OUT_DIR
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from training import chat, words
from training.tasks import training_conversations

VOCAB_SIZE = 4096
CONTEXT_TOKENS_MAX = 4096
PAD_ID, TURN_END_ID = 0, 2
_SPECIAL = (chat.PAD, chat.TURN_START, chat.TURN_END)
_MARKS = (chat.CALL_START, chat.CALL_END, chat.RESPONSE_START, chat.RESPONSE_END)

# GPT-2's split, except that a digit always stands alone, and that marks before a digit take the
# space along: lists of numbers become a third shorter.
_SPLIT = (
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+ (?=\p{N})| ?[^\s\p{L}\p{N}]+"
    r"|\s+(?!\S)|\s+"
)
_CONVERSATIONS = 30_000


def corpus(seed: int) -> Iterator[str]:
    """Yield the texts the merges are learnt from."""
    for conversation in training_conversations(seed, _CONVERSATIONS):
        yield "".join(s.text for s in chat.segments(conversation.system, conversation.samples))
    # A listed word is worth a token with and without the space before it.
    for word in words.WORDS + words.NAMES + words.CITIES + words.COUNTRIES:
        yield from (f"{word} {word} {word.capitalize()} {word.capitalize()}" for _ in range(20))


def train(seed: int) -> Tokenizer:
    """Return a tokenizer of exactly `VOCAB_SIZE` entries."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(text, normalized=False) for text in _SPECIAL + _MARKS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(seed), trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, tokenizer.get_vocab_size()
    assert tokenizer.token_to_id(chat.PAD) == PAD_ID
    assert tokenizer.token_to_id(chat.TURN_END) == TURN_END_ID
    return _with_visible_marks(tokenizer)


def _with_visible_marks(tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer with tool marks that `skip_special_tokens` does not remove.

    The trainer makes all its added tokens special, and only the serialised form can undo that.
    """
    serialised = json.loads(tokenizer.to_str())
    for token in serialised["added_tokens"]:
        token["special"] = token["content"] in _SPECIAL
    return Tokenizer.from_str(json.dumps(serialised))


def save(tokenizer: Tokenizer, out: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    added = {
        str(tokenizer.token_to_id(text)): {
            "content": text,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": text in _SPECIAL,
        }
        for text in _SPECIAL + _MARKS
    }
    config = {
        "added_tokens_decoder": added,
        "bos_token": None,
        "chat_template": chat.CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": chat.TURN_END,
        "model_max_length": CONTEXT_TOKENS_MAX,
        "pad_token": chat.PAD,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    """Train and write the tokenizer."""
    parser = argparse.ArgumentParser(description="Train the tokenizer of the default model.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    save(train(arguments.seed), arguments.out)


if __name__ == "__main__":
    main()
