"""Verifies all files of replicas that answer wrongly, and reports which bases are damaged.

The control plane names the replicas. A quarantined replica is being removed, so its files are
verified before another engine uses them. A suspected replica in a small pool continues to run, so
its base is verified at once. A damaged base proves the fault. A comparison of a few answers does
not.
"""

import asyncio
from collections.abc import Callable

import structlog

from replica.agent.artifacts.library import Library
from sluice.wire.agent.v1 import agent_pb2 as agent

log = structlog.get_logger(__name__)


class SuspectReader:
    """Verifies the bases of suspected replicas, one after another, in `run`."""

    def __init__(self, library: Library, on_spoiled: Callable[[str, str], None]) -> None:
        """Create a reader without suspects. The caller starts `run` in a TaskGroup.

        Args:
            library: Artifacts of this node.
            on_spoiled: Function that is called with the digest of a damaged base and a description
                of the damage.
        """
        self._library = library
        self._on_spoiled = on_spoiled
        self._quarantined: set[str] = set()
        # replica -> Unix time of its last suspicion in milliseconds
        self._suspected: dict[str, int] = {}
        self._unread: dict[str, None] = {}  # digests to verify, in the order of their suspicions
        self._has_unread = asyncio.Event()

    def follow(self, desired: agent.SyncResponse) -> None:
        """Doubt the files of replicas that were quarantined or suspected since the last call."""
        for replica in desired.replicas:
            if replica.is_quarantined and replica.replica_id not in self._quarantined:
                self._library.doubt(replica.base_digest, with_adapters=True)
            at_unix_ms = replica.suspected_at_unix_ms
            if at_unix_ms > self._suspected.get(replica.replica_id, 0):
                self._library.doubt(replica.base_digest, with_adapters=True)
                self._unread[replica.base_digest] = None
                self._has_unread.set()
        self._quarantined = {it.replica_id for it in desired.replicas if it.is_quarantined}
        self._suspected = {
            it.replica_id: max(it.suspected_at_unix_ms, self._suspected.get(it.replica_id, 0))
            for it in desired.replicas
        }

    async def run(self) -> None:
        """Verify doubted bases until cancelled."""
        while True:
            await self._has_unread.wait()
            self._has_unread.clear()
            while self._unread:
                digest = next(iter(self._unread))
                del self._unread[digest]
                problem = await self._library.problem_of(digest)
                # otherwise the disk could not be read, so the base may be intact
                if problem and self._library.has(digest):
                    log.error("base_not_read", digest=digest, problem=problem)
                elif problem:
                    self._on_spoiled(digest, problem)
