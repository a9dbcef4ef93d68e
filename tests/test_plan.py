"""Planning: shards, duplicates, and what a later start may and may not find."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shards import planfile
from shards.corpus import Reader
from shards.errors import CorpusError, OutputError, PlanError, UsageError
from shards.layout import Layout, check_name
from shards.plan import model_versions, only_plan, read_plan
from shards.types import Plan, QuerySet, Shard
from tests.outputs import Output, invalid_strings, make_output, write_corpus


def ids_of(output: Output, plan: Plan) -> list[str | int]:
    reader = Reader(output.spec, plan.id_type)
    return [doc_id for shard in plan.shards for doc_id in reader.read(shard).doc_ids]


def corpus(output: Output, name: str) -> Path:
    return output.root / "corpus" / name


def ranges(shards: Iterable[Shard]) -> list[tuple[int, int, int, int]]:
    return [(shard.row_group, shard.start, shard.rows, shard.first_row) for shard in shards]


# -- cutting -------------------------------------------------------------------------------------


def test_plan_shards_never_cross_a_row_group(tmp_path: Path) -> None:
    plan = make_output(tmp_path, docs=25, group=10, shard_size=4).plan
    assert ranges(plan.shards) == [
        (0, 0, 4, 0),
        (0, 4, 4, 4),
        (0, 8, 2, 8),
        (1, 0, 4, 10),
        (1, 4, 4, 14),
        (1, 8, 2, 18),
        (2, 0, 4, 20),
        (2, 4, 1, 24),
    ]
    assert plan.docs == 25


def test_plan_shard_ids_are_unique_and_survive_a_move(tmp_path: Path) -> None:
    output = make_output(tmp_path)
    names = [shard.shard_id for shard in output.plan.shards]
    assert len(set(names)) == len(names)
    other = make_output(tmp_path / "elsewhere")
    assert [shard.shard_id for shard in other.plan.shards] == names


def test_plan_corpus_without_documents_is_valid(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus" / "a.parquet", pa.array([], pa.string()), text=pa.array([], pa.string()))
    output = make_output(tmp_path / "other")
    output.spec = replace(output.spec, path=str(tmp_path / "corpus"))
    plan, change = output.make_plan()
    assert (plan.shards, plan.docs, change.kind) == ((), 0, "created")
    assert output.make_plan()[1].kind == "unchanged"


def test_plan_read_back_is_equal(tmp_path: Path) -> None:
    output = make_output(tmp_path)
    plan, change = output.make_plan()
    assert (change.kind, change.new_files, change.new_shards) == ("created", 1, len(plan.shards))
    assert read_plan(output.layout, "m1") == plan
    assert output.make_plan() == (plan, replace(change, kind="unchanged", new_files=0, new_shards=0))
    assert model_versions(output.layout) == ["m1"]
    assert only_plan(output.layout, None) == plan


def test_plan_any_flipped_byte_is_noticed(tmp_path: Path) -> None:
    output = make_output(tmp_path)
    assert output.plan
    path = planfile.path(output.layout, "m1", 0, 0)
    data = path.read_bytes()
    for at in range(0, len(data), 7):
        changed = bytearray(data)
        changed[at] ^= 0x10
        path.write_bytes(changed)
        with pytest.raises(PlanError, match="damaged plan"):
            read_plan(output.layout, "m1")


def test_only_plan_unknown_or_ambiguous_name_says_what_there_is(tmp_path: Path) -> None:
    output = make_output(tmp_path)
    with pytest.raises(UsageError, match="no plan"):
        only_plan(output.layout, None)
    assert output.plan
    output.model_version = "m2"
    assert output.plan
    with pytest.raises(UsageError, match="m1, m2"):
        only_plan(output.layout, None)
    with pytest.raises(UsageError, match="m1, m2"):
        only_plan(output.layout, "m3")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "-a", "a" * 101, "ä", "a b"])
def test_model_version_that_is_no_file_name_is_refused(name: str) -> None:
    with pytest.raises(UsageError):
        check_name(name)


# -- duplicates ----------------------------------------------------------------------------------


def with_duplicates(tmp_path: Path, policy: str) -> Output:
    output = make_output(tmp_path, docs=6, group=3, shard_size=2, duplicates=policy)
    write_corpus(corpus(output, "b.parquet"), ["x", "d1", "x", None, None, "d5"], text=list("abcdef"))
    return output


def test_duplicates_fail_names_ids_places_and_settings(tmp_path: Path) -> None:
    with pytest.raises(CorpusError) as error:
        assert with_duplicates(tmp_path, "fail").plan
    text = str(error.value)
    assert "'d1' at" in text
    assert "a.parquet:1 and" in text
    assert "b.parquet:1" in text
    assert "b.parquet:0 and" in text
    assert "keep_first or keep_last" in text
    assert "\n" not in text


def test_duplicates_fail_names_five_at_most(tmp_path: Path) -> None:
    output = make_output(tmp_path, docs=20)
    write_corpus(corpus(output, "b.parquet"), [f"d{i}" for i in range(20)], text=["other"] * 20)
    with pytest.raises(CorpusError, match="and more") as error:
        assert output.plan
    assert str(error.value).count(" at ") == 5


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("keep_first", ["d0", "d1", "d2", "d3", "d4", "d5", "x"]),
        ("keep_last", ["d0", "d2", "d3", "d4", "d1", "x", "d5"]),
    ],
)
def test_duplicates_keep_leaves_each_id_once(tmp_path: Path, policy: str, expected: list[str]) -> None:
    output = with_duplicates(tmp_path, policy)
    plan = output.plan
    assert ids_of(output, plan) == expected
    assert plan.duplicates == 3
    assert plan.docs == 12 - 3  # two documents without an id are documents, and dead letters


def test_duplicates_shard_without_documents_is_dropped(tmp_path: Path) -> None:
    output = make_output(tmp_path, docs=4, group=4, shard_size=2, duplicates="keep_first")
    write_corpus(corpus(output, "b.parquet"), ["d2", "d1", "y"], text=list("abc"))
    plan = output.plan
    assert [shard.file[-9:] for shard in plan.shards] == ["a.parquet", "a.parquet", "b.parquet"]
    assert ids_of(output, plan)[-1] == "y"


def test_duplicates_large_integers_that_a_float_would_merge_are_different(tmp_path: Path) -> None:
    output = make_output(tmp_path)
    write_corpus(corpus(output, "a.parquet"), [2**53, 2**53 + 1, None, None], text=list("abcd"))
    assert output.plan.docs == 4


def test_duplicates_invalid_utf8_ids_compare_as_bytes(tmp_path: Path) -> None:
    output = make_output(tmp_path, duplicates="keep_first")
    ids = invalid_strings([b"\xff", b"\xff", b"\xfe"])
    write_corpus(corpus(output, "a.parquet"), ids, text=list("abc"))
    assert (output.plan.docs, output.plan.duplicates) == (2, 1)


@pytest.mark.parametrize(("policy", "kept"), [("keep_first", "a.parquet"), ("keep_last", "b.parquet")])
def test_duplicates_identical_files_count_row_by_row(tmp_path: Path, policy: str, kept: str) -> None:
    output = make_output(tmp_path, duplicates=policy)
    write_corpus(corpus(output, "a.parquet"), ["x", None], text=["a", "b"])
    shutil.copy(corpus(output, "a.parquet"), corpus(output, "b.parquet"))
    plan = output.plan
    assert (plan.docs, plan.duplicates) == (2, 2)
    assert {Path(shard.file).name for shard in plan.shards} == {kept}
    assert output.make_plan()[1].kind == "unchanged"


def test_duplicates_identical_files_fail_by_default(tmp_path: Path) -> None:
    output = make_output(tmp_path)
    shutil.copy(corpus(output, "a.parquet"), corpus(output, "b.parquet"))
    with pytest.raises(CorpusError, match=r"a\.parquet and .*b\.parquet have the same content"):
        assert output.plan


# -- unreadable files ----------------------------------------------------------------------------


def test_unreadable_file_is_named(tmp_path: Path) -> None:
    output = make_output(tmp_path)
    corpus(output, "zero.parquet").touch()
    with pytest.raises(CorpusError, match=r"zero\.parquet"):
        assert output.plan


def test_unreadable_file_with_skip_becomes_one_shard_each(tmp_path: Path) -> None:
    output = make_output(tmp_path, skip_unreadable=True)
    for name in ("y.parquet", "z.parquet"):
        corpus(output, name).touch()
    plan = output.plan
    bad = [shard for shard in plan.shards if shard.unreadable]
    assert [Path(shard.file).name for shard in bad] == ["y.parquet", "z.parquet"]
    assert len({shard.shard_id for shard in bad}) == 2
    assert [shard.docs for shard in bad] == [0, 0]
    assert plan.docs == 25
    assert output.make_plan()[1].kind == "unchanged"
    assert read_plan(output.layout, "m1") == plan


def test_unreadable_id_page_with_skip_becomes_a_shard(tmp_path: Path) -> None:
    output = make_output(tmp_path, skip_unreadable=True)
    path = write_corpus(corpus(output, "b.parquet"), [f"e{i}" for i in range(50)])
    chunk = pq.read_metadata(path).row_group(0).column(0)
    data = bytearray(path.read_bytes())
    for at in range(chunk.data_page_offset, chunk.data_page_offset + 12):
        data[at] ^= 0xFF
    path.write_bytes(data)
    plan = output.plan
    assert [Path(shard.file).name for shard in plan.shards if shard.unreadable] == ["b.parquet"]
    assert output.make_plan()[1].kind == "unchanged"
    output.spec = replace(output.spec, skip_unreadable=False, path=str(path))
    output.model_version = "m2"
    with pytest.raises(CorpusError, match=r"b\.parquet"):
        assert output.plan


# -- the next start ------------------------------------------------------------------------------


def published(tmp_path: Path, **spec: object) -> Output:
    output = make_output(tmp_path, **spec)
    output.publish(output.plan, output.plan.shards[0])
    return output


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"shard_size": 5}, "shard_size: 4 → 5"),
        ({"text_column": "doc_id"}, "text_column: text → doc_id"),
        ({"query_column": "text"}, "query_column: none → text"),
        ({"duplicates": "keep_last"}, "duplicates: fail → keep_last"),
    ],
)
def test_replan_other_spec_is_refused_with_the_difference(
    tmp_path: Path, change: dict[str, object], named: str
) -> None:
    output = published(tmp_path)
    output.spec = replace(output.spec, **change)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="another model_version") as error:
        output.make_plan()
    assert named in str(error.value)


def test_replan_other_weights_or_queries_are_refused_by_name(tmp_path: Path) -> None:
    output = published(tmp_path)
    output.components = {"weights": "b" * 64, "query": "q", "dtype": "float32"}
    with pytest.raises(PlanError, match=r"weights: w1 → bbbbbbbbbbbb….*dtype: none → float32"):
        output.make_plan()
    output.components = {"weights": "w1", "query": "q"}
    output.queries = QuerySet(ids=("1",), texts=("a",))
    with pytest.raises(PlanError, match="queries: none"):
        output.make_plan()


def test_replan_without_any_part_replaces_the_plan(tmp_path: Path) -> None:
    output = make_output(tmp_path)
    assert output.plan
    output.components = {"weights": "w2"}
    output.spec = replace(output.spec, shard_size=10)
    plan, change = output.make_plan()
    assert (change.kind, len(plan.shards)) == ("replaced", 3)
    assert read_plan(output.layout, "m1") == plan


def test_replan_skip_unreadable_or_path_alone_is_no_difference(tmp_path: Path) -> None:
    output = published(tmp_path)
    output.spec = replace(output.spec, skip_unreadable=True, path=f"{tmp_path}/corpus/*.parquet")
    assert output.make_plan()[1].kind == "unchanged"


@pytest.mark.parametrize("gone", [True, False])
def test_replan_planned_file_changed_or_gone_is_refused(tmp_path: Path, gone: bool) -> None:
    output = published(tmp_path)
    write_corpus(corpus(output, "z.parquet"), ["z"])
    path = corpus(output, "a.parquet")
    if gone:
        path.unlink()
    else:
        write_corpus(path, ["other"])
    with pytest.raises(PlanError, match=r"planned file .*a\.parquet " + ("is gone" if gone else "changed")):
        output.make_plan()


def test_replan_changed_file_without_any_part_plans_anew(tmp_path: Path) -> None:
    output = make_output(tmp_path)
    assert output.plan
    write_corpus(corpus(output, "a.parquet"), ["other"])
    plan, change = output.make_plan()
    assert (change.kind, plan.docs) == ("replaced", 1)


def test_replan_renamed_file_is_accepted_and_shards_point_to_it(tmp_path: Path) -> None:
    output = published(tmp_path)
    before = output.plan
    corpus(output, "a.parquet").rename(corpus(output, "renamed.parquet"))
    plan, change = output.make_plan()
    assert change.kind == "unchanged"
    assert [shard.key for shard in plan.shards] == [shard.key for shard in before.shards]
    assert {Path(shard.file).name for shard in plan.shards} == {"renamed.parquet"}
    assert len(ids_of(output, plan)) == 25


def test_replan_swapped_names_follow_the_content(tmp_path: Path) -> None:
    output = make_output(tmp_path)
    write_corpus(corpus(output, "b.parquet"), ["x"])
    output.publish(output.plan, output.plan.shards[0])
    ids = ids_of(output, output.plan)
    corpus(output, "a.parquet").rename(corpus(output, "c"))
    corpus(output, "b.parquet").rename(corpus(output, "a.parquet"))
    corpus(output, "c").rename(corpus(output, "b.parquet"))
    plan, change = output.make_plan()
    assert change.kind == "unchanged"
    assert ids_of(output, plan) == ids


def test_replan_new_files_extend_the_plan(tmp_path: Path) -> None:
    output = published(tmp_path)
    before = output.plan
    write_corpus(corpus(output, "0.parquet"), ["x", "y"])
    plan, change = output.make_plan()
    assert (change.kind, change.new_files, change.new_shards) == ("extended", 1, 1)
    assert plan.shards[:-1] == before.shards
    assert plan.docs == 27
    assert str(change) == "extended by 1 new files"
    assert output.make_plan() == (plan, replace(change, kind="unchanged", new_files=0, new_shards=0))
    assert read_plan(output.layout, "m1") == plan


@pytest.mark.parametrize("policy", ["keep_first", "keep_last"])
def test_replan_duplicate_of_a_planned_document_leaves_the_planned_one(tmp_path: Path, policy: str) -> None:
    output = published(tmp_path, duplicates=policy)
    for name in ("0.parquet", "z.parquet"):  # before and after the planned file
        write_corpus(corpus(output, name), ["d3", f"new-{name}", "twice"], text=["a", "b", name])
    plan, _ = output.make_plan()
    ids = ids_of(output, plan)
    assert len(ids) == len(set(ids)) == 28
    assert ids[:25] == [f"d{i}" for i in range(25)]
    twice = next(s for s in plan.shards[8:] if "twice" in Reader(output.spec, "string").read(s).doc_ids)
    assert Path(twice.file).name == ("0.parquet" if policy == "keep_first" else "z.parquet")
    assert plan.duplicates == 3


def test_replan_duplicate_of_a_planned_document_fails_by_default(tmp_path: Path) -> None:
    output = published(tmp_path)
    write_corpus(corpus(output, "z.parquet"), ["d3"], text=["other"])
    with pytest.raises(CorpusError, match="'d3' at"):
        output.make_plan()


@pytest.mark.parametrize("name", ["0.parquet", "z.parquet"])
def test_replan_copy_of_a_planned_file_follows_the_policy(tmp_path: Path, name: str) -> None:
    output = published(tmp_path / "fail")
    shutil.copy(corpus(output, "a.parquet"), corpus(output, name))
    with pytest.raises(CorpusError, match="same content"):
        output.make_plan()
    output = published(tmp_path / "keep", duplicates="keep_last")
    shutil.copy(corpus(output, "a.parquet"), corpus(output, name))
    plan, _ = output.make_plan()
    assert (plan.docs, plan.duplicates) == (25, 25)
    assert {Path(shard.file).name for shard in plan.shards} == {"a.parquet"}
    assert sorted(Path(file.path).name for file in plan.files) == sorted(["a.parquet", name])


def test_replan_copy_that_was_left_out_may_go(tmp_path: Path) -> None:
    output = make_output(tmp_path, duplicates="keep_first")
    shutil.copy(corpus(output, "a.parquet"), corpus(output, "b.parquet"))
    output.publish(output.plan, output.plan.shards[0])
    corpus(output, "a.parquet").unlink()
    plan, change = output.make_plan()
    assert change.kind == "unchanged"
    assert {Path(shard.file).name for shard in plan.shards} == {"b.parquet"}
    assert len(ids_of(output, plan)) == 25


def test_replan_other_id_type_in_one_output_is_refused(tmp_path: Path) -> None:
    output = make_output(tmp_path)
    assert output.plan
    write_corpus(tmp_path / "ints" / "a.parquet", [1, 2])
    output.spec = replace(output.spec, path=str(tmp_path / "ints"))
    output.model_version = "m2"
    with pytest.raises(PlanError, match="doc_id is string for model_version 'm1'"):
        output.make_plan()


def test_plan_missing_base_file_is_noticed(tmp_path: Path) -> None:
    output = published(tmp_path)
    write_corpus(corpus(output, "z.parquet"), ["x"])
    output.make_plan()
    planfile.path(output.layout, "m1", 0, 0).unlink()
    with pytest.raises(PlanError, match="missing"):
        read_plan(output.layout, "m1")


# -- the output directory ------------------------------------------------------------------------


def test_layout_existing_without_an_output_is_one_line(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(OutputError) as error:
            Layout.existing(path)
        assert "\n" not in str(error.value)


def test_layout_file_in_the_way_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "scores").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "out", tmp_path / "out"):
        with pytest.raises(OutputError) as error:
            Layout.open(path)
        assert "\n" not in str(error.value)


def test_layout_foreign_directory_with_files_can_be_used(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("mine")
    layout = Layout.open(tmp_path)
    assert not list(layout.private.iterdir())
    assert (tmp_path / "note.txt").read_text() == "mine"


def test_layout_path_that_duckdb_would_misread_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot have"):
        Layout.open(tmp_path / "what?")


def test_layout_opened_twice_is_the_same(tmp_path: Path) -> None:
    output = make_output(tmp_path)
    assert output.plan
    assert Layout.existing(tmp_path / "out") == output.layout
