"""Triton's messages come from its client package, and nothing else does."""

import subprocess
import sys

import pytest

OURS = "from sluice.triton import Stub, messages\n"
CLIENT = "import tritonclient.grpc as client, tritonclient.grpc.service_pb2 as generated\n"
SAME = (
    "assert messages is generated is client.service_pb2\n"
    "assert Stub is client.service_pb2_grpc.GRPCInferenceServiceStub\n"
    "client.InferInput('x', [1], 'INT32')\n"
    "from tritonclient.grpc import aio\n"
    "assert issubclass(aio.InferenceServerClient, object)\n"
)


def run(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=False, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", ["sluice.triton", "router.app", "gateway.app"])
def test_messages_cost_no_client_and_no_numpy(module: str) -> None:
    run(
        f"import sys, {module}\n"
        "assert 'tritonclient.grpc.service_pb2' in sys.modules\n"
        "others = {'tritonclient.grpc', 'tritonclient.grpc._client', 'numpy', 'rapidjson'}\n"
        "assert not others & set(sys.modules), others & set(sys.modules)\n"
    )


@pytest.mark.parametrize("code", [OURS + CLIENT, CLIENT + OURS], ids=["before", "after"])
def test_the_client_may_be_used_in_the_same_process(code: str) -> None:
    run(code + SAME)
