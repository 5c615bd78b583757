"""A router of two ends or freezes under load: no stream ends, and each client reads its own text."""

import signal

import pytest
import structlog

from tests.integration.gateway.real_site import (
    STREAMS,
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
