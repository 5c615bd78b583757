"""Request bodies of golden prompts."""

from typing import Annotated

from pydantic import AfterValidator, Field

from control_plane.fields import AdminBody

PROMPT_TOKENS_MAX = 512
OUTPUT_TOKENS_MAX = 64


def _without_nul(value: str) -> str:
    if "\0" in value:
        raise ValueError("the character NUL is not allowed")
    return value


def _short_enough(token_ids: list[int]) -> list[int]:
    if len(token_ids) > PROMPT_TOKENS_MAX:
        message = (
            f"{len(token_ids)} tokens; a golden prompt has at most {PROMPT_TOKENS_MAX}, because "
            "every replica computes it anew each time: shorten it"
        )
        raise ValueError(message)
    return token_ids


_Token = Annotated[int, Field(ge=0, le=2**31 - 1)]
_Words = Annotated[str, Field(max_length=4096), AfterValidator(_without_nul)]


class GoldenPromptBody(AdminBody):
    """A prompt to which all replicas of a release must give the same answer.

    `token_ids` is the whole prompt, chat template included, as `/v1/tokenize` of the gateway
    returns it. If `expected_token_ids` are set, an answer must begin with them. The texts are only
    shown to operators.
    """

    token_ids: Annotated[
        list[_Token],
        AfterValidator(_short_enough),
        Field(min_length=1, json_schema_extra={"maxItems": PROMPT_TOKENS_MAX}),
    ]
    output_tokens_max: Annotated[int, Field(ge=1, le=OUTPUT_TOKENS_MAX)] = 16
    every_s: Annotated[int, Field(ge=5, le=86_400)] = 60
    expected_token_ids: Annotated[list[_Token], Field(max_length=OUTPUT_TOKENS_MAX)] = Field(
        default_factory=list[int]
    )
    prompt_text: _Words = ""
    expected_text: _Words = ""


class ReleaseBody(AdminBody):
    """The reason for lifting a quarantine."""

    reason: _Words = ""
