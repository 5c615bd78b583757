"""Loads the tokenizer and chat template of a base, which turn messages into token ids and back.

A base is loaded once from its artifact directory. Loading runs in a thread, because it needs a
second for a large tokenizer.
"""

import asyncio
import hashlib
from array import array
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import orjson
from tokenizers import Tokenizer

from gateway.bases.cache import BaseCache
from gateway.bases.encoder import PromptEncoder
from gateway.bases.files import (
    added_tokens,
    end_ids,
    read_json,
    read_tokenizer,
    reserved_texts,
    special_tokens,
    template_sources,
)
from gateway.bases.grown_prompts import (
    ENDING_CHARACTERS,
    GrownPrompt,
    GrownPrompts,
    PromptPlace,
    PromptTokens,
)
from gateway.bases.prompt_trail import PromptTrail
from gateway.bases.sandbox import OutOfTimeError
from gateway.bases.slices import Steps, finished
from gateway.bases.spans import PromptSpans
from gateway.bases.templates import CPU_S, ChatTemplate, WrittenChat
from gateway.bases.text_bound import characters_per_token_max, require_fit
from gateway.bases.threads import PromptThreads
from gateway.bodies.messages import Message, Tool
from gateway.dialects.detection import dialect_of
from gateway.dialects.dialect import Dialect
from gateway.dialects.forms import ReasoningForm
from gateway.text.detokenizer import TokenTable, token_table
from sluice.hashing import chained_hashes, shared_blocks

# Maximum number of characters of a prompt that is rendered and encoded in the event loop, at about
# 1 ms per 10 KB. Larger prompts would delay other streams.
_INLINE_CHARACTERS_MAX = 16 << 10
_CHARACTERS_PER_MESSAGE = 256  # a message's fixed cost of rendering, expressed in characters
# Maximum number of tokens hashed in the event loop, at 30 ms per million tokens.
_INLINE_TOKENS_MAX = 8 << 10
_INLINE_CPU_S = 0.003
_FORM = 1  # version of stored prompts, which changes with rendering or tokenizing


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Sampling values that the base's authors recommend. A `top_k` of 0 sets no limit."""

    temperature: float
    top_p: float
    top_k: int


class EncodedPrompt(NamedTuple):
    """A prompt's token ids, and the hashes of its full blocks, 16 bytes each.

    Attributes:
        ids: Token ids, in an array because a list would use nine times the memory.
        is_reasoning: Whether the prompt's text opens a block of reasoning, so that the answer
            begins with reasoning.
        dropped_turns: Number of the chat's oldest turns that were dropped to fit the context.
        pinned_blocks: Number of leading full blocks that the prompt shares with a warm prompt.
            Replicas keep these blocks cached.
        record: Part of the prompt that the turn stores (see `PromptTrail`), or empty if none.
    """

    ids: "array[int]"
    block_hashes: bytes
    is_reasoning: bool = False
    dropped_turns: int = 0
    pinned_blocks: int = 0
    record: bytes = b""

    def pinned_as(self, start: "EncodedPrompt") -> "EncodedPrompt":
        """Return the prompt, with those leading blocks pinned that it shares with a warm prompt."""
        return self._replace(pinned_blocks=shared_blocks(self.block_hashes, start.block_hashes))


class _ContextBound(NamedTuple):
    """The bound on a prompt's number of characters.

    Attributes:
        characters_per_token: Maximum number of characters in one token, or 0 for no bound.
        context_tokens: Context of the model, in tokens, or 0 if it is not specified.
        param: Name of the body's field for the prompt.
    """

    characters_per_token: int
    context_tokens: int
    param: str

    def check(self, characters: int) -> None:
        """Raise BadRequestError if a prompt of this many characters cannot fit the context."""
        require_fit(characters, self.characters_per_token, self.context_tokens, self.param)


@dataclass(frozen=True, slots=True)
class BaseAssets:
    """Tokenizer, template and defaults of one base.

    Attributes:
        template: Chat template for requests without tools.
        calling_template: Chat template for requests with tools. Most bases use `template` for them.
        table: Text of each token, which is empty for special tokens.
        dialect: The base's syntax of tool calls and reasoning.
        characters_per_token_max: Maximum number of characters in one token, or 0 for no bound.
        threads: Threads for large prompts, or None for the executor of the event loop.
    """

    tokenizer: Tokenizer
    template: ChatTemplate
    calling_template: ChatTemplate
    table: TokenTable
    end_ids: frozenset[int]
    defaults: SamplingDefaults
    dialect: Dialect
    _encoder: PromptEncoder
    _reasoning_table: TokenTable
    _tools_table: TokenTable
    _spans: PromptSpans
    _grown: GrownPrompts
    characters_per_token_max: int = 0
    threads: PromptThreads | None = None

    def forget_idle(self) -> None:
        """Drop cached prompts and texts that no request has used for an hour."""
        self._encoder.forget_idle()
        self._grown.forget_idle()
        self._spans.forget_idle()

    def heeds_effort(self, effort: str) -> bool:
        """Return whether the base supports a reasoning effort, which its template must use.

        The effort `none` is also supported by a base that never reasons.
        """
        never = self.dialect.reasoning is ReasoningForm.NONE
        return self.template.heeds_effort or (never and effort == "none")

    def table_for(self, *, tools: bool) -> TokenTable:
        """Return the token table for a parsed answer, in which the dialect's marks have their text.

        Args:
            tools: Whether tool calls are parsed too, and not only reasoning.
        """
        return self._tools_table if tools else self._reasoning_table

    async def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        cache_root: bytes,
        *,
        owner: str = "",
        session: str = "",
        options: Mapping[str, object] = MappingProxyType({}),
        context_tokens_max: int = 0,
        param: str = "messages",
        trail: PromptTrail | None = None,
    ) -> EncodedPrompt:
        """Return the prompt as ids and block hashes. Large prompts are processed in a thread.

        Args:
            messages: The conversation.
            tools: Tools in the prompt.
            cache_root: Root of the chain of block hashes.
            owner: Tenant that the prompt belongs to. The threads alternate between owners.
            session: The owner's session, or empty without a session. Each prompt of a session
                extends the previous prompt.
            options: Options for the template, e.g. `enable_thinking`.
            context_tokens_max: Context of the model, in tokens, or 0 to check no bound here.
            param: Name of the body's field for the conversation.
            trail: Prompt that earlier turns have stored, or None if this turn stores no prompt.

        Raises:
            BadRequestError: CONTEXT_LENGTH_EXCEEDED if a text has too many characters.
        """
        place = PromptPlace(owner, cache_root, session)
        known = self._grown.find(place, messages)
        bound = _ContextBound(self.characters_per_token_max, context_tokens_max, param)
        encode = partial(self._encode, messages, tools, place, known, options, bound, trail)
        new = messages if known is None else messages[len(known.chat.messages) - 1 :]
        if _size(new, tools) <= _INLINE_CHARACTERS_MAX:
            try:
                return finished(encode(_INLINE_CPU_S, None))
            except OutOfTimeError:
                pass  # the template is slow, so a thread renders it again with more time
        return await self._in_thread(owner, encode(CPU_S, self._tokenizing))

    async def encode_text(
        self, text: str, cache_root: bytes, *, owner: str = "", add_special_tokens: bool = True
    ) -> EncodedPrompt:
        """Return a text as ids and block hashes.

        Args:
            text: The whole prompt, which may contain special tokens.
            cache_root: Root of the chain of block hashes.
            owner: Owner of the prompt, as in `encode_chat`.
            add_special_tokens: Whether the tokenizer adds special tokens, e.g. one before the text.
        """
        if len(text) <= _INLINE_CHARACTERS_MAX:
            return finished(self._encode_text(text, cache_root, add_special_tokens, None))
        steps = self._encode_text(text, cache_root, add_special_tokens, self._tokenizing)
        return await self._in_thread(owner, steps)

    async def hash_ids(
        self, ids: Sequence[int], cache_root: bytes, *, owner: str = ""
    ) -> EncodedPrompt:
        """Return a prompt of token ids with its block hashes. `owner` is that of `encode_chat`."""
        if len(ids) <= _INLINE_TOKENS_MAX:
            return self._with_hashes(ids, cache_root)
        return await self._in_thread(owner, self._hashing(ids, cache_root))

    def require_fit(self, characters: int, context_tokens_max: int, param: str) -> None:
        """Refuse a text with more characters than the tokens of the whole context can have.

        Args:
            characters: Number of characters of the text.
            context_tokens_max: Context of the model, in tokens, or 0 if it is not specified.
            param: Name of the body's field for the text.

        Raises:
            BadRequestError: CONTEXT_LENGTH_EXCEEDED.
        """
        require_fit(characters, self.characters_per_token_max, context_tokens_max, param)

    @property
    def _tokenizing(self) -> Executor | None:
        return self.threads and self.threads.tokenizing

    async def _in_thread(self, owner: str, steps: Steps[EncodedPrompt]) -> EncodedPrompt:
        if self.threads is None:
            return await asyncio.to_thread(finished, steps)
        return await self.threads.run_steps(owner, steps)

    def _encode(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        place: PromptPlace,
        known: GrownPrompt | None,
        options: Mapping[str, object],
        bound: "_ContextBound",
        trail: PromptTrail | None,
        cpu_s: float,
        tokenizing: Executor | None,
    ) -> Steps[EncodedPrompt]:
        template = self.calling_template if tools else self.template
        if known is None:
            known = self._restored(place, trail, messages, tools, options)
        if known is not None:
            more = template.continued(known.chat, messages, tools, options, cpu_s=cpu_s)
            if more is not None:
                return (yield from self._encode_more(place, known, more, bound, trail, tokenizing))
            if cpu_s < CPU_S:
                raise OutOfTimeError("all of it has to be written anew")
        pieces, chat = template.written(messages, tools, options, cpu_s=cpu_s, param=bound.param)
        bound.check(sum(map(len, pieces)))
        is_reasoning = self.dialect.opens_reasoning(pieces[-1][-ENDING_CHARACTERS:])
        if chat is not None and self._grown.can_keep(place, chat):
            tokens = yield from self._grown.encode(place, chat, None, tokenizing, trail)
            return _without_hashes(tokens, is_reasoning=is_reasoning)
        ids = yield from self._encoder.encode(pieces, place.root, tokenizing)
        return self._with_hashes(ids, place.root, is_reasoning=is_reasoning)

    def _restored(
        self,
        place: PromptPlace,
        trail: PromptTrail | None,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        options: Mapping[str, object],
    ) -> GrownPrompt | None:
        """Return the prompt that earlier turns have stored, if `messages` extend its messages."""
        latest = None if trail is None else trail.latest
        if trail is None or latest is None or not 0 < latest.messages <= len(messages):
            return None
        template = self.calling_template if tools else self.template
        chat = template.written_before(
            messages[: latest.messages],
            tools,
            options,
            opening=trail.opening,
            given=latest.given,
        )
        return None if chat is None else self._grown.restored(place, trail, chat)

    def _encode_more(
        self,
        place: PromptPlace,
        known: GrownPrompt,
        chat: WrittenChat,
        bound: "_ContextBound",
        trail: PromptTrail | None,
        tokenizing: Executor | None,
    ) -> Steps[EncodedPrompt]:
        """Return the tokens of a conversation that extends the cached prompt `known`."""
        new = "".join([*chat.texts, chat.behind])
        bound.check(known.characters + len(new))
        ending = (known.ending + new)[-ENDING_CHARACTERS:]
        tokens = yield from self._grown.encode(place, chat, known, tokenizing, trail)
        return _without_hashes(tokens, is_reasoning=self.dialect.opens_reasoning(ending))

    def _encode_text(
        self, text: str, cache_root: bytes, add_special_tokens: bool, tokenizing: Executor | None
    ) -> Steps[EncodedPrompt]:
        if add_special_tokens:
            ids = yield from self._encoder.encode_whole(text, tokenizing)
        else:
            ids = yield from self._encoder.encode([text], cache_root, tokenizing)
        return self._with_hashes(ids, cache_root)

    def _with_hashes(
        self, ids: Sequence[int], cache_root: bytes, *, is_reasoning: bool = False
    ) -> EncodedPrompt:
        """Return a prompt with its block hashes, which are cached for a long prompt."""
        kept = ids if isinstance(ids, array) else array("I", ids)
        if len(kept) <= _INLINE_TOKENS_MAX:
            return EncodedPrompt(kept, chained_hashes(kept, cache_root), is_reasoning)
        return EncodedPrompt(kept, self._spans.hashed(kept, cache_root), is_reasoning)

    def _hashing(self, ids: Sequence[int], cache_root: bytes) -> Steps[EncodedPrompt]:
        """Hash a prompt of token ids, in one step for `PromptThreads`."""
        yield from ()
        return self._with_hashes(ids, cache_root)


def _without_hashes(tokens: PromptTokens, *, is_reasoning: bool) -> EncodedPrompt:
    return EncodedPrompt(tokens.ids, tokens.hashes, is_reasoning, record=tokens.record)


def _size(messages: Sequence[Message], tools: Sequence[Tool]) -> int:
    """Return an estimate of the work to render and encode a chat, in characters of text."""
    size = _CHARACTERS_PER_MESSAGE * (len(messages) + len(tools))
    for message in messages:
        size += len(message.text())
        for call in message.tool_calls or ():
            size += len(call.function.arguments)
    for tool in tools:
        size += len(repr(tool.function.parameters)) + len(tool.function.description or "")
    return size


def load_base(directory: Path, threads: PromptThreads | None = None) -> BaseAssets:
    """Read a base's files. The call blocks on the disk.

    Args:
        directory: Directory of the base's files.
        threads: Threads for large prompts.

    Raises:
        OSError: A file is missing.
        ValueError: A file has invalid content. The message names the file.
    """
    tokenizer = read_tokenizer(directory / "tokenizer.json")
    config = read_json(directory / "tokenizer_config.json")
    generation = read_json(directory / "generation_config.json", is_optional=True)
    model = read_json(directory / "config.json", is_optional=True)
    ends = end_ids(tokenizer, config, generation, model)
    sources = template_sources(directory, config)
    names, reserved = special_tokens(config), reserved_texts(tokenizer)
    try:
        templates = {source: ChatTemplate(source, names, reserved) for source in set(sources)}
        dialect = dialect_of("\n".join(sources), added_tokens(tokenizer), config)
    except ValueError as error:
        raise ValueError(f"the chat template of {directory} cannot be used: {error}") from error
    table = token_table(tokenizer, ends, int(model.get("vocab_size") or 0))
    marked = [
        table.showing({dialect.mark_ids[mark] for mark in marks if mark in dialect.mark_ids} - ends)
        for marks in (dialect.marks(tools=False), dialect.marks(tools=True))
    ]
    encoder, spans = PromptEncoder(tokenizer), PromptSpans()
    return BaseAssets(
        tokenizer=tokenizer,
        template=templates[sources[0]],
        calling_template=templates[sources[1]],
        table=table,
        end_ids=ends,
        defaults=SamplingDefaults(
            temperature=float(generation.get("temperature") or 1.0),
            top_p=float(generation.get("top_p") or 1.0),
            top_k=int(generation.get("top_k") or 0),
        ),
        dialect=dialect,
        _encoder=encoder,
        _reasoning_table=marked[0],
        _tools_table=marked[1],
        _spans=spans,
        _grown=GrownPrompts(encoder, spans, fingerprint=_fingerprint(directory, sources, config)),
        characters_per_token_max=characters_per_token_max(tokenizer),
        threads=threads,
    )


def _fingerprint(directory: Path, sources: Sequence[str], config: Mapping[str, object]) -> bytes:
    """Return a digest of template, tokenizer and library, because they determine token ids."""
    digest = hashlib.blake2b(digest_size=16)
    tokenizer = (directory / "tokenizer.json").read_bytes()
    written = orjson.dumps([_FORM, version("tokenizers"), *sources, config])
    for part in (tokenizer, written):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


# Cache of the bases that a process needs to generate text.
AssetCache = BaseCache[BaseAssets]
