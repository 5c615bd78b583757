"""The state of a connection in `h2`, with bounds against hostile clients.

Names with an underscore are private to `h2`, which offers no other hook. A test in
`tests/unit/gateway/test_http2.py` fails if these names change.
"""

from typing import Any

from h2.config import H2Configuration
from h2.connection import ConnectionInputs, H2Connection
from h2.events import ConnectionTerminated, Event
from h2.settings import SettingCodes, Settings
from hpack import Encoder

from gateway.server.malformed import HEAD_BYTES_MAX

# Bytes of one body that a client may send ahead. A body of 4 MiB needs 2 s if a round trip needs
# 100 ms.
STREAM_WINDOW_BYTES = 256 << 10
_WINDOW_BYTES = 1 << 20  # maximum of unread bytes of all streams of a connection
_DEFAULT_WINDOW_BYTES = 65_535
_TABLE_BYTES_MAX = 4096  # bytes of the header table for answers
_UNBOUNDED = 2**31 - 1
_CONFIGURATION = H2Configuration(
    client_side=False,
    header_encoding=None,
    validate_inbound_headers=False,  # `heads` validates them instead
    normalize_inbound_headers=False,
    validate_outbound_headers=False,
    normalize_outbound_headers=False,
)


class _PlainEncoder(Encoder):
    """Encodes header fields without Huffman coding, which costs 50 us to save about 150 bytes."""

    def encode(self, headers: Any, huffman: bool = False) -> bytes:  # noqa: ARG002 - hpack's
        """Return the encoded block of header fields.

        A client's setting may shrink the header table but not enlarge it.
        """
        if self.header_table_size > _TABLE_BYTES_MAX:  # noqa: PLR1730 - a change is sent
            self.header_table_size = _TABLE_BYTES_MAX
        return super().encode(headers, huffman=False)


class Http2State(H2Connection):
    """The `h2` state of one server connection."""

    MAX_CLOSED_STREAMS = 1024  # h2's default of 65,536 would use 6 MB per long connection

    def __init__(self, streams_max: int) -> None:
        """After the construction, `data_to_send` returns the first bytes for the client."""
        super().__init__(_CONFIGURATION)
        self.encoder = _PlainEncoder()
        told = {
            SettingCodes.MAX_CONCURRENT_STREAMS: streams_max,
            SettingCodes.MAX_HEADER_LIST_SIZE: HEAD_BYTES_MAX,
            SettingCodes.INITIAL_WINDOW_SIZE: STREAM_WINDOW_BYTES,
        }
        self.local_settings = Settings(client=False, initial_values=told)
        self.initiate_connection()
        # With the real maximum, h2 would end the whole connection instead of refusing one stream.
        bounds = {**told, SettingCodes.MAX_CONCURRENT_STREAMS: _UNBOUNDED}
        self.local_settings = Settings(client=False, initial_values=bounds)
        self.increment_flow_control_window(_WINDOW_BYTES - _DEFAULT_WINDOW_BYTES)

    def _receive_goaway_frame(self, frame: Any) -> tuple[list[Any], list[Event]]:
        """Record that the client opens no more streams.

        h2 itself would drop the running answers.
        """
        # A ping changes no state, so this input only checks that the connection is open.
        self.state_machine.process_input(ConnectionInputs.RECV_PING)
        event = ConnectionTerminated()
        event.last_stream_id = frame.last_stream_id
        return [], [event]
