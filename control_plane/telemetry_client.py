"""The common parts of clients of the telemetry service, with sessions, deadlines and errors."""

import aiohttp

_ANSWER_BYTES_MAX = 16 << 20


class FeedDownError(RuntimeError):
    """The telemetry service does not answer now. The message has the reason.

    A retry may succeed.
    """


def open_session(telemetry_key: str, deadline_s: float) -> aiohttp.ClientSession:
    """Return an HTTP session for the telemetry service, which need not run yet.

    Args:
        telemetry_key: Admin key for the service.
        deadline_s: Seconds for each request, from its start to the end of its answer.
    """
    return aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {telemetry_key}"},
        timeout=aiohttp.ClientTimeout(total=deadline_s),
        trust_env=False,
    )


async def read_bounded(response: aiohttp.ClientResponse) -> bytes:
    """Return the body of an answer. Raises FeedDownError if the body has more than 16 MiB."""
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > _ANSWER_BYTES_MAX:
            raise FeedDownError(f"{response.url} answers with more than 16 MiB")
    return bytes(body)
