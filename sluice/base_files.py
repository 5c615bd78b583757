"""The names of the small files of a base that a tokenizer needs. Weights are not among them."""

from typing import Final

TOKENIZER: Final = "tokenizer.json"
CHAT_TEMPLATE: Final = "chat_template.jinja"
# Directory of further templates, with one `NAME.jinja` each.
MORE_TEMPLATES: Final = "additional_chat_templates"
TOOLS_TEMPLATE: Final = f"{MORE_TEMPLATES}/tool_use.jinja"
# All files, including optional ones. A base has only the optional files that its authors wrote.
TEXT_FILES: Final = (
    TOKENIZER,
    "tokenizer_config.json",
    CHAT_TEMPLATE,
    TOOLS_TEMPLATE,
    "config.json",
    "generation_config.json",
)
# Most bases per report of a gateway to the control plane. The report names bases that the gateway
# cannot serve yet.
MISSING_BASES_MAX = 64
# Limit of a tokenizer in artifacts, in bytes. The other files have lower limits.
TEXT_FILE_BYTES_MAX: Final = 64 << 20
