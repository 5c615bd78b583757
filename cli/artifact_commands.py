"""`sluice artifacts`: commands that upload, import and list bases and adapters."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from cli.admin import AsJson, Digest, ask, given, show_one
from cli.api import ApiClient, Json
from cli.bars import byte_bar
from cli.plan_files import read_plan
from cli.render import show_json, show_objects
from cli.stack_commands import fail
from cli.store_commands import register
from cli.uploads import ended, upload
from sluice.manifests import Manifest, ManifestError, manifest_of_directory

artifacts = typer.Typer(help="Bases and adapters, by digest.", no_args_is_help=True)

_SHOWN = ("digest", "kind", "size_bytes", "file_count", "base_digests", "is_pinned")
_VERSION = ("id", "adapter_digest", "base_digest", "is_promoted", "rollout_id")
_JOBS = 4


class ArtifactKindOption(StrEnum):
    """The kind of an artifact."""

    BASE = "base"
    ADAPTER = "adapter"


Directory = Annotated[
    Path, typer.Argument(exists=True, file_okay=False, help="Directory of its files.")
]
Base = Annotated[str, typer.Option("--base", help="Digest of an adapter's base; none: a base.")]
OfTenant = Annotated[
    str, typer.Option("--tenant", help="Owner; default: the key's tenant, else all tenants.")
]
Signature = Annotated[
    list[str] | None,
    typer.Option(
        "--signature", metavar="KEY=BASE64", help="Signature of the digest by a registered key."
    ),
]


@artifacts.command("list")
def list_artifacts(
    *,
    kind: Annotated[
        ArtifactKindOption | None, typer.Option(help="Only artifacts of this kind.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the artifacts."""
    only = given(kind=None if kind is None else kind.value)
    found = ask(lambda api: api.list("/v1/artifacts", **only))
    show_objects(found, _SHOWN, as_json=as_json)


@artifacts.command("show")
def show_artifact(digest: Digest, *, as_json: AsJson = False) -> None:
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
    """Upload a directory. Only missing chunks are sent, also after an interrupted upload."""
    manifest = _manifest(directory)
    body = _subject(base, tenant, signature) | {"manifest": manifest.document()}

    async def work(api: ApiClient) -> Json:
        with byte_bar("sending") as on_sent:
            return await upload(api, directory, manifest, body, jobs=jobs, on_sent=on_sent)

    found = ask(work)
    _show_end(found, as_json=as_json)


@artifacts.command("import")
def import_artifact(
    uri: Annotated[
        str,
        typer.Argument(
            help="file:///directory, s3://bucket/prefix, https://..., or an adapter's .safetensors."
        ),
    ],
    *,
    base: Base = "",
    tenant: OfTenant = "",
    signature: Signature = None,
    as_json: AsJson = False,
) -> None:
    """Let the control plane download an artifact from a source that its operator allows."""
    body = _subject(base, tenant, signature) | {"source": uri}

    async def work(api: ApiClient) -> Json:
        return await ended(api, await api.call("POST", "/v1/artifacts/imports", body))

    _show_end(ask(work), as_json=as_json)


@artifacts.command("verify")
def verify_artifact(directory: Directory, digest: Digest) -> None:
    """Compare a directory with an artifact, file by file. Exit status 1 means a difference."""
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
def remove_artifact(digest: Digest, *, tenant: OfTenant = "") -> None:
    """Remove an artifact from a tenant. Its bytes are deleted when no object needs them."""
    query = {"tenant_id": tenant} if tenant else None
    ask(lambda api: api.call("DELETE", f"/v1/artifacts/{digest}", query=query))
    typer.echo(f"removed {digest}")


def publish(
    model: Annotated[str, typer.Argument(help="Public name.")],
    version: Annotated[str, typer.Argument(help="Name, as in MODEL@VERSION.")],
    adapter: Annotated[
        str,
        typer.Argument(
            help="A local directory, sha256:DIGEST, or a URI to import; none: the base alone."
        ),
    ] = "",
    *,
    base_model: Annotated[
        str, typer.Option(help="For an adapter: the model of its base, without an adapter.")
    ] = "",
    pool: Annotated[str, typer.Option(help="For a base alone: the pool that serves it.")] = "",
    promote: Annotated[bool, typer.Option(help="Let the model serve it, at once.")] = False,
    staged: Annotated[
        bool, typer.Option("--staged", help="Roll it out; see: sluice rollouts watch.")
    ] = False,
    plan: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="Plan of --staged, as JSON; default: the model's plan.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Create a version of a model from an adapter or a base. The first one needs --promote."""
    if plan is not None and not staged:
        raise typer.BadParameter("belongs to --staged", param_hint="--plan")
    if promote and staged:
        raise typer.BadParameter("exclude each other: choose one", param_hint="--promote, --staged")
    if bool(adapter) != bool(base_model) or bool(adapter) == bool(pool):
        raise typer.BadParameter("an adapter needs --base-model, a base alone --pool")
    directory = Path(adapter) if adapter and ":" not in adapter else None
    manifest = None if directory is None else _manifest(directory)

    async def work(api: ApiClient) -> Json:
        uri = adapter
        if directory is not None and manifest is not None:
            base = (await api.call("GET", f"/v1/models/{base_model}"))["base_digest"]
            body = _subject(base, "", None) | {"manifest": manifest.document()}
            with byte_bar("sending") as on_sent:
                ready = await upload(api, directory, manifest, body, on_sent=on_sent)
            uri = f"sha256:{ready['digest']}"
        promote_to = "100%" if promote else "staged" if staged else ""
        body: Json = {"artifact_uri": uri, "base_model": base_model, "promote_to": promote_to}
        if pool:
            body = {"pool_id": pool, "adapter_type": "none", "promote_to": promote_to}
        body |= given(plan=None if plan is None else read_plan(plan))
        while True:
            made = await api.call("PUT", f"/v1/models/{model}/versions/{version}", body)
            if "state" not in made:
                return made
            body["artifact_uri"] = f"sha256:{(await ended(api, made))['digest']}"

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


def _show_end(upload: Json, *, as_json: bool) -> None:
    if as_json:
        show_json(upload)
    else:
        typer.echo(f"{upload['digest']} is ready ({upload['kind']}, {upload['size_bytes']} bytes)")


register(artifacts)
