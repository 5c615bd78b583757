"""The stack's base, told to the control plane: adapters are checked against its files."""

import asyncio
from pathlib import Path

from cli.api import Api, ApiError
from cli.uploads import upload
from sluice.manifests import ManifestError, manifest_of_directory

PUSH_S_MAX = 30.0  # of a start that serves already; a push that broke off goes on at the next one


async def push_base(api: Api, directory: Path, timeout_s: float = PUSH_S_MAX) -> str:
    """Upload a base, unless it is there already.

    Args:
        api: Of the control plane.
        directory: The artifact; its name is its digest.
        timeout_s: In all.

    Returns:
        Why it is not there, in a line for people; empty when it is.
    """
    try:
        async with asyncio.timeout(timeout_s):
            if await api.find(f"/v1/artifacts/{directory.name}") is None:
                manifest = await asyncio.to_thread(manifest_of_directory, directory)
                body = {"kind": "base", "manifest": manifest.document()}
                await upload(api, directory, manifest, body)
    except TimeoutError:
        return f"the upload of the base took more than {timeout_s:g} s; the next start goes on"
    except (ApiError, ManifestError, OSError) as error:
        return str(error)
    return ""
