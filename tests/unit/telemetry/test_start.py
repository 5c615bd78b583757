"""Tests that the service reports impossible settings before it starts any part."""

import pytest

from telemetry.__main__ import main


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"SECURITY_PROTOCOL": "tls"}, "KAFKA__SECURITY_PROTOCOL: "),
        ({"SECURITY_PROTOCOL": "ssl", "SSL_CA_LOCATION": "/nowhere"}, "KAFKA__*: ssl.ca.location "),
    ],
    ids=str,
)
def test_how_brokers_are_spoken_to_is_looked_at(given, told, monkeypatch, capsys) -> None:
    settings = {
        "CLICKHOUSE_URL": "http://127.0.0.1:1",
        "KAFKA_BOOTSTRAP": "127.0.0.1:1",
        "HTTP_ADDRESS": "nowhere.invalid:1",
        "ADMIN_KEY_SHA256": "0" * 64,
    }
    for name, value in settings.items():
        monkeypatch.setenv(f"TELEMETRY__{name}", value)
    for name, value in given.items():
        monkeypatch.setenv(f"KAFKA__{name}", value)
    monkeypatch.setattr("telemetry.__main__.configure_logs", lambda _: None)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(told)
