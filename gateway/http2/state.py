"""The state of a connection in `h2`, with the bounds of a server that trusts no client.

The names with an underscore are h2's, which has no other hook; `tests/unit/gateway/test_http2.py`
fails when they change.
"""

from typing import Any

from h2.config import H2Configuration
from h2.connection import ConnectionInputs, H2Connection
from h2.events import ConnectionTerminated, Event
from h2.settings import SettingCodes, Settings
from hpack import Encoder

from gateway.server.malformed import HEAD_BYTES_MAX

# A client may send so much of one body ahead of its reader: 4 MiB over a line of 100 ms take 2 s.
STREAM_WINDOW_BYTES = 256 << 10
_WINDOW_BYTES = 1 << 20  # of all streams together
_DEFAULT_WINDOW_BYTES = 65_535
_TABLE_BYTES_MAX = 4096  # of header fields that answers have in common
_UNBOUNDED = 2**31 - 1
_CONFIGURATION = H2Configuration(
    client_side=False,
    header_encoding=None,
    validate_inbound_headers=False,  # see `heads`
    normalize_inbound_headers=False,
    validate_outbound_headers=False,
    normalize_outbound_headers=False,
)


class _PlainEncoder(Encoder):
    """Codes fields as they are: Huffman's code would halve some 300 bytes, and takes 50 us."""

    def encode(self, headers: Any, huffman: bool = False) -> bytes:  # noqa: ARG002 - hpack's
        """Return the block of fields.

        A client may ask for a smaller table of fields, and not for more memory.
        """
        if self.header_table_size > _TABLE_BYTES_MAX:  # noqa: PLR1730 - a setting is told
            self.header_table_size = _TABLE_BYTES_MAX
        return super().encode(headers, huffman=False)


class Http2State(H2Connection):
    """The state of a server's connection."""

    MAX_CLOSED_STREAMS = 1024  # h2 remembers 65,536: 6 MB for a connection that lasts

    def __init__(self, streams_max: int) -> None:
        """Prepare; the first bytes for the client wait in `data_to_send`."""
        super().__init__(_CONFIGURATION)
        self.encoder = _PlainEncoder()
        told = {
            SettingCodes.MAX_CONCURRENT_STREAMS: streams_max,
            SettingCodes.MAX_HEADER_LIST_SIZE: HEAD_BYTES_MAX,
            SettingCodes.INITIAL_WINDOW_SIZE: STREAM_WINDOW_BYTES,
        }
        self.local_settings = Settings(client=False, initial_values=told)
        self.initiate_connection()
        # h2 would end the whole connection where one stream too many is to be refused.
        bounds = {**told, SettingCodes.MAX_CONCURRENT_STREAMS: _UNBOUNDED}
        self.local_settings = Settings(client=False, initial_values=bounds)
        self.increment_flow_control_window(_WINDOW_BYTES - _DEFAULT_WINDOW_BYTES)

    def _receive_goaway_frame(self, frame: Any) -> tuple[list[Any], list[Event]]:
        """Note that the client opens no more streams; h2 would drop the answers under way."""
        self.state_machine.process_input(ConnectionInputs.RECV_PING)  # may it be said now?
        event = ConnectionTerminated()
        event.last_stream_id = frame.last_stream_id
        return [], [event]
