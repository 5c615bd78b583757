"""Keys of contents, as the control plane sends them."""

import secrets

from sluice.sealing import Sealer
from sluice.shared_secret import SharedSecret
from sluice.stored_content import KEY_BYTES, SEALED_FOR, key_place
from sluice.wire.control.v1 import control_pb2 as wire


def content_keys(
    tenant_id: str, secret: SharedSecret, *numbers: int, erased_at_unix_ms: int = 0
) -> wire.ContentKeys:
    """Return new keys of a tenant, with these numbers."""
    sealer = Sealer(secret, SEALED_FOR)
    return wire.ContentKeys(
        id=tenant_id,
        erased_at_unix_ms=erased_at_unix_ms,
        keys=[
            wire.ContentKey(
                number=it,
                sealed=sealer.seal(secrets.token_hex(KEY_BYTES), key_place(tenant_id, it)),
            )
            for it in numbers
        ],
    )
