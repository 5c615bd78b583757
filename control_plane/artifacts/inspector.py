"""Inspects an artifact before it is accepted. Run by `python -m control_plane.artifacts.inspector`.

The inspection has a separate process, because it runs foreign code (tokenizers, jinja2) on foreign
data, and hashes files of any size. The process has bounded memory and CPU time, and can be killed.
It reads one job as JSON from stdin, and writes one report as JSON to stdout.
"""

import json
import resource
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from obstore.exceptions import BaseError

from control_plane.artifacts.adapter_check import AdapterLimits, check_adapter
from control_plane.artifacts.base_check import CONFIG_FILE, TextParsers, check_base
from control_plane.artifacts.headers import CheckError, read_json
from control_plane.artifacts.stored import stored_files
from sluice.chunk_store import open_backend
from sluice.manifests import parse_manifest

STORE_FAILED = 3  # exit status of a process that could not read the store
# bytes of address space, of which threads and the store's client use 2 GiB
_MEMORY_BYTES_MAX = 6 << 30
_BASE_CONFIG_BYTES_MAX = 16 << 20


@dataclass(frozen=True, slots=True)
class InspectionJob:
    """An artifact to inspect, with the limits of the inspection.

    Attributes:
        store_url: URL of the store, in the form that `open_backend` reads.
        kind: Kind of the artifact, `adapter` or `base`.
        manifest: Manifest of the artifact.
        base_manifest: Manifest of the adapter's base, or None if the artifact is a base.
        rank_max: Largest rank of adapters.
        adapter_bytes_max: Largest size of an adapter's files together, in bytes.
        cpu_s: CPU seconds after which the inspector is killed.
    """

    store_url: str
    kind: str
    manifest: Mapping[str, Any]
    base_manifest: Mapping[str, Any] | None
    rank_max: int
    adapter_bytes_max: int
    cpu_s: int

    def to_json(self) -> bytes:
        """Return the job as the text that `main` reads."""
        return json.dumps(asdict(self)).encode()


def inspect(job: InspectionJob) -> list[str]:
    """Return the reasons why an artifact is refused, one sentence each, or none if accepted.

    Raises:
        OSError, BaseError: The store lacks a chunk, or cannot be read.
    """
    backend = open_backend(job.store_url)
    files = stored_files(backend, parse_manifest(job.manifest))
    if job.kind == "base":
        reasons = check_base(files, TextParsers(count_tokens, compile_template))
    else:
        assert job.base_manifest is not None
        base = stored_files(backend, parse_manifest(job.base_manifest))
        limits = AdapterLimits(job.rank_max, job.adapter_bytes_max)
        try:
            config = read_json(base[CONFIG_FILE], _BASE_CONFIG_BYTES_MAX)
        except (CheckError, KeyError):
            return ["the base has no config.json that can be read: import the base anew"]
        reasons = check_adapter(files, config, limits)
    if reasons:
        return reasons  # refused already, so the expensive hashing is skipped
    return [
        f"{file.name} has another SHA-256 than its manifest says: make the manifest anew"
        for file in files.values()
        if not file.is_whole()
    ]


def count_tokens(text: str) -> int:
    """Return the number of tokens in a tokenizer.json. Raises ValueError if it is not valid."""
    from tokenizers import Tokenizer

    try:
        return int(Tokenizer.from_str(text).get_vocab_size(with_added_tokens=True))
    except BaseException as error:
        # The library's own errors are plain Exceptions, but a panic of its Rust code is a
        # BaseException. Both show that the text is not valid.
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
            raise
        raise ValueError(str(error)) from None


def compile_template(source: str) -> None:
    """Compile a chat template without running it. Raises ValueError if it is not valid."""
    from jinja2 import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import Node
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class AdapterGeneration(Extension):
        """Accepts `{% generation %}`, which marks text for training. Its body is rendered."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 requires this form

        def parse(self, parser: Parser) -> list[Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(extensions=[loopcontrols, AdapterGeneration])
    try:
        environment.compile(source)
    except (TemplateError, RecursionError, SyntaxError) as error:
        raise ValueError(str(error) or type(error).__name__) from None


def main() -> None:
    """Inspect one job. If the process fails, it writes no report and its exit status is not 0."""
    job = InspectionJob(**json.loads(sys.stdin.buffer.read()))
    resource.setrlimit(resource.RLIMIT_CPU, (job.cpu_s, job.cpu_s))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES_MAX, _MEMORY_BYTES_MAX))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        reasons = inspect(job)
    except (OSError, BaseError) as error:
        sys.stderr.write(f"{error!s:.500}\n")
        raise SystemExit(STORE_FAILED) from None
    json.dump({"reasons": reasons}, sys.stdout)


if __name__ == "__main__":
    main()
