"""Tokenizer and sizes of a base that embeds or classifies; such a base has no chat template."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tokenizers import Tokenizer

from gateway.bases.cache import BaseCache
from gateway.bases.files import read_json, read_tokenizer
from gateway.bases.labels import Labels, pair_form, read_labels
from gateway.bases.slices import (
    SlicingTokenizer,
    Steps,
    TooManyTokensError,
    encode_batch,
    finished,
)
from gateway.bases.text_bound import characters_per_token_max, require_fit
from gateway.bases.threads import PromptThreads

# Encoding takes about 1 ms per 10 KB, plus some time per text; larger texts would delay streams.
_INLINE_CHARACTERS_MAX = 16 << 10
_CHARACTERS_PER_TEXT = 64


@dataclass(frozen=True, slots=True)
class EmbeddingBase:
    """Tokenizer and sizes of one base.

    Attributes:
        tokenizer: Tokenizer of the base; neither cuts nor pads.
        dimensions: Length of a vector: of an embedding, or the number of labels.
        vocabulary: Number of token ids that the model has.
        slicing: The tokenizer, for long texts.
        characters_per_token_max: Maximum of characters in one token; 0: no bound.
        threads: Threads for large texts; None: the executor of the event loop.
        labels: Labels of a base that classifies, or None if the base makes embeddings.
    """

    tokenizer: Tokenizer
    dimensions: int
    vocabulary: int
    slicing: SlicingTokenizer
    characters_per_token_max: int = 0
    threads: PromptThreads | None = None
    labels: Labels | None = None

    def require_fit(self, characters: int, context_tokens_max: int, param: str) -> None:
        """Refuse a text before it is tokenized; see `gateway.bases.text_bound.require_fit`."""
        require_fit(characters, self.characters_per_token_max, context_tokens_max, param)

    async def encode_pairs(
        self,
        first: Sequence[str],
        second: Sequence[str],
        *,
        owner: str,
        tokens_max: int,
        total_max: int,
    ) -> list[list[int]]:
        """Return the ids of every text of `first` with every one of `second`, as rows.

        The pairs of the first text come first. For the arguments see `encode`; `total_max` bounds
        the tokens of all rows.

        Raises:
            TooManyTokensError: There are more than `total_max`.
        """
        form = pair_form(self.tokenizer)
        ids = await self.encode(
            [*first, *second],
            owner=owner,
            add_special_tokens=False,
            tokens_max=tokens_max,
            total_max=total_max,
        )
        ones, others = ids[: len(first)], ids[len(first) :]
        ones_total, others_total = sum(map(len, ones)), sum(map(len, others))
        if ones_total * len(others) + others_total * len(ones) > total_max:
            raise TooManyTokensError(f"more than {total_max} tokens")
        return [form.joined(one, other) for one in ones for other in others]

    def truncated(self, ids: list[int], tokens_max: int) -> list[int]:
        """Return the first tokens of a text, and its trailing special tokens if it has any."""
        if len(ids) <= tokens_max:
            return ids
        behind = list((self.slicing.around or ((), ()))[1])
        if not behind or ids[-len(behind) :] != behind or len(behind) >= tokens_max:
            return ids[:tokens_max]
        return ids[: tokens_max - len(behind)] + behind

    async def encode(
        self,
        texts: Sequence[str],
        *,
        owner: str = "",
        add_special_tokens: bool = True,
        tokens_max: int = 0,
        total_max: int = 0,
    ) -> list[list[int]]:
        """Return the token ids of each text; large texts are tokenized in a thread, in slices.

        Args:
            texts: Texts.
            owner: Owner of the texts; the threads serve owners in turn.
            add_special_tokens: Whether the tokenizer adds special tokens.
            tokens_max: Number of tokens per text that the caller needs; some more may be returned.
                0: all.
            total_max: Maximum of tokens of all texts together; 0: no bound.

        Raises:
            TooManyTokensError: There are more than `total_max`.
        """
        encode = partial(self._encode, texts, add_special_tokens, tokens_max, total_max)
        size = sum(map(len, texts)) + _CHARACTERS_PER_TEXT * len(texts)
        if size <= _INLINE_CHARACTERS_MAX:
            return finished(encode(None))
        if self.threads is None:
            return await asyncio.to_thread(finished, encode(None))
        return await self.threads.run_steps(owner, encode(self.threads.tokenizing))

    def _encode(
        self,
        texts: Sequence[str],
        add_special_tokens: bool,
        tokens_max: int,
        total_max: int,
        tokenizing: Executor | None,
    ) -> Steps[list[list[int]]]:
        around = self.slicing.around if add_special_tokens else ((), ())
        if around is None:  # the positions of special tokens are not known
            made = encode_batch(self.tokenizer, texts, tokenizing, add_special_tokens=True)
            return [encoding.ids for encoding in made]
        before, behind = map(list, around)
        found = yield from self.slicing.encode(
            texts, tokenizing, tokens_max=tokens_max, total_max=total_max
        )
        return [[*before, *ids, *behind] for ids in found]


def load_embedding_base(directory: Path, threads: PromptThreads | None = None) -> EmbeddingBase:
    """Read a base's files; blocks.

    Args:
        directory: Directory of the base's files.
        threads: Threads for large texts.

    Raises:
        OSError: A file is missing.
        ValueError: A file has invalid content; the message names the file.
    """
    tokenizer = read_tokenizer(directory / "tokenizer.json")
    tokenizer.no_truncation()  # a text that is too long is refused, never cut
    tokenizer.no_padding()
    config = read_json(directory / "config.json")
    sizes = config.get("hidden_size"), config.get("vocab_size")
    dimensions, vocabulary = (size if isinstance(size, int) else 0 for size in sizes)
    if dimensions < 1 or vocabulary < 1:
        raise ValueError(f"{directory}/config.json has no hidden_size or no vocab_size")
    slicing, characters = SlicingTokenizer(tokenizer), characters_per_token_max(tokenizer)
    labels = read_labels(config)
    if labels is not None:
        dimensions = len(labels.names)
    return EmbeddingBase(tokenizer, dimensions, vocabulary, slicing, characters, threads, labels)


# The embedding bases of a process.
EmbeddingBaseCache = BaseCache[EmbeddingBase]
