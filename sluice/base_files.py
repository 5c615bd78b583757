"""The small files of a base: what whoever turns text into tokens needs of it, and no weights."""

from typing import Final

TOKENIZER: Final = "tokenizer.json"
# Optional ones included: a base has those of them that its authors wrote.
TEXT_FILES: Final = (
    TOKENIZER,
    "tokenizer_config.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
)
# What artifacts are allowed for a tokenizer; the other files have lower limits.
TEXT_FILE_BYTES_MAX: Final = 64 << 20
