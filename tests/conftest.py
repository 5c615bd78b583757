"""Shared by all tests."""

import os

# Test fixtures start servers as another user, for which Python forks. gRPC's fork handlers may
# abort such a child before it becomes the server; without them nothing of gRPC runs in it.
# Has to be set before gRPC is imported.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

from hypothesis import settings

from sluice import process
from tests.ports import free_port

# Before anybody imports it by name.
process.free_port = free_port

# A machine that stalls is no reason to fail.
settings.register_profile("sluice", deadline=None)
settings.load_profile("sluice")
