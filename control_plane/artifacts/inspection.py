"""Starts the inspector process, and kills it after its time limit."""

import asyncio
import contextlib
import json
import os
import signal
import sys

import structlog

from control_plane.artifacts.inspector import STORE_FAILED, InspectionJob

log = structlog.get_logger(__name__)

# Environment variables for the inspector, which needs Python and the store. The inspector must not
# receive the control plane's secrets.
_PASSED_ON = ("PATH", "HOME", "LANG", "SSL_CERT_FILE", "SSL_CERT_DIR")
_ERRORS_SHOWN = 500
# Exit statuses without a result. The store was unreadable, or the process was stopped, so a retry
# may succeed.
_UNDECIDED = {STORE_FAILED, -signal.SIGINT, -signal.SIGTERM}


async def inspect_apart(job: InspectionJob, limit_s: float) -> list[str] | None:
    """Return the reasons why an artifact is refused, which a separate process determines.

    Args:
        job: The artifact to inspect, with its limits.
        limit_s: Seconds after which the process is killed and the artifact is refused.

    Returns:
        Reasons, one sentence each, or none if the artifact is accepted. The result is None if the
        store could not be read, or if another process stopped the inspector.
    """
    env = {
        name: value
        for name, value in os.environ.items()
        if name in _PASSED_ON or name.startswith("AWS_")
    }
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "control_plane.artifacts.inspector"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=env,
        )
    except OSError as error:
        log.warning("inspector_not_started", error=str(error))
        return None
    try:
        async with asyncio.timeout(limit_s):
            report, errors = await process.communicate(job.to_json())
    except TimeoutError:
        return [f"the artifact could not be checked within {limit_s:.0f} s: make it smaller"]
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode == 0:
        with contextlib.suppress(ValueError, TypeError, KeyError):
            return [str(reason) for reason in json.loads(report)["reasons"]]
    tail = errors.decode(errors="replace")[-_ERRORS_SHOWN:]
    log.warning("inspection_failed", status=process.returncode, errors=tail)
    if process.returncode in _UNDECIDED:
        return None
    return [
        "the process that checks the files ended early: the tokenizer or template"
        " may be broken or far too large, save them anew"
    ]
