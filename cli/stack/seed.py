"""Creates the objects of a fresh stack through the admin REST: a model and a demo tenant.

The calls are safe to repeat. Operators may have changed tiers, the tenant and the alias, so
existing ones are not written. Every start writes base, pool and model again, from the command
line and the shipped model.
"""

import asyncio
import json
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cli.api import ApiClient, ApiError
from cli.stack.home import Secrets, with_demo_key

if TYPE_CHECKING:  # imported only when a call needs it
    import httpx

MODEL, ALIAS, TENANT = "sluice-tiny", "default", "demo"
_POOL_PREFIX = "tiny-"
# Each tier below the first has a reserved share, which protects it from a flood of a higher tier.
# The first two tiers serve people, so a request with a predicted wait above 1.5 s is refused
# with a retry time. The wait is without the prompt's own prefill. Batch work has no deadline, so it
# may wait for the longest deadline that a request may have.
_WATCHED = {"ttft_deadline_ms": 1_500}
TIERS = {
    "standard": {"priority": 10, "rpm": 0, "tpm": 0, **_WATCHED},
    "free": {"priority": 1, "rpm": 60, "tpm": 20000, "reserved_percent": 5, **_WATCHED},
    "batch": {"priority": 0, "rpm": 0, "tpm": 0, "reserved_percent": 5, "is_preemptible": True},
}
_CANARY = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Hello!"}],
    "max_tokens": 1,
    "stream": True,
}
_CANARY_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class ShippedBase:
    """A base that the stack serves.

    Attributes:
        digest: Digest of the base's artifact.
        name: Public name of the base's model.
        context_tokens_max: Largest number of tokens of prompt and answer together.
        adapters: Name and digest of each adapter, which is served as `<name of the base>-<name>`.
    """

    digest: str
    name: str
    context_tokens_max: int
    adapters: tuple[tuple[str, str], ...] = ()


def read_base(
    directory: Path, digest: str, adapters: tuple[tuple[str, str], ...] = ()
) -> ShippedBase:
    """Return the fields of a base in Hugging Face's form that the control plane needs."""
    config = json.loads((directory / "config.json").read_text())
    return ShippedBase(digest, MODEL, int(config["max_position_embeddings"]), adapters)


async def seed(
    api: ApiClient, base: ShippedBase, *, engine: str, replicas: int, secrets: Secrets
) -> Secrets:
    """Create or update all objects. Returns the secrets with a valid key of the demo tenant."""
    for tier_id, tier in TIERS.items():
        if await api.find(f"/v1/tiers/{tier_id}") is None:
            await api.call("PUT", f"/v1/tiers/{tier_id}", tier)
    await seed_base(api, base, engine=engine, replicas=replicas, pool_prefix=_POOL_PREFIX)
    if not any([await api.find(f"/v1/{kind}/{ALIAS}") for kind in ("aliases", "models")]):
        await api.call("PUT", f"/v1/aliases/{ALIAS}", {"target": MODEL})
    if await api.find(f"/v1/tenants/{TENANT}") is None:
        await api.call(
            "PUT", f"/v1/tenants/{TENANT}", {"name": "Demo", "tier_id": "standard", "weight": 1}
        )
    keys = await api.list(f"/v1/tenants/{TENANT}/keys")
    valid = {str(key["id"]) for key in keys if not key.get("is_disabled")}
    if secrets.demo_key and secrets.demo_key_id in valid:
        return secrets
    made = await api.call("POST", f"/v1/tenants/{TENANT}/keys", {})
    return with_demo_key(secrets, str(made["id"]), str(made["key"]))


async def seed_base(
    api: ApiClient, base: ShippedBase, *, engine: str, replicas: int, pool_prefix: str
) -> str:
    """Serve a base under its name, and return the id of its pool.

    There is one pool per engine and base, because neither can change in a pool. Pools of earlier
    starts are retired.
    """
    await api.call(
        "PUT",
        f"/v1/bases/{base.digest}",
        {"name": base.name, "context_tokens_max": base.context_tokens_max},
    )
    pool_id = f"{pool_prefix}{engine}-{base.digest[:8]}"
    await api.call(
        "PUT",
        f"/v1/pools/{pool_id}",
        {"base_digest": base.digest, "engine": engine, "replicas_wanted": replicas},
    )
    model = {"base_digest": base.digest, "pool_id": pool_id}
    await api.call("PUT", f"/v1/models/{base.name}", model)
    await _seed_adapters(api, base, model)
    await retire_pools(api, pool_prefix, current=pool_id)
    return pool_id


async def _seed_adapters(api: ApiClient, base: ShippedBase, model: dict[str, str]) -> None:
    """Serve the adapters of a base, and delete the models of removed adapters."""
    served = {f"{base.name}-{name}": digest for name, digest in base.adapters}
    for name, digest in served.items():
        await api.call("PUT", f"/v1/models/{name}", model | {"adapter_digest": digest})
    for known in await api.list("/v1/models"):
        name = str(known["id"])
        if name.startswith(f"{base.name}-") and known["adapter_digest"] and name not in served:
            await remove_unused(api, f"/v1/models/{name}")


async def remove_unused(api: ApiClient, path: str) -> None:
    """Delete an object unless other objects refer to it, e.g. an operator's alias."""
    try:
        await api.call("DELETE", path)
    except ApiError as error:
        if error.status != 409:
            raise


async def retire_pools(api: ApiClient, pool_prefix: str, *, current: str = "") -> None:
    """Scale the pools of earlier starts to zero, and delete the pools that are empty."""
    for pool in await api.list("/v1/pools"):
        old = str(pool.pop("id"))
        if old.startswith(pool_prefix) and old != current:
            await api.call("PUT", f"/v1/pools/{old}", pool | {"replicas_wanted": 0})
            await remove_unused(api, f"/v1/pools/{old}")  # else at the next start


async def first_token(
    base_url: str, key: str, say: Callable[[str], None], *, verify: ssl.SSLContext | bool
) -> None:
    """Request one token through the public API, and retry until the token arrives.

    Every refusal is temporary, because the gateway may not have received the key or the model yet,
    and the engine may still be starting. `say` is called with each new reason. `verify` is httpx's
    argument for CAs.
    """
    import httpx

    said = ""
    async with httpx.AsyncClient(timeout=10.0, verify=verify, trust_env=False) as http:
        while True:
            reason = await _try_token(http, base_url, key)
            if not reason:
                return
            if reason != said:
                say(reason)
                said = reason
            await asyncio.sleep(_CANARY_PAUSE_S)


async def _try_token(http: "httpx.AsyncClient", base_url: str, key: str) -> str:
    """Return the reason why there was no token, or an empty string if there was one."""
    import httpx

    headers = {"authorization": f"Bearer {key}"}
    try:
        async with http.stream(
            "POST", f"{base_url}/chat/completions", json=_CANARY, headers=headers
        ) as answer:
            if answer.status_code != 200:
                text = (await answer.aread()).decode(errors="replace")
                return _short(text) or f"status {answer.status_code}"
            async for line in answer.aiter_lines():
                if line.startswith("data: {") and '"error"' in line[:20]:
                    return _short(line.removeprefix("data: "))
                if line == "data: [DONE]":
                    return ""
    except httpx.HTTPError as error:
        return type(error).__name__
    return "the stream ended early"


def _short(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])[:120]
    except (ValueError, KeyError, TypeError):
        return text.strip()[:120]


async def wait_answering(api: ApiClient, timeout_s: float) -> None:
    """Wait until the admin REST accepts the key.

    Raises:
        ApiError: There was no answer in time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            await api.call("GET", "/v1/tiers")
        except ApiError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.05)
        else:
            return
