import pytest

from sluice.kafka import KafkaSettings, security


def test_without_settings_nothing_is_added():
    assert security() == {}


def test_options_have_librdkafkas_names(monkeypatch):
    values = {
        "SECURITY_PROTOCOL": "sasl_ssl",
        "SSL_CA_LOCATION": "/etc/ca.pem",
        "SASL_MECHANISM": "SCRAM-SHA-512",
        "SASL_USERNAME": "sluice",
        "SASL_PASSWORD": "secret",
    }
    for name, value in values.items():
        monkeypatch.setenv(f"KAFKA__{name}", value)

    assert security() == {
        "security.protocol": "sasl_ssl",
        "ssl.ca.location": "/etc/ca.pem",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.username": "sluice",
        "sasl.password": "secret",
    }
    assert "secret" not in repr(KafkaSettings())


def test_a_misspelt_protocol_stops_the_start(monkeypatch, capsys):
    monkeypatch.setenv("KAFKA__SECURITY_PROTOCOL", "tls")
    with pytest.raises(SystemExit):
        security()
    assert "KAFKA__SECURITY_PROTOCOL: Input should be 'plaintext', 'ssl'" in capsys.readouterr().err
