"""Computes the number of tokens that an answer may have. Pure."""

from gateway.bodies.generation import GenerationFields
from gateway.bodies.mistakes import bad_value
from sluice.errors import BadRequestError, ErrorCode

# Context in tokens that is assumed for models whose context is not specified.
_UNKNOWN_CONTEXT_TOKENS = 1 << 20


def output_budget(
    request: GenerationFields, prompt_tokens: int, context_tokens_max: int, index: int = 0
) -> int:
    """Return the number of tokens that an answer may have.

    If the requested bound does not fit beside the prompt, the request is refused, as at OpenAI. An
    answer that is cut before the requested bound would look complete.

    Args:
        request: Fields of the request, which has one or several prompts.
        prompt_tokens: Tokens of this prompt.
        context_tokens_max: Context of the model, in tokens, or 0 if the context is not specified.
        index: Index of this prompt.

    Raises:
        BadRequestError: Prompt and bound do not fit into the context.
    """
    context = context_tokens_max or _UNKNOWN_CONTEXT_TOKENS
    wanted = request.output_tokens_max
    if not prompt_tokens:
        raise bad_value(request.prompt_param(index), "it has no tokens; send at least one")
    if prompt_tokens + (wanted or 1) <= context:
        budget = wanted or context - prompt_tokens
        if (request.min_tokens or 0) > budget:
            raise bad_value("min_tokens", f"the context leaves {budget} tokens for the answer")
        return budget
    param = request.prompt_param(index)
    if wanted is None:
        detail = f"your {param} resulted in {prompt_tokens} tokens"
    else:
        detail = (
            f"you requested {prompt_tokens + wanted} tokens ({prompt_tokens} in the {param}, "
            f"{wanted} in the completion)"
        )
    raise BadRequestError(
        ErrorCode.CONTEXT_LENGTH_EXCEEDED,
        f"This model's maximum context length is {context} tokens. However, {detail}. "
        f"Please reduce the length of the {param} or completion.",
        param=param,
    )
