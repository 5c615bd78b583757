"""The broker's side of SCRAM, with the example of RFC 7677, and of Kafka's frames around it."""

import struct
from base64 import b64decode

import pytest

from cli.stack.broker_login import Login, LoginError, apis_of
from cli.stack.scram import Credential, ScramError, ScramExchange

SALT = b64decode("W22ZaJ0SNY7soEsUEjb6gQ==")
CREDENTIAL = Credential.of("user", "pencil", SALT)
NONCE = "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
FIRST = b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO"
SERVER_FIRST = b"r=rOprNGfwEbeRWgbNEkqO" + NONCE.encode() + b",s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
WITHOUT_PROOF = b"c=biws,r=rOprNGfwEbeRWgbNEkqO" + NONCE.encode()
FINAL = WITHOUT_PROOF + b",p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
SERVER_FINAL = b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="
APIS = struct.pack(">hhhhhh", 3, 0, 12, 18, 0, 2)


def begun(credential: Credential = CREDENTIAL) -> ScramExchange:
    exchange = ScramExchange(credential, NONCE)
    exchange.first(FIRST)
    return exchange


def test_the_example_of_the_rfc():
    exchange = ScramExchange(CREDENTIAL, NONCE)
    assert exchange.first(FIRST) == SERVER_FIRST
    assert exchange.final(FINAL) == SERVER_FINAL


@pytest.mark.parametrize(
    "message",
    [b"", b"n,,", b"\xff", b"n,,n=user", b"n,,n=user,r=", b"p=tls,,n=user,r=x", b"n,,n=other,r=x"],
)
def test_first_messages_that_are_none(message: bytes):
    with pytest.raises(ScramError):
        ScramExchange(CREDENTIAL, NONCE).first(message)


@pytest.mark.parametrize(
    "message",
    [
        b"",
        WITHOUT_PROOF,
        WITHOUT_PROOF + b",p=",
        WITHOUT_PROOF + b",p=!",
        WITHOUT_PROOF + b",p=" + b"A" * 43 + b"=",
        FINAL.replace(b"biws", b"eSws"),
        FINAL.replace(b"rOpr", b"rOps"),
    ],
)
def test_proofs_that_are_none(message: bytes):
    with pytest.raises(ScramError):
        begun().final(message)


def test_another_password_is_refused():
    with pytest.raises(ScramError, match="password is wrong"):
        begun(Credential.of("user", "pencils", SALT)).final(FINAL)


def test_nonces_are_drawn_anew():
    assert ScramExchange(CREDENTIAL).first(FIRST) != ScramExchange(CREDENTIAL).first(FIRST)


def test_a_credential_shows_no_key():
    assert "stored_key" not in repr(CREDENTIAL)


def request(key: int, version: int, body: bytes = b"") -> bytes:
    return struct.pack(">hhih", key, version, 7, 1) + b"x" + body


def test_the_apis_of_the_broker_and_of_the_login_are_listed():
    login = Login(CREDENTIAL, APIS)
    told = login.answer(request(18, 0))
    assert told[:4] == struct.pack(">i", 7)
    assert apis_of(told) == APIS + struct.pack(">hhhhhh", 17, 1, 1, 36, 0, 1)
    assert login.answer(request(18, 2)) == told + bytes(4), "and how long to wait: 0 ms"
    later = login.answer(request(18, 3))
    assert struct.unpack_from(">h", later, 4) == (35,), "ask again, with version 2"
    assert not login.is_done


@pytest.mark.parametrize(
    "frame", [b"", b"\0" * 9, request(3, 0), request(36, 0), request(17, 0), request(17, 1)]
)
def test_nothing_else_is_answered_before_the_login(frame: bytes):
    with pytest.raises(LoginError) as refused:
        Login(CREDENTIAL, APIS).answer(frame)
    assert refused.value.reply == b""


def test_a_refused_login_is_told_why():
    login = Login(CREDENTIAL, APIS)
    login.answer(request(17, 1, struct.pack(">h", 13) + b"SCRAM-SHA-256"))
    with pytest.raises(LoginError) as refused:
        login.answer(request(36, 0, struct.pack(">i", 3) + b"n,,"))
    correlation, error = struct.unpack_from(">ih", refused.value.reply)
    assert (correlation, error) == (7, 58)
    assert b"no first message" in refused.value.reply
    assert not login.is_done


def test_another_mechanism_is_told_ours():
    told = Login(CREDENTIAL, APIS).answer(request(17, 1, struct.pack(">h", 5) + b"PLAIN"))
    assert struct.unpack_from(">h", told, 4) == (33,)
    assert told.endswith(b"SCRAM-SHA-256")
