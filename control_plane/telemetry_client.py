"""The common parts of clients of the telemetry service: requests, deadlines, errors."""

import aiohttp

_ANSWER_BYTES_MAX = 16 << 20


class FeedDownError(RuntimeError):
    """Telemetry has no answer to be had now; the message says why. Asking again may help."""


def open_session(telemetry_key: str, deadline_s: float) -> aiohttp.ClientSession:
    """Return a session; the service need not be there.

    Args:
        telemetry_key: The admin key that it takes.
        deadline_s: Seconds for each question, from its begin to the end of its answer.
    """
    return aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {telemetry_key}"},
        timeout=aiohttp.ClientTimeout(total=deadline_s),
        trust_env=False,
    )


async def read_bounded(response: aiohttp.ClientResponse) -> bytes:
    """Return the body of an answer; FeedDownError when it has more than 16 MiB."""
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > _ANSWER_BYTES_MAX:
            raise FeedDownError(f"{response.url} answers with more than 16 MiB")
    return bytes(body)
