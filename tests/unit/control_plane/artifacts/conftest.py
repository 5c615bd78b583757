"""Artifacts to check: a random base, an adapter of it, and files that lie."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.random_models import write_random_adapter, write_random_model


@dataclass
class Bytes:
    """A file in memory that notes what is read of it."""

    name: str
    content: bytes
    claimed: int | None = None
    reads: list[tuple[int, int]] = field(default_factory=list)

    @property
    def size_bytes(self) -> int:
        return len(self.content) if self.claimed is None else self.claimed

    def read(self, offset: int, length: int) -> bytes:
        assert 0 <= offset <= offset + length <= self.size_bytes
        self.reads.append((offset, length))
        return self.content[offset : offset + length]


def sources(directory: Path) -> dict[str, Bytes]:
    return {
        path.relative_to(directory).as_posix(): Bytes(
            path.relative_to(directory).as_posix(), path.read_bytes()
        )
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="session")
def shared_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("base") / "base"
    write_random_model(directory)
    return directory


@pytest.fixture
def base_files(shared_base: Path) -> dict[str, Bytes]:
    return sources(shared_base)


@pytest.fixture
def base_config(shared_base: Path) -> dict:
    return json.loads((shared_base / "config.json").read_text())


@pytest.fixture
def adapter_dir(shared_base: Path, tmp_path: Path) -> Path:
    write_random_adapter(tmp_path / "adapter", shared_base, rank=4)
    return tmp_path / "adapter"


@pytest.fixture(name="file_of")
def file_of_fixture() -> type[Bytes]:
    return Bytes


@pytest.fixture(name="sources")
def sources_fixture():
    return sources
