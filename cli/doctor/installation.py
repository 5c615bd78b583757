"""Turns facts of an installation, local or remote, into findings of problems, without I/O."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from cli.doctor.model import DoctorFinding, DoctorLevel, ok

# Differences of clocks in seconds, above which a finding is a warning, or wrong. Budgets and
# tickets expire by these clocks. HTTP dates are whole seconds, so small differences are unknown.
CLOCK_S_WELL, CLOCK_S_MAX = 3.0, 30.0
SNAPSHOT_S_MAX = 60.0  # the threshold of the alert ControlStateStale
SEEN_S_MAX = 60.0
DAY_S = 86_400
CERTIFICATE_S_WELL = 14 * DAY_S
CERTIFICATE_S_MIN = 3 * DAY_S
LOCK_S_MAX = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceFacts:
    """The answers of one service process.

    Attributes:
        name: Name of the process.
        url: URL that was queried.
        problem: Reason why the service does not answer or is not ready, or empty if it is ready.
        version: Version of the program, or empty if unknown.
        clock_ahead_s: Whole seconds by which its clock is ahead of this machine's, if known.
        snapshot_age_s: Seconds since its last contact with the control plane, None without any.
    """

    name: str
    url: str
    problem: str = ""
    version: str = ""
    clock_ahead_s: float | None = None
    snapshot_age_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseFacts:
    """The facts in PostgreSQL's answers.

    Attributes:
        problem: Reason why the database could not be queried.
        revision: Revision of the schema, or empty if there is no schema.
        newest: Newest revision of this program.
        is_older: Whether the schema's revision is one of this program's earlier revisions.
        missing_rights: Tables that the user cannot read or write.
        holders: Sessions with locks that block other sessions, each with its age in seconds.
        clock_ahead_s: Seconds by which its clock is ahead of this machine's.
    """

    problem: str = ""
    revision: str = ""
    newest: str = ""
    is_older: bool = False
    missing_rights: Sequence[str] = ()
    holders: Sequence[tuple[str, float]] = ()
    clock_ahead_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallationFacts:
    """All facts about an installation.

    Attributes:
        version: Version of this program.
        services: Facts of each process.
        refused: Paths of the admin REST that the key may not read, with the HTTP status.
        silent: Nodes and routers without a sign of life, with the silence in seconds.
        certificates: Certificate files of this machine, each with the seconds until it expires, or
            with the reason why it cannot be read.
        database: Facts of the database, or None if this machine has no address of the database.
    """

    version: str
    services: Sequence[ServiceFacts] = ()
    refused: Mapping[str, int] | None = None
    silent: Sequence[tuple[str, float]] = ()
    certificates: Sequence[tuple[str, float | str]] = ()
    database: DatabaseFacts | None = None


def installation_findings(facts: InstallationFacts) -> Iterator[DoctorFinding]:
    """Yield the findings of all checks of an installation."""
    yield from map(_answers, facts.services)
    yield _versions(facts)
    yield _clocks(facts)
    yield from _snapshots(facts)
    yield _permissions(facts)
    yield _presence(facts)
    yield _certificates(facts)
    if facts.database is None:
        found = "no address: SLUICE_DATABASE_URL is not set"
        yield DoctorFinding(
            "database", DoctorLevel.UNKNOWN, found, "set it to the URL of the database"
        )
    else:
        yield from _database(facts.database)


def _answers(service: ServiceFacts) -> DoctorFinding:
    if not service.problem:
        return ok(service.name, f"{service.url} is ready")
    fix = f"sluice status; sluice logs {service.name} (in a cluster: its pod's log)"
    return DoctorFinding(service.name, DoctorLevel.WRONG, f"{service.url}: {service.problem}", fix)


def _versions(facts: InstallationFacts) -> DoctorFinding:
    apart = {it.name: it.version for it in facts.services if it.version != facts.version}
    apart = {name: version for name, version in apart.items() if version}
    if not any(it.version for it in facts.services):
        return DoctorFinding("versions", DoctorLevel.UNKNOWN, "no process reported its version")
    if not apart:
        return ok("versions", f"all {facts.version}")
    found = ", ".join(f"{name} {version}" for name, version in apart.items())
    fix = "finish the upgrade, the control plane first; neighbouring versions work together"
    return DoctorFinding("versions", DoctorLevel.WARNING, f"here {facts.version}; {found}", fix)


def _clocks(facts: InstallationFacts) -> DoctorFinding:
    ahead = {it.name: it.clock_ahead_s for it in facts.services if it.clock_ahead_s is not None}
    if facts.database is not None and facts.database.clock_ahead_s is not None:
        ahead["postgresql"] = facts.database.clock_ahead_s
    if not ahead:
        return DoctorFinding("clocks", DoctorLevel.UNKNOWN, "no process reported the time")
    worst = max(ahead, key=lambda name: abs(ahead[name]))
    apart_s = max(ahead.values()) - min(*ahead.values(), 0.0)
    apart_s = max(apart_s, abs(ahead[worst]))
    if apart_s <= CLOCK_S_WELL:
        return ok("clocks", f"{len(ahead)} within {CLOCK_S_WELL:.0f} s of this machine's")
    found = f"{worst} is {abs(ahead[worst]):.0f} s {'ahead' if ahead[worst] > 0 else 'behind'}"
    level = DoctorLevel.WRONG if apart_s > CLOCK_S_MAX else DoctorLevel.WARNING
    fix = "let chrony or systemd-timesyncd keep the time on that machine, and on this one"
    return DoctorFinding("clocks", level, found, fix)


def _snapshots(facts: InstallationFacts) -> Iterator[DoctorFinding]:
    known = [it for it in facts.services if it.snapshot_age_s is not None]
    old = [it for it in known if (it.snapshot_age_s or 0.0) > SNAPSHOT_S_MAX]
    if known and not old:
        yield ok("snapshots", f"{len(known)} got a snapshot within a minute")
    for service in old:
        found = f"{service.name} last got a snapshot {service.snapshot_age_s:.0f} s ago"
        fix = (
            "it serves what it knew then: look whether it reaches CONTROL_PLANE__GRPC_ADDRESS,"
            " and at its log; docs/runbooks/ControlStateStale.md"
        )
        yield DoctorFinding("snapshots", DoctorLevel.WRONG, found, fix)


def _permissions(facts: InstallationFacts) -> DoctorFinding:
    if facts.refused is None:
        return DoctorFinding("admin key", DoctorLevel.UNKNOWN, "the control plane did not answer")
    if not facts.refused:
        return ok("admin key", "may read all objects")
    paths = ", ".join(f"{path} ({status})" for path, status in facts.refused.items())
    if 401 in facts.refused.values():
        fix = "SLUICE_ADMIN_KEY is unknown or expired: `sluice admin-keys create` with a good one"
        return DoctorFinding("admin key", DoctorLevel.WRONG, f"refused: {paths}", fix)
    fix = "ask for a key of the role that the work needs: viewer reads, operator runs, admin all"
    return DoctorFinding("admin key", DoctorLevel.WARNING, f"may not read {paths}", fix)


def _presence(facts: InstallationFacts) -> DoctorFinding:
    silent = [(name, age_s) for name, age_s in facts.silent if age_s > SEEN_S_MAX]
    if not silent:
        return ok("nodes and routers", "all reported within a minute")
    found = ", ".join(f"{name} for {age_s:.0f} s" for name, age_s in silent[:5])
    more = f" and {len(silent) - 5} more" if len(silent) > 5 else ""
    fix = "check that the agent or router there runs and reaches the control plane"
    return DoctorFinding("nodes and routers", DoctorLevel.WRONG, f"silent: {found}{more}", fix)


def _certificates(facts: InstallationFacts) -> DoctorFinding:
    if not facts.certificates:
        return ok("certificates", "mutual TLS is off")
    renew = "sluice certificates create --out DIR (running processes take new files by themselves)"
    broken = [(file, why) for file, why in facts.certificates if isinstance(why, str)]
    if broken:
        found = "; ".join(f"{file}: {why}" for file, why in broken)
        return DoctorFinding("certificates", DoctorLevel.WRONG, found, renew)
    left = {file: left_s for file, left_s in facts.certificates if not isinstance(left_s, str)}
    file = min(left, key=lambda name: left[name])
    if left[file] > CERTIFICATE_S_WELL:
        return ok("certificates", f"good for {left[file] / DAY_S:.0f} days")
    level = DoctorLevel.WRONG if left[file] < CERTIFICATE_S_MIN else DoctorLevel.WARNING
    when = f"ends in {left[file] / DAY_S:.1f} days" if left[file] > 0 else "has ended"
    return DoctorFinding("certificates", level, f"{file} {when}", renew)


def _database(database: DatabaseFacts) -> Iterator[DoctorFinding]:
    if database.problem:
        fix = "check that PostgreSQL runs, and that SLUICE_DATABASE_URL is right"
        yield DoctorFinding("database", DoctorLevel.WRONG, database.problem, fix)
        return
    yield _schema(database)
    if database.missing_rights:
        found = f"may not read and write {', '.join(database.missing_rights[:5])}"
        fix = "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO the user"
        yield DoctorFinding("database rights", DoctorLevel.WRONG, found, fix)
    else:
        yield ok("database rights", "all tables can be read and written")
    long = [(what, age_s) for what, age_s in database.holders if age_s > LOCK_S_MAX]
    if long:
        found = "; ".join(f"{what} holds a lock for {age_s:.0f} s" for what, age_s in long[:5])
        fix = (
            "end it (SELECT pg_terminate_backend(PID)): a migration gives up after 4 s of waiting,"
            " and writes wait behind it"
        )
        yield DoctorFinding("database locks", DoctorLevel.WRONG, found, fix)
    else:
        yield ok("database locks", "nothing waits for a lock")


def _schema(database: DatabaseFacts) -> DoctorFinding:
    if not database.revision:
        fix = "python -m control_plane.migrate"
        return DoctorFinding(
            "schema", DoctorLevel.WRONG, "the database has no tables of Sluice", fix
        )
    if database.revision == database.newest:
        return ok("schema", f"revision {database.revision}, the newest")
    found = f"revision {database.revision}, this program's is {database.newest}"
    if database.is_older:
        fix = "python -m control_plane.migrate (before the new control plane starts)"
        return DoctorFinding("schema", DoctorLevel.WRONG, found, fix)
    fix = "a newer program migrated it: upgrade this one"
    return DoctorFinding("schema", DoctorLevel.WARNING, found, fix)
