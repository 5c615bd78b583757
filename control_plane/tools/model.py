"""Tools that gateways call for a tenant's models, in the form that admins write. Pure."""

import json
import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Protocol
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from control_plane.fields import AdminBody, Count, Id
from sluice.errors import BadRequestError, ErrorCode
from sluice.server_tools import header_place

_URL_CHARACTERS_MAX = 2048
_NAMES_MAX, _HEADERS_MAX = 100, 16
_SCHEMA_BYTES_MAX = 64 << 10  # the same limit as for a tool in a client's request
_HEADER_CHARACTERS_MAX = 8192
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}")
_HEADER_TEXT = re.compile(r"[\x20-\x7e]*")
# Headers that a tool may not set, because the gateway sets them for the connection and the body.
_HEADERS_OF_OURS = frozenset(
    {
        *("host", "connection", "content-length", "content-type", "transfer-encoding", "accept"),
        *("accept-encoding", "mcp-session-id", "mcp-protocol-version", "mcp-method", "mcp-name"),
    }
)


class ServerToolKind(StrEnum):
    """The protocol of a tool."""

    HTTP = "http"
    MCP = "mcp"


class ServerToolApproval(StrEnum):
    """Whether a person has to approve each call."""

    ALWAYS = "always"
    NEVER = "never"


class ServerToolMethod(StrEnum):
    """The HTTP method of a call. GET and DELETE have the arguments in the query."""

    GET = "GET"
    POST = "POST"
    PUT = "PUT"
    PATCH = "PATCH"
    DELETE = "DELETE"


def _checked_name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ValueError("1 to 64 of A-Z a-z 0-9 _ - are allowed")
    return value


def _checked_url(value: str) -> str:
    """Return a URL that may be called. Gateways check the URL's address at each call."""
    try:
        parts = urlsplit(value)
        _ = parts.port
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname or not value.isascii():
        raise ValueError("a URL as https://host/path is expected")
    if "@" in parts.netloc or parts.fragment or not value.isprintable() or " " in value:
        raise ValueError("a URL without user and fragment is expected: send secrets as headers")
    return value


def _checked_schema(value: dict[str, Any]) -> dict[str, Any]:
    if len(json.dumps(value)) > _SCHEMA_BYTES_MAX:
        raise ValueError(f"at most {_SCHEMA_BYTES_MAX} bytes of JSON are allowed")
    if value and value.get("type") != "object":
        raise ValueError('a JSON schema with "type": "object" is expected')
    return value


def _checked_headers(value: dict[str, str]) -> dict[str, str]:
    for name, text in value.items():
        if not _HEADER_NAME.fullmatch(name):
            raise ValueError("the name of a header is expected")
        if name.lower() in _HEADERS_OF_OURS:
            raise ValueError(f"{name} is set by the gateway: leave it out")
        if not _HEADER_TEXT.fullmatch(text) or len(text) > _HEADER_CHARACTERS_MAX:
            raise ValueError(f"{name}: printable ASCII, at most {_HEADER_CHARACTERS_MAX}")
    return value


Names = Annotated[list[Id], Field(max_length=_NAMES_MAX, default_factory=list[str])]
ToolNames = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=128)]],
    Field(max_length=_NAMES_MAX, default_factory=list[str]),
]


class ServerToolBody(AdminBody):
    """A tool that gateways call for models of a tenant.

    `secret_headers` are encrypted, and shown as empty texts. An empty text in a write stands for
    the stored text, if scheme, host and port of `url` are unchanged. `models` and `keys` restrict
    the tool to requests with these models and keys. An empty list is no restriction. `price_micros`
    is the price of a call, in millionths of the ledger's currency.
    """

    owner_tenant_id: Id
    kind: Annotated[ServerToolKind, Field(strict=False)]
    name: Annotated[str, AfterValidator(_checked_name)]
    description: Annotated[str, Field(max_length=4096)] = ""
    parameters: Annotated[
        dict[str, Any], Field(default_factory=dict[str, Any]), AfterValidator(_checked_schema)
    ]
    url: Annotated[str, Field(max_length=_URL_CHARACTERS_MAX), AfterValidator(_checked_url)]
    method: Annotated[ServerToolMethod, Field(strict=False)] = ServerToolMethod.POST
    timeout_ms: Annotated[int, Field(ge=100, le=300_000)] = 10_000
    result_bytes_max: Annotated[int, Field(ge=256, le=1 << 20)] = 32 << 10
    secret_headers: Annotated[
        dict[str, str],
        Field(max_length=_HEADERS_MAX, default_factory=dict[str, str]),
        AfterValidator(_checked_headers),
    ]
    is_idempotent: bool = False
    approval: Annotated[ServerToolApproval, Field(strict=False)] = ServerToolApproval.ALWAYS
    allowed_tools: ToolNames
    models: Names
    keys: Names
    price_micros: Count = 0

    @model_validator(mode="after")
    def _of_its_kind(self) -> "ServerToolBody":
        if self.kind is ServerToolKind.MCP and self.parameters:
            raise ValueError("parameters: a server of mcp lists its tools itself")
        if self.kind is ServerToolKind.HTTP and self.allowed_tools:
            raise ValueError("allowed_tools: an http tool is one tool")
        return self


class HeaderSealer(Protocol):
    """Encrypts a header's text for one place, so that a copy in another place is useless."""

    def seal(self, text: str, place: str) -> str:
        """Return the encrypted text."""
        ...

    def opened(self, sealed: str, place: str) -> str:
        """Return the decrypted text. Raises ValueError if it cannot be decrypted."""
        ...


def stored_headers(
    known: Mapping[str, Any] | None, wanted: Mapping[str, Any], key: str, sealer: HeaderSealer
) -> dict[str, str]:
    """Return the encrypted headers of a tool's row.

    Args:
        known: The stored row, or None if the tool is new.
        wanted: Values of the request body.
        key: Id of the tool.
        sealer: Encrypts new texts.

    Raises:
        BadRequestError: A header without a new text is not stored, or was stored for another
            address.
    """
    before: Mapping[str, str] = {} if known is None else known["secret_headers"]
    sealed: dict[str, str] = {}
    for name, text in wanted["secret_headers"].items():
        place = header_place(key, wanted["url"], name)
        kept = before.get(name, "")
        is_same = bool(kept) and _opens_as(kept, place, text, sealer)
        if not text and not is_same:
            message = f"secret_headers: {name} is not stored for this address: send its text"
            raise BadRequestError(ErrorCode.INVALID_REQUEST, message, param="secret_headers")
        sealed[name] = kept if is_same else sealer.seal(text, place)
    return sealed


def _opens_as(kept: str, place: str, text: str, sealer: HeaderSealer) -> bool:
    try:
        opened = sealer.opened(kept, place)
    except ValueError:
        return False
    return not text or opened == text
