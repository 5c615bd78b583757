"""Tests which migrations are pending, and how files are parsed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.migrations import MigrationError, fill, load, migrations_folder, parse, pending


def test_statements_end_at_the_end_of_a_line_and_comments_alone_are_none() -> None:
    migration = parse("0002_more.sql", "-- why\nSELECT ';';\nSELECT 2\n;\n-- the end\n")
    assert migration.statements == ("-- why\nSELECT ';'", "SELECT 2")
    assert (migration.version, migration.name) == (2, "more")


@pytest.mark.parametrize("name", ["requests.sql", "0001.sql", "1_a.sql", "0001_a'b.sql"])
def test_a_file_must_say_its_number_and_name(name: str) -> None:
    with pytest.raises(MigrationError, match="NNNN_what_it_does"):
        parse(name, "SELECT 1;")


@given(st.sets(st.integers(1, 30)), st.sets(st.integers(1, 30)))
def test_exactly_the_missing_ones_are_pending_in_order(numbers: set[int], done: set[int]) -> None:
    files = [parse(f"{number:04}_m.sql", f"SELECT {number};") for number in numbers]
    applied = {file.version: file.checksum for file in files if file.version in done}
    versions = [migration.version for migration in pending(files, applied)]
    assert versions == sorted(numbers - done)


def test_a_changed_file_is_refused() -> None:
    migration = parse("0001_m.sql", "SELECT 1;")
    with pytest.raises(MigrationError, match="changed after it was applied"):
        pending([migration], {1: "other"})


def test_a_number_used_twice_is_refused() -> None:
    files = [parse("0001_a.sql", "SELECT 1;"), parse("0001_b.sql", "SELECT 2;")]
    with pytest.raises(MigrationError, match="same number"):
        pending(files, {})


def test_the_shipped_migrations_fill_for_a_server_and_for_a_cluster() -> None:
    for variables in (
        {"on_cluster": "", "engine_prefix": ""},
        {"on_cluster": "ON CLUSTER 'main'", "engine_prefix": "Replicated"},
    ):
        for migration in load(migrations_folder()):
            for statement in migration.statements:
                filled = fill(statement, variables)
                assert "{{" not in filled
                assert variables["on_cluster"] in filled
                if "CREATE TABLE" in filled:
                    # Only sums for web pages use the Aggregating engine. All other rows may be
                    # inserted twice.
                    kind = "Aggregating" if "slo_minutes" in filled else "Replacing"
                    assert f"= {variables['engine_prefix']}{kind}MergeTree" in filled
