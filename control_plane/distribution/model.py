"""Input and output of the planner of distribution. Chunks are counted from 0."""

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
    """Why a chunk did not arrive."""

    CORRUPT = "corrupt"  # it came, and its SHA-256 is another one
    TIMEOUT = "timeout"
    REFUSED = "refused"  # no connection, or the source does not have it


@dataclass(frozen=True, slots=True)
class NodePlace:
    """Where a node stands; a rack's name is unique within its region."""

    region: str
    rack: str


@dataclass(frozen=True, slots=True)
class Artifact:
    """An artifact, as the planner distributes it in chunks.

    Attributes:
        digest: Its name.
        chunk_count: Number of chunks; at least 1.
        chunk_bytes: Size of every chunk in bytes; a smaller last chunk is planned at this size.
    """

    digest: str
    chunk_count: int
    chunk_bytes: int


@dataclass(frozen=True, slots=True)
class Failure:
    """A chunk that a node asked for in vain, and of whom."""

    digest: str
    chunk: int
    source: str
    trouble: Trouble


@dataclass(frozen=True, slots=True)
class NodeReport:
    """A node's report, sent at most a few times a second.

    Attributes:
        node_id: Its name.
        place: Region and rack of the node.
        boot_id: Another one after every start of the agent.
        held: Verified chunks on its disk, by digest: bit i is chunk i. All artifacts in the first
            report of a boot and when the last answer asked for all, later only changed ones.
        failures: Failed fetches since the last report.
        is_full: `held` names all that the node has.
        serves: Others can get chunks of it.
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
    """Fetch the chunks from `start` to before `stop` that are not there yet."""

    digest: str
    start: int
    stop: int
    source: str
    priority: Priority


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """The whole list of a node's orders, the most urgent first.

    A node gives up orders that are not on it any more: the next answer repairs a lost one.
    `wants_full` asks for a report of all that the node holds.
    """

    orders: tuple[Order, ...] = ()
    wants_full: bool = False


@dataclass(frozen=True, slots=True)
class PlannerLimits:
    """Bounds of the planner.

    Attributes:
        groups_max: An artifact is planned in at most so many groups of neighbouring chunks.
        horizon_s: Seconds that a node's orders to fetch, and to serve, last at full speed.
            More than a report's interval, or links stand still between two reports.
        up_bytes_s: Bytes per second that a node may send to others.
        down_bytes_s: Bytes per second that a node can receive.
        uploads_max: Orders that name one node as their source.
        downloads_max: Orders of one node.
        store_readers_max: Nodes of one region that read from the store at once.
        store_bytes_s: Bytes per second that one region reads from the store.
        seeds: A power of two. With so many copies of a group in the region, there or on the way,
            nobody asks the store or another region for it.
        across_max: Orders of one region that are served by other regions.
        prefetch_ratio: Prefetch fills at most this part of what may be planned for a link.
        tries_max: Looks for a source in one round, in vain or not.
        order_timeout_s: Seconds after which an order is taken back; nodes report a faulty source
            sooner.
        lost_after_s: Without a report for so long, a node counts as gone.
        shun_s: Seconds of shunning after the first failure; doubled by each of the following.
        shun_max_s: Longest.
        corrupt_shun_s: Seconds of shunning after a corrupt chunk.
        accused_max: A node that blames so many different sources is itself at fault: it is not
            believed for
            a while and reads from the store; if it was for corrupt chunks, it serves nobody either.
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
