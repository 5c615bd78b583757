"""`sluice doctor`: reports faults of this machine and of an installation, with corrections."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.admin import AsJson, setting_value, take_certificates
from cli.render import show_json, show_table
from cli.stack.home import Home, read_env

if TYPE_CHECKING:
    from cli.doctor.model import DoctorFinding

_WRONG = 1
_HOST = "127.0.0.1"

MetricsUrl = Annotated[
    list[str] | None,
    typer.Option(
        "--metrics-url",
        metavar="NAME=URL",
        help="Page of metrics of a gateway, router or agent; may be repeated.",
    ),
]


def doctor(
    *,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of `sluice up`.")] = 8000,
    admin_port: Annotated[int, typer.Option(min=1, max=65535, help="The same.")] = 8001,
    metrics_url: MetricsUrl = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine and the installation, and print each fault with its correction.

    The command changes nothing. It reads facts of this machine and of the installation that the
    environment or the running stack names, if any. These facts are processes, clocks, versions,
    certificates and the database. Exit status 1 means a fault, and warnings alone mean 0.
    """
    from cli.doctor.machine import machine_findings
    from cli.doctor.machine_look import look_at_machine

    home = Home.find()
    pages = _pages(home, metrics_url or [])
    findings = [*machine_findings(look_at_machine(home, (port, admin_port)))]
    if setting_value("SLUICE_ADMIN_URL"):
        findings += _installation(home, pages)
    if as_json:
        show_json([asdict(finding) for finding in findings])
    else:
        _show(findings)
    if any(finding.level == "wrong" for finding in findings):
        raise typer.Exit(_WRONG)


def _installation(home: Home, pages: dict[str, str]) -> Iterable["DoctorFinding"]:
    import asyncio

    from cli.doctor.installation import installation_findings
    from cli.doctor.installation_look import look_at_installation

    take_certificates()
    named = {
        name: setting_value(f"SLUICE_{name.upper()}")
        for name in ("admin_url", "admin_key", "telemetry_url", "database_url")
    }
    looked = look_at_installation(
        pages,
        public_url=setting_value("OPENAI_BASE_URL"),
        certificates=_certificates(home),
        **named,
    )
    return installation_findings(asyncio.run(looked))


def _pages(home: Home, given: Sequence[str]) -> dict[str, str]:
    """Return URLs of metrics pages by name, from the options, or else of the local stack."""
    pages: dict[str, str] = {}
    for word in given:
        name, equals, url = word.partition("=")
        if not equals or not url.startswith(("http://", "https://")):
            raise typer.BadParameter(f"{word} is not NAME=URL", param_hint="--metrics-url")
        pages[name] = url
    if pages or "SLUICE_ADMIN_URL" in os.environ:
        return pages
    from cli.stack.ports import read_ports

    scheme = "https" if read_env(home).get("MTLS__CERTIFICATE") else "http"
    ports = read_ports(home.ports_file)
    wanted = {"gateway": "gateway_ops", "router": "router_http", "agent": "agent_http"}
    return {
        name: f"{scheme}://{_HOST}:{ports[port]}/metrics"
        for name, port in wanted.items()
        if port in ports
    }


def _certificates(home: Home) -> list[Path]:
    named = os.environ.get("MTLS__CERTIFICATE")
    stored = sorted(home.certificates.glob("*.pem")) if "SLUICE_ADMIN_URL" not in os.environ else []
    files = [*([Path(named)] if named else []), *stored]
    return [file for file in dict.fromkeys(files) if not file.name.endswith("-key.pem")]


def _show(findings: Sequence["DoctorFinding"]) -> None:
    rows = [(it.level, it.check, it.found) for it in findings]
    show_table(("state", "check", "found"), rows)
    for finding in findings:
        if finding.fix:
            typer.echo(f"{finding.check}: {finding.fix}")
