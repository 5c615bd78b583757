"""The shared part of all commands on the admin REST: address, key, and output of the result."""

import os
import sys
from collections.abc import Awaitable, Callable
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from cli.api import TIMEOUT_S, ApiClient, ApiError, Json
from cli.render import show_fields, show_json
from cli.stack.home import Home, read_env, stored_secret
from cli.stack_commands import fail

AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]
Tenant = Annotated[str, typer.Argument(help="Id of a tenant.")]
Digest = Annotated[str, typer.Argument(help="SHA-256 that names the artifact, 64 hex digits.")]

_TLS = "MTLS__"  # prefix of the settings of mutual TLS

WHERE = (
    "Taken from SLUICE_ADMIN_URL, SLUICE_ADMIN_KEY and SLUICE_TELEMETRY_URL of the environment,"
    " else "
    "the running stack of $SLUICE_HOME."
)


def setting(name: str) -> str:
    """Return an address or key from the environment, or else from the stack's env file."""
    if value := setting_value(name):
        return value
    raise fail(f"{name} is not set, nor in {Home.find().env_file}: start the stack, or set it")


def setting_value(name: str) -> str:
    """Return an address or key, or an empty string if neither environment nor env file has it."""
    return os.environ.get(name) or read_env(Home.find()).get(name) or ""


def take_certificates() -> None:
    """Use the mTLS certificates that the environment names, or else those of the local stack."""
    if "SLUICE_ADMIN_URL" not in os.environ:
        for name, value in read_env(Home.find()).items():
            if name.startswith(_TLS):
                os.environ.setdefault(name, value)
    if any(name.upper().startswith(_TLS) for name in os.environ):
        from sluice import certificates

        certificates.use()


def has_certificate() -> bool:
    """Return whether this process already uses a certificate, without loading one."""
    module = sys.modules.get("sluice.certificates")
    return module is not None and module.ours() is not None


def take_secret() -> None:
    """Use the installation's secret of the environment, or else that of the local stack, if any."""
    from sluice import shared_secret

    if "SLUICE_ADMIN_URL" not in os.environ:
        known = stored_secret(Home.find())
        if known:
            os.environ.setdefault(shared_secret.VARIABLE, known)
    if shared_secret.VARIABLE in os.environ:
        shared_secret.use()


def refuse_clear(name: str, url: str) -> None:
    """Raise an exit if the admin key would be sent to `url`, the value of `name`, in clear text."""
    if urlsplit(url).scheme != "https" and has_certificate():
        raise fail(
            f"{name} is {url}: with mutual TLS (MTLS__CERTIFICATE) our services answer HTTPS"
            " only, and the key would be sent in clear text"
        )


def ask(
    work: Callable[[ApiClient], Awaitable[Any]],
    url_name: str = "SLUICE_ADMIN_URL",
    *,
    status: int = 1,
    timeout_s: float = TIMEOUT_S,
) -> Any:
    """Return the result of `work`. After an error it prints a line on stderr and exits."""
    url, key = setting(url_name), setting("SLUICE_ADMIN_KEY")
    take_certificates()
    refuse_clear(url_name, url)

    import asyncio

    async def run() -> Any:
        async with ApiClient(url, key, timeout_s=timeout_s) as api:
            return await work(api)

    try:
        return asyncio.run(run())
    except ApiError as error:
        raise fail(str(error), status) from None


def show_one(
    path: str, *, as_json: bool, readable: Callable[[Json], Json] = lambda found: found
) -> None:
    """Print one object as JSON, or field by field after `readable` has changed it for people."""
    found = ask(lambda api: api.call("GET", path))
    if as_json:
        show_json(found)
    else:
        show_fields(readable(found))


def delete_one(path: str, name: str) -> None:
    """Delete an object and print that it was deleted."""
    ask(lambda api: api.call("DELETE", path))
    typer.echo(f"deleted {name}")


def given(**options: object) -> dict[str, Any]:
    """Return the options that the command line sets. Missing options are None and left out."""
    return {name: value for name, value in options.items() if value is not None}
