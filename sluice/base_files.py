"""The small files of a base: all that tokenizing needs, without weights."""

from typing import Final

TOKENIZER: Final = "tokenizer.json"
CHAT_TEMPLATE: Final = "chat_template.jinja"
# Further templates lie here, one `NAME.jinja` each.
MORE_TEMPLATES: Final = "additional_chat_templates"
TOOLS_TEMPLATE: Final = f"{MORE_TEMPLATES}/tool_use.jinja"
# Optional ones included: a base has those of them that its authors wrote.
TEXT_FILES: Final = (
    TOKENIZER,
    "tokenizer_config.json",
    CHAT_TEMPLATE,
    TOOLS_TEMPLATE,
    "config.json",
    "generation_config.json",
)
# Bases that a gateway tells the control plane of at once: it cannot serve them yet.
MISSING_BASES_MAX = 64
# Limit of a tokenizer in artifacts; the other files have lower limits.
TEXT_FILE_BYTES_MAX: Final = 64 << 20
