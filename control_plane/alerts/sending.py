"""Sends notices over HTTP and SMTP, only to checked addresses, and with a deadline."""

import asyncio
import smtplib
import socket
import ssl
import time
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from email.message import EmailMessage
from typing import TypeVar
from urllib.parse import urlsplit

import aiohttp

from control_plane.alerts import notices
from control_plane.alerts.notices import Notice
from control_plane.alerts.receivers import Receiver, refusal
from sluice.checked_addresses import (
    CheckedResolver,
    Refuse,
    check_literal,
    checked_addresses,
    refused_for,
)
from sluice.ids import new_id

_Result = TypeVar("_Result")

TIMEOUT_S = 10.0
_ANSWER_BYTES_MAX = 2000
_RETRYABLE = frozenset({408, 425, 429})  # statuses below 500 after which a retry may succeed


@dataclass(frozen=True, slots=True)
class SendError(Exception):
    """A receiver did not accept a notice.

    Attributes:
        reason: Reason in words, without secrets.
        may_repeat: Whether a retry may succeed.
        after_ms: Wait that the receiver requested, in milliseconds.
    """

    reason: str
    may_repeat: bool = True
    after_ms: int = 0


async def send(receiver: Receiver, notice: Notice, source: str) -> None:
    """Send a notice.

    Raises:
        SendError: The receiver did not accept the notice, or its address must not be called.
    """
    if receiver.kind == "email":
        await in_time(_mail(receiver, notice))
    else:
        url, body, headers = request_of(receiver, notice, source)
        await post(url, body, headers, is_internal=receiver.is_internal)


async def post(
    url: str, body: bytes, headers: Mapping[str, str], *, is_internal: bool = False
) -> None:
    """Post a body to a URL, after a check of the address to which the URL resolves.

    Raises:
        SendError: The receiver did not accept the body, or its address must not be called.
    """
    await in_time(_post(url, body, headers, is_internal=is_internal))


async def in_time(work: Awaitable[_Result]) -> _Result:
    """Return the result of `work`, within the deadline.

    Raises:
        SendError: The work failed or missed the deadline.
    """
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return await work
    except TimeoutError:
        raise SendError(f"no answer within {TIMEOUT_S:g} s") from None
    except (OSError, aiohttp.ClientError, smtplib.SMTPException) as error:
        raise _failed(error) from None


def _failed(error: Exception) -> SendError:
    if reason := refused_for(error):
        return SendError(reason, may_repeat=False)
    cause = error.__cause__ or error
    text = f"{type(error).__name__}: {cause}".replace("\n", " ")[:200]
    refused = isinstance(error, smtplib.SMTPResponseException) and error.smtp_code >= 500
    lost = isinstance(error, smtplib.SMTPRecipientsRefused)
    return SendError(text, may_repeat=not (refused or lost))


def _refuse(*, is_internal: bool) -> Refuse:
    return lambda _host, _port, address: refusal(address, is_internal=is_internal)


async def _post(url: str, body: bytes, headers: Mapping[str, str], *, is_internal: bool) -> None:
    parts = urlsplit(url)
    if parts.hostname is None:
        raise SendError("the URL has no host", may_repeat=False)
    refuse = _refuse(is_internal=is_internal)
    check_literal(parts.hostname, parts.port or 0, refuse)
    connector = aiohttp.TCPConnector(resolver=CheckedResolver(refuse), force_close=True)
    async with (
        aiohttp.ClientSession(connector=connector, trust_env=False) as http,
        http.post(url, data=body, headers=headers, allow_redirects=False) as answer,
    ):
        if answer.status >= 300:
            said = (await answer.content.read(_ANSWER_BYTES_MAX)).decode(errors="replace")
            raise refused(answer.status, said, answer.headers.get("Retry-After", ""))


def refused(status: int, said: str, wait: str) -> SendError:
    """Return the error for an answer without success.

    Args:
        status: HTTP status of the answer.
        said: Beginning of the answer's text.
        wait: Value of the answer's Retry-After header, or empty without the header.
    """
    after_ms = int(wait) * 1000 if wait.isdigit() and len(wait) < 6 else 0
    reason = f"status {status}: {' '.join(said.split())[:160]}"
    return SendError(reason, may_repeat=status in _RETRYABLE or status >= 500, after_ms=after_ms)


def request_of(
    receiver: Receiver, notice: Notice, source: str
) -> tuple[str, bytes, dict[str, str]]:
    """Return URL, body and headers of the request that sends a notice."""
    secret, url = receiver.secret.get_secret_value(), receiver.url
    headers = {"Content-Type": "application/json", "User-Agent": "sluice-alerts"}
    match receiver.kind:
        case "slack":
            return url, notices.encoded(notices.slack(notice)), headers
        case "pagerduty":
            body = notices.encoded(notices.pagerduty(notice, secret, source))
            return url or notices.PAGERDUTY_URL, body, headers
        case "alertmanager":
            body = notices.encoded(notices.alertmanager(notice))
            if secret:
                headers["Authorization"] = f"Bearer {secret}"
            return f"{url.rstrip('/')}/api/v2/alerts", body, headers
        case _:
            body = notices.encoded(notices.webhook(notice))
            headers["Sluice-Delivery"] = new_id("delivery")
            headers["Sluice-Signature"] = notices.signature(secret, body, round(time.time()))
            return url, body, headers


class _CheckedSmtp(smtplib.SMTP):
    """An SMTP client that connects to a checked address, and verifies the certificate by name."""

    address = ""

    def _get_socket(self, host: str, port: int, timeout: float) -> socket.socket:  # noqa: ARG002
        return socket.create_connection((self.address, port), timeout)


async def _mail(receiver: Receiver, notice: Notice) -> None:
    parts = urlsplit(receiver.url)
    host, is_tls = parts.hostname or "", parts.scheme == "smtps"
    port = parts.port or (465 if is_tls else 587)
    addresses = await checked_addresses(host, port, _refuse(is_internal=receiver.is_internal))
    message = notices.email(notice, receiver.sender, receiver.to, new_id("mail"))
    await asyncio.to_thread(_deliver, receiver, message, (addresses[0]["host"], host, port), is_tls)


def _deliver(
    receiver: Receiver, message: EmailMessage, where: tuple[str, str, int], is_tls: bool
) -> None:
    """Deliver a message to the server. A password is sent over TLS only."""
    address, host, port = where
    context = ssl.create_default_context()
    smtp = _CheckedSmtp(timeout=TIMEOUT_S)
    smtp.address = address
    if is_tls:
        raw = socket.create_connection((address, port), TIMEOUT_S)
        smtp.sock = context.wrap_socket(raw, server_hostname=host)
        smtp.file = None
        code, said = smtp.getreply()
    else:
        code, said = smtp.connect(host, port)
    with smtp:
        if code != 220:
            raise smtplib.SMTPConnectError(code, said)
        smtp.ehlo()
        if not is_tls and smtp.has_extn("starttls"):
            smtp._host = host  # type: ignore[attr-defined] # noqa: SLF001 - name that TLS verifies
            smtp.starttls(context=context)
            smtp.ehlo()
            is_tls = True
        if receiver.user:
            if not is_tls:
                raise smtplib.SMTPNotSupportedError(
                    "the server offers no TLS: the password is not sent"
                )
            smtp.login(receiver.user, receiver.secret.get_secret_value())
        smtp.send_message(message)
