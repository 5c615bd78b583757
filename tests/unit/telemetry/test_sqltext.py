"""Tests the parser of SQL, to which the content of literals and comments must be invisible."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.stack.sqltext import output_format, returns_rows, split_inline_insert


@pytest.mark.parametrize(
    ("sql", "query", "name", "data"),
    [
        (b"INSERT INTO t FORMAT Native\n\x00\xff", b"INSERT INTO t ", "Native", b"\x00\xff"),
        (b"insert into t (a, `b)`) format CSV\n 1,2\n", b"insert into t (a, `b)`) ", "CSV", b" 1,2\n"),
        (b"INSERT INTO d.t (format, b) FORMAT TSV\r\nx", b"INSERT INTO d.t (format, b) ", "TSV", b"x"),
        (b"INSERT INTO t FORMAT Values (1),(2)", b"INSERT INTO t ", "Values", b"(1),(2)"),
        (b"INSERT INTO t SETTINGS a='FORMAT' FORMAT CSV;\n1", b"INSERT INTO t SETTINGS a='FORMAT' ", "CSV", b"1"),
        (b"/* FORMAT x */ INSERT INTO format FORMAT CSV\n1", b"/* FORMAT x */ INSERT INTO format ", "CSV", b"1"),
        (b"INSERT INTO TABLE FUNCTION null('a Int8') FORMAT CSV\n1", b"INSERT INTO TABLE FUNCTION null('a Int8') ", "CSV", b"1"),
    ],
)  # fmt: skip
def test_inline_data_is_split_off(sql: bytes, query: bytes, name: str, data: bytes) -> None:
    found = split_inline_insert(sql)
    assert found is not None
    assert (found.query, found.format, found.data) == (query, name, data)


@pytest.mark.parametrize(
    "sql",
    [
        b"INSERT INTO t VALUES (8, 'a FORMAT b\n')",
        b"INSERT INTO format.values VALUES (1)",
        b"INSERT INTO t SELECT 'x' FORMAT CSV\n",
        b"INSERT INTO t FROM INFILE 'x' FORMAT CSV\n",
        b"SELECT 1 FORMAT CSV\n",
        b"-- INSERT INTO t FORMAT CSV\nSELECT 1",
        b"INSERT INTO t FORMAT",
        b"INSERT",
        b"",
    ],
)
def test_everything_else_is_left_alone(sql: bytes) -> None:
    assert split_inline_insert(sql) is None


@given(st.binary(max_size=200))
def test_data_is_never_looked_at(data: bytes) -> None:
    found = split_inline_insert(b"INSERT INTO t (a) FORMAT RowBinary\n" + data)
    assert found is not None
    assert found.data == data


@given(st.text(max_size=60))
def test_a_literal_never_ends_early(text: str) -> None:
    literal = "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
    sql = f"SELECT {literal} AS x FORMAT JSONEachRow"
    assert output_format(sql.encode()) == "JSONEachRow"
    assert output_format(f"SELECT {literal}".encode()) is None
    assert split_inline_insert(f"INSERT INTO t VALUES ({literal})".encode()) is None


@given(st.binary(max_size=300))
def test_no_bytes_break_it(sql: bytes) -> None:
    split_inline_insert(sql)
    output_format(sql)
    returns_rows(sql)


@pytest.mark.parametrize(
    ("sql", "name"),
    [
        (b"SELECT 1 FORMAT CSV SETTINGS max_threads=1", "CSV"),
        (b"SELECT 1 SETTINGS max_threads=1\n FORMAT Native", "Native"),
        (b"SELECT format('{}', 1) FROM (SELECT 1 FORMAT Null)", None),
        (b"SELECT 1 AS format FROM t", None),
        (b"SELECT 1 -- FORMAT CSV", None),
        (b"SELECT $$ FORMAT CSV $$", None),
    ],
)
def test_the_output_format_is_found(sql: bytes, name: str | None) -> None:
    assert output_format(sql) == name


@pytest.mark.parametrize(
    "sql", [b"SELECT 1", b" -- c\n with 1 as x select x", b"(SELECT 1)", b"SHOW TABLES"]
)
def test_queries_return_rows(sql: bytes) -> None:
    assert returns_rows(sql)


@pytest.mark.parametrize(
    "sql", [b"CREATE TABLE t (a Int8)", b"INSERT INTO t VALUES (1)", b"SET a = 1", b""]
)
def test_commands_return_none(sql: bytes) -> None:
    assert not returns_rows(sql)
