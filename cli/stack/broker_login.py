"""The login of a Kafka client at the local stack's broker, whose mock cluster has no users.

This module has no I/O. Each request frame has one response frame, until `is_done`. It implements
the part of Kafka's protocol before the login: ApiVersions, SaslHandshake (1), SaslAuthenticate
(0, 1). A frame consists of its length (i32, big endian) and a payload. The functions here receive
and return payloads.
"""

import struct

from cli.stack.scram import MECHANISM, Credential, ScramError, ScramExchange

FRAME_MAX_BYTES = 4096  # more than a login needs, which has a few hundred bytes
_I32 = struct.Struct(">i")
_REQUEST = struct.Struct(">hhih")  # key, version, correlation, length of the client's name
_API = struct.Struct(">hhh")  # key, lowest and highest version
_API_VERSIONS, _HANDSHAKE, _AUTHENTICATE = 18, 17, 36
_LOGIN_APIS = _API.pack(_HANDSHAKE, 1, 1) + _API.pack(_AUTHENTICATE, 0, 1)
_OUR_APIS = 2
# Kafka's error codes.
_UNSUPPORTED_VERSION, _UNSUPPORTED_MECHANISM, _FAILED = 35, 33, 58
_VERSIONS_MAX = 2  # latest known version of ApiVersions. To later ones, brokers answer version 0


class LoginError(Exception):
    """The connection has to end, after `reply` is sent to the client if it is not empty."""

    def __init__(self, text: str, reply: bytes = b"") -> None:
        super().__init__(text)
        self.reply = reply


class _RefusedError(Exception):
    """The connection has to end after the answer to a request."""

    def __init__(self, text: str, content: bytes) -> None:
        super().__init__(text)
        self.content = content


def versions_request() -> bytes:
    """Return an ApiVersions request of version 0."""
    return _REQUEST.pack(_API_VERSIONS, 0, 0, -1)


def apis_of(response: bytes) -> bytes:
    """Return the packed APIs of a response to `versions_request`.

    Raises ValueError for any other response.
    """
    _, error, count = struct.unpack_from(">ihi", response)
    apis = response[10 : 10 + count * _API.size]
    if error or len(apis) != count * _API.size:
        raise ValueError(f"no list of APIs, Kafka's error is {error}")
    return apis


class Login:
    """The login of one connection."""

    def __init__(self, credential: Credential, apis: bytes) -> None:
        """Create the state of a connection's login.

        Args:
            credential: Credential of the only user.
            apis: API versions of the broker, as `apis_of` returns them.
        """
        self._apis = apis
        self._exchange = ScramExchange(credential)
        self._has_shaken = self._has_begun = False
        self.is_done = False

    def answer(self, request: bytes) -> bytes:
        """Return the response to a request. Raises LoginError."""
        correlation = request[4:8]
        try:
            key, version, _, name_bytes = _REQUEST.unpack_from(request)
            return correlation + self._content(
                key, version, request[_REQUEST.size + max(name_bytes, 0) :]
            )
        except struct.error:
            raise LoginError("the request is cut") from None
        except _RefusedError as refused:
            raise LoginError(str(refused), correlation + refused.content) from None

    def _content(self, key: int, version: int, body: bytes) -> bytes:
        if key == _API_VERSIONS:
            return self._versions(version)
        if key == _HANDSHAKE and version == 1 and not self._has_shaken:
            return self._handshake(body)
        if key == _AUTHENTICATE and version in {0, 1} and self._has_shaken:
            return self._authenticate(version, body)
        raise LoginError(f"request {key} of version {version} before the login")

    def _versions(self, version: int) -> bytes:
        is_known = 0 <= version <= _VERSIONS_MAX
        count = len(self._apis) // _API.size + _OUR_APIS
        head = struct.pack(">hi", 0 if is_known else _UNSUPPORTED_VERSION, count)
        throttle = _I32.pack(0) if is_known and version else b""
        return head + self._apis + _LOGIN_APIS + throttle

    def _handshake(self, body: bytes) -> bytes:
        (length,) = struct.unpack_from(">h", body)
        self._has_shaken = body[2 : 2 + max(length, 0)] == MECHANISM.encode()
        error = 0 if self._has_shaken else _UNSUPPORTED_MECHANISM
        return struct.pack(">hi", error, 1) + _string(MECHANISM.encode())

    def _authenticate(self, version: int, body: bytes) -> bytes:
        (length,) = _I32.unpack_from(body)
        try:
            proof = self._step(body[4 : 4 + max(length, 0)])
        except ScramError as error:
            text = str(error)
            raise _RefusedError(
                text, _authenticated(version, _FAILED, text.encode(), b"")
            ) from None
        return _authenticated(version, 0, None, proof)

    def _step(self, message: bytes) -> bytes:
        if not self._has_begun:
            self._has_begun = True
            return self._exchange.first(message)
        proof = self._exchange.final(message)
        self.is_done = True
        return proof


def _authenticated(version: int, error: int, text: bytes | None, proof: bytes) -> bytes:
    lifetime = struct.pack(">q", 0) if version else b""  # 0 means a session without an end
    return struct.pack(">h", error) + _string(text) + _I32.pack(len(proof)) + proof + lifetime


def _string(text: bytes | None) -> bytes:
    return struct.pack(">h", -1) if text is None else struct.pack(">h", len(text)) + text
