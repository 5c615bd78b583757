"""Bodies of bases, and of the public names that resolve to them."""

import re
from typing import Annotated

from pydantic import AfterValidator

from control_plane.fields import AdminBody, Count, Digest, Id, OptionalDigest, OptionalId, Text

RELEASE_MARK = "@"  # separates the name of a model from the name of its release
_RELEASE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")


def _checked_release(value: str) -> str:
    if value and not _RELEASE.fullmatch(value):
        raise ValueError(
            "1 to 64 of A-Z a-z 0-9 . _ + - are allowed, beginning with a letter or digit"
        )
    return value


ReleaseName = Annotated[str, AfterValidator(_checked_release)]


class BaseBody(AdminBody):
    """A base, whose weights nodes have in their artifact folders, by digest."""

    name: Text = ""
    context_tokens_max: Count


class ModelBody(AdminBody):
    """A public name. Without `owner_tenant_id`, all tenants may use the name.

    Its base and adapter are stored as a release, which `model@release` names permanently. If
    `release` is empty, the release has a name derived from the digests.
    """

    base_digest: Digest
    pool_id: Id
    adapter_digest: OptionalDigest = ""
    release: ReleaseName = ""
    owner_tenant_id: OptionalId = ""


class AliasBody(AdminBody):
    """Another name of a model or of `model@release`, with the same owner."""

    target: Id
    owner_tenant_id: OptionalId = ""


def release_id(model_id: str, release: str) -> str:
    """Return the public name of a release of a model."""
    return f"{model_id}{RELEASE_MARK}{release}"


def release_of_digests(base_digest: str, adapter_digest: str) -> str:
    """Return the default name of a release. Migration 0004 has the same rule."""
    return f"{adapter_digest[:8]}-{base_digest[:8]}" if adapter_digest else base_digest[:12]
