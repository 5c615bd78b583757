"""The choice of the poller for gRPC's sockets in this process."""

import os
import sys

_EXPERIMENTS = "GRPC_EXPERIMENTS"


def poll_in_place() -> None:
    """Let the one thread that waits for gRPC's events read the sockets as well.

    By default (grpcio 1.85) a pool of threads reads them and wakes that thread, which wakes the
    event loop. With few streams that say much that is one wake-up too many for each message: of
    a paced one, reading takes 113 instead of 200 us of CPU, writing 155 instead of 192.
    Call it before gRPC is imported; what the environment says about it already stands.
    """
    assert "grpc" not in sys.modules, "gRPC has looked at the environment already"
    os.environ.setdefault(_EXPERIMENTS, "-event_engine_client,-event_engine_listener")
