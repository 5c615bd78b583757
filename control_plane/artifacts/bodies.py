"""Request bodies of the admin REST for artifacts. Pure."""

from typing import Annotated, Any, Self

from pydantic import Field, WithJsonSchema, model_validator

from control_plane.artifacts.model import Kind
from control_plane.fields import AdminBody, Id, OptionalDigest, OptionalId
from sluice.manifests import CHUNK_BYTES, FILES_MAX, FORMAT

Signature = Annotated[str, Field(pattern=r"^[A-Za-z0-9+/]{86}==$")]


_SHA256: dict[str, Any] = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
_SIZE: dict[str, Any] = {"type": "integer", "minimum": 0}
_FILE: dict[str, Any] = {
    "type": "object",
    "required": ["name", "size_bytes", "sha256", "chunks"],
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "description": "Relative to the artifact, with slashes"},
        "size_bytes": _SIZE,
        "sha256": _SHA256 | {"description": "Of the whole file"},
        "chunks": {
            "type": "array",
            "items": _SHA256,
            "description": f"Of each {CHUNK_BYTES} bytes; the last chunk may be shorter",
        },
    },
}
# The JSON schema of the manifests that `sluice.manifests` reads.
MANIFEST: dict[str, Any] = {
    "type": "object",
    "required": ["format", "chunk_bytes", "files"],
    "additionalProperties": False,
    "properties": {
        "format": {"const": FORMAT},
        "chunk_bytes": {"const": CHUNK_BYTES},
        "files": {"type": "array", "minItems": 1, "maxItems": FILES_MAX, "items": _FILE},
    },
}


class _Subject(AdminBody):
    """A new artifact of a tenant. Without a tenant, all tenants may use the artifact.

    A publisher's artifacts always belong to its tenant, even if the body does not name the tenant.
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


class ArtifactPinBody(AdminBody):
    """Whether an artifact is kept even without references."""

    is_pinned: bool


class ImportBody(_Subject):
    """Begins an import of a directory, a bucket's prefix, or a web server's directory."""

    source: Annotated[str, Field(min_length=1, max_length=2048)]


class UploadBody(_Subject):
    """Begins an upload, or continues it."""

    manifest: Annotated[dict[str, Any], WithJsonSchema(MANIFEST)]
