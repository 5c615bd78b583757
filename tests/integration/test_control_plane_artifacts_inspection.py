"""The process that looks at artifacts: what is hostile ends it, and nothing else."""

import hashlib
import json
from pathlib import Path

import pytest

from control_plane.artifacts import inspector
from control_plane.artifacts.inspection import inspect_apart
from control_plane.artifacts.inspector import InspectionJob
from sluice.chunk_store import ChunkStore, open_backend
from sluice.manifests import manifest_of_directory
from tests.integration.artifact_site import contents
from tests.support.random_models import write_random_adapter, write_random_model

pytestmark = pytest.mark.real


@pytest.fixture
def base_dir(tmp_path: Path) -> Path:
    write_random_model(tmp_path / "base", changes={"intermediate_size": 6000})
    return tmp_path / "base"


async def job_of(
    store_dir: Path, directory: Path, base: Path | None = None, **changes
) -> InspectionJob:
    """Put a directory into a store, and return the job to look at it."""
    store = ChunkStore(open_backend(store_dir.as_uri()))
    for place in (directory, *([] if base is None else [base])):
        for sha256, content in contents(place, manifest_of_directory(place)).items():
            assert hashlib.sha256(content).hexdigest() == sha256
            await store.put(sha256, content)
    store.close()
    values = {
        "store_url": store_dir.as_uri(),
        "kind": "base" if base is None else "adapter",
        "manifest": manifest_of_directory(directory).document(),
        "base_manifest": None if base is None else manifest_of_directory(base).document(),
        "rank_max": 64,
        "adapter_bytes_max": 1 << 30,
        "cpu_s": 30,
    }
    return InspectionJob(**(values | changes))


async def test_good_ones_have_no_reasons_against_them(tmp_path, base_dir) -> None:
    assert await inspect_apart(await job_of(tmp_path / "store", base_dir), 60) == []
    write_random_adapter(tmp_path / "adapter", base_dir, rank=2)
    adapter = await job_of(tmp_path / "store", tmp_path / "adapter", base_dir)
    assert await inspect_apart(adapter, 60) == []
    assert inspector.inspect(adapter) == []


async def test_files_that_take_the_parsers_down_are_refused(tmp_path, base_dir) -> None:
    """Nested beyond any stack, in each of the files that code of others reads."""
    deep = 200_000
    nested = '{"a":' * deep + "1" + "}" * deep
    tokenizer = (base_dir / "tokenizer.json").read_text()
    config = json.loads((base_dir / "tokenizer_config.json").read_text())
    for name, text in (
        ("tokenizer.json", nested),
        ("config.json", nested),
        ("tokenizer_config.json", json.dumps(config | {"chat_template": "{{" + "(" * deep})),
        ("chat_template.jinja", "{% if x %}" * 50_000),
    ):
        path = base_dir / name
        before = path.read_text() if path.exists() else None
        path.write_text(text)
        reasons = await inspect_apart(await job_of(tmp_path / "store", base_dir), 60)
        assert reasons, name
        assert all(len(reason) < 1000 for reason in reasons)
        if before is None:
            path.unlink()
        else:
            path.write_text(before)
    assert (base_dir / "tokenizer.json").read_text() == tokenizer
    assert await inspect_apart(await job_of(tmp_path / "store", base_dir), 60) == []


async def test_time_ends(tmp_path, base_dir) -> None:
    job = await job_of(tmp_path / "store", base_dir)
    (reason,) = await inspect_apart(job, 0.01)
    assert "could not be checked within" in reason


async def test_a_store_that_cannot_be_read_is_no_reason(tmp_path, base_dir) -> None:
    job = await job_of(tmp_path / "store", base_dir)
    weights = max((tmp_path / "store").rglob("*"), key=lambda path: path.stat().st_size)
    weights.unlink()
    assert await inspect_apart(job, 60) is None


async def test_secrets_do_not_reach_it(tmp_path, base_dir, monkeypatch) -> None:
    monkeypatch.setenv("CONTROL_PLANE__DATABASE_URL", "postgresql://secret")
    seen = tmp_path / "seen"
    (tmp_path / "fake").write_text(
        f"#!/bin/sh\nenv > {seen}\ncat > /dev/null\necho '{{\"reasons\": []}}'\n"
    )
    (tmp_path / "fake").chmod(0o700)
    monkeypatch.setattr("sys.executable", str(tmp_path / "fake"))
    assert await inspect_apart(await job_of(tmp_path / "store", base_dir), 60) == []
    assert "PATH=" in seen.read_text()
    assert "secret" not in seen.read_text()


@pytest.mark.parametrize(("ending", "is_end"), [("kill -TERM $$", False), ("echo report", True)])
async def test_no_status_is_without_meaning(
    tmp_path, base_dir, monkeypatch, ending, is_end
) -> None:
    """Ended from outside it may report the next time; what it prints instead of a report is an end."""
    (tmp_path / "fake").write_text(f"#!/bin/sh\ncat > /dev/null\n{ending}\n")
    (tmp_path / "fake").chmod(0o700)
    monkeypatch.setattr("sys.executable", str(tmp_path / "fake"))
    found = await inspect_apart(await job_of(tmp_path / "store", base_dir), 60)
    assert (found is not None) == is_end
