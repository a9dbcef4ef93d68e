"""Bytes → records: JSON Lines, CSV, TSV and Arrow, and what is wrong with a record of them."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shards import arrowfile, jsonl, lines, nested, separated, template
from shards.errors import CorpusError, UsageError
from shards.formats import Kind, Source, belongs, source
from shards.record import Fields, FileError, Parser, Record, Wanted

WANTED = Wanted(id="id", texts=("text",))
BOM = b"\xef\xbb\xbf"
WORDS = st.text(
    st.one_of(st.characters(codec="utf-8"), st.sampled_from("\u2028\u2029\x85\x0b\x0c\x1e\r\n\"',\t\0"))
)


def cut(data: bytes, sizes: list[int]) -> Iterator[bytes]:
    """The data in pieces of these sizes, over and over."""
    at = step = 0
    while at < len(data):
        yield data[at : at + sizes[step % len(sizes)]]
        at, step = at + sizes[step % len(sizes)], step + 1


def parse(
    data: bytes,
    parser: Parser = jsonl.parse,
    *,
    wanted: Wanted = WANTED,
    sizes: tuple[int, ...] = (7,),
    fields: Fields | None = None,
) -> list[Record]:
    return list(parser(lines.split(cut(data, list(sizes))), wanted, fields or Fields()))


def one(line: bytes | str, **options: Any) -> Record:
    (record,) = parse(line if isinstance(line, bytes) else line.encode(), **options)
    return record


def ignore(_: int) -> None:
    pass


# -- lines ---------------------------------------------------------------------------------------


@given(
    data=st.binary(),
    pieces=st.lists(st.sampled_from([b"\n", b"\r\n", b"\r", BOM, "\u2028".encode()])),
    seed=st.randoms(),
)
def test_split_any_bytes_in_any_pieces_give_the_lines_between_newline_bytes(
    data: bytes, pieces: list[bytes], seed: random.Random
) -> None:
    data = b"".join(seed.sample([*pieces, data[:9], data[9:]], len(pieces) + 2))
    sizes = [seed.randint(1, 5) for _ in range(3)]
    expected = data.split(b"\n")
    if not expected[-1]:
        expected.pop()
    if expected:
        expected[0] = expected[0].removeprefix(BOM)
    assert list(lines.split(cut(data, sizes))) == list(enumerate(expected, 1))


@pytest.mark.parametrize("size", [1, 3, 100])
def test_split_line_beyond_the_limit_is_left_out_and_the_next_one_is_not(size: int) -> None:
    data = b"12345\n123456\n\n1234567890123\nabc"
    found = list(lines.split(cut(data, [size]), limit=5))
    assert found == [(1, b"12345"), (2, None), (3, b""), (4, None), (5, b"abc")]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_read_whole_file_is_unpacked_and_progress_is_told(tmp_path: Path, suffix: str) -> None:
    data = random.Random(1).randbytes(3 << 19)
    path = packed(tmp_path / f"a.jsonl{suffix}", data)
    told: list[int] = []
    assert b"".join(lines.read(str(path), source(str(path)).compression, told.append)) == data
    assert told == sorted(told)
    assert told[-1] == path.stat().st_size


def packed(path: Path, data: bytes) -> Path:
    if path.suffix == ".gz":
        data = gzip.compress(data, 1)
    elif path.suffix == ".zst":
        data = pa.compress(data, codec="zstd", asbytes=True)
    path.write_bytes(data)
    return path


def until_it_ends(path: Path, compression: Any) -> bytes:
    found = b""
    pieces = lines.read(str(path), compression, ignore)
    try:
        for piece in pieces:
            found += piece
    except lines.EndsEarlyError:
        return found
    raise AssertionError("it did not end early")


def test_read_concatenated_streams_are_one_file(tmp_path: Path) -> None:
    for suffix, compression in ((".gz", "gzip"), (".zst", "zstd")):
        path = packed(tmp_path / f"a{suffix}", b"one\n")
        path.write_bytes(path.read_bytes() * 2)
        assert b"".join(lines.read(str(path), compression, ignore)) == b"one\none\n"  # type: ignore[arg-type]


@pytest.mark.parametrize("left", [11, 60_000, 200_000, -1])
def test_read_gzip_that_ends_early_keeps_every_byte_before(tmp_path: Path, left: int) -> None:
    path = packed(tmp_path / "a.gz", random.Random(1).randbytes(200_000).hex().encode())
    data = path.read_bytes()[:left]
    path.write_bytes(data)
    found = until_it_ends(path, "gzip")
    assert found == zlib.decompressobj(31).decompress(data)


def test_read_zstd_that_ends_early_keeps_the_blocks_before(tmp_path: Path) -> None:
    whole = random.Random(1).randbytes(400_000).hex().encode()
    path = packed(tmp_path / "a.zst", whole)
    data = path.read_bytes()
    for left in (5, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:left])
        kept = until_it_ends(path, "zstd")
        assert whole.startswith(kept)
        assert len(kept) > left * 2 - (160 << 10)  # a block is 128 KiB, and two characters are a byte


@pytest.mark.parametrize(("name", "compression", "at"), [("a.gz", "gzip", 200), ("a.zst", "zstd", 0)])
def test_read_damaged_or_empty_compressed_file_is_an_error_that_names_it(
    tmp_path: Path, name: str, compression: Any, at: int
) -> None:
    path = packed(tmp_path / name, random.Random(1).randbytes(1000).hex().encode() * 50)
    data = bytearray(path.read_bytes())
    data[at] ^= 0x55  # of zstd the magic number: its frames need not carry a checksum
    for content in (bytes(data), b"", path.read_bytes() + b"and more"):
        path.write_bytes(content)
        with pytest.raises(CorpusError, match=rf"cannot read .*{name}") as error:
            list(lines.read(str(path), compression, ignore))
        assert "\n" not in str(error.value)


# -- JSON Lines ----------------------------------------------------------------------------------


@st.composite
def json_lines(draw: st.DrawFn) -> tuple[bytes, dict[int, tuple[str, str] | None]]:
    """A file, and for each line that is a record its (id, text), or None: it is none that can be scored."""
    parts: list[bytes] = []
    expected: dict[int, tuple[str, str] | None] = {}
    for number in range(1, draw(st.integers(0, 8)) + 1):
        kind = draw(st.sampled_from(["good", "blank", "junk", "half"]))
        if kind == "good":
            name, text = draw(st.one_of(WORDS, st.integers())), draw(WORDS)
            line = json.dumps({"id": name, "text": text}, ensure_ascii=draw(st.booleans())).encode()
            expected[number] = (str(name), text)
        elif kind == "blank":
            line = draw(st.sampled_from([b"", b" ", b"\t "]))
        elif kind == "junk":
            line = b"{" + draw(st.binary()).replace(b"\n", b"") + b"\xff"
            expected[number] = None
        else:
            line = b'{"id": "x", "text": "\\udc00' + draw(WORDS).encode().hex().encode() + b'"}'
            expected[number] = None
        parts.append(line + draw(st.sampled_from([b"\n", b"\r\n"])))
    data = b"".join(parts)
    data = data.removesuffix(b"\n") if draw(st.booleans()) else data
    return (BOM if draw(st.booleans()) else b"") + data, expected


@given(made=json_lines(), sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_jsonl_every_line_is_a_document_byte_for_byte_or_an_error(
    made: tuple[bytes, dict[int, tuple[str, str] | None]], sizes: list[int]
) -> None:
    data, expected = made
    found = parse(data, sizes=tuple(sizes))
    assert {record.line: None if record.error else (record.id, record.texts[0]) for record in found} == expected
    assert [record.line for record in found] == list(expected)


@given(data=st.binary())
def test_jsonl_any_bytes_give_a_record_for_each_line_that_is_not_blank(data: bytes) -> None:
    found = parse(data)
    whole = data.removeprefix(BOM).split(b"\n")
    assert [record.line for record in found] == [at for at, line in enumerate(whole, 1) if line.strip(b" \t\r")]


@pytest.mark.parametrize(
    ("line", "kind", "says"),
    [
        ('{"id": "a", "text": "b"', "MalformedRecord", "not JSON: Expecting ',' delimiter (column 24)"),
        ('{"id": "a", "text": "b"} {}', "MalformedRecord", "Extra data"),
        ("\u2028", "MalformedRecord", "not JSON"),
        ("[1, 2]", "MalformedRecord", "not an object but an array"),
        ("null", "MalformedRecord", "not an object but null"),
        ('{"text": "b"}', "MalformedRecord", "no field 'id'; it has: text"),
        ('{"id": "a"}', "MalformedRecord", "no field 'text'; it has: id"),
        ('{"id": null, "text": "b"}', "NullValue", "column 'id': null"),
        ('{"id": 1.0, "text": "b"}', "MalformedRecord", "a number that is no integer"),
        ('{"id": 1e3, "text": "b"}', "MalformedRecord", "a number that is no integer"),
        ('{"id": NaN, "text": "b"}', "MalformedRecord", "a number that is no integer"),
        ('{"id": true, "text": "b"}', "MalformedRecord", "column 'id' is true or false"),
        ('{"id": ["a"], "text": "b"}', "MalformedRecord", "column 'id' is an array"),
        ('{"id": "a", "text": 5}', "MalformedRecord", "column 'text' is an integer; a string is needed"),
        ('{"id": "a", "text": {"b": 1}}', "MalformedRecord", "column 'text' is an object"),
        ('{"id": "a", "text": "\\ud800"}', "MalformedRecord", "half a surrogate pair (\\ud800)"),
        ('{"id": "\\udfff", "text": "b"}', "MalformedRecord", "column 'id': half a surrogate pair (\\udfff)"),
        (b'{"id": "a", "text": "\xff"}', "MalformedRecord", "not UTF-8 at byte 21 of the line: invalid start byte"),
        (b'{"id": "a", "text": "\xed\xa0\x80"}', "MalformedRecord", "not UTF-8 at byte 21"),
        ("[" * 200_000, "MalformedRecord", "nested too deeply"),
    ],
)
def test_jsonl_bad_record_says_what_is_wrong(line: str | bytes, kind: str, says: str) -> None:
    record = one(line)
    assert record.error is not None
    assert record.error[0] == kind
    assert says in record.error[1]
    record.error[1].encode()


def test_jsonl_bad_text_keeps_the_id() -> None:
    record = one('{"id": 7, "text": "\\ud800"}')
    assert (record.id, record.integer) == ("7", True)


def test_jsonl_numbers_stay_what_is_written() -> None:
    for number in (2**53 + 1, -(2**63), 2**64, "1" + "0" * 5000):
        text = str(number)
        record = one(f'{{"id": {text}, "text": "b", "other": 1e999}}')
        assert (record.id, record.integer, record.error) == (text, True, None)
    assert one('{"id": "007", "text": "b"}').id == "007"


def test_jsonl_key_that_stands_twice_has_its_last_value() -> None:
    assert one('{"id": 1, "text": "a", "text": "b"}').texts == ("b",)


def test_jsonl_null_text_is_null_and_no_error() -> None:
    assert one('{"id": 1, "text": null}') == Record(1, "1", True, (None,))


def test_jsonl_surrogate_pair_is_a_character() -> None:
    assert one('{"id": 1, "text": "\\ud83d\\ude00"}').texts == ("😀",)


def test_jsonl_too_long_line_is_one_error() -> None:
    found = list(jsonl.parse(iter([(1, None), (2, b'{"id": 1, "text": "b"}')]), WANTED, Fields()))
    assert [record.error and record.error[0] for record in found] == ["RecordTooLarge", None]


def test_jsonl_nested_columns_and_a_dotted_key_that_goes_first() -> None:
    wanted = Wanted(id="meta.id", texts=("meta.body.text",))
    assert one('{"meta": {"id": 1, "body": {"text": "a"}}}', wanted=wanted).texts == ("a",)
    record = one('{"meta": {"id": 1, "body": {"text": "a"}}, "meta.body.text": "b"}', wanted=wanted)
    assert record.texts == ("b",)
    for line in ('{"meta": {"id": 1, "body": 5}}', '{"meta": {"id": 1}}'):
        error = one(line, wanted=wanted).error
        assert error is not None
        assert "no field 'meta.body.text'" in error[1]


def test_jsonl_fields_are_those_that_some_record_has() -> None:
    fields = Fields()
    parse(b'junk\n{"id": 1}\n{"id": 2, "text": null, "x": 1}\n', fields=fields)
    assert (fields.names, fields.seen) == (["id"], {"id", "text"})


# -- CSV and TSV ---------------------------------------------------------------------------------


@given(
    rows=st.lists(st.tuples(WORDS.filter(bool), WORDS, WORDS), max_size=6),
    end=st.sampled_from(["\n", "\r\n"]),
    last=st.booleans(),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
)
def test_csv_what_was_quoted_comes_back_byte_for_byte(
    rows: list[tuple[str, str, str]], end: str, last: bool, sizes: list[int]
) -> None:
    file = io.StringIO(newline="")
    writer = csv.writer(file, quoting=csv.QUOTE_ALL, lineterminator=end)
    writer.writerows([("text", "other", "id"), *((text, other, name) for name, text, other in rows)])
    data = file.getvalue()
    found = parse((data if last else data.removesuffix(end)).encode(), separated.parse_csv, sizes=tuple(sizes))
    assert [(record.id, record.texts[0]) for record in found] == [(name, text) for name, text, _ in rows]


@pytest.mark.parametrize(
    ("row", "kind", "says"),
    [
        (b"a,b,c", "MalformedRecord", "3 fields, and the header has 2"),
        (b"a", "MalformedRecord", "1 field, and the header has 2"),
        (b",b", "NullValue", "column 'id': empty"),
        (b'a,"b"c', "MalformedRecord", "not CSV: ',' expected after '\"'"),
        (b'a,"b\nc"d', "MalformedRecord", "lines 2 to 3"),
        (b'a,"b\nc', "MalformedRecord", "unexpected end of data, lines 2 to 3"),
        (b"a,b\rc", "MalformedRecord", "new-line character"),
        (b"a,\xff", "MalformedRecord", "column 'text': not UTF-8: byte 0xff"),
        (b"\xe4,b", "MalformedRecord", "column 'id': not UTF-8: byte 0xe4"),
    ],
)
def test_csv_bad_row_is_one_error_with_its_line(row: bytes, kind: str, says: str) -> None:
    record = one(b"id,text\n" + row, parser=separated.parse_csv)
    assert record.error is not None
    assert record.error[0] == kind
    assert says in record.error[1]
    assert record.line == 2


def test_csv_reading_goes_on_after_a_bad_row() -> None:
    found = parse(b'\xef\xbb\xbfid,text\r\na,b\r\n\r\nc,"d"e\r\nf,"g\r\nh"\r\ni\r\nj,k', separated.parse_csv)
    assert [(record.line, record.id, record.texts[0]) for record in found] == [
        (2, "a", "b"),
        (4, None, None),
        (5, "f", "g\r\nh"),
        (7, None, None),
        (8, "j", "k"),
    ]


def test_csv_values_are_strings_as_they_stand() -> None:
    found = parse(b"id,text\n007,1.0\n1e3,\n", separated.parse_csv)
    assert [(record.id, record.integer, record.texts[0]) for record in found] == [
        ("007", False, "1.0"),
        ("1e3", False, ""),
    ]


def test_csv_quote_that_never_closes_is_an_error_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(separated, "LIMIT", 1 << 20)
    data = b'id,text\na,b\nc,"' + b"x\n" * (1 << 20)
    with pytest.raises(FileError, match="quote that opens on line 3 does not close within 1 MiB"):
        parse(data, separated.parse_csv, sizes=(1 << 16,))


def test_csv_long_field_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        one(b"id,text\na," + b"x" * 300_000, parser=separated.parse_csv, sizes=(1 << 16,)).texts[0] == "x" * 300_000
    )


@pytest.mark.parametrize(
    ("data", "says"), [(b"", "no header"), (b"id,text,id\n", "stands 2 times"), (b'"i"d', "not CSV")]
)
def test_csv_bad_header_is_an_error_of_the_file(data: bytes, says: str) -> None:
    with pytest.raises(FileError, match=says):
        parse(data, separated.parse_csv)


def test_csv_missing_column_is_left_to_the_plan() -> None:
    fields = Fields()
    assert parse(b"id,body\na,b\n", separated.parse_csv, fields=fields) == []
    assert (fields.names, fields.seen) == (["id", "body"], {"id"})


def test_tsv_quotes_are_text_and_a_newline_always_ends_a_record() -> None:
    found = parse(b'text\tid\r\n"open\ta\r\nsay "hi"\rx\tb\nc\n\nd\te\tf', separated.parse_tsv)
    assert [(record.line, record.id, record.texts[0]) for record in found] == [
        (2, "a", '"open'),
        (3, "b", 'say "hi"\rx'),
        (4, None, None),
        (6, None, None),
    ]


# -- Arrow ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("new", [pa.ipc.new_file, pa.ipc.new_stream])
def test_arrow_file_and_stream_give_the_wanted_columns(tmp_path: Path, new: Any) -> None:
    table = pa.table(
        {
            "other": pa.array([[1]] * 25_000),
            "text": pa.array(["a", None] * 12_500).dictionary_encode(),
            "meta": pa.array([{"id": i} for i in range(25_000)]),
        }
    )
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.OSFile(str(tmp_path / "a"), "wb") as file, new(file, table.schema, options=options) as writer:
        writer.write_table(table)
    found = list(arrowfile.tables(str(tmp_path / "a"), Wanted(id="meta.id", texts=("text",)), ignore))
    assert max(part.num_rows for part in found) == 10_000
    whole = pa.concat_tables(found)
    assert whole.schema == pa.schema([("meta.id", pa.int64()), ("text", pa.string())])
    assert whole.column("meta.id").to_pylist() == list(range(25_000))
    assert whole.column("text").to_pylist() == ["a", None] * 12_500


def test_arrow_cut_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    table = pa.table({"id": ["x"] * 1000, "text": ["y" * 50] * 1000})
    path = tmp_path / "a.arrow"
    for new in (pa.ipc.new_file, pa.ipc.new_stream):
        with pa.OSFile(str(path), "wb") as file, new(file, table.schema) as writer:
            writer.write_table(table)
        path.write_bytes(path.read_bytes()[:-9000])
        with pytest.raises(CorpusError, match=r"cannot read .*a\.arrow"):
            list(arrowfile.tables(str(path), WANTED, ignore))
    for content in (b"", b"FEA1 of old", b"ARROW1"):
        path.write_bytes(content)
        with pytest.raises(CorpusError, match=r"cannot read .*a\.arrow"):
            list(arrowfile.tables(str(path), WANTED, ignore))


# -- names, columns, templates -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind", "compression"),
    [
        ("a.parquet", Kind.PARQUET, ""),
        ("part-0000", Kind.PARQUET, ""),
        ("a.JSONL", Kind.JSONL, ""),
        ("a.b.ndjson.gz", Kind.JSONL, "gzip"),
        ("a.json-lines.zst", Kind.JSONL, "zstd"),
        ("a.csv.gz", Kind.CSV, "gzip"),
        ("a.tsv", Kind.TSV, ""),
        ("a.arrow", Kind.ARROW, ""),
        ("a.ipc", Kind.ARROW, ""),
        ("a.feather", Kind.ARROW, ""),
    ],
)
def test_source_is_told_by_the_extension(name: str, kind: Kind, compression: Any) -> None:
    assert source(name) == Source(path=name, kind=kind, compression=compression)


def test_source_wanted_format_goes_before_the_extension() -> None:
    assert source("a.json.gz", "jsonl") == Source(path="a.json.gz", kind=Kind.JSONL, compression="gzip")


@pytest.mark.parametrize("name", ["a.jsonl.bz2", "a.csv.xz", "a.arrow.gz", "a.gz"])
def test_source_that_cannot_be_unpacked_is_an_error_and_not_left_out(name: str) -> None:
    with pytest.raises(CorpusError, match=name):
        source(name)
    assert name == "a.gz" or belongs(Path(name), "auto")


def test_nested_kind_of_a_missing_field_lists_the_columns() -> None:
    schema = pa.schema([("a.b", pa.string()), ("a", pa.struct([("c", pa.struct([("d", pa.int8())]))]))])
    assert nested.kind("f", schema, "a.b") == pa.string()
    assert nested.kind("f", schema, "a.c.d") == pa.int8()
    for name in ("a.x", "a.c.d.e", "b", "a.b.c"):
        with pytest.raises(CorpusError, match=rf"no column '{name}' in f; it has: a\.b, a"):
            nested.kind("f", schema, name)


def test_template_fills_named_columns_and_keeps_braces() -> None:
    made = template.parse("{{{title}}}\n{meta.body}{title}.")
    assert made.columns == ["title", "meta.body"]
    assert made.fill({"title": ["a", "b"], "meta.body": ["{x}", ""]}) == ["{a}\n{x}a.", "{b}\nb."]


@pytest.mark.parametrize("text", ["", "no column", "{}", "{0}", "{a!r}", "{a:>3}", "{a", "a}", "{{a}}"])
def test_template_that_says_nothing_or_too_much_is_one_line(text: str) -> None:
    with pytest.raises(UsageError) as error:
        template.parse(text)
    assert "\n" not in str(error.value)
