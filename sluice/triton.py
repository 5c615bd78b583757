"""Triton's protocol, from the generated modules of its client package, without the client.

`tritonclient.grpc` imports its client at once, and with it numpy. The import costs 0.6 s and 26 MB
in every gateway worker, router and agent, although none uses the client. So the package's own code
is skipped, and its two generated modules are imported directly. A later import of the client works
as usual, with the same messages.
"""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec, module_from_spec
from typing import Any, cast

_PACKAGE = "tritonclient.grpc"


@contextmanager
def _not_run(name: str) -> Generator[None]:
    """Permit imports of a package's modules without running the package's own code."""
    spec = None if name in sys.modules else find_spec(name)
    if spec is None:
        yield
        return
    sys.modules[name] = module_from_spec(spec)
    try:
        yield
    finally:
        del sys.modules[name]


with _not_run(_PACKAGE):
    from tritonclient.grpc import service_pb2, service_pb2_grpc

# The package has no type annotations.
messages = cast("Any", service_pb2)
Stub = cast("Any", service_pb2_grpc.GRPCInferenceServiceStub)
Servicer = cast("Any", service_pb2_grpc.GRPCInferenceServiceServicer)
add_servicer = cast("Any", service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server)
