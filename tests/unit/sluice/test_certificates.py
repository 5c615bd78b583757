import shutil
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.serialization import Encoding

import control_plane.__main__ as control_plane_main
import telemetry.__main__ as telemetry_main
from cli.certificates import _key_pem, create, issue, new_authority, settings_of
from sluice import certificates as module
from sluice.certificates import CertificateError, Certificates, MtlsSettings, install, ours, use
from sluice.identity import DOMAIN, CertificateRole, Service, server_name

SERVICE_SETTINGS = {
    "CONTROL_PLANE__DATABASE_URL": "postgresql+asyncpg://u@h/d",
    "CONTROL_PLANE__GRPC_ADDRESS": "127.0.0.1:1",
    "CONTROL_PLANE__HTTP_ADDRESS": "127.0.0.1:2",
    "CONTROL_PLANE__ADMIN_KEY_SHA256": "0" * 64,
    "TELEMETRY__CLICKHOUSE_URL": "http://127.0.0.1:3",
    "TELEMETRY__KAFKA_BOOTSTRAP": "127.0.0.1:4",
    "TELEMETRY__HTTP_ADDRESS": "127.0.0.1:5",
    "TELEMETRY__ADMIN_KEY_SHA256": "0" * 64,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    create(folder, days=2, hosts=["127.0.0.1", "localhost"])
    return folder


@pytest.fixture
def folder(made, tmp_path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "own"))


def loaded(
    folder: Path, role: CertificateRole = CertificateRole.ROUTER, **changes: str
) -> Certificates:
    values = settings_of(folder, role) | changes
    names = {name.removeprefix("MTLS__").lower(): value for name, value in values.items()}
    return Certificates(MtlsSettings.model_validate(names))


def shake(client: ssl.SSLContext, server: ssl.SSLContext, name: str | None) -> ssl.SSLObject:
    """Return the server's side of a connection; raises what a side finds wrong."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        client.wrap_bio(to_client, to_server, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(6):
        for side in sides:
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return sides[1]


def serial(link: ssl.SSLObject) -> str:
    return (link.getpeercert() or {})["serialNumber"]


def test_processes_see_each_others_roles(folder):
    router, gateway = loaded(folder), loaded(folder, CertificateRole.GATEWAY)

    link = shake(
        gateway.client_context(),
        router.server_context(is_required=True),
        server_name(CertificateRole.ROUTER, DOMAIN),
    )

    assert router.identity(link.getpeercert()).roles == {CertificateRole.GATEWAY}
    assert router.fresh().expires_unix_s == pytest.approx(
        (datetime.now(UTC) + timedelta(days=2)).timestamp(), abs=600
    )


def test_another_role_than_the_expected_one_is_no_server(folder):
    router, gateway = loaded(folder), loaded(folder, CertificateRole.GATEWAY)

    with pytest.raises(ssl.SSLCertVerificationError, match="engine"):
        shake(
            gateway.client_context(),
            router.server_context(is_required=True),
            server_name(CertificateRole.ENGINE, DOMAIN),
        )


def test_clients_need_no_certificate_where_people_call_and_a_good_one_if_any(folder, tmp_path):
    control = loaded(folder, CertificateRole.CONTROL_PLANE)
    people = ssl.create_default_context(cafile=str(folder / "ca.pem"))

    link = shake(people, control.server_context(is_required=False), "localhost")
    assert control.identity(link.getpeercert()).roles == frozenset()
    with pytest.raises(ssl.SSLError, match="did not return a certificate"):
        shake(people, control.server_context(is_required=True), "localhost")

    create(tmp_path / "foreign", days=2)
    own = settings_of(tmp_path / "foreign", CertificateRole.GATEWAY)
    people.load_cert_chain(own["MTLS__CERTIFICATE"], own["MTLS__KEY"])
    for is_required in (False, True):
        with pytest.raises(ssl.SSLCertVerificationError):
            shake(people, control.server_context(is_required=is_required), "localhost")


def test_replaced_files_are_used_by_new_connections_on_both_sides(folder):
    router, gateway = loaded(folder), loaded(folder, CertificateRole.GATEWAY)
    context, name = (
        router.server_context(is_required=True),
        server_name(CertificateRole.ROUTER, DOMAIN),
    )
    before, old = router.fresh(), serial(shake(gateway.client_context(), context, name))

    create(folder, days=2)

    assert router.fresh() is not before
    assert serial(shake(gateway.client_context(), context, name)) != old
    assert router.fresh() is router.fresh(), "unchanged files are not loaded again"


def test_clients_without_a_server_name_get_the_newest_certificate_too(folder):
    control = loaded(folder, CertificateRole.CONTROL_PLANE)
    context = control.server_context(is_required=False)
    create(tmp := folder.parent / "new", days=2)
    shutil.copytree(tmp, folder, dirs_exist_ok=True)

    kubelet = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    kubelet.check_hostname = False  # it calls by address, and sends no name

    shake(kubelet, context, None)


def test_a_new_ca_is_taken_by_a_context_that_serves_already(folder, tmp_path):
    router = loaded(folder)
    context = router.server_context(is_required=True)
    create(tmp_path / "new", days=2)

    shutil.copytree(tmp_path / "new", folder, dirs_exist_ok=True)

    gateway = loaded(tmp_path / "new", CertificateRole.GATEWAY)
    shake(gateway.client_context(), context, server_name(CertificateRole.ROUTER, DOMAIN))


def test_half_replaced_files_leave_the_old_ones_in_use_and_are_tried_again(folder, monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr(module.log, "warning", lambda event, **_: lines.append(event))
    router = loaded(folder)
    old, good = router.fresh(), (folder / "router.pem").read_bytes()

    (folder / "router.pem").write_bytes((folder / "gateway.pem").read_bytes())  # not of this key
    assert router.fresh() is old
    assert router.fresh() is old
    (folder / "router.pem").unlink()
    assert router.fresh() is old
    (folder / "router.pem").write_bytes(good)

    assert router.fresh().certificate == good
    assert lines == ["certificate_not_loaded"] * 2


def test_files_that_were_refused_are_tried_again_a_while_later(folder, monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr(module.log, "warning", lambda event, **_: lines.append(event))
    now_s, tries = [1000.0], []
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s[0])
    router = loaded(folder)
    create(folder, days=2)
    load, old = router._load, router._loaded

    def no_descriptor():
        tries.append(now_s[0])
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(router, "_load", no_descriptor)
    for now_s[0] in (1000.0, 1029.0, 1030.0, 1059.0):
        assert router.fresh() is old
    assert tries == [1000.0, 1030.0]
    assert lines == ["certificate_not_loaded"]

    monkeypatch.setattr(router, "_load", load)
    now_s[0] = 1060.0
    assert router.fresh().certificate == (folder / "router.pem").read_bytes()


def test_the_domain_separates_platforms_that_share_a_ca(folder):
    with pytest.raises(CertificateError, match=r"router\.sluice\.internal.*none of a role.*DOMAIN"):
        loaded(folder, MTLS__DOMAIN="other.internal")


def test_a_missing_file_is_named(folder):
    (folder / "router.pem").unlink()
    with pytest.raises(CertificateError, match=r"MTLS__CERTIFICATE: .*router\.pem"):
        loaded(folder)


def test_settings_are_all_or_none(folder):
    with pytest.raises(CertificateError, match=r"^MTLS__CERTIFICATE, MTLS__KEY: .*all three"):
        Certificates(MtlsSettings(ca=folder / "ca"))


def test_a_key_of_another_certificate_is_refused(folder):
    with pytest.raises(CertificateError, match=r"MTLS__KEY: .*cannot be used together"):
        loaded(folder, MTLS__KEY=str(folder / "gateway-key.pem"))


@pytest.mark.parametrize("when", ["at the start", "later"])
def test_a_key_with_a_passphrase_is_refused_without_a_prompt(folder, when):
    key = Path(settings_of(folder, CertificateRole.ROUTER)["MTLS__KEY"])
    router = loaded(folder)
    before = router.fresh()
    private = serialization.load_pem_private_key(key.read_bytes(), None)
    secret = serialization.BestAvailableEncryption(b"secret")
    key.write_bytes(private.private_bytes(Encoding.PEM, serialization.PrivateFormat.PKCS8, secret))

    if when == "later":
        assert router.fresh() is before
    else:
        with pytest.raises(CertificateError, match=r"MTLS__KEY: .*the key has a passphrase"):
            loaded(folder)


def test_a_ca_that_did_not_sign_is_refused(folder, tmp_path):
    create(tmp_path / "foreign", days=2)
    with pytest.raises(CertificateError, match=r"our peers would refuse .*router\.pem: .*MTLS__CA"):
        loaded(folder, MTLS__CA=str(tmp_path / "foreign" / "ca"))


def test_an_expired_certificate_is_refused(folder):
    long_ago = datetime.now(UTC) - timedelta(days=9)
    authority = new_authority("old", long_ago, timedelta(days=100))
    certificate, key = issue(
        authority, [server_name(CertificateRole.ROUTER, DOMAIN)], long_ago, timedelta(days=2)
    )
    (folder / "router.pem").write_bytes(certificate.public_bytes(Encoding.PEM))
    (folder / "router-key.pem").write_bytes(_key_pem(key))
    (folder / "ca" / "internal.pem").write_bytes(authority.certificate.public_bytes(Encoding.PEM))
    with pytest.raises(CertificateError, match="certificate has expired; have a new one signed"):
        loaded(folder)


def test_a_directory_without_cas_and_a_file_that_is_none_are_named(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(CertificateError, match=r"MTLS__CA: .*put the CAs there"):
        loaded(folder, MTLS__CA=str(tmp_path / "empty"))
    with pytest.raises(CertificateError, match=r"MTLS__CA: .*no certificate that can be read"):
        loaded(folder, MTLS__CA=str(folder / "router-key.pem"))
    with pytest.raises(CertificateError, match=r"MTLS__ENGINE_CA: .*nowhere"):
        loaded(folder, MTLS__ENGINE_CA=str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    "role", [role for role in CertificateRole if role is not CertificateRole.ENGINE]
)
def test_every_role_can_use_its_certificates(folder, monkeypatch, role):
    monkeypatch.setattr(module._Ours, "certificates", None)
    for name, value in settings_of(folder, role).items():
        monkeypatch.setenv(name, value)

    use(role)

    assert ours() is not None
    assert role in ours().fresh().identity.roles


def test_a_process_does_not_start_with_the_certificate_of_another(folder, monkeypatch, capsys):
    for name, value in settings_of(folder, CertificateRole.GATEWAY).items():
        monkeypatch.setenv(name, value)

    with pytest.raises(SystemExit) as ended:
        use(CertificateRole.AGENT)

    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        f"MTLS__CERTIFICATE: {folder}/gateway.pem is of gateway.sluice.internal, localhost,"
        " and this process is called agent.sluice.internal and engine.sluice.internal;"
        " name the file that was made for it\n"
    )
    assert ours() is None


def test_with_certificates_our_own_processes_are_called_by_https_alone(folder, monkeypatch, capsys):
    monkeypatch.setattr(module._Ours, "certificates", None)
    use(CertificateRole.TELEMETRY, {"A": "http://control-plane:8001"})  # without: as it always was
    for name, value in settings_of(folder, CertificateRole.TELEMETRY).items():
        monkeypatch.setenv(name, value)

    use(CertificateRole.TELEMETRY, {"A": "", "B": "https://control-plane:8001"})
    with pytest.raises(SystemExit) as ended:
        use(CertificateRole.TELEMETRY, {"A": "http://control-plane:8001"})

    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "A: http://control-plane:8001 would be called in clear, with a key, although mutual TLS is"
        " on; set https://control-plane:8001\n"
    )


@pytest.mark.parametrize(
    ("service", "setting"),
    [
        (control_plane_main, "CONTROL_PLANE__TELEMETRY_URL"),
        (telemetry_main, "TELEMETRY__CONTROL_PLANE_URL"),
    ],
    ids=["control-plane", "telemetry"],
)
def test_services_list_their_peers(monkeypatch, service, setting):
    monkeypatch.setenv(setting, "http://other:8001")
    for name, value in SERVICE_SETTINGS.items():
        monkeypatch.setenv(name, value)
    told = {}

    def told_and_ended(_role, called):
        told.update(called)
        raise SystemExit(0)

    monkeypatch.setattr(service.certificates, "use", told_and_ended)
    monkeypatch.setattr(service, "configure_logs", lambda _name: None)
    with pytest.raises(SystemExit):
        service.main()

    assert told == {setting: "http://other:8001"}


def test_without_settings_nothing_changes(monkeypatch):
    monkeypatch.setenv("MTLS__DOMAIN", "x.internal")
    use(CertificateRole.ROUTER)
    assert ours() is None
    assert module.server_tls(is_required=True) is None
    assert module.http_options(CertificateRole.TELEMETRY) == {}
    assert module.refusal_of(None, Service.METRICS) == ""


def test_metrics_need_a_certificate_under_mutual_tls(folder, monkeypatch):
    monkeypatch.setattr(module._Ours, "certificates", None)
    install(loaded(folder))

    class Transport:
        def __init__(self, *names: str) -> None:
            self._names = names

        def get_extra_info(self, _name: str) -> dict:
            return {"subjectAltName": tuple(("DNS", name) for name in self._names)}

    assert "nobody" in module.refusal_of(None, Service.METRICS)
    assert "gateway" in module.refusal_of(Transport("gateway.sluice.internal"), Service.METRICS)
    assert module.refusal_of(Transport("monitoring.sluice.internal"), Service.METRICS) == ""


def test_only_callers_of_engines_are_signed_by_their_ca(folder):
    callers = ssl.create_default_context(cafile=str(folder / "ca" / "engine-callers.pem"))
    may = set()
    for role in (
        CertificateRole.ROUTER,
        CertificateRole.GATEWAY,
        CertificateRole.AGENT,
        CertificateRole.TELEMETRY,
        CertificateRole.OPERATOR,
    ):
        try:
            shake(callers, loaded(folder, role).server_context(is_required=False), "localhost")
        except ssl.SSLCertVerificationError:
            continue
        except ssl.SSLError:
            pass
        may.add(role)

    assert may == {CertificateRole.ROUTER, CertificateRole.GATEWAY, CertificateRole.AGENT}
    assert loaded(folder).engine_callers() == (folder / "ca" / "engine-callers.pem").read_bytes()


def test_keys_are_their_owners_and_cas_stay(folder):
    ca = (folder / "ca" / "internal.pem").read_bytes()
    create(folder, days=2)

    assert (folder / "ca" / "internal.pem").read_bytes() == ca
    keys = list(folder.rglob("*-key.pem"))
    assert len(keys) == 9
    assert {key.stat().st_mode & 0o777 for key in keys} == {0o600}
    (folder / "private" / "internal-key.pem").unlink()
    with pytest.raises(CertificateError, match="has only one of"):
        create(folder, days=2)
