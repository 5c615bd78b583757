"""Selects the poller for gRPC's sockets in this process."""

import os
import sys

_EXPERIMENTS = "GRPC_EXPERIMENTS"


def poll_in_place() -> None:
    """Make the single thread that waits for gRPC's events read the sockets as well.

    By default (grpcio 1.85) a pool of threads reads the sockets and wakes that thread, which wakes
    the event loop. With few busy streams this is one unnecessary wake-up for each message. Without
    it, the CPU time of reading a paced message is 113 instead of 200 us, and of writing 155 instead
    of 192. The call must precede gRPC's import. A value in the environment has precedence.
    """
    assert "grpc" not in sys.modules, "gRPC has looked at the environment already"
    os.environ.setdefault(_EXPERIMENTS, "-event_engine_client,-event_engine_listener")
