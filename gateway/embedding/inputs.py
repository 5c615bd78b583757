"""Tokenizes and checks all inputs of an embeddings request, before any of them is sent."""

from collections.abc import Sequence

from gateway.bases.embedding import EmbeddingBase
from gateway.bases.slices import TooManyTokensError
from gateway.bodies.mistakes import bad_value
from gateway.bodies.prompts import check_ids
from sluice.errors import BadRequestError, ErrorCode

TOKENS_MAX = 300_000  # maximum number of tokens per request, equal to OpenAI's


async def token_ids(
    inputs: list[str] | list[list[int]],
    base: EmbeddingBase,
    *,
    owner: str,
    context_tokens_max: int,
    tokens_kept: int = 0,
) -> list[list[int]]:
    """Return the ids of each input. Texts receive special tokens, and given ids stay unchanged.

    Args:
        inputs: Texts, or lists of token ids.
        base: Base with the tokenizer.
        owner: Tenant that the texts belong to. See `EmbeddingBase.encode`.
        context_tokens_max: Context for one text, in tokens, or 0 if it is not specified. A longer
            text may have only its beginning in the result.
        tokens_kept: Number of each input's tokens to return, including special tokens, or 0 for
            all.

    Raises:
        BadRequestError: The model lacks an id, a text has too many characters, or all texts
            together have too many tokens.
    """
    texts = [text for text in inputs if isinstance(text, str)]
    if texts:
        if not tokens_kept:
            for index, text in enumerate(texts):
                base.require_fit(len(text), context_tokens_max, _param(texts, index))
        needed = tokens_kept or context_tokens_max
        try:
            lists = await base.encode(texts, owner=owner, tokens_max=needed, total_max=TOKENS_MAX)
        except TooManyTokensError as error:
            raise bad_value("input", f"{error} in one request") from None
    else:
        lists = [ids for ids in inputs if not isinstance(ids, str)]
        for index, ids in enumerate(lists):
            check_ids(_param(lists, index), ids, base.vocabulary)
    return [base.truncated(ids, tokens_kept) for ids in lists] if tokens_kept else lists


async def pair_ids(
    first: Sequence[str],
    second: Sequence[str],
    base: EmbeddingBase,
    *,
    owner: str,
    context_tokens_max: int,
) -> list[list[int]]:
    """Return one row of ids for each pair of a text of `first` with a text of `second`.

    Raises:
        BadRequestError: A text has too many characters, or all rows together have too many tokens.
    """
    texts = [*first, *second]
    for index, text in enumerate(texts):
        base.require_fit(len(text), context_tokens_max, _param(texts, index))
    try:
        return await base.encode_pairs(
            first, second, owner=owner, tokens_max=context_tokens_max, total_max=TOKENS_MAX
        )
    except TooManyTokensError as error:
        raise bad_value("input", f"{error} in one request") from None


def check_lengths(texts: Sequence[Sequence[int]], context_tokens_max: int) -> None:
    """Raise BadRequestError if a text is empty or too long, or if all together are too long.

    Args:
        texts: Token ids of each text.
        context_tokens_max: Context for one text, in tokens, or 0 if it is not specified.
    """
    lengths = [len(ids) for ids in texts]
    if 0 in lengths:
        raise bad_value(_param(texts, lengths.index(0)), "it has no tokens; send at least one")
    longest = max(lengths)
    if context_tokens_max and longest > context_tokens_max:
        index = next(i for i, length in enumerate(lengths) if length > context_tokens_max)
        raise BadRequestError(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"This model's maximum context length is {context_tokens_max} tokens. However, input"
            f" {index} has at least {lengths[index]} tokens, special ones included. Send it in"
            " parts.",
            param=_param(texts, index),
        )
    if sum(lengths) > TOKENS_MAX:
        raise bad_value("input", f"{sum(lengths)} tokens; a request has at most {TOKENS_MAX}")


def _param(texts: Sequence[object], index: int) -> str:
    return f"input[{index}]" if len(texts) > 1 else "input"
