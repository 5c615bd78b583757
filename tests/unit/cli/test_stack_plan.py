import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from cli import stack_commands
from cli.app import app
from cli.stack.home import Home, load_secrets
from cli.stack.plan import users, waves
from cli.stack.ports import FIRST, LAST, assign, load_ports, read_ports
from cli.stack.services import INTERNAL_PORTS, ServicePlan, StackOptions


@st.composite
def graphs(draw) -> dict[str, set[str]]:
    count = draw(st.integers(0, 12))
    names = [f"n{i}" for i in range(count)]
    graph = {
        name: draw(st.sets(st.sampled_from(names[:i]))) if i else set()
        for i, name in enumerate(names)
    }
    return {name: graph[name] for name in draw(st.permutations(names))}


@given(graphs())
def test_every_service_starts_once_after_its_dependencies(graph) -> None:
    layers = waves(graph)
    order = [name for layer in layers for name in layer]
    assert sorted(order) == sorted(graph)
    position = {name: i for i, layer in enumerate(layers) for name in layer}
    assert all(position[name] > position[other] for name in graph for other in graph[name])


@given(graphs())
def test_every_service_stops_once_before_its_dependencies(graph) -> None:
    layers = waves(users(graph))
    assert sorted(name for layer in layers for name in layer) == sorted(graph)
    position = {name: i for i, layer in enumerate(layers) for name in layer}
    assert all(position[name] < position[other] for name in graph for other in graph[name])


@pytest.mark.parametrize("graph", [{"a": ["b"], "b": ["a"]}, {"a": ["a"]}])
def test_a_cycle_is_refused(graph) -> None:
    with pytest.raises(ValueError, match="cycle"):
        waves(graph)
    with pytest.raises(ValueError, match="cycle"):
        waves(users(graph))


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown: b"):
        waves({"a": ["b"]})
    with pytest.raises(ValueError, match="unknown: b"):
        users({"a": ["b"]})


PORTS = st.integers(FIRST, FIRST + 20)


@given(
    names=st.lists(st.sampled_from("abcdef"), unique=True),
    known=st.dictionaries(st.sampled_from("abcdefxyz"), PORTS),
    taken=st.sets(PORTS, max_size=12),
    start=st.integers(0, 1 << 32),
)
def test_ports_are_free_distinct_and_kept_while_they_can_be(names, known, taken, start) -> None:
    ports = assign(names, known, lambda port: port not in taken, start)
    assert list(ports) == names
    assert len(set(ports.values())) == len(names)
    assert not taken & set(ports.values())
    assert all(FIRST <= port <= LAST for port in ports.values())
    kept = [known[name] for name in names if name in known]
    for name in names:
        if name in known and known[name] not in taken and kept.count(known[name]) == 1:
            assert ports[name] == known[name]


def test_no_free_port_is_said() -> None:
    with pytest.raises(RuntimeError, match="no free port"):
        assign(["a"], {}, lambda _: False, 0)


def test_ports_are_remembered(tmp_path) -> None:
    file = tmp_path / "ports.json"
    assert read_ports(file) == {}
    first = load_ports(file, ["a", "b"], start=7, public=())
    assert read_ports(file) == first == load_ports(file, ["a", "b"], start=99, public=())
    now_public = set(first.values())
    assert now_public.isdisjoint(load_ports(file, "ab", start=7, public=now_public).values())
    file.write_text("no json")
    assert read_ports(file) == {}


def telemetry_env(tmp_path, **options) -> dict[str, str]:
    ports = {name: FIRST + number for number, name in enumerate(INTERNAL_PORTS)}
    home = Home(tmp_path)
    plan = ServicePlan(home, StackOptions(**options), load_secrets(home), ports)
    [telemetry] = [it for it in plan.services() if it.spec.name == "telemetry"]
    return dict(telemetry.spec.env)


def test_telemetry_sends_spans_where_up_was_told(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=secret")
    assert not [name for name in telemetry_env(tmp_path) if "OTLP" in name]
    url = "http://127.0.0.1:4318/v1/traces"
    told = telemetry_env(tmp_path, otlp_endpoint=url)
    assert {name: it for name, it in told.items() if "OTLP" in name} == {
        "TELEMETRY__OTLP_ENDPOINT": url,
        "OTEL_EXPORTER_OTLP_HEADERS": "x-key=secret",
    }


@pytest.mark.parametrize("wrong", ["collector:4318", "http://collector:4318", "ftp://c/v1/traces"])
def test_an_endpoint_that_telemetry_would_not_start_with_is_refused(wrong) -> None:
    told = CliRunner().invoke(app, ["up", "--otlp-endpoint", wrong])
    assert told.exit_code == 2
    assert wrong in told.output


def test_a_background_start_hands_the_endpoint_on(tmp_path, monkeypatch) -> None:
    given: list[str] = []
    monkeypatch.setenv("SLUICE_HOME", str(tmp_path))
    monkeypatch.setattr(
        stack_commands, "_start_in_background", lambda _, arguments: given.extend(arguments)
    )
    url = "https://collector/v1/traces"
    assert CliRunner().invoke(app, ["up", "--detach", "--otlp-endpoint", url]).exit_code == 0
    assert f"--otlp-endpoint={url}" in given
