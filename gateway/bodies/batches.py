"""The body of a request that creates a batch. Pure."""

from typing import Annotated, Any, Literal

from gateway.bodies.fields import Metadata, Only, ShortText
from gateway.bodies.parsing import Body


class BatchRequest(Body):
    """A batch to be created from an uploaded file of requests."""

    input_file_id: ShortText
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: Annotated[
        Any, Only(instead="the installation sets when files expire")
    ] = None
