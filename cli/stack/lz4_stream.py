"""Decodes bodies that consist of several lz4 frames, while they arrive.

The library's decoder ends after one frame, but clients send a frame per block of rows.
"""

from collections.abc import Iterator

import lz4.frame

_STEP_BYTES = 1 << 20


class Lz4Stream:
    """Decodes lz4 frames in parts, after any of which the caller may stop.

    Attributes:
        is_complete: Whether the input so far ends with a complete frame.
    """

    def __init__(self) -> None:
        self.is_complete = True
        self._decoder = lz4.frame.LZ4FrameDecompressor()

    def decode(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the decoded bytes of further input, in parts of at most 1 MiB.

        Raises:
            RuntimeError: The bytes are not lz4 frames.
        """
        left = chunk
        while left or not self._decoder.needs_input:
            self.is_complete = False
            yield self._decoder.decompress(left, max_length=_STEP_BYTES)
            left = b""
            if self._decoder.eof:
                left = self._decoder.unused_data or b""
                self._decoder = lz4.frame.LZ4FrameDecompressor()
                self.is_complete = True
