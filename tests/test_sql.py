"""`rescore sql`: any reading statement, and no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from shards.errors import UsageError
from shards.snapshot import query
from tests.outputs import Output, make_output


@pytest.fixture
def output(tmp_path: Path) -> Output:
    output = make_output(tmp_path)
    output.score_all(dead=[1])
    return output


def everything(output: Output) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in output.root.rglob("*") if path.is_file()}


def test_sql_gives_columns_types_and_rows(output: Output) -> None:
    result = query(output.layout, "SELECT doc_id, score FROM scores ORDER BY score DESC LIMIT 2")
    assert result.columns == ("doc_id", "score")
    assert result.types == ("VARCHAR", "FLOAT")
    assert result.rows == [("d24", 24.0), ("d23", 23.0)]


@pytest.mark.parametrize(
    "sql",
    [
        "FROM runs",
        "WITH a AS (SELECT 1) SELECT * FROM a",
        "DESCRIBE scores",
        "SHOW TABLES",
        "SUMMARIZE scores",
        "EXPLAIN SELECT * FROM scores",
        "EXPLAIN ANALYZE SELECT count(*) FROM scores",
        "PIVOT shards ON state USING count(*)",
        "SELECT 1;",
        "SELECT * FROM scores -- a comment",
    ],
)
def test_sql_reading_statement_answers(output: Output, sql: str) -> None:
    assert query(output.layout, sql).rows


@pytest.mark.parametrize(
    "sql",
    [
        "COPY (SELECT 1) TO '{scores}/m1/e0/00/x.parquet'",
        "EXPLAIN ANALYZE COPY (SELECT 1) TO '{scores}/m1/e0/x.csv'",
        "EXPLAIN (ANALYZE) COPY (SELECT 1) TO '{scores}/m1/e0/x.csv'",
        "COPY scores TO '{root}/x.csv'",
        "EXPORT DATABASE '{scores}/x'",
        "ATTACH '{root}/x.duckdb'",
        "CREATE TABLE x AS SELECT 1",
        "DELETE FROM shards",
        "UPDATE runs SET state = 'complete'",
        "DROP VIEW scores",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SET enable_external_access = true",
        "SELECT 1; SELECT 2",
        "",
        "SELECT * FROM read_csv('/etc/passwd')",
        "SELECT * FROM '{root}/corpus.parquet'",
        "SELECT nonsense",
        "SELEC",
        "SELECT * FROM nowhere",
        "SELECT 1/'a'::INTEGER",
    ],
)
def test_sql_anything_else_is_one_line_and_writes_nothing(output: Output, sql: str) -> None:
    before = everything(output)
    text = sql.format(scores=output.layout.root / "scores", root=output.root)
    with pytest.raises(UsageError) as error:
        query(output.layout, text)
    assert "\n" not in str(error.value)
    assert everything(output) == before
