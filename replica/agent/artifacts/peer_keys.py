"""Stores on disk the keys with which this node verifies the tickets of other nodes."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import structlog

log = structlog.get_logger(__name__)


class PeerKeys:
    """The last keys of the control plane. Only their owner can read the file."""

    def __init__(self, path: Path) -> None:
        """Read the keys of an earlier agent from the file, if it exists."""
        self._path = path
        self._keys: Mapping[int, bytes] = {}
        try:
            written = json.loads(path.read_bytes())
            self._keys = {int(number): bytes.fromhex(key) for number, key in written.items()}
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, AttributeError) as error:
            log.warning("peer_keys_unreadable", path=str(path), error=repr(error))

    @property
    def known(self) -> Mapping[int, bytes]:
        """All valid keys by id. Empty until the control plane has sent the first keys."""
        return self._keys

    def take(self, keys: Mapping[int, bytes]) -> None:
        """Replace the keys, and write changed keys to the file, which blocks.

        An error of the disk is logged instead of raised, because serving does not need the file.
        """
        if not keys or keys == self._keys:
            return
        self._keys = dict(keys)
        try:
            self._save({str(number): key.hex() for number, key in keys.items()})
        except OSError as error:
            log.warning("peer_keys_not_saved", path=str(self._path), error=str(error))

    def _save(self, document: Mapping[str, str]) -> None:
        staging = self._path.with_suffix(".new")
        staging.unlink(missing_ok=True)  # the file of an agent that was killed during a write
        descriptor = os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(document, file)
            file.flush()
            os.fsync(file.fileno())
        staging.replace(self._path)
