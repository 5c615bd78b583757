"""Checks at start-up whether the settings can work on this machine, and reports each problem."""

import os
import resource
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from gateway.limits.valkey import ValkeyClient
from gateway.server.runner import bound_socket
from gateway.server.tls import TlsFiles
from gateway.settings import GatewaySettings
from sluice import kafka
from sluice.addresses import host_and_port

# Open files besides clients' connections, for connections to routers, Valkey, brokers and
# Prometheus.
_OTHER_FILES = 512
_WORKERS_PER_CPU_MAX = 8  # More workers would only compete for the processor.
_NAME_MAX = 64  # Bound of an instance's name in characters, as in its setting.
# Length of the suffix of a worker's name, with its slot and the number of starts in the slot.
_SUFFIX_MAX = len("-255.99999")


def problems(settings: GatewaySettings) -> Iterator[str]:
    """Yield the problems, each with the name of the variable and the fix."""
    yield from _workers(settings)
    yield from _files(settings)
    yield from _tls(settings)
    yield from _valkey(settings)
    yield from kafka.problems(settings.kafka_bootstrap)
    # both sockets stay bound until the end, so that equal addresses are detected
    with ExitStack() as listening:
        yield from _address("GATEWAY__HTTP_ADDRESS", settings.http_address, listening)
        if settings.ops_address is not None:
            yield from _address("GATEWAY__OPS_ADDRESS", settings.ops_address, listening)


def _workers(settings: GatewaySettings) -> Iterator[str]:
    most = _WORKERS_PER_CPU_MAX * len(os.sched_getaffinity(0))
    if settings.workers > most:
        yield f"GATEWAY__WORKERS: {settings.workers} are too many for this machine; at most {most}"
    if settings.workers > 1 and len(settings.instance_id) > _NAME_MAX - _SUFFIX_MAX:
        yield (
            "GATEWAY__INSTANCE_ID: it is too long, because the name of a worker is it and a number;"
            f" with several workers it has at most {_NAME_MAX - _SUFFIX_MAX} characters"
        )
    wanted = settings.connections_max + _OTHER_FILES
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and wanted > hard:
        yield (
            f"GATEWAY__CONNECTIONS_MAX: {settings.connections_max} connections need {wanted} open"
            f" files, and the limit is {hard}; lower it, or raise the limit (ulimit -n)"
        )


def allow_open_files(settings: GatewaySettings) -> None:
    """Raise this process's soft limit of open files to the number that its connections need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = settings.connections_max + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _files(settings: GatewaySettings) -> Iterator[str]:
    try:
        settings.state_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=settings.state_dir):
            pass
    except OSError as error:
        yield f"GATEWAY__STATE_DIR: {error}; name a directory that can be written to"
    if settings.artifacts_dir is not None and not _is_readable(settings.artifacts_dir):
        yield (
            f"GATEWAY__ARTIFACTS_DIR: {settings.artifacts_dir} is no readable directory;"
            " name the one that holds the bases"
        )


def _is_readable(directory: Path) -> bool:
    return directory.is_dir() and os.access(directory, os.R_OK | os.X_OK)


def _tls(settings: GatewaySettings) -> Iterator[str]:
    cert, key = settings.tls_cert, settings.tls_key
    if (cert is None) != (key is None):
        lacking = "GATEWAY__TLS_KEY" if key is None else "GATEWAY__TLS_CERT"
        yield f"{lacking}: TLS needs a certificate and its key; set both or none"
    elif cert is not None and key is not None:
        try:
            TlsFiles(cert, key)
        except (OSError, ssl.SSLError) as error:
            yield (
                f"GATEWAY__TLS_CERT, GATEWAY__TLS_KEY: {error}; name PEM files of a certificate"
                " chain and its key"
            )


def _valkey(settings: GatewaySettings) -> Iterator[str]:
    try:
        ValkeyClient(settings.valkey_url.get_secret_value())
    except ValueError as error:
        yield f"GATEWAY__VALKEY_URL: {error}"


def _address(variable: str, address: str, listening: ExitStack) -> Iterator[str]:
    try:
        listening.enter_context(bound_socket(*host_and_port(address))).listen(1)
    except OSError as error:
        yield (
            f"{variable}: cannot listen on {address}: {error}; end the process that does, or"
            " choose another"
        )
