"""A router ends under load: no stream ends, nobody reads another text."""

import signal

import pytest

from tests.integration.gateway.real_site import STREAMS, outlive_router, running_site

pytestmark = pytest.mark.real


@pytest.mark.parametrize(
    ("cell_replicas_max", "how"),
    [(1, signal.SIGKILL), (0, signal.SIGKILL), (0, signal.SIGTERM)],
    ids=["two cells, killed", "one cell, killed", "one cell, told to end"],
)
async def test_no_stream_ends_when_a_router_does(
    control_plane, artifacts, valkey, eventually, tmp_path, cell_replicas_max: int, how
) -> None:
    # Room for all in either cell: a busy machine may need longer than a resumed stream waits for
    # the next owner of its own.
    shape = {"cell_replicas_max": cell_replicas_max, "places": STREAMS + 8}
    async with running_site(control_plane, artifacts, valkey, tmp_path, **shape) as site:
        await outlive_router(site, how, eventually)
