"""Input and output of the distribution planner. Chunks are counted from 0."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

STORE = "store"  # stands where the id of a node would


class Priority(IntEnum):
    """Urgency of an artifact for a node; a lower number goes before a higher one."""

    NEEDED = 0  # a request waits for it
    WARMING = 1  # promoted, or a replica that starts
    PREFETCH = 2


class Trouble(StrEnum):
    """The reason why a chunk did not arrive."""

    CORRUPT = "corrupt"  # it came, and its SHA-256 is another one
    TIMEOUT = "timeout"
    REFUSED = "refused"  # no connection, or the source does not have it


@dataclass(frozen=True, slots=True)
class NodePlace:
    """The place of a node; a rack's name is unique within its region."""

    region: str
    rack: str


@dataclass(frozen=True, slots=True)
class Artifact:
    """An artifact, as the planner distributes it in chunks.

    Attributes:
        digest: Digest, which names the artifact.
        chunk_count: Number of chunks; at least 1.
        chunk_bytes: Size of every chunk in bytes; a smaller last chunk is planned at this size.
    """

    digest: str
    chunk_count: int
    chunk_bytes: int


@dataclass(frozen=True, slots=True)
class Failure:
    """A chunk that a node did not get, with its source."""

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
        boot_id: Id of the agent's run, new after every start.
        held: Verified chunks on its disk, by digest: bit i is chunk i. All artifacts in the first
            report of a boot and when the last answer asked for all, later only changed ones.
        failures: Failed fetches since the last report.
        is_full: Whether `held` names all chunks on the node.
        serves: Whether other nodes can get chunks from it.
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
    """An order to fetch the missing ones of the chunks from `start` to before `stop`."""

    digest: str
    start: int
    stop: int
    source: str
    priority: Priority


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """The complete list of a node's orders, the most urgent first.

    A node drops orders that are missing from the latest list, so a lost answer is repaired by the
    next one. `wants_full` asks for a report of all chunks on the node.
    """

    orders: tuple[Order, ...] = ()
    wants_full: bool = False


@dataclass(frozen=True, slots=True)
class PlannerLimits:
    """Bounds of the planner.

    Attributes:
        groups_max: Most groups of neighbouring chunks that an artifact is planned in.
        horizon_s: Seconds that a node's orders to fetch, and to serve, last at full speed.
            More than a report's interval, or links stand still between two reports.
        up_bytes_s: Bytes per second that a node may send to others.
        down_bytes_s: Bytes per second that a node can receive.
        uploads_max: Orders that name one node as their source.
        downloads_max: Orders of one node.
        store_readers_max: Nodes of one region that read from the store at once.
        store_bytes_s: Bytes per second that one region reads from the store.
        seeds: Number of copies of a group in a region, there or on the way, from which on no node
            asks the store or another region for it; a power of two.
        across_max: Most orders of one region that other regions serve.
        prefetch_ratio: Largest part of a link's planned work that prefetch may use.
        tries_max: Most searches for a source in one round, successful or not.
        order_timeout_s: Seconds after which an order is taken back; nodes report a faulty source
            sooner.
        lost_after_s: Seconds without a report after which a node counts as gone.
        shun_s: Seconds of shunning after the first failure; doubled by each further one.
        shun_max_s: Longest time of shunning in seconds.
        corrupt_shun_s: Seconds of shunning after a corrupt chunk.
        accused_max: Number of different sources that a node may blame; beyond, the node itself is
            at fault: its reports are ignored for a while, it reads from the store, and after
            corrupt chunks it serves no other node.
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
