"""Runs `sluice scaling` against the control plane of a test."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from typer.testing import CliRunner

from cli.app import app
from tests.integration.conftest import ADMIN_KEY, ControlPlane

Command = Callable[..., Awaitable[str]]


def scaling_command(plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Return a function that runs a command, checks its exit status, and returns its output."""
    monkeypatch.setenv("SLUICE_ADMIN_URL", str(plane.admin.base_url))
    monkeypatch.setenv("SLUICE_ADMIN_KEY", ADMIN_KEY)

    async def run(*words: str, status: int = 0) -> str:
        done = await asyncio.to_thread(CliRunner().invoke, app, ["scaling", *words])
        assert done.exit_code == status, (words, done.output)
        return done.output

    return run
