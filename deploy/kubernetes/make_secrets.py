"""Writes the Secrets that the manifests name, as JSON for `kubectl apply -f -`; nothing is stored.

`python deploy/kubernetes/make_secrets.py --database-url postgresql+asyncpg://... --valkey-url redis://...`.
Keys of ours are made anew each time: run it once, and keep what it says in your store of secrets.
"""  # noqa: INP001 - a script beside what it belongs to

import argparse
import hashlib
import json
import secrets
import sys
from collections.abc import Sequence


def manifests(given: argparse.Namespace) -> list[dict[str, object]]:
    """Return the Secrets; the first admin's key is made here.

    Control plane and telemetry have that key, to ask one another. Nodes have a key of the store
    that need not write, and the operator's key, if any.
    """
    key = f"sk-admin-{secrets.token_urlsafe(32)}"
    found = {
        "sluice-admin": {"key": key, "key-sha256": hashlib.sha256(key.encode()).hexdigest()},
        # Proves that a process belongs to this installation.
        "sluice-installation": {"secret": secrets.token_urlsafe(32)},
        "sluice-database": {"url": given.database_url},
        "sluice-valkey": {"url": given.valkey_url},
        "sluice-clickhouse": {
            "user": given.clickhouse_user,
            "password": given.clickhouse_password,
        },
        "sluice-objects": {
            "access-key-id": given.s3_access_key_id,
            "secret-access-key": given.s3_secret_access_key,
        },
        # Nodes only fetch.
        "sluice-objects-read": {
            "access-key-id": given.s3_read_access_key_id or given.s3_access_key_id,
            "secret-access-key": given.s3_read_secret_access_key or given.s3_secret_access_key,
        },
        # Made by the platform once it runs: docs/runbooks/install.md.
        **({"sluice-operator": {"key": given.operator_key}} if given.operator_key else {}),
    }
    return [
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name, "namespace": given.namespace},
            "type": "Opaque",
            "stringData": data,
        }
        for name, data in found.items()
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Write a List to stdout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--namespace", default="sluice")
    parser.add_argument("--database-url", required=True)
    parser.add_argument("--valkey-url", required=True)
    parser.add_argument("--clickhouse-user", default="default")
    parser.add_argument("--clickhouse-password", default="")
    parser.add_argument("--s3-access-key-id", default="")
    parser.add_argument("--s3-secret-access-key", default="")
    parser.add_argument("--s3-read-access-key-id", default="", help="for nodes; else the same")
    parser.add_argument("--s3-read-secret-access-key", default="")
    parser.add_argument("--operator-key", default="")
    items = manifests(parser.parse_args(arguments))
    json.dump({"apiVersion": "v1", "kind": "List", "items": items}, sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
