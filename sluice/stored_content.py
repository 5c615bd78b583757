"""Facts about stored content of tenants that the control plane and gateways share. Pure."""

SEALED_FOR = "keys of content"
KEY_BYTES = 32
CONVERSATION, CHAT_COMPLETION = "conversation", "chat.completion"  # kinds of records


def key_place(tenant_id: str, number: int) -> str:
    """Return the place for sealing a key, different for every tenant and number."""
    return f"{tenant_id}\0{number}"
