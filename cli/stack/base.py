"""Reads the files of an installation's first base, and uploads them to the control plane."""

import asyncio
from pathlib import Path

from cli.api import ApiClient, ApiError
from cli.stack.preflight import find_adapters, find_base
from cli.stack.seed import ShippedBase, read_base
from cli.uploads import upload
from sluice.artifacts import import_directory
from sluice.manifests import ManifestError, manifest_of_directory

# Seconds for the upload, during which the stack already serves. The next start continues an
# interrupted upload.
PUSH_S_MAX = 30.0


def import_base(chosen: Path | None, artifacts: Path) -> ShippedBase:
    """Copy a base, by default the shipped base with its adapters, into an artifact folder.

    Raises:
        StackError: The directory has no base.
        OSError: The disk is full, or a file cannot be read.
    """
    directory = find_base(chosen)
    digest = import_directory(directory, artifacts)
    adapters = tuple(
        (path.name, import_directory(path, artifacts)) for path in find_adapters(chosen)
    )
    return read_base(directory, digest, adapters)


async def push_base(
    api: ApiClient, directory: Path, timeout_s: float = PUSH_S_MAX, *, base_digest: str = ""
) -> str:
    """Upload a base, or an adapter of `base_digest`, unless it exists already.

    Args:
        api: Client of the control plane.
        directory: Directory of the artifact, named by the digest.
        timeout_s: Seconds for the whole upload.
        base_digest: Existing base of an adapter. Empty if the artifact itself is a base.

    Returns:
        Reason of a failure in one line, or an empty string if the artifact exists now.
    """
    subject = {"kind": "adapter", "base_digest": base_digest} if base_digest else {"kind": "base"}
    try:
        async with asyncio.timeout(timeout_s):
            if await api.find(f"/v1/artifacts/{directory.name}") is None:
                manifest = await asyncio.to_thread(manifest_of_directory, directory)
                body = subject | {"manifest": manifest.document()}
                await upload(api, directory, manifest, body)
    except TimeoutError:
        return f"the upload took more than {timeout_s:g} s; the next start goes on"
    except (ApiError, ManifestError, OSError) as error:
        return str(error)
    return ""
