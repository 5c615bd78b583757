"""The configurations of the TLS front against what gateways do; test_front.py of the gateway runs them."""

import re
from pathlib import Path
from typing import Any

import yaml

from gateway.settings import GatewaySettings

ROOT = Path(__file__).parents[3]
FRONT = ROOT / "deploy" / "front"
GATEWAY = (ROOT / "deploy" / "kubernetes" / "base" / "gateway.yaml").read_text()
IDLE_S = GatewaySettings.model_fields["idle_timeout_s"].default


def given(name: str) -> float:
    """Return what a setting of the gateways is in the manifests."""
    return float(re.search(rf'GATEWAY__{name}, value: "(\d+)"', GATEWAY)[1])


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


def envoy() -> dict[str, Any]:
    return yaml.safe_load((FRONT / "envoy.yaml").read_text())["static_resources"]


def haproxy(directive: str) -> str:
    (found,) = re.findall(
        rf"^ +{directive} (.+)$", (FRONT / "haproxy.cfg").read_text(), re.MULTILINE
    )
    return found


def test_envoy_cuts_no_answer_and_asks_for_none_twice() -> None:
    (listener,) = envoy()["listeners"]
    http = listener["filter_chains"][0]["filters"][0]["typed_config"]
    (host,) = http["route_config"]["virtual_hosts"]
    route = host["routes"][-1]["route"]
    assert route["timeout"] == "0s"
    assert "per_try_timeout" not in route["retry_policy"]
    retried = set(route["retry_policy"]["retry_on"].split(","))
    assert retried == {"connect-failure", "refused-stream", "reset-before-request"}
    assert seconds(http["stream_idle_timeout"]) > given("DRAIN_S")
    assert http["common_http_protocol_options"]["max_headers_count"] == 128
    assert http["preserve_external_request_id"] is True
    assert "tracing" not in http


def test_envoy_takes_gateways_out_before_they_close() -> None:
    for cluster in envoy()["clusters"]:
        takes_out_before_a_close(cluster)


def takes_out_before_a_close(cluster: dict[str, Any]) -> None:
    (check,) = cluster["health_checks"]
    noticed_s = seconds(check["interval"]) * check["unhealthy_threshold"] + seconds(
        check["timeout"]
    )
    assert check["http_health_check"]["path"] == "/readyz"
    assert noticed_s < given("UNREADY_S")
    (options,) = cluster["typed_extension_protocol_options"].values()
    assert seconds(options["common_http_protocol_options"]["idle_timeout"]) < IDLE_S


def test_envoy_speaks_http2_to_gateways_but_for_websockets() -> None:
    clusters = envoy()["clusters"]
    options = [it["typed_extension_protocol_options"].popitem()[1] for it in clusters]
    protocols = [set(it["explicit_http_config"]) for it in options]
    assert [it["name"] for it in clusters] == ["gateways", "gateways-http1"]
    assert protocols == [{"http2_protocol_options"}, {"http_protocol_options"}]
    routes = envoy()["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    (host,) = routes["route_config"]["virtual_hosts"]
    upgrade, rest = (it["route"] for it in host["routes"][-2:])
    assert upgrade["cluster"] == "gateways-http1"
    assert upgrade["upgrade_configs"] == [{"upgrade_type": "websocket"}]
    assert rest["cluster"] == "gateways"


def test_haproxy_cuts_no_answer_and_asks_for_none_twice() -> None:
    assert haproxy("retry-on") == "conn-failure"
    for side in ("client", "server"):
        assert seconds(haproxy(f"timeout {side}")) > given("DRAIN_S")
    assert seconds(haproxy("hard-stop-after")) > given("DRAIN_S")
    assert int(haproxy(r"tune\.http\.maxhdr")) == 128
    assert int(haproxy(r"tune\.bufsize")) >= 2 * 16384


def test_haproxy_takes_gateways_out_before_they_close() -> None:
    inter_s, fall = re.search(r"inter (\d+)s fall (\d+)", haproxy("default-server check")).groups()
    assert haproxy("option httpchk") == "GET /readyz"
    assert int(inter_s) * int(fall) < given("UNREADY_S")


def test_haproxy_has_room_for_every_gateway() -> None:
    scaling = ROOT / "deploy/kubernetes/components/gateway-scaling/gateway-scaling.yaml"
    gateways_max = yaml.safe_load(scaling.read_text())["spec"]["maxReplicas"]
    slots = int(haproxy("server-template").split()[1])
    assert slots > gateways_max
    # An A record has 16 bytes.
    assert int(haproxy("accepted_payload_size")) > 16 * slots + 512


def test_both_reach_gateways_by_the_name_of_the_manifests() -> None:
    services = [it for it in yaml.safe_load_all(GATEWAY) if it["kind"] == "Service"]
    (headless,) = [it for it in services if it["spec"].get("clusterIP") == "None"]
    address = f"{headless['metadata']['name']}:{headless['spec']['ports'][0]['port']}"
    assert address in haproxy("server-template")
    for cluster in envoy()["clusters"]:
        (endpoint,) = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
        socket = endpoint["endpoint"]["address"]["socket_address"]
        assert f"{socket['address']}:{socket['port_value']}" == address
