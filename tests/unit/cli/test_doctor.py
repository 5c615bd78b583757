"""What the doctor says of facts: each that is wrong is found, with something to do about it."""

from dataclasses import replace

import pytest

from cli.doctor.installation import (
    DatabaseFacts,
    InstallationFacts,
    ServiceFacts,
    installation_findings,
)
from cli.doctor.machine import MachineFacts, machine_findings
from cli.doctor.model import DoctorLevel

GIB = 1 << 30
WELL = MachineFacts(
    platform="linux x86_64",
    memory_bytes=8 * GIB,
    disk_bytes=100 * GIB,
    home="/srv/ada/.sluice",
    open_files=65_536,
)
DATABASE = DatabaseFacts(revision="0023", newest="0023", clock_ahead_s=0.1)
READY = ServiceFacts(name="gateway", url="http://g", version="1.0", clock_ahead_s=0.0)
GOOD = InstallationFacts(
    version="1.0",
    services=(READY, replace(READY, name="router", version="", snapshot_age_s=1.0)),
    refused={},
    silent=(("node a", 3.0),),
    certificates=(("a.pem", 60 * 86_400.0),),
    database=DATABASE,
)


def test_a_good_machine_has_nothing_to_do() -> None:
    found = list(machine_findings(WELL))
    assert {it.level for it in found} == {DoctorLevel.OK}
    assert not any(it.fix for it in found)


def test_a_good_installation_has_nothing_to_do() -> None:
    found = list(installation_findings(GOOD))
    assert {it.level for it in found} == {DoctorLevel.OK}, found
    assert not any(it.fix for it in found)


@pytest.mark.parametrize(
    ("facts", "check", "level", "word"),
    [
        ({"platform": "darwin arm64"}, "platform", DoctorLevel.WARNING, "WSL"),
        ({"missing_wheels": ("PostgreSQL",)}, "packages", DoctorLevel.WARNING, "pip install"),
        (
            {"engine_problems": ("Triton needs glibc 2.35: x",)},
            "engine",
            DoctorLevel.WRONG,
            "glibc",
        ),
        ({"memory_bytes": GIB // 2}, "memory", DoctorLevel.WRONG, "--no-embeddings"),
        ({"memory_bytes": GIB + 1}, "memory", DoctorLevel.WARNING, "--no-embeddings"),
        ({"memory_bytes": None}, "memory", DoctorLevel.UNKNOWN, ""),
        ({"disk_bytes": GIB // 2}, "disk", DoctorLevel.WRONG, "another disk"),
        ({"disk_bytes": 2 * GIB}, "disk", DoctorLevel.WARNING, "another disk"),
        ({"home_problem": "/ cannot be written"}, "home", DoctorLevel.WRONG, "SLUICE_HOME"),
        ({"home": "/srv/a b"}, "home", DoctorLevel.WRONG, "SLUICE_HOME"),
        ({"open_files": 1024}, "open files", DoctorLevel.WARNING, "ulimit"),
        ({"readable_secrets": ("/h/env",)}, "secrets", DoctorLevel.WRONG, "chmod 600 /h/env"),
        ({"holders": {8000: "nginx (pid 7)"}}, "ports", DoctorLevel.WARNING, "--port"),
    ],
)
def test_faults_of_a_machine_are_found(facts, check, level, word) -> None:
    (found,) = [it for it in machine_findings(replace(WELL, **facts)) if it.check == check]
    assert found.level == level
    assert word in found.fix


def test_a_running_stack_has_its_ports_and_its_memory() -> None:
    facts = replace(WELL, runs=True, holders={8000: "python (pid 7)"}, memory_bytes=GIB // 4)
    assert {it.level for it in machine_findings(facts)} == {DoctorLevel.OK}


def service(**facts: object) -> dict[str, object]:
    return {"services": (replace(READY, **facts),)}


def database(**facts: object) -> dict[str, object]:
    return {"database": replace(DATABASE, **facts)}


@pytest.mark.parametrize(
    ("facts", "check", "level", "word"),
    [
        (service(problem="does not answer"), "gateway", DoctorLevel.WRONG, "sluice logs gateway"),
        (service(version="0.9"), "versions", DoctorLevel.WARNING, "upgrade"),
        (service(version=""), "versions", DoctorLevel.UNKNOWN, ""),
        (service(clock_ahead_s=-9.0), "clocks", DoctorLevel.WARNING, "chrony"),
        (service(clock_ahead_s=3600.0), "clocks", DoctorLevel.WRONG, "chrony"),
        (database(clock_ahead_s=40.0), "clocks", DoctorLevel.WRONG, "chrony"),
        (service(snapshot_age_s=300.0), "snapshots", DoctorLevel.WRONG, "ControlStateStale"),
        ({"refused": None}, "admin key", DoctorLevel.UNKNOWN, ""),
        ({"refused": {"/v1/admin-keys": 403}}, "admin key", DoctorLevel.WARNING, "role"),
        ({"refused": {"/v1/nodes": 401}}, "admin key", DoctorLevel.WRONG, "SLUICE_ADMIN_KEY"),
        ({"silent": (("node a", 900.0),)}, "nodes and routers", DoctorLevel.WRONG, "agent"),
        ({"certificates": (("a.pem", 86_400.0),)}, "certificates", DoctorLevel.WRONG, "create"),
        (
            {"certificates": (("a.pem", 9 * 86_400.0),)},
            "certificates",
            DoctorLevel.WARNING,
            "create",
        ),
        ({"certificates": (("a.pem", "no PEM"),)}, "certificates", DoctorLevel.WRONG, "create"),
        ({"database": None}, "database", DoctorLevel.UNKNOWN, "set it to"),
        (database(problem="refused"), "database", DoctorLevel.WRONG, "SLUICE_DATABASE_URL"),
        (database(revision=""), "schema", DoctorLevel.WRONG, "control_plane.migrate"),
        (database(revision="0020", is_older=True), "schema", DoctorLevel.WRONG, "migrate"),
        (database(revision="0099"), "schema", DoctorLevel.WARNING, "upgrade this one"),
        (database(missing_rights=("keys",)), "database rights", DoctorLevel.WRONG, "GRANT"),
        (
            database(holders=(("psql (pid 9, idle)", 99.0),)),
            "database locks",
            DoctorLevel.WRONG,
            "pid 9",
        ),
    ],
)
def test_faults_of_an_installation_are_found(facts, check, level, word) -> None:
    found = [it for it in installation_findings(replace(GOOD, **facts)) if it.check == check]
    assert [it.level for it in found] == [level]
    assert word in found[0].fix + found[0].found
