"""Routers and an engine end or freeze under load: no stream ends, nobody reads another text."""

import signal

import pytest
import structlog

from tests.integration.gateway.real_site import (
    STREAMS,
    WAIT_S,
    all_serve,
    outlive_router,
    restart_router,
    running_site,
)

pytestmark = pytest.mark.real
log = structlog.get_logger(__name__)
# Room for all in either cell: a busy machine may need longer than a resumed stream waits for the
# next owner of its own.
PLACES = STREAMS + 8


async def test_no_stream_ends_when_a_router_of_two_cells_dies_or_freezes(
    control_plane, artifacts, valkey, eventually, tmp_path
) -> None:
    shape = {"cell_replicas_max": 1, "places": PLACES}
    async with running_site(control_plane, artifacts, valkey, tmp_path, **shape) as site:
        loser = await outlive_router(site, signal.SIGKILL, eventually)
        await restart_router(site, loser, control_plane)
        await outlive_router(site, signal.SIGSTOP, eventually)


async def test_no_stream_ends_when_the_router_of_a_cell_or_an_engine_does(
    control_plane, artifacts, valkey, eventually, tmp_path
) -> None:
    shape = {"cell_replicas_max": 0, "places": PLACES}
    async with running_site(control_plane, artifacts, valkey, tmp_path, **shape) as site:
        for how in (signal.SIGKILL, signal.SIGTERM):
            loser = await outlive_router(site, how, eventually)
            await restart_router(site, loser, control_plane)
        await outlive_router(site, signal.SIGSTOP, eventually)

        await eventually(lambda: all_serve(site), timeout_s=WAIT_S)
        frozen = site.tritons[0]
        site.pause_s = 0.0
        try:
            found = await site.many(lambda: frozen.signal(signal.SIGSTOP))
            assert found == await site.undisturbed()
        finally:
            frozen.signal(signal.SIGCONT)
        log.info("failover_measured", longest_pause_s=round(site.pause_s, 3))
