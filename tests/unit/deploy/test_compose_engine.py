"""deploy/compose/engine.sh: what of the machine it changes. Programs that change anything are fakes."""

import os
import subprocess
from pathlib import Path

import pytest

ENGINE = Path(__file__).parents[3] / "deploy" / "compose" / "engine.sh"
FOREIGN = (
    "-P FORWARD ACCEPT",
    "-N DOCKER-OTHER",
    "-A FORWARD -i br-0123456789ab -j DOCKER-OTHER",
    "-A FORWARD -s 172.31.9.0/24 -j ACCEPT",
)
OWN = (
    "-N DOCKER-USER",
    "-A FORWARD -j DOCKER-USER",
    "-A FORWARD -i docker0 -j ACCEPT",
)
SINCE = ("-A FORWARD -s 10.9.0.0/16 -j DROP",)  # somebody else's, meanwhile


class Machine:
    """Fakes on PATH that tell of rules and bridges, and note what they are asked to change."""

    def __init__(self, folder: Path) -> None:
        self.home, self.programs, self.log = folder / "home", folder / "bin", folder / "log"
        self.rules, self.bridges = folder / "rules", folder / "bridges"
        self.home.mkdir()
        self.programs.mkdir()
        self.log.touch()
        note = f'echo "$(basename "$0") $*" >> {self.log}'
        show = f'case "$*" in "-t filter -S") cat {self.rules} ;; *-S*) ;; *) {note} ;; esac'
        self.program("iptables", show)
        self.program("ip6tables", "exit 1")
        self.program(
            "ip",
            f'case "$*" in *show*) awk \'{{print NR ": " $1 ": <UP>"}}\' {self.bridges} ;;'
            f" *) {note} ;; esac",
        )
        self.program("id", "echo 0")
        self.program("docker", "exit 1")
        self.program("debootstrap", f"{note}; exit 1")

    def program(self, name: str, body: str) -> None:
        file = self.programs / name
        file.write_text(f"#!/bin/bash\n{body}\n")
        file.chmod(0o755)

    def now(self, *, rules: tuple[str, ...], bridges: tuple[str, ...]) -> None:
        self.rules.write_text("".join(f"{line}\n" for line in rules))
        self.bridges.write_text("".join(f"{line}\n" for line in bridges))

    def began_with(self, *, rules: tuple[str, ...], bridges: tuple[str, ...]) -> None:
        told = "".join(f"iptables -t filter {line}\n" for line in rules)
        (self.home / "rules.before").write_text(told)
        (self.home / "bridges.before").write_text("".join(f"{line}\n" for line in bridges))

    def engine(self, command: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {
            "COMPOSE_CHECK_HOME": str(self.home),
            "PATH": f"{self.programs}:{os.environ['PATH']}",
        }
        return subprocess.run(
            [str(ENGINE), command],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    @property
    def changes(self) -> list[str]:
        return self.log.read_text().splitlines()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_stop_removes_docker_changes_made_since_the_start(machine: Machine) -> None:
    machine.began_with(rules=FOREIGN, bridges=("br-0123456789ab",))
    machine.now(
        rules=FOREIGN + OWN + SINCE,
        bridges=("br-0123456789ab", "docker0", "br-aaaaaaaaaaaa", "br-lan"),
    )

    done = machine.engine("stop")

    assert done.returncode == 0, done.stderr
    assert machine.changes == [
        "ip link delete docker0",
        "ip link delete br-aaaaaaaaaaaa",
        "iptables -t filter -D FORWARD -j DOCKER-USER",
        "iptables -t filter -D FORWARD -i docker0 -j ACCEPT",
        "iptables -t filter -X DOCKER-USER",
    ]


def test_stop_after_a_start_that_changed_nothing_changes_nothing(machine: Machine) -> None:
    machine.began_with(rules=FOREIGN, bridges=())
    machine.now(rules=FOREIGN, bridges=())

    done = machine.engine("stop")

    assert (done.returncode, machine.changes) == (0, []), done.stderr
    assert not list(machine.home.glob("*.before"))


def test_stop_without_a_start_changes_nothing(machine: Machine) -> None:
    machine.now(rules=FOREIGN + OWN, bridges=("docker0", "br-0123456789ab"))
    (machine.home / "docker.pid").write_text(str(os.getpid()))  # of another process by now

    done = machine.engine("stop")

    assert done.returncode == 0, done.stderr
    assert machine.changes == []


@pytest.mark.parametrize(
    ("rules", "bridges"), [(OWN, ()), ((), ("docker0",))], ids=["chains", "bridge"]
)
def test_no_engine_starts_beside_another(
    machine: Machine, rules: tuple[str, ...], bridges: tuple[str, ...]
) -> None:
    machine.now(rules=rules, bridges=bridges)

    done = machine.engine("start")

    assert done.returncode == 2
    assert "Start that Docker, or name it in DOCKER_HOST" in done.stdout + done.stderr
    assert machine.changes == [], "nothing was begun"
