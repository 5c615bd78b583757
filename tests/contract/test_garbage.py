"""A host that answers with bytes that are no frame is lost, like one that does not answer."""

from collections.abc import AsyncIterator

import grpc.aio
import pytest

from sluice.errors import FailedError
from sluice.kserve import probe

pytestmark = pytest.mark.real
SERVICE = "inference.GRPCInferenceService"


async def test_bytes_that_are_no_frame() -> None:
    async def nonsense(
        requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> None:
        async for _ in requests:  # until the caller leaves
            await context.write(b"\xff\xff\xff")

    server = grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(nonsense)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICE, {"ModelStreamInfer": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        with pytest.raises(FailedError, match="invalid frame"):
            await probe(f"127.0.0.1:{port}", "llm", [1], 1, timeout_s=60)
    finally:
        await server.stop(None)
