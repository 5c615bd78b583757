"""docker-compose.yml: its schema, and whether what it sets is what the services take."""

import json
import re
import subprocess
import sys
from typing import Any

import pytest

from cli.settings_table import SETTINGS
from sluice.shared_secret import InstallationSettings
from tests.unit.deploy.compose_file import PREFIXES, ROOT, env_file, is_job, is_ours, services

SERVICES = services()
NAMES = sorted(SERVICES)
SLUICE = "deploy/images/sluice.Dockerfile"
CONFIGURED = [name for name in NAMES if SERVICES[name].get("command", [""])[0] in PREFIXES]


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


def test_it_follows_the_compose_specification() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run(
        [*command, str(ROOT / "docker-compose.yml")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", CONFIGURED)
def test_every_setting_is_known_right_and_given(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    service = SERVICES[name]
    prefix = PREFIXES[service["command"][0]]
    for variable, value in service["environment"].items():
        assert isinstance(value, str), f"{variable}: quote it, YAML makes {value!r} of it"
        assert variable.startswith((prefix, "AWS_", "INSTALLATION__")), variable
        monkeypatch.setenv(variable, value)
    (owner,) = [o for o in SETTINGS.values() if o.model_config["env_prefix"] == prefix]
    assert owner.check()[1] == []
    monkeypatch.setenv(
        "INSTALLATION__SECRET", service["environment"].get("INSTALLATION__SECRET", "")
    )
    assert InstallationSettings.check()[1] == []


def test_all_five_services_are_there() -> None:
    # Settings that several of them share.
    shared = {"installation", "certificates", "kafka"}
    assert {PREFIXES[SERVICES[name]["command"][0]] for name in CONFIGURED} == {
        owner.model_config["env_prefix"] for name, owner in SETTINGS.items() if name not in shared
    }


@pytest.mark.parametrize("name", NAMES)
def test_every_service_is_bounded_and_comes_back(name: str) -> None:
    service = SERVICES[name]
    limits = service["deploy"]["resources"]["limits"]
    assert {"cpus", "memory"} <= limits.keys()
    assert service["restart"] in ("unless-stopped", "on-failure:5")
    assert service["logging"]["options"]["max-size"]
    assert service["networks"]


@pytest.mark.parametrize("name", NAMES)
def test_every_service_that_stays_has_a_health_check(name: str) -> None:
    service = SERVICES[name]
    if is_job(service):
        assert service["healthcheck"] == {"disable": True}
    else:
        assert service["healthcheck"]["test"][0] in ("CMD", "CMD-SHELL")
        assert {"interval", "timeout", "retries"} <= service["healthcheck"].keys()


@pytest.mark.parametrize("name", [name for name in NAMES if is_ours(SERVICES[name])])
def test_a_health_check_that_starts_python_has_time_for_it(name: str) -> None:
    check = SERVICES[name]["healthcheck"]
    if not check.get("disable"):
        assert check["test"][1].startswith("python")
        assert check["timeout"] == "5s"


@pytest.mark.parametrize("name", [name for name in NAMES if is_ours(SERVICES[name])])
def test_ours_have_few_rights(name: str) -> None:
    service = SERVICES[name]
    assert service["user"] not in ("", "0", "root", "0:0")
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["read_only"] or name == "replica-gpu"
    assert "privileged" not in service
    assert (ROOT / service["build"]["dockerfile"]).is_file()


def test_gateways_and_routers_run_from_the_small_image() -> None:
    small = {name for name in NAMES if SERVICES[name]["image"].startswith("sluice-edge:")}
    assert small == {"gateway", "gateway-2", "router", "router-2"}
    for name in small:
        build = SERVICES[name]["build"]
        assert build["args"]["IMAGE"] == "sluice-edge"
        assert build | {"args": None} == SERVICES["control-plane"]["build"] | {"args": None}


@pytest.mark.parametrize(
    "name", [name for name in NAMES if SERVICES[name].get("build", {}).get("dockerfile") == SLUICE]
)
def test_containers_without_a_shell_are_probed_with_python(name: str) -> None:
    service = SERVICES[name]
    assert is_job(service) or service["healthcheck"]["test"][:2] == ["CMD", "python"]
    assert service.get("entrypoint", ["python"])[0] == "python"


def test_dependencies_exist_and_have_the_awaited_conditions() -> None:
    for name, service in SERVICES.items():
        for other, how in service.get("depends_on", {}).items():
            target = SERVICES[other]
            if how["condition"] == "service_healthy":
                assert not is_job(target), f"{name} waits for the health of the job {other}"
            if how["condition"] == "service_completed_successfully":
                assert is_job(target), f"{name} waits for the end of {other}"
            # Else the profile could not be started alone.
            assert set(target.get("profiles", [])) <= set(service.get("profiles", [])), name


def test_ports_are_published_once_and_on_the_loopback_only() -> None:
    published = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert all(port.startswith("127.0.0.1:") for port in published)
    numbers = [port.split(":")[1] for port in published]
    assert len(numbers) == len(set(numbers))
    known = {value for name, value in env_file().items() if name.endswith("_PORT")}
    assert set(numbers) <= known


def test_every_mounted_file_exists() -> None:
    import yaml

    named = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["volumes"]
    used: set[str] = set()
    for service in SERVICES.values():
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            if source == "./.tls":
                assert mount.endswith(":ro")  # made by who uses the profile
            elif source.startswith("./"):
                assert (ROOT / source).exists(), source
                assert mount.endswith(":ro")
            else:
                used.add(source)
    assert used == set(named)


def test_two_of_a_kind_share_no_state_and_no_name() -> None:
    for kind, variable in (("gateway", "GATEWAY__INSTANCE_ID"), ("router", "ROUTER__INSTANCE_ID")):
        pair = [SERVICES[kind], SERVICES[f"{kind}-2"]]
        assert len({service["environment"][variable] for service in pair}) == 2
        assert len({service["volumes"][0].split(":")[0] for service in pair}) == 2


@pytest.mark.parametrize("name", ["gateway", "gateway-2", "router", "router-2"])
def test_the_grace_period_is_longer_than_the_drain(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = SERVICES[name]
    for variable, value in service["environment"].items():
        monkeypatch.setenv(variable, value)
    prefix = PREFIXES[service["command"][0]]
    (owner,) = [o for o in SETTINGS.values() if o.model_config["env_prefix"] == prefix]
    settings: Any = owner.from_environment()
    steps = ("unready_s", "idle_grace_s", "drain_s", "flush_s")
    drain_s = sum(getattr(settings, step, 0.0) for step in steps)
    assert drain_s < seconds(service["stop_grace_period"])


def standins() -> dict[str, str]:
    lines = (ROOT / "deploy/compose/standins/images.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines)


def test_every_image_of_others_has_a_stand_in_or_is_left_out() -> None:
    override = (ROOT / "deploy/compose/standins/override.yml").read_text()
    recipe = (ROOT / "deploy/compose/standins/Dockerfile").read_text()
    text = (ROOT / "docker-compose.yml").read_text()
    named = set(re.findall(r"image: \$\{(\w+_IMAGE):-", text)) | {"PYTHON_IMAGE"}
    assert "grafana:\n    profiles: !override" in override
    assert named - {"GRAFANA_IMAGE"} == standins().keys()
    for variable, image in standins().items():
        if variable != "PYTHON_IMAGE":
            target = image.removeprefix("sluice-standin-").removesuffix(":check")
            assert re.search(rf"^FROM .* AS {target}$", recipe, re.MULTILINE), target


def test_the_stand_in_of_kafka_has_every_topic() -> None:
    recipe = (ROOT / "deploy/compose/standins/Dockerfile").read_text()
    wanted = set(re.findall(r"sluice\.\w+\.v1", " ".join(SERVICES["topics"]["command"])))
    assert wanted
    assert wanted <= set(re.findall(r"--topic=(sluice\.\w+\.v1):", recipe))


def test_the_front_is_killed_later_than_it_ends_by_itself() -> None:
    (limit,) = re.findall(
        r"hard-stop-after (\d+)s", (ROOT / "deploy/front/haproxy.cfg").read_text()
    )
    assert seconds(SERVICES["front"]["stop_grace_period"]) > int(limit)


def test_addresses_lead_to_services() -> None:
    for name in CONFIGURED:
        for variable, value in SERVICES[name]["environment"].items():
            if variable.endswith(("CONTROL_ADDRESS", "KAFKA_BOOTSTRAP", "GRPC_ADDRESS")):
                host = value.rpartition(":")[0]
                assert host in SERVICES or host == "0.0.0.0", (name, variable)
            if variable.endswith("ENGINE_HOST"):
                assert value == name


def test_prometheus_scrapes_the_running_services() -> None:
    targets = json.loads((ROOT / "deploy/compose/targets.json").read_text())
    prefixes = {"gateway": "OPS_ADDRESS", "router": "HTTP_ADDRESS", "agent": "HTTP_ADDRESS"}
    for job, addresses in targets.items():
        for address in addresses:
            host, _, port = address.partition(":")
            given = [
                value
                for name, value in SERVICES[host]["environment"].items()
                if name.endswith(prefixes.get(job, "__HTTP_ADDRESS"))
            ]
            assert given == [f"0.0.0.0:{port}"]


def test_no_secret_has_a_default_and_images_can_be_pinned() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    for line in text.splitlines():
        for name in ("PASSWORD", "_KEY", "SECRET"):
            assert f"{name}:-" not in line, line
        if line.strip().startswith("image:"):
            assert "${" in line
            assert ":latest" not in line
            assert "." not in line.split(":-")[-1].split("/")[0] or "/" not in line
