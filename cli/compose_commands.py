"""`sluice compose`: creates the .env file and the first objects for docker-compose.yml."""

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from cli import compose_env
from cli.admin import refuse_clear, take_certificates
from cli.api import ApiClient, ApiError, trust
from cli.stack.errors import StackError
from cli.stack.home import Home, Secrets, load_secrets, render_env, save_secrets, write_atomic
from cli.stack.seed import ShippedBase, first_token, seed, wait_answering
from cli.stack_commands import EngineOption, fail
from sluice.engines import OPENVINO

_CONTROL_PLANE_S = 60.0
_PUSH_S = 120.0

compose = typer.Typer(no_args_is_help=True, help="Settings and keys for docker-compose.yml.")


@compose.command("init")
def init(
    *,
    file: Annotated[Path, typer.Option(help="File that Docker reads.")] = compose_env.ENV_FILE,
) -> None:
    """Add generated secrets to .env, where present values stay, and write context `compose`."""
    home = Home.find()
    try:
        added = compose_env.write(file, home)
    except OSError as error:
        raise fail(f"{error.filename} cannot be written: {error.strerror}") from None
    except ValueError as error:
        raise fail(f"{file}: {error}") from None
    typer.echo(f"{file}: {', '.join(added) or 'nothing was missing'}")
    typer.echo(f"talk to it with: sluice --context {compose_env.CONTEXT} ...")


@compose.command("bootstrap")
def bootstrap(
    *,
    base: Annotated[
        Path | None, typer.Option(help="Directory of another base than the shipped one.")
    ] = None,
    engine: EngineOption = OPENVINO.name,
    replicas: Annotated[int, typer.Option(min=1, max=16, help="Replicas of the pool.")] = 1,
    first_token_s: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for a first token; 0: no wait.")
    ] = 180.0,
) -> None:
    """Create a base, its pool and model, tiers and a tenant in an installation.

    The command may be repeated. It runs in a container of the installation, and needs
    SLUICE_ADMIN_URL, SLUICE_ADMIN_KEY and OPENAI_BASE_URL. It writes addresses and the key of the
    tenant `demo` to $SLUICE_HOME/env.
    """
    from cli.stack.base import import_base

    home = Home.find()
    try:
        url, key, public = (
            os.environ[name] for name in ("SLUICE_ADMIN_URL", "SLUICE_ADMIN_KEY", "OPENAI_BASE_URL")
        )
    except KeyError as error:
        raise fail(f"{error.args[0]} is not set") from None
    take_certificates()
    refuse_clear("SLUICE_ADMIN_URL", url)
    secrets = replace(load_secrets(home), admin_key=key)
    try:
        shipped = import_base(base, home.artifacts)
        secrets = asyncio.run(_give(url, home, shipped, secrets, engine, replicas))
        write_atomic(
            home.env_file,
            render_env({"OPENAI_BASE_URL": public, "OPENAI_API_KEY": secrets.demo_key}),
            mode=0o600,
        )
        if first_token_s:
            asyncio.run(_wait_token(public, secrets.demo_key, first_token_s))
    except (ApiError, StackError, OSError) as error:
        raise fail(str(error)) from None
    typer.echo(f"base {shipped.digest[:12]} serves as {shipped.name}; keys: {home.env_file}")


async def _give(
    url: str, home: Home, base: ShippedBase, secrets: Secrets, engine: str, replicas: int
) -> Secrets:
    """Upload the base before its pool exists, because a new pool's nodes fetch the base at once."""
    from cli.stack.base import push_base

    async with ApiClient(url, secrets.admin_key) as api:
        await wait_answering(api, _CONTROL_PLANE_S)
        problem = await push_base(api, home.artifacts / base.digest, _PUSH_S)
        for _, digest in base.adapters:
            problem = problem or await push_base(
                api, home.artifacts / digest, _PUSH_S, base_digest=base.digest
            )
        if problem:
            raise StackError(problem)
        made = await seed(api, base, engine=engine, replicas=replicas, secrets=secrets)
    save_secrets(home, made)
    return made


async def _wait_token(public: str, key: str, timeout_s: float) -> None:
    last = "nothing was heard"

    def note(reason: str) -> None:
        nonlocal last
        last = reason
        typer.echo(json.dumps({"event": "no_token_yet", "reason": reason}))

    try:
        async with asyncio.timeout(timeout_s):
            await first_token(public, key, note, verify=trust())
    except TimeoutError:
        raise StackError(
            f"no token came within {timeout_s:g} s (last: {last}); see: docker compose logs"
        ) from None
