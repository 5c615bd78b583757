"""The body of a request for embeddings. Pure."""

from typing import Annotated, Literal

from pydantic import Field

from gateway.bodies.fields import Integer, ModelName, ShortText
from gateway.bodies.parsing import Body, parse
from gateway.bodies.prompts import FilledTextOrIds, listed

_DIMENSIONS_MAX = 65_536


class EmbeddingRequest(Body):
    """Texts to be embedded. A field whose value is null counts as absent."""

    model: ModelName
    input: FilledTextOrIds
    dimensions: Annotated[Integer, Field(ge=1, le=_DIMENSIONS_MAX)] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    user: ShortText | None = None
    truncate_prompt_tokens: Annotated[Integer, Field(ge=-1, le=1 << 30)] | None = None

    def truncation_tokens(self, context_tokens_max: int) -> int:
        """Return the number of tokens of each text to embed, or 0 for all tokens.

        Args:
            context_tokens_max: Context of the model, in tokens, which -1 in the body selects.
        """
        wanted = self.truncate_prompt_tokens
        return context_tokens_max if wanted == -1 else wanted or 0

    @property
    def inputs(self) -> list[str] | list[list[int]]:
        """The texts, or the lists of ids, at least one."""
        return listed(self.input)


def parse_embedding_request(body: bytes) -> EmbeddingRequest:
    """Return the request in `body`, or raise BadRequestError with the name of the wrong field."""
    return parse(EmbeddingRequest, body)
