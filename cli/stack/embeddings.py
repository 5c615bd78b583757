"""The embedding model of the local stack, optional because its weights are another package.

No error in this module may fail the start of the stack, because chat works without embeddings.
"""

import asyncio
from contextlib import suppress

from cli.api import ApiClient, ApiError
from cli.stack.home import Home
from cli.stack.seed import ShippedBase, remove_unused, retire_pools, seed_base
from replica.embedding.bert import read_bert_config
from replica.embedding.package import INSTALL, MODEL_NAME, find_package
from replica.engine.artifact import ArtifactError
from sluice.artifacts import import_directory

SERVED = MODEL_NAME
UNWANTED = "off (--no-embeddings)"
ABSENT = f"off: their model is not installed; make setup, or: {INSTALL}; then start again"
_ENGINE, _POOL_PREFIX = "embed", "minilm-"
_POLL_S = 0.2


def describe(*, is_wanted: bool) -> str:
    """Return the name of the model, or the reason why it is not served, with a correction."""
    if not is_wanted:
        return UNWANTED
    return ABSENT if find_package() is None else SERVED


def import_base(home: Home) -> ShippedBase:
    """Copy the installed model into the artifact folder, which blocks for about 0.3 s.

    Raises:
        ArtifactError: The directory has no model that the engine can serve.
        OSError: The disk is full, or a file is missing.
    """
    package = find_package()
    if package is None:
        raise ArtifactError(ABSENT)
    digest = import_directory(package, home.artifacts)
    return ShippedBase(digest, MODEL_NAME, read_bert_config(package).tokens_max)


async def start(home: Home, api: ApiClient) -> str:
    """Import the model, request a replica, and return the id of its pool.

    Raises:
        ApiError: The control plane refused.
        ArtifactError: The base is not valid, as for `import_base`.
        OSError: A file cannot be read or written, as for `import_base`.
    """
    base = await asyncio.to_thread(import_base, home)
    return await seed_base(api, base, engine=_ENGINE, replicas=1, pool_prefix=_POOL_PREFIX)


async def stop(api: ApiClient) -> None:
    """Delete the model and the pools of an earlier start."""
    if await api.find(f"/v1/models/{MODEL_NAME}") is not None:
        await remove_unused(api, f"/v1/models/{MODEL_NAME}")
    await retire_pools(api, _POOL_PREFIX)


async def wait_ready(api: ApiClient, pool_id: str, timeout_s: float) -> str:
    """Wait for the replica. Returns the reason of a failure, or an empty string if it serves."""
    reason = "no replica yet"
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while reason:
                await asyncio.sleep(_POLL_S)
                reason = await _missing(api, pool_id)
    return reason


async def _missing(api: ApiClient, pool_id: str) -> str:
    try:
        found = [r for r in await api.list("/v1/replicas") if r["pool_id"] == pool_id]
    except ApiError as error:
        return str(error)
    if any(replica["state"] == "ready" for replica in found):
        return ""
    return "; ".join(f"{r['state']} {r.get('message') or ''}".strip() for r in found) or "waiting"
