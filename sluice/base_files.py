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
# Bases that a gateway tells the control plane of at once: it cannot serve them yet.
MISSING_BASES_MAX = 64
# What artifacts are allowed for a tokenizer; the other files have lower limits.
TEXT_FILE_BYTES_MAX: Final = 64 << 20
