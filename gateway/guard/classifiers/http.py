"""A classifier over HTTP, with the interface of OpenAI's `/v1/moderations`."""

import asyncio
from collections.abc import Mapping, Sequence

import aiohttp
import orjson

from gateway.guard.classifiers.protocol import ClassifierError, moderation_scores

_ANSWER_BYTES_MAX = 4 << 20


class HttpClassifier:
    """Sends texts to one URL. The HTTP session is opened with the first request."""

    def __init__(self, url: str, *, model: str = "", key: str = "") -> None:
        """The arguments are the same for all requests.

        Args:
            url: URL that texts are posted to.
            model: Model name to send in each request, or empty to send none.
            key: Bearer token, or empty to send none.
        """
        self._url = url
        self._model = {"model": model} if model else {}
        self._headers = {"content-type": "application/json"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"
        self._session: aiohttp.ClientSession | None = None

    async def scores(
        self, texts: Sequence[str], *, timeout_s: float
    ) -> Sequence[Mapping[str, float]]:
        """Return the scores of all texts, from one request to the URL."""
        session = self._session = self._session or aiohttp.ClientSession()
        body = orjson.dumps({**self._model, "input": list(texts)})
        try:
            async with (
                asyncio.timeout(timeout_s),
                session.post(
                    self._url, data=body, headers=self._headers, allow_redirects=False
                ) as answer,
            ):
                if answer.status != 200:
                    raise ClassifierError(f"it answered with status {answer.status}")
                content = await _read(answer)
        except TimeoutError:
            raise ClassifierError(f"no answer within {timeout_s:.2f} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ClassifierError(f"it cannot be asked: {type(error).__name__}") from error
        try:
            document = orjson.loads(content)
        except orjson.JSONDecodeError:
            raise ClassifierError("the answer is no JSON") from None
        return moderation_scores(document, len(texts))

    async def close(self) -> None:
        """Close the HTTP session."""
        if self._session is not None:
            await self._session.close()


async def _read(answer: aiohttp.ClientResponse) -> bytes:
    parts, size = list[bytes](), 0
    async for part in answer.content.iter_chunked(1 << 16):
        size += len(part)
        if size > _ANSWER_BYTES_MAX:
            raise ClassifierError(f"the answer has more than {_ANSWER_BYTES_MAX} bytes")
        parts.append(part)
    return b"".join(parts)
