"""What the admin REST takes about artifacts; pure."""

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from control_plane.artifacts.model import Kind
from control_plane.fields import Body, Id, OptionalDigest, OptionalId

Signature = Annotated[str, Field(pattern=r"^[A-Za-z0-9+/]{86}==$")]


class _Subject(Body):
    """What is to become an artifact of a tenant; without a tenant everybody may use it.

    A publisher's artifacts are its tenant's, named or not.
    """

    kind: Annotated[Kind, Field(strict=False)]
    base_digest: OptionalDigest = ""
    tenant_id: OptionalId = ""
    signatures: Annotated[dict[Id, Signature], Field(max_length=8)] = {}  # noqa: RUF012 - pydantic

    @model_validator(mode="after")
    def _has_its_base(self) -> Self:
        if bool(self.base_digest) != (self.kind is Kind.ADAPTER):
            raise ValueError("an adapter needs the base_digest of its base, and a base has none")
        return self


class PinBody(Body):
    """Whether an artifact is kept, needed or not."""

    is_pinned: bool


class ImportBody(_Subject):
    """Begins an import of a directory, a bucket's prefix, or a web server's directory."""

    source: Annotated[str, Field(min_length=1, max_length=2048)]


class UploadBody(_Subject):
    """Begins an upload, or goes on with it."""

    manifest: dict[str, Any]
