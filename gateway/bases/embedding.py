"""Tokenizer and sizes of a base that makes embeddings or classifies, without chat template."""

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

# Maximum number of characters that are encoded in the event loop. Encoding needs about 1 ms per 10
# KB, and each text costs as much as `_CHARACTERS_PER_TEXT`. Larger inputs would delay streams.
_INLINE_CHARACTERS_MAX = 16 << 10
_CHARACTERS_PER_TEXT = 64


@dataclass(frozen=True, slots=True)
class EmbeddingBase:
    """Tokenizer and sizes of one base.

    Attributes:
        tokenizer: Tokenizer of the base, set to neither truncate nor pad.
        dimensions: Length of an embedding, or the number of labels of a base that classifies.
        vocabulary: Number of token ids of the model.
        slicing: The same tokenizer, wrapped to process long texts in slices.
        characters_per_token_max: Maximum number of characters in one token, or 0 for no bound.
        threads: Threads for large texts, or None for the executor of the event loop.
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
        """Refuse a text that cannot fit, before it is tokenized. See `text_bound.require_fit`."""
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
        """Return one row of ids for each pair of a text of `first` with a text of `second`.

        The rows are ordered by their text of `first`, and then by their text of `second`. The
        arguments are those of `encode`, except that `total_max` bounds the tokens of all rows.

        Raises:
            TooManyTokensError: The rows have more than `total_max` tokens.
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
        """Return the first tokens of a text, with any special tokens at the end preserved."""
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
        """Return the token ids of each text. Large texts are tokenized in a thread, in slices.

        Args:
            texts: Texts.
            owner: Tenant that the texts belong to. The threads alternate between owners.
            add_special_tokens: Whether the tokenizer adds special tokens.
            tokens_max: Number of tokens per text that the caller needs, or 0 for all. A row may
                have more tokens.
            total_max: Maximum number of tokens of all texts together, or 0 for no bound.

        Raises:
            TooManyTokensError: The texts have more than `total_max` tokens.
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
        if around is None:  # the tokenizer's special tokens depend on the text
            made = encode_batch(self.tokenizer, texts, tokenizing, add_special_tokens=True)
            return [encoding.ids for encoding in made]
        before, behind = map(list, around)
        found = yield from self.slicing.encode(
            texts, tokenizing, tokens_max=tokens_max, total_max=total_max
        )
        return [[*before, *ids, *behind] for ids in found]


def load_embedding_base(directory: Path, threads: PromptThreads | None = None) -> EmbeddingBase:
    """Read a base's files. The call blocks on the disk.

    Args:
        directory: Directory of the base's files.
        threads: Threads for large texts.

    Raises:
        OSError: A file is missing.
        ValueError: A file has invalid content. The message names the file.
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


# Cache of the bases with which a process embeds or classifies.
EmbeddingBaseCache = BaseCache[EmbeddingBase]
