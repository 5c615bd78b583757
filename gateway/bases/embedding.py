"""An embedding base in the gateway: its tokenizer and its sizes; no chat template."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tokenizers import Tokenizer

from gateway.bases.cache import BaseCache
from gateway.bases.files import read_json, read_tokenizer
from gateway.bases.slices import encode_batch, special_tokens_around
from gateway.bases.threads import PromptThreads

# Encoding takes about 1 ms per 10 KB, and some of it per text; above this streams would feel it.
_INLINE_CHARACTERS_MAX = 16 << 10
_CHARACTERS_PER_TEXT = 64


@dataclass(frozen=True, slots=True)
class EmbeddingBase:
    """Tokenizer and sizes of one base.

    Attributes:
        tokenizer: Tokenizer of the base; neither cuts nor pads.
        dimensions: Length of an embedding.
        vocabulary: Number of token ids that the model has.
        threads: Threads that work on large texts; None: one of the loop's own.
    """

    tokenizer: Tokenizer
    dimensions: int
    vocabulary: int
    threads: PromptThreads | None = None

    def truncated(self, ids: list[int], tokens_max: int) -> list[int]:
        """Return the first tokens of a text, and the special ones at its end if it has them."""
        if len(ids) <= tokens_max:
            return ids
        behind = list((special_tokens_around(self.tokenizer) or ((), ()))[1])
        if not behind or ids[-len(behind) :] != behind or len(behind) >= tokens_max:
            return ids[:tokens_max]
        return ids[: tokens_max - len(behind)] + behind

    async def encode(
        self, texts: Sequence[str], *, owner: str = "", add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Return the token ids of each text; large ones are worked on in a thread.

        Args:
            texts: Texts, which are not cut.
            owner: Owner of the texts: owners take turns at the threads.
            add_special_tokens: Whether the tokenizer adds its own.
        """
        size = sum(map(len, texts)) + _CHARACTERS_PER_TEXT * len(texts)
        if size <= _INLINE_CHARACTERS_MAX:
            return self._encode(texts, add_special_tokens, None)
        work = partial(self._encode, texts, add_special_tokens)
        if self.threads is None:
            return await asyncio.to_thread(work, None)
        return await self.threads.run(owner, partial(work, self.threads.tokenizing))

    def _encode(
        self, texts: Sequence[str], add_special_tokens: bool, tokenizing: Executor | None
    ) -> list[list[int]]:
        encodings = encode_batch(
            self.tokenizer, texts, tokenizing, add_special_tokens=add_special_tokens
        )
        return [encoding.ids for encoding in encodings]


def load_embedding_base(directory: Path, threads: PromptThreads | None = None) -> EmbeddingBase:
    """Read a base's files; blocks.

    Args:
        directory: Holds them.
        threads: Threads that work on large texts.

    Raises:
        OSError: A file is missing.
        ValueError: A file is not what it should be; the message names it.
    """
    tokenizer = read_tokenizer(directory / "tokenizer.json")
    tokenizer.no_truncation()  # a text that is too long is refused, never cut
    tokenizer.no_padding()
    config = read_json(directory / "config.json")
    sizes = config.get("hidden_size"), config.get("vocab_size")
    dimensions, vocabulary = (size if isinstance(size, int) else 0 for size in sizes)
    if dimensions < 1 or vocabulary < 1:
        raise ValueError(f"{directory}/config.json has no hidden_size or no vocab_size")
    return EmbeddingBase(tokenizer, dimensions, vocabulary, threads)


# The embedding bases of a process.
EmbeddingBaseCache = BaseCache[EmbeddingBase]
