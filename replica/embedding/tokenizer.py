"""What a text is to the model: token ids with the special tokens around them."""

from pathlib import Path

from tokenizers import Tokenizer


def open_tokenizer(directory: Path) -> Tokenizer:
    """Return the tokenizer of a base, for whole texts.

    The file itself asks to cut texts and to pad them, which is a matter of the script that wrote
    it: what is too long is refused by the engine, in words, and the engine pads by itself.
    """
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
