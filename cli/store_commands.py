"""Further commands of `sluice artifacts`, for pull, pins, garbage, uploads and signing keys."""

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from cli.admin import AsJson, Digest, ask, delete_one, show_one
from cli.api import ApiClient, Json
from cli.bars import byte_bar
from cli.downloads import Pull, find_manifest
from cli.render import show_fields, show_json, show_objects, size_text
from cli.stack_commands import fail
from sluice.manifests import ManifestError, manifest_of_directory

uploads = typer.Typer(help="Uploads and imports of artifacts.", no_args_is_help=True)
signing_keys = typer.Typer(help="Public keys that may sign artifacts.", no_args_is_help=True)

_JOBS = 4
_GARBAGE = ("digest", "kind", "size", "state", "goes_at", "needed_by")
_UPLOADS = ("id", "kind", "digest", "tenant_id", "state", "size_bytes", "source", "created_at")
_KEYS = ("id", "public_key", "owner_tenant_id", "is_disabled")
_DONE = ("noticed", "needed", "retired", "removed")
_STATES = {
    "running": "the sweep takes long and goes on: run this again later",
    "busy": "another control plane is sweeping: run this again in a moment",
}

UploadId = Annotated[
    str, typer.Argument(help="Id of an upload; see: sluice artifacts uploads list.")
]
KeyName = Annotated[str, typer.Argument(metavar="KEY", help="Id of a signing key.")]


def pull_artifact(
    digest: Digest,
    directory: Annotated[
        Path, typer.Argument(help="Directory to create, or an empty one.", file_okay=False)
    ],
    *,
    jobs: Annotated[int, typer.Option(min=1, max=16, help="Chunks fetched at once.")] = _JOBS,
    as_json: AsJson = False,
) -> None:
    """Download an artifact. Every chunk is verified, and an interrupted download is resumed.

    An unfinished download is stored beside DIR, in a directory whose name ends in .part.
    """

    async def work(api: ApiClient) -> Json:
        manifest = await find_manifest(api, digest)
        found: Json = {
            "digest": digest,
            "directory": str(directory),
            "size_bytes": manifest.size_bytes,
            "file_count": len(manifest.files),
        }
        if directory.is_dir() and any(directory.iterdir()):
            if manifest_of_directory(directory).digest == digest:
                return found
            raise fail(f"{directory} holds something else: name a directory that is not there yet")
        with byte_bar("fetching") as on_done:
            await Pull(directory, manifest).run(api, jobs=jobs, on_done=on_done)
        return found

    try:
        found = ask(work)
    except ManifestError:
        raise fail(
            f"{directory} holds something else: name a directory that is not there yet"
        ) from None
    except OSError as error:
        where = error.filename or directory
        raise fail(
            f"{where}: {error.strerror}; the same command goes on where this one ended"
        ) from None
    if as_json:
        show_json(found)
    else:
        count, size = found["file_count"], size_text(found["size_bytes"])
        typer.echo(f"{directory} is {digest} ({count} files, {size})")


def pin_artifact(digest: Digest, *, as_json: AsJson = False) -> None:
    """Keep an artifact even if no object needs it. The command is for admins."""
    _pin(digest, is_pinned=True, as_json=as_json)


def unpin_artifact(digest: Digest, *, as_json: AsJson = False) -> None:
    """Let an artifact be removed when no object needs it. The command is for admins."""
    _pin(digest, is_pinned=False, as_json=as_json)


def list_holders(digest: Digest, *, as_json: AsJson = False) -> None:
    """List the nodes that have a complete artifact on disk, with the times of completion."""
    found = ask(lambda api: api.list(f"/v1/artifacts/{digest}/nodes"))
    show_objects(found, ("id", "since"), as_json=as_json)


def collect_garbage(
    *,
    run: Annotated[
        bool, typer.Option("--run", help="Remove due artifacts now; no grace gets shorter.")
    ] = False,
    show_all: Annotated[
        bool,
        typer.Option("--all", help="Also show kept artifacts, and the objects that need them."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show unneeded artifacts, which will be removed, and the reasons to keep the rest.

    An artifact is noticed when it is first unneeded, then in grace. At goes_at it is due, and the
    next sweep retires it. A retired artifact is invisible, and is removed at goes_at. A kept
    artifact is needed.
    Column needed_by names one object of each kind that needs the artifact. Sweeps run every minute.
    """

    async def work(api: ApiClient) -> tuple[Json | None, list[Json]]:
        swept = await api.call("POST", "/v1/artifacts/sweeps") if run else None
        return swept, await api.list("/v1/artifacts/garbage")

    swept, found = ask(work)
    if as_json:
        show_json({"sweep": swept, "artifacts": found})
        return
    if swept is not None:
        _print_sweep(swept)
    going = [row for row in found if row["state"] != "kept"]
    rows = [
        row | {"size": size_text(row["size_bytes"]), "goes_at": row["goes_at"][:19]}
        for row in (going + [row for row in found if row["state"] == "kept"] * show_all)
    ]
    if rows:
        show_objects(rows, _GARBAGE, as_json=False)
    freed = size_text(sum(row["size_bytes"] for row in going))
    kept = Counter(reason.split()[0] for row in found for reason in row["needed_by"])
    why = ", ".join(f"{count} {reason}" for reason, count in kept.most_common())
    kept_count = len(found) - len(going)
    typer.echo(
        f"{len(going)} artifacts are unused ({freed}); {kept_count} are kept"
        + (f", because of: {why}; see --all" if why else "")
    )


def _print_sweep(swept: Json) -> None:
    if swept["state"] in _STATES:
        typer.echo(_STATES[swept["state"]])
        return
    counts = ", ".join(f"{len(swept[name])} {name}" for name in _DONE)
    typer.echo(f"swept: {counts}; {swept['chunks']} chunks left the store")


def _pin(digest: str, *, is_pinned: bool, as_json: bool) -> None:
    path, body = f"/v1/artifacts/{digest}/pin", {"is_pinned": is_pinned}
    made = ask(lambda api: api.call("PUT", path, body))
    show_objects([made], ("digest", "kind", "size_bytes", "is_pinned"), as_json=as_json)


@uploads.command("list")
def list_uploads(*, as_json: AsJson = False) -> None:
    """List uploads and imports, newest first. Ended uploads are listed for a week."""
    show_objects(ask(lambda api: api.list("/v1/artifacts/uploads")), _UPLOADS, as_json=as_json)


@uploads.command("show")
def show_upload(upload: UploadId, *, as_json: AsJson = False) -> None:
    """Show an upload with its missing chunks, or with the reasons of its refusal."""
    found = ask(lambda api: api.call("GET", f"/v1/artifacts/uploads/{upload}"))
    if as_json:
        show_json(found)
        return
    lacks = size_text(sum(chunk["size_bytes"] for chunk in found["missing"]))
    show_fields(found | {"missing": f"{len(found['missing'])} chunks, {lacks}"})


@uploads.command("cancel")
def cancel_upload(upload: UploadId, *, as_json: AsJson = False) -> None:
    """Cancel a running upload or import, and remove its chunks."""
    ended = ask(lambda api: api.call("POST", f"/v1/artifacts/uploads/{upload}/cancel"))
    show_objects([ended], _UPLOADS, as_json=as_json)


@signing_keys.command("list")
def list_signing_keys(*, as_json: AsJson = False) -> None:
    """List the keys that are trusted to sign artifacts."""
    show_objects(ask(lambda api: api.list("/v1/signing-keys")), _KEYS, as_json=as_json)


@signing_keys.command("show")
def show_signing_key(key: KeyName, *, as_json: AsJson = False) -> None:
    """Show a signing key."""
    show_one(f"/v1/signing-keys/{key}", as_json=as_json)


@signing_keys.command("set")
def set_signing_key(
    key: KeyName,
    public_key: Annotated[str, typer.Argument(help="Ed25519, 32 bytes in base64.")],
    *,
    tenant: Annotated[
        str, typer.Option(help="Tenant whose artifacts it signs; default: all.")
    ] = "",
    is_disabled: Annotated[
        bool,
        typer.Option("--disable/--enable", help="Disable its signatures, or enable them again."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Register a public key, or replace it. The command is for admins."""
    body = {"public_key": public_key, "owner_tenant_id": tenant, "is_disabled": is_disabled}
    made = ask(lambda api: api.call("PUT", f"/v1/signing-keys/{key}", body))
    show_objects([made], _KEYS, as_json=as_json)


@signing_keys.command("delete")
def delete_signing_key(key: KeyName) -> None:
    """Delete a signing key. The artifacts that it signed remain."""
    delete_one(f"/v1/signing-keys/{key}", f"signing key {key}")


def register(artifacts: typer.Typer) -> None:
    """Add the commands to `sluice artifacts`."""
    artifacts.command("pull")(pull_artifact)
    artifacts.command("pin")(pin_artifact)
    artifacts.command("unpin")(unpin_artifact)
    artifacts.command("nodes")(list_holders)
    artifacts.command("gc")(collect_garbage)
    artifacts.add_typer(uploads, name="uploads")
    artifacts.add_typer(signing_keys, name="signing-keys")
