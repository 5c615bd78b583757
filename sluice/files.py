"""Files of tenants: records whose items are parts of a file, in their order."""

import json

KIND = PREFIX = "file"
PART_BYTES = 1 << 20


def part_id(number: int) -> str:
    """Return the id of a part, by its number from 0 on."""
    return f"{number:08d}"


def file_content(filename: str, purpose: str, size_bytes: int, status: str = "processed") -> bytes:
    """Return what the record of a file says of it, as JSON."""
    told = {"filename": filename, "purpose": purpose, "bytes": size_bytes, "status": status}
    return json.dumps(told).encode()
