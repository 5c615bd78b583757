"""A file of requests becomes sums of tokens by time, or an error that names its line."""

import gzip
import json
from pathlib import Path

import pytest

from cli.token_curves import CurveError, TokenCurve, read_curve

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:16:10.0000000,1,2
"""


def test_each_published_form_is_read(tmp_path: Path) -> None:
    expected = TokenCurve(15, [770, 1], [153, 2])
    (tmp_path / "azure.csv").write_text(AZURE)
    assert read_curve(tmp_path / "azure.csv") == expected
    with gzip.open(tmp_path / "azure.csv.gz", "wt") as file:
        file.write(AZURE)
    assert read_curve(tmp_path / "azure.csv.gz") == expected
    tokens = [(0, 374, 44), (4000, 396, 109), (24_000, 1, 2)]
    for names in (
        ("timestamp", "input_length", "output_length"),
        ("received_at_unix_ms", "prompt_tokens", "output_tokens"),
    ):
        lines = [json.dumps(dict(zip(names, row, strict=True))) for row in tokens]
        (tmp_path / "lines.jsonl").write_text("\n".join(lines) + "\n\n")
        assert read_curve(tmp_path / "lines.jsonl") == expected


def test_a_day_and_more_has_longer_buckets(tmp_path: Path) -> None:
    file = tmp_path / "days.jsonl"
    rows = [{"timestamp": at, "input_length": 1, "output_length": 1} for at in (0, 47 * 3_600_000)]
    file.write_text("\n".join(map(json.dumps, rows)))
    found = read_curve(file)
    assert found.bucket_s == 30
    assert len(found.prompt_tokens) == len(found.output_tokens) == 47 * 120 + 1


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no column TIMESTAMP"),
        ("a,b\n1,2\n", ":1: no column TIMESTAMP, ContextTokens, GeneratedTokens"),
        (AZURE + "soon,1,2\n", ":5: TIMESTAMP is 'soon', not a time"),
        (AZURE + "2023-11-16 18:15:46,x,2\n", ":5: ContextTokens is 'x', not a whole number"),
        ('{"timestamp": 1}', ":1: input_length is None"),
        ('{"at": 1}', ":1: no timestamp and no received_at_unix_ms"),
        ('{"timestamp": 1, "input_length": -1, "output_length": 1}', "-1, not within 0"),
        ("{nothing", ":1: not JSON"),
        (
            '{"timestamp": 0, "input_length": 1, "output_length": 1}\n'
            '{"timestamp": 500000000, "input_length": 1, "output_length": 1}',
            "139 hours of requests, at most 48",
        ),
    ],
)
def test_a_malformed_file_is_an_error_that_names_its_place(
    tmp_path: Path, text: str, told: str
) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(CurveError) as caught:
        read_curve(tmp_path / "file")
    assert told in str(caught.value)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CurveError, match="No such file"):
        read_curve(tmp_path / "nothing")
