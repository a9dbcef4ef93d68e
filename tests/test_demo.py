"""The demo's corpus."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.demo import docstrings, write_corpus

SOURCE = '''"""The module."""
import sys
if sys.platform == "win32":
    def place():
        """There."""
else:
    def place():
        """Here."""
class Thing:
    """A thing."""
    def use(self):
        """Use it."""
    def bare(self): ...
'''


def test_docstrings_every_definition_comes_with_its_qualified_name(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text(SOURCE)
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "left_out.py").write_text(SOURCE)
    (tmp_path / "broken.py").write_text("def (")
    assert sorted(docstrings(tmp_path)) == [
        ("pkg", "The module."),
        ("pkg.Thing", "A thing."),
        ("pkg.Thing.use", "Use it."),
        ("pkg.place", "Here."),
        ("pkg.place", "There."),
    ]


def test_write_corpus_plants_a_null_and_invalid_bytes_in_several_files(tmp_path: Path) -> None:
    write_corpus([(f"d{i}", f"text {i}") for i in range(9000)], tmp_path / "corpus")
    files = sorted((tmp_path / "corpus").glob("*.parquet"))
    assert len(files) == 4
    assert pq.ParquetFile(files[0]).num_row_groups == 2
    table = pq.read_table(tmp_path / "corpus")
    assert table.num_rows == 9002
    assert table.column("text").null_count == 1
    raw = table.column("text").combine_chunks().cast(pa.binary()).to_pylist()
    bad = table.column("doc_id").to_pylist().index("demo.invalid_utf8")
    assert b"\xe9" in raw[bad]
