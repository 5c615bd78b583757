"""A router or an engine freezes under load: no stream ends, nobody reads another text."""

import signal

import pytest
import structlog

from tests.integration.gateway.real_site import (
    STREAMS,
    WAIT_S,
    all_serve,
    outlive_router,
    running_site,
)

pytestmark = pytest.mark.real
log = structlog.get_logger(__name__)


@pytest.mark.parametrize(
    ("cell_replicas_max", "how"),
    [(1, signal.SIGSTOP), (0, signal.SIGSTOP)],
    ids=["two cells, frozen", "one cell, frozen"],
)
async def test_no_stream_ends_when_a_router_freezes(
    control_plane, artifacts, valkey, eventually, tmp_path, cell_replicas_max: int, how
) -> None:
    shape = {"cell_replicas_max": cell_replicas_max, "places": STREAMS // 2 + 8}
    async with running_site(control_plane, artifacts, valkey, tmp_path, **shape) as site:
        await outlive_router(site, how, eventually)


async def test_no_stream_ends_when_an_engine_freezes(
    control_plane, artifacts, valkey, eventually, tmp_path
) -> None:
    shape = {"cell_replicas_max": 0, "places": STREAMS}
    async with running_site(control_plane, artifacts, valkey, tmp_path, **shape) as site:
        await eventually(lambda: all_serve(site), timeout_s=WAIT_S)
        undisturbed = await site.many()
        frozen = site.tritons[0]
        site.pause_s = 0.0
        try:
            assert await site.many(lambda: frozen.signal(signal.SIGSTOP)) == undisturbed
        finally:
            frozen.signal(signal.SIGCONT)
        log.info("failover_measured", longest_pause_s=round(site.pause_s, 3))
