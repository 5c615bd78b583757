"""`sluice artifacts`: bases and adapters on their way to the platform."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from cli.admin import AsJson, ask, show_one
from cli.api import Api, ApiError, Json
from cli.render import console, show_json, show_objects
from cli.stack_commands import fail
from sluice.manifests import CHUNK_BYTES, Manifest, ManifestError, manifest_of_directory

artifacts = typer.Typer(help="Bases and adapters, by digest.", no_args_is_help=True)

_SHOWN = ("digest", "kind", "size_bytes", "file_count", "base_digests", "is_pinned")
_VERSION = ("id", "adapter_digest", "base_digest", "is_promoted", "rollout_id")
_JOBS = 4
_ENDED = ("ready", "refused")
_POLL_S = 0.5
_TRIES_MAX = 30

Directory = Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Of its files.")]
Base = Annotated[str, typer.Option("--base", help="Digest of an adapter's base; none: a base.")]
OfTenant = Annotated[
    str, typer.Option("--tenant", help="Whose it is; default: the key's tenant, else everybody's.")
]
Signature = Annotated[
    list[str] | None,
    typer.Option("--signature", metavar="KEY=BASE64", help="Of the digest, by a registered key."),
]


@artifacts.command("list")
def list_artifacts(*, as_json: AsJson = False) -> None:
    """List the artifacts."""
    show_objects(ask(lambda api: api.list("/v1/artifacts")), _SHOWN, as_json=as_json)


@artifacts.command("show")
def show_artifact(digest: str, *, as_json: AsJson = False) -> None:
    """Show an artifact."""
    show_one(f"/v1/artifacts/{digest}", as_json=as_json)


@artifacts.command("push")
def push_artifact(
    directory: Directory,
    *,
    base: Base = "",
    tenant: OfTenant = "",
    signature: Signature = None,
    jobs: Annotated[int, typer.Option(min=1, max=16, help="Chunks sent at once.")] = _JOBS,
    as_json: AsJson = False,
) -> None:
    """Upload a directory; what is there already is not sent, and an upload that broke goes on."""
    manifest = _manifest(directory)
    body = _subject(base, tenant, signature) | {"manifest": manifest.document()}

    found = ask(lambda api: _upload(api, directory, manifest, body, jobs))
    _show_end(found, as_json=as_json)


@artifacts.command("import")
def import_artifact(
    uri: Annotated[str, typer.Argument(help="file:///directory, s3://bucket/prefix, https://...")],
    *,
    base: Base = "",
    tenant: OfTenant = "",
    signature: Signature = None,
    as_json: AsJson = False,
) -> None:
    """Let the control plane fetch an artifact from where an operator has allowed it."""
    body = _subject(base, tenant, signature) | {"source": uri}

    async def work(api: Api) -> Json:
        return await _ended(api, await api.call("POST", "/v1/artifacts/imports", body))

    _show_end(ask(work), as_json=as_json)


@artifacts.command("verify")
def verify_artifact(directory: Directory, digest: str) -> None:
    """Compare a directory with an artifact, file by file; exit status 1 when they differ."""
    mine = {file.name: file.sha256 for file in _manifest(directory).files}
    found = ask(lambda api: api.call("GET", f"/v1/artifacts/{digest}/manifest"))
    theirs = {file["name"]: file["sha256"] for file in found["files"]}
    for name in sorted(mine.keys() | theirs.keys()):
        if mine.get(name) != theirs.get(name):
            here, there = name in mine, name in theirs
            problem = "differs" if here and there else "is only here" if here else "is not here"
            typer.echo(f"{name} {problem}")
    if mine != theirs:
        raise typer.Exit(1)
    typer.echo(f"{directory} is {digest}")


@artifacts.command("remove")
def remove_artifact(digest: str, *, tenant: OfTenant = "") -> None:
    """Take an artifact from a tenant; its bytes go when nobody needs them."""
    query = f"?tenant_id={tenant}" if tenant else ""
    ask(lambda api: api.call("DELETE", f"/v1/artifacts/{digest}{query}"))
    typer.echo(f"removed {digest}")


def publish(
    model: Annotated[str, typer.Argument(help="Public name.")],
    version: Annotated[str, typer.Argument(help="Of the model; becomes MODEL@VERSION.")],
    adapter: Annotated[
        str, typer.Argument(help="A directory here, sha256:DIGEST, or what can be imported.")
    ],
    *,
    base_model: Annotated[str, typer.Option(help="A model without adapter, as it is served.")],
    promote: Annotated[bool, typer.Option(help="Let the model stand for it, at once.")] = False,
    staged: Annotated[
        bool, typer.Option("--staged", help="Roll it out; see: sluice rollouts watch.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make an adapter a version of a model; the first version of a new model is promoted."""
    if promote and staged:
        raise typer.BadParameter("is one or the other", param_hint="--promote, --staged")
    directory = Path(adapter) if ":" not in adapter else None
    manifest = None if directory is None else _manifest(directory)

    async def work(api: Api) -> Json:
        uri = adapter
        if directory is not None and manifest is not None:
            base = (await api.call("GET", f"/v1/models/{base_model}"))["base_digest"]
            body = _subject(base, "", None) | {"manifest": manifest.document()}
            ready = await _upload(api, directory, manifest, body, _JOBS)
            uri = f"sha256:{ready['digest']}"
        promote_to = "100%" if promote else "staged" if staged else ""
        body = {"artifact_uri": uri, "base_model": base_model, "promote_to": promote_to}
        while True:
            made = await api.call("PUT", f"/v1/models/{model}/versions/{version}", body)
            if "state" not in made:
                return made
            body["artifact_uri"] = f"sha256:{(await _ended(api, made))['digest']}"

    show_objects([ask(work)], _VERSION, as_json=as_json)


def _manifest(directory: Path) -> Manifest:
    try:
        return manifest_of_directory(directory)
    except (ManifestError, OSError) as error:
        raise fail(str(error)) from None


def _subject(base: str, tenant: str, signatures: list[str] | None) -> Json:
    signed: dict[str, str] = {}
    for option in signatures or []:
        key, mark, text = option.partition("=")
        if not (key and mark):
            raise typer.BadParameter(f"{option!r} is not KEY=BASE64", param_hint="--signature")
        signed[key] = text
    kind = "adapter" if base else "base"
    return {"kind": kind, "base_digest": base, "tenant_id": tenant, "signatures": signed}


async def _upload(api: Api, directory: Path, manifest: Manifest, body: Json, jobs: int) -> Json:
    """Upload a directory, and return what became of it."""
    upload = await api.call("POST", "/v1/artifacts/uploads", body)
    await _send(api, upload, directory, manifest, jobs)
    path = f"/v1/artifacts/uploads/{upload['id']}"
    return await _ended(api, await api.call("POST", f"{path}/complete"))


async def _send(api: Api, upload: Json, directory: Path, manifest: Manifest, jobs: int) -> None:
    """Send what an upload lacks, some chunks at once, with a bar on a terminal's stderr."""
    places = _places(directory, manifest)
    waiting = [(chunk["sha256"], chunk["size_bytes"]) for chunk in upload["missing"]]
    columns = (TextColumn("sending"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    err = console(stderr=True)
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        bar = progress.add_task("", total=sum(size for _, size in waiting))

        async def work() -> None:
            while waiting:
                sha256, size = waiting.pop()
                content = await asyncio.to_thread(_read, *places[sha256], size)
                await _put(api, f"/v1/artifacts/uploads/{upload['id']}/chunks/{sha256}", content)
                progress.advance(bar, size)

        # A group would wrap the one error that people shall read.
        outcomes = await asyncio.gather(*(work() for _ in range(jobs)), return_exceptions=True)
    for outcome in outcomes:
        if outcome is not None:
            raise outcome


async def _put(api: Api, path: str, content: bytes) -> None:
    """Send a chunk; while the platform is busy or restarts, again."""
    for left in reversed(range(_TRIES_MAX)):
        try:
            await api.send_bytes(path, content)
        except ApiError as error:
            if not left or 0 < error.status < 500:
                raise
            await asyncio.sleep(1.0)
        else:
            return


def _places(directory: Path, manifest: Manifest) -> dict[str, tuple[Path, int]]:
    """Return the file and offset of each chunk."""
    return {
        chunk.sha256: (directory / file.name, index * CHUNK_BYTES)
        for file in manifest.files
        for index, chunk in enumerate(file.chunks())
    }


def _read(path: Path, offset: int, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(size)


async def _ended(api: Api, upload: Json) -> Json:
    """Return an upload once it has ended; ApiError with the reasons if it was refused."""
    while upload["state"] not in _ENDED:
        await asyncio.sleep(_POLL_S)
        upload = await api.call("GET", f"/v1/artifacts/uploads/{upload['id']}")
    if upload["state"] == "refused":
        raise ApiError("refused: " + "\n".join(upload["reasons"]), 400)
    return upload


def _show_end(upload: Json, *, as_json: bool) -> None:
    if as_json:
        show_json(upload)
    else:
        typer.echo(f"{upload['digest']} is ready ({upload['kind']}, {upload['size_bytes']} bytes)")
