"""What the gateway needs of a base to turn messages into token ids and token ids into text.

Loaded once per base from its artifact directory, in a thread: a large tokenizer takes a second.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import TemplateSyntaxError
from tokenizers import Tokenizer

from gateway.bases.cache import BaseCache
from gateway.bases.files import read_json, read_tokenizer
from gateway.bases.templates import ChatTemplate
from gateway.bodies.chat import Message, Tool
from gateway.text.detokenizer import TokenTable, token_table
from sluice.hashing import chained_hashes

# Rendering and encoding take about 1 ms per 10 KB; above this they would be felt by other streams.
_INLINE_CHARACTERS_MAX = 16 << 10
_CHARACTERS_PER_MESSAGE = 64  # what rendering one costs beside its text, in these terms


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What the base's authors recommend when a request says nothing; top_k 0 is off."""

    temperature: float
    top_p: float
    top_k: int


class EncodedPrompt(NamedTuple):
    """A prompt's token ids, and the hashes of its full blocks, 16 bytes each."""

    ids: list[int]
    block_hashes: bytes


@dataclass(frozen=True, slots=True)
class BaseAssets:
    """Tokenizer, template and defaults of one base."""

    tokenizer: Tokenizer
    template: ChatTemplate
    table: TokenTable
    end_ids: frozenset[int]
    defaults: SamplingDefaults

    async def encode_chat(
        self, messages: Sequence[Message], tools: Sequence[Tool], cache_root: bytes
    ) -> EncodedPrompt:
        """Return the prompt as ids and block hashes; large ones are worked on in a thread."""
        size = sum(_CHARACTERS_PER_MESSAGE + len(message.text()) for message in messages)
        has_calls = any(message.tool_calls for message in messages)
        if size <= _INLINE_CHARACTERS_MAX and not tools and not has_calls:
            return self._encode(messages, tools, cache_root)
        return await asyncio.to_thread(self._encode, messages, tools, cache_root)

    def _encode(
        self, messages: Sequence[Message], tools: Sequence[Tool], cache_root: bytes
    ) -> EncodedPrompt:
        pieces = self.template.pieces(messages, tools)
        # The batch call lets go of the interpreter lock, and the fast one computes no offsets.
        encodings = self.tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
        if len(encodings) == 1:
            ids = encodings[0].ids
        else:
            ids = [token for encoding in encodings for token in encoding.ids]
        return EncodedPrompt(ids, chained_hashes(ids, cache_root))


def load_base(directory: Path) -> BaseAssets:
    """Read a base's files; blocks.

    Raises:
        OSError: A file is missing.
        ValueError: A file is not what it should be; the message names it.
    """
    tokenizer = read_tokenizer(directory / "tokenizer.json")
    config = read_json(directory / "tokenizer_config.json")
    generation = read_json(directory / "generation_config.json", is_optional=True)
    model = read_json(directory / "config.json", is_optional=True)
    end_ids = _end_ids(tokenizer, config, generation, model)
    try:
        template = ChatTemplate(
            _template_source(directory, config), _special_tokens(config), _reserved(tokenizer)
        )
    except TemplateSyntaxError as error:
        raise ValueError(f"the chat template of {directory} is not valid: {error}") from error
    return BaseAssets(
        tokenizer=tokenizer,
        template=template,
        table=token_table(tokenizer, end_ids, int(model.get("vocab_size") or 0)),
        end_ids=end_ids,
        defaults=SamplingDefaults(
            temperature=float(generation.get("temperature") or 1.0),
            top_p=float(generation.get("top_p") or 1.0),
            top_k=int(generation.get("top_k") or 0),
        ),
    )


def _template_source(directory: Path, config: dict[str, Any]) -> str:
    separate = directory / "chat_template.jinja"
    if separate.exists():
        return separate.read_text()
    source = config.get("chat_template")
    if isinstance(source, list):  # several named ones
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("default")
    if not isinstance(source, str):
        raise ValueError(f"{directory}/tokenizer_config.json has no chat_template")  # noqa: TRY004 - about the file's content
    return source


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return the tokens that templates refer to by name, e.g. `bos_token`."""
    found: dict[str, str] = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _reserved(tokenizer: Tokenizer) -> set[str]:
    """Return the texts that the tokenizer reads as special tokens."""
    added = tokenizer.get_added_tokens_decoder().values()
    return {token.content for token in added if token.special and len(token.content) > 1}


def _end_ids(tokenizer: Tokenizer, *configs: dict[str, Any]) -> frozenset[int]:
    found: set[int] = set()
    for config in configs:
        value = config.get("eos_token_id")
        ids: list[Any] = value if isinstance(value, list) else [value]
        found.update(i for i in ids if isinstance(i, int))
        text = config.get("eos_token")
        text = text.get("content") if isinstance(text, dict) else text
        if isinstance(text, str):
            token_id = tokenizer.token_to_id(text)
            found.update(() if token_id is None else (token_id,))
    return frozenset(found)


class AssetCache(BaseCache[BaseAssets]):
    """The bases that chat completions of this process need."""

    def __init__(self, artifacts: Path) -> None:
        super().__init__(artifacts, load_base)
