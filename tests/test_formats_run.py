"""Whole runs on real Ray over corpora that are not Parquet."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from tests.projects import Project

pytestmark = pytest.mark.ray


def write(project: Project, name: str, data: bytes) -> Path:
    path = project.root / "corpus" / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return path


def test_run_json_lines_are_scored_and_bad_lines_are_dead_letters(project: Project) -> None:
    lines = [b'{"doc_id": "d%d", "text": "%s"}' % (i, b"x" * i) for i in range(25)]
    lines[3] = b'{"doc_id": "d3", "text": "cut o'
    lines[7] = b'{"doc_id": "d7", "text": "\\ud800"}'
    plain = write(project, "a.jsonl", b"\n".join([b"", *lines]))
    more = gzip.compress(b'{"doc_id": "e0", "text": "yy"}\n{"doc_id": "e1", "text": "yy"}\n')
    packed = write(project, "b.jsonl.gz", more[:-4])
    done = project.run()
    assert done.returncode == 3, done.stderr
    assert "Staging: 2 of 2 files" in done.stderr
    letters = project.sql(
        "SELECT doc_id, file, row, stage, error_type, message FROM dead_letters ORDER BY file, row"
    )
    assert [letter[:5] for letter in letters] == [
        (None, str(plain), 3, "read", "MalformedRecord"),
        ("d7", str(plain), 7, "read", "MalformedRecord"),
        (None, str(packed), 2, "read", "TruncatedFile"),
    ]
    assert letters[0][5].startswith("not JSON: Unterminated string")
    assert letters[0][5].endswith(f"({plain}, line 5)")
    rows = dict(project.sql("SELECT doc_id, score FROM scores"))
    expected = {f"d{i}": i + 0.001 for i in range(25) if i not in (3, 7)} | {"e0": 2.001, "e1": 2.001}
    assert rows == {name: pytest.approx(score) for name, score in expected.items()}
    assert project.verify()["ok"]


def test_run_second_model_version_uses_what_is_staged(project: Project) -> None:
    write(project, "a.csv", b'id,title,body\n1,T,"B\nb"\n2,T,\n')
    project.config["corpus"] |= {"id_column": "id", "text_template": "{title}: {body}"}
    assert project.run().returncode == 0
    (staged,) = (project.output / "staged").iterdir()
    before = staged.stat()
    project.config["ranker"] |= {"model_version": "m2", "options": {"version": "2"}}
    done = project.run()
    assert done.returncode == 0, done.stderr
    assert "Staging" not in done.stderr
    assert [item.stat().st_ino for item in (project.output / "staged").iterdir()] == [before.st_ino]
    rows = project.sql("SELECT model_version, doc_id, round(score, 3) FROM scores ORDER BY ALL")
    assert [(version, name) for version, name, _ in rows] == [("m1", "1"), ("m1", "2"), ("m2", "1"), ("m2", "2")]
    assert [score for *_, score in rows] == [pytest.approx(value) for value in (6.001, 3.001) * 2]
    project.config["corpus"]["text_template"] = "{body}"
    refused = project.run()
    assert refused.returncode == 2
    assert 'text_template: "{title}: {body}" → "{body}"' in refused.stderr
