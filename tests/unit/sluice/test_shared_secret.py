"""The secret of an installation: what it takes, and what is told when there is none."""

import pytest

from sluice import shared_secret
from sluice.shared_secret import InstallationSettings, SharedSecret

SECRET, OTHER = "a" * 32, "b" * 32


@pytest.mark.parametrize("given", [None, "", "short", f"{SECRET},short", f"{SECRET},"])
def test_a_process_without_a_good_secret_ends_with_the_fix(
    given: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(shared_secret.VARIABLE)
    if given is not None:
        monkeypatch.setenv(shared_secret.VARIABLE, given)
    with pytest.raises(SystemExit) as ended:
        shared_secret.use()
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert "INSTALLATION__SECRET" in said
    assert SECRET not in said


def test_it_is_never_shown() -> None:
    settings = InstallationSettings(secret=SECRET)  # type: ignore[arg-type]
    assert SECRET not in repr(settings)
    assert not any(SECRET in token for token in SharedSecret([SECRET]).tokens("x"))


def test_tokens_and_macs_are_of_one_secret_and_one_purpose() -> None:
    ours, both, others = (
        SharedSecret([SECRET]),
        SharedSecret([OTHER, SECRET]),
        SharedSecret([OTHER]),
    )
    (token,) = ours.tokens("one")
    assert both.is_token("one", [token])
    assert ours.is_token("one", both.tokens("one"))
    assert not others.is_token("one", [token])
    assert not ours.is_token("two", [token])
    assert not ours.is_token("one", [])
    mac = ours.mac("topic", b"event")
    assert both.is_mac("topic", b"event", mac)
    assert not others.is_mac("topic", b"event", mac)
    assert not ours.is_mac("other", b"event", mac)
    assert not ours.is_mac("topic", b"events", mac)
    assert not ours.is_mac("topic", b"event", b"")
    assert mac not in {ours.mac("topi", b"cevent"), bytes.fromhex(ours.tokens("topic")[0])}
