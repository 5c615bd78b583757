"""Files of tenants, stored as records whose items are the parts of a file, in order."""

import json

KIND = PREFIX = "file"
PART_BYTES = 1 << 20


def part_id(number: int) -> str:
    """Return the id of a part from its number, which starts at 0."""
    return f"{number:08d}"


def file_content(filename: str, purpose: str, size_bytes: int, status: str = "processed") -> bytes:
    """Return the metadata of a file for its record, as JSON."""
    told = {"filename": filename, "purpose": purpose, "bytes": size_bytes, "status": status}
    return json.dumps(told).encode()
