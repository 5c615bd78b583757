"""Input and output of the distribution planner. Chunks are numbered from 0."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

STORE = "store"  # source of an order whose chunks come from the store, in place of a node id


class Priority(IntEnum):
    """Urgency of an artifact for a node. A lower number is more urgent."""

    NEEDED = 0  # a request waits for the artifact
    WARMING = 1  # a promoted release or a starting replica will need the artifact
    PREFETCH = 2


class Trouble(StrEnum):
    """The reason why a chunk was not fetched."""

    CORRUPT = "corrupt"  # the SHA-256 of the received chunk differs
    TIMEOUT = "timeout"
    REFUSED = "refused"  # the source was not reachable, or did not have the chunk


@dataclass(frozen=True, slots=True)
class NodePlace:
    """The place of a node. The name of a rack is unique within its region."""

    region: str
    rack: str


@dataclass(frozen=True, slots=True)
class Artifact:
    """An artifact, as the planner distributes it in chunks.

    Attributes:
        digest: Digest, which names the artifact.
        chunk_count: Number of chunks, at least 1.
        chunk_bytes: Size of every chunk in bytes. A smaller last chunk is planned at this size.
    """

    digest: str
    chunk_count: int
    chunk_bytes: int


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed fetch of a chunk by a node, with the source of the chunk."""

    digest: str
    chunk: int
    source: str
    trouble: Trouble


@dataclass(frozen=True, slots=True)
class NodeReport:
    """A node's report, sent at most a few times a second.

    Attributes:
        node_id: Id of the node.
        place: Region and rack of the node.
        boot_id: Id of the agent's process, new after every start.
        held: Verified chunks on the node's disk by digest, in which bit i is chunk i. The first
            report of a boot, and the report after an answer with `wants_full`, list all artifacts.
            Other reports list only changed artifacts.
        failures: Failed fetches since the last report.
        is_full: Whether `held` lists all chunks on the node.
        serves: Whether other nodes can fetch chunks from the node.
    """

    node_id: str
    place: NodePlace
    boot_id: str
    held: Mapping[str, int] = field(default_factory=dict[str, int])
    failures: tuple[Failure, ...] = ()
    is_full: bool = False
    serves: bool = True


@dataclass(frozen=True, slots=True)
class Order:
    """An order to fetch a node's missing chunks from `start` (inclusive) to `stop` (exclusive)."""

    digest: str
    start: int
    stop: int
    source: str
    priority: Priority


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """The complete list of a node's orders, the most urgent first.

    A node drops orders that are missing in the latest list, so that a lost answer is repaired by
    the next answer. `wants_full` requests a report of all chunks on the node.
    """

    orders: tuple[Order, ...] = ()
    wants_full: bool = False


@dataclass(frozen=True, slots=True)
class PlannerLimits:
    """The bounds of the planner.

    Attributes:
        groups_max: Largest number of groups of neighbouring chunks per artifact.
        horizon_s: Seconds of work at full speed in a node's orders to fetch and to serve. The value
            exceeds the interval between reports, because links would otherwise be idle between two
            reports.
        up_bytes_s: Bytes per second that a node may send to other nodes.
        down_bytes_s: Bytes per second that a node can receive.
        uploads_max: Largest number of orders with one node as their source.
        downloads_max: Largest number of orders of one node.
        store_readers_max: Largest number of nodes of one region that read from the store
            concurrently.
        store_bytes_s: Bytes per second that one region may read from the store.
        seeds: Number of copies of a group in a region, including copies in transit. From this
            number on, nodes of the region fetch the group only from each other. The number is a
            power of two.
        across_max: Largest number of orders of one region that other regions serve.
        prefetch_ratio: Largest share of a link's planned work that prefetch may use.
        tries_max: Largest number of searches for a source per round, successful or not.
        order_timeout_s: Seconds after which an order is withdrawn. Nodes report a faulty source
            sooner.
        lost_after_s: Seconds without a report after which a node counts as lost.
        shun_s: Seconds for which a source is not used after its first failure, doubled by each
            further failure.
        shun_max_s: Largest number of seconds for which a source is not used.
        corrupt_shun_s: Seconds for which a source is not used after a corrupt chunk.
        accused_max: Number of different accused sources from which on the accusing node counts as
            faulty. Its reports of failures are then ignored for a while, and it reads from the
            store. If it reported corrupt chunks, it also serves no other node.
    """

    groups_max: int = 1024
    horizon_s: float = 1.5
    up_bytes_s: float = 1.25e9
    down_bytes_s: float = 1.25e9
    uploads_max: int = 128
    downloads_max: int = 64
    store_readers_max: int = 16
    store_bytes_s: float = 6.25e9
    seeds: int = 2
    across_max: int = 64
    prefetch_ratio: float = 0.5
    tries_max: int = 20_000
    order_timeout_s: float = 30.0
    lost_after_s: float = 5.0
    shun_s: float = 5.0
    shun_max_s: float = 300.0
    corrupt_shun_s: float = 600.0
    accused_max: int = 4
