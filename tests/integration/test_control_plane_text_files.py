"""What gateways get of bases: small files by name, out of the store, and nothing else."""

import asyncio
from pathlib import Path

import grpc.aio
import pytest

from gateway.bases.source import BaseFetchError, fetch_base
from sluice.wire.distribution.v1 import distribution_pb2 as wire
from sluice.wire.distribution.v1.distribution_pb2_grpc import DistributionServiceStub
from tests.integration.artifact_site import Site, push
from tests.links import trusted_channel
from tests.support.random_models import write_random_model

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]

GATEWAYS = 100
PATIENCE_S = 240.0
# All that may be said to one that has asked for what is there: too many ask, or the machine stalls.
COME_BACK = (
    "try again later",
    "the database cannot be reached",
    "the control plane does not answer",
    "failed to connect",
)


async def pushed(site: Site) -> tuple[str, Path]:
    directory = site.home / "base"
    write_random_model(directory)
    answer = await push(site.admin, directory)
    assert answer.is_success, answer.text
    return answer.json()["digest"], directory


async def test_a_gateway_gets_the_small_files_of_a_base(site) -> None:
    digest, directory = await pushed(site)
    found = await fetch_base(site.plane.grpc_address, digest)
    assert found == {name: (directory / name).read_bytes() for name in found}
    assert {"tokenizer.json", "tokenizer_config.json", "config.json"} <= found.keys()
    assert "model.safetensors" not in found


async def test_other_roles_are_refused_and_missing_files_are_named(site) -> None:
    digest, _ = await pushed(site)
    codes: list[grpc.StatusCode] = []
    async with trusted_channel(site.plane.grpc_address) as channel:
        stub = DistributionServiceStub(channel)
        for asked, name in (
            (digest, "model.safetensors"),
            (digest, "../../secrets"),
            ("x", "tokenizer.json"),
            ("0" * 64, "tokenizer.json"),
            (digest, "chat_template.jinja"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                async with asyncio.timeout(60):
                    await stub.TextFile(wire.TextFileRequest(digest=asked, name=name)).read()
            codes.append(refused.value.code())
    bad, missing = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
    assert codes == [bad, bad, bad, missing, missing]


async def test_lost_and_changed_files_are_never_served(site) -> None:
    digest, directory = await pushed(site)
    content = (directory / "tokenizer.json").read_bytes()
    (chunk,) = (
        path for path in site.store.rglob("*") if path.is_file() and path.read_bytes() == content
    )
    chunk.write_bytes(content[:-1] + b" ")
    with pytest.raises(BaseFetchError, match="changed in the store"):
        await fetch_base(site.plane.grpc_address, digest)
    chunk.unlink()
    with pytest.raises(BaseFetchError, match="not in the store"):
        await fetch_base(site.plane.grpc_address, digest)
    chunk.write_bytes(content)
    assert await fetch_base(site.plane.grpc_address, digest)


async def test_many_gateways_at_once_are_served_or_told_to_come_back(site) -> None:
    digest, _ = await pushed(site)

    async def one() -> None:
        while True:
            try:
                assert await fetch_base(site.plane.grpc_address, digest)
            except BaseFetchError as error:
                assert any(words in str(error) for words in COME_BACK), error
                await asyncio.sleep(0.2)
            else:
                return

    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
        for _ in range(GATEWAYS):
            tasks.create_task(one())
    async with asyncio.timeout(PATIENCE_S):
        await one()  # nothing is held up afterwards
