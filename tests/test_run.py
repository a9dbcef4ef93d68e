"""Whole runs on real Ray: what is scored, what a killed worker or driver costs, what is refused."""

from __future__ import annotations

import json

import psutil
import pyarrow as pa
import pytest

from tests.outputs import invalid_strings, write_corpus
from tests.projects import Project, wait_until, with_faults

pytestmark = pytest.mark.ray


def test_run_whole_corpus_every_document_has_its_score(project: Project) -> None:
    project.corpus(["x" * i for i in range(25)], group=10)
    project.corpus(["y" * i for i in range(25)], name="b.parquet", first=25)
    done = project.run()
    assert done.returncode == 0, done.stderr
    rows = project.sql("SELECT doc_id, model_version, score FROM scores")
    expected = {f"d{i}": i % 25 + 0.001 for i in range(50)}
    assert {doc_id: pytest.approx(score) for doc_id, _, score in rows} == expected
    assert {name for _, name, _ in rows} == {"m1"}
    assert "50 scored, 0 dead, 0 missing of 50" in done.stderr
    assert project.verify()["ok"]


def test_run_again_scores_nothing_and_needs_no_cluster(project: Project) -> None:
    project.corpus(["x"] * 30)
    assert project.run().returncode == 0
    project.address = "127.0.0.1:1"
    done = project.run()
    assert done.returncode == 0, done.stderr
    assert "3 shards done, 0 to do" in done.stderr


def test_run_bad_documents_cost_one_dead_letter_each(project: Project) -> None:
    texts = ["fine"] * 40
    texts[3], texts[14], texts[25] = "nan", "raise", "fine too"
    project.corpus(invalid_strings([t.encode() for t in texts[:20]] + [None, b"\xff\xfe", *[b"ok"] * 18]))
    done = project.run()
    assert done.returncode == 3, done.stderr
    letters = project.sql("SELECT doc_id, stage, error_type, row FROM dead_letters ORDER BY row")
    assert letters == [
        ("d3", "score", "NonFiniteScore", 3),
        ("d14", "score", "ValueError", 14),
        ("d20", "read", "NullValue", 20),
        ("d21", "read", "UnicodeDecodeError", 21),
    ]
    assert project.sql("SELECT count(*) FROM scores") == [(36,)]
    shown = project.rescore("dlq", "list", str(project.output), "--json")
    assert "this text cannot be scored" in shown.stdout
    assert project.run("--set", "retry.dead_letters_ok=4").returncode == 0


def test_run_empty_corpus_is_complete(project: Project) -> None:
    write_corpus(project.root / "corpus" / "a.parquet", pa.array([], pa.string()), text=pa.array([], pa.string()))
    done = project.run()
    assert done.returncode == 0, done.stderr
    assert project.sql("SELECT count(*) FROM scores") == [(0,)]
    assert project.verify()["ok"]


def test_run_query_set_every_document_is_scored_against_every_query(project: Project) -> None:
    project.corpus(invalid_strings([b"one", None, b"three"]))
    (project.root / "queries.jsonl").write_text(
        '{"query_id": "q1", "text": "a"}\n{"query_id": "q2", "text": "bb"}\n'
    )
    project.config["corpus"] = {"path": "corpus", "queries": "queries.jsonl"}
    done = project.run()
    assert done.returncode == 3, done.stderr
    rows = project.sql("SELECT doc_id, query_id, round(score, 3) FROM scores ORDER BY ALL")
    assert [(d, q) for d, q, _ in rows] == [("d0", "q1"), ("d0", "q2"), ("d2", "q1"), ("d2", "q2")]
    assert project.sql("SELECT doc_id, query_id FROM dead_letters ORDER BY ALL") == [("d1", "q1"), ("d1", "q2")]
    assert "4 scored, 2 dead, 0 missing of 6" in done.stderr
    assert project.verify()["ok"]


def test_run_query_set_redriven_single_query_is_scored_and_doubles_nothing(project: Project) -> None:
    fixed = project.root / "fixed"
    project.corpus(["x", "y"])
    (project.root / "queries.csv").write_text("query_id,text\nq1,good\nq2,bad\n")
    project.config["corpus"] = {"path": "corpus", "queries": "queries.csv"}
    project.config["ranker"] |= {"class": "tests.rankers:PickyQuery", "options": {"fixed": str(fixed)}}
    assert project.run().returncode == 3
    assert project.sql("SELECT count(*) FROM scores") == [(2,)]
    fixed.touch()
    assert project.rescore("dlq", "redrive", str(project.output), "--where", "doc_id = 'd1'").returncode == 0
    done = project.run()
    assert done.returncode == 3, done.stderr
    rows = project.sql("SELECT doc_id, query_id FROM scores ORDER BY ALL")
    assert rows == [("d0", "q1"), ("d1", "q1"), ("d1", "q2")]
    assert project.verify()["ok"]


def test_run_own_queries_each_document_is_scored_against_its_own(project: Project) -> None:
    write_corpus(project.root / "corpus/a.parquet", [1, 2**60 + 1], text=["x", "x"], q=["", "longer"])
    project.config["corpus"] = {"path": "corpus", "query_column": "q"}
    assert project.run().returncode == 0
    rows = project.sql("SELECT doc_id, round(score, 3) FROM scores ORDER BY doc_id")
    assert rows == [(1, pytest.approx(1.0)), (2**60 + 1, pytest.approx(1.006))]


def test_run_worker_killed_its_shards_are_scored_elsewhere(project: Project) -> None:
    with_faults(project)
    texts = ["x"] * 100
    texts[37] = "kill-worker"
    project.corpus(texts)
    done = project.run()
    assert done.returncode == 0, done.stderr
    assert project.sql("SELECT count(*), count(DISTINCT doc_id) FROM scores") == [(100, 100)]
    assert project.sql("SELECT count(*) > 0 FROM attempts WHERE event = 'died'") == [(True,)]
    assert project.verify()["ok"]


@pytest.mark.parametrize("text", ["always-kill-worker", "segfault"])
def test_run_document_that_kills_its_worker_costs_one_document(project: Project, text: str) -> None:
    with_faults(project)
    texts = ["x"] * 60
    texts[37] = text
    project.corpus(texts)
    done = project.run()
    assert done.returncode == 3, done.stderr
    assert project.sql("SELECT count(*), count(DISTINCT doc_id) FROM scores") == [(59, 59)]
    letters = project.sql("SELECT doc_id, row, stage, error_type, docs FROM dead_letters")
    assert letters == [("d37", 37, "worker", "WorkerDied", 1)]
    [(message, traceback)] = project.sql("SELECT message, traceback FROM dead_letters")
    assert "it ended" in message
    assert "pid: " in message
    assert ("Segmentation fault" in traceback and "_score" in traceback) == (text == "segfault")
    assert not (project.output / ".rescore" / "crashes").exists()
    assert project.sql("SELECT count(DISTINCT worker) <= 4 FROM attempts WHERE event = 'died'") == [(True,)]
    assert project.sql("SELECT count(*) FROM attempts WHERE event = 'failed'") == [(0,)]
    assert project.verify()["ok"]


def test_run_driver_killed_resume_scores_only_what_is_missing(project: Project) -> None:
    with_faults(project)
    texts = ["x"] * 100
    texts[75] = "kill-driver"
    project.corpus(texts)
    project.config["workers"]["count"] = 1
    killed = project.run()
    assert killed.returncode == -9
    kept = {p.name: p.read_bytes() for p in project.output.glob("scores/m1/*/*/*.g0.parquet")}
    assert 5 <= len(kept) < 10
    assert not project.verify()["complete"]
    done = project.run()
    assert done.returncode == 0, done.stderr
    assert "to do" in done.stderr
    after = {p.name: p.read_bytes() for p in project.output.glob("scores/m1/*/*/*.g0.parquet")}
    assert {name: after[name] for name in kept} == kept
    assert project.sql("SELECT count(*), count(DISTINCT doc_id) FROM scores") == [(100, 100)]
    assert project.verify()["ok"]


def test_run_sigterm_drains_and_the_same_command_goes_on(project: Project) -> None:
    with_faults(project)
    texts = ["x"] * 200
    texts[5] = "stop-driver"
    project.corpus(texts)
    project.config["workers"]["count"] = 1
    stopped = project.run()
    assert stopped.returncode == 5, stopped.stderr
    assert "SIGTERM" in stopped.stderr
    done, leased = project.sql(
        "SELECT count(*) FILTER (state = 'done'), count(*) FILTER (state = 'leased') FROM shards"
    )[0]
    assert 1 <= done < 20
    assert leased == 0
    resumed = project.run()
    assert resumed.returncode == 0, resumed.stderr
    assert project.verify()["ok"]


def test_run_while_it_runs_status_answers_and_a_second_driver_is_refused(project: Project) -> None:
    with_faults(project)
    texts = ["x"] * 60
    texts[59] = "gate"
    project.corpus(texts)
    project.config["workers"]["count"] = 1
    first = project.start("run", project.write_config())
    try:
        wait_until(lambda: (project.marks / "gate").exists())
        wait_until(lambda: project.sql("SELECT count(*) FROM shards WHERE state = 'done'")[0][0] >= 4)
        second = project.run()
        assert second.returncode == 2
        assert str(first.pid) in second.stderr
        assert len(second.stderr.strip().splitlines()) == 1
        state = json.loads(project.rescore("status", str(project.output), "--json").stdout)
        assert state["state"] == "running"
        assert state["docs"]["total"] == 60
        assert [worker["pid"] > 0 for worker in state["workers"]] == [True]
        assert project.sql("SELECT count(*) FROM scores")[0][0] >= 40
        rows = project.rescore("sql", str(project.output), "SELECT count(*) AS n FROM scores", "--format", "json")
        assert json.loads(rows.stdout)["n"] >= 40
    finally:
        (project.marks / "open").touch()
        output, _ = first.communicate(timeout=60)
    assert first.returncode == 0, output
    assert json.loads(project.rescore("status", str(project.output), "--json").stdout)["state"] == "complete"


def test_run_broken_model_stops_without_dead_letters_and_goes_on_when_fixed(project: Project) -> None:
    fixed = project.root / "fixed"
    project.config["ranker"] |= {"class": "tests.rankers:Broken", "options": {"fixed": str(fixed)}}
    project.corpus(["x"] * 100)
    broken = project.run()
    assert broken.returncode == 4, broken.stderr
    assert "the head is not attached" in broken.stderr
    assert project.sql("SELECT count(*) FROM dead_letters") == [(0,)]
    fixed.touch()
    assert project.run().returncode == 0
    assert project.sql("SELECT count(*) FROM scores") == [(100,)]


def test_run_same_name_other_ranker_is_refused_naming_the_difference(project: Project) -> None:
    project.corpus(["x"] * 10)
    assert project.run().returncode == 0
    done = project.run("--set", "ranker.options={version: '2'}")
    assert done.returncode == 2
    assert "m1" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert project.run("--set", "ranker.options={version: '2'}", "--set", "ranker.model_version=m2").returncode == 0
    assert project.sql("SELECT model_version, count(*) FROM scores GROUP BY 1 ORDER BY 1") == [
        ("m1", 10),
        ("m2", 10),
    ]


def test_run_redriven_dead_letter_is_resolved_by_the_next_run(project: Project) -> None:
    fixed = project.root / "fixed"
    project.config["ranker"] |= {"class": "tests.rankers:Picky", "options": {"fixed": str(fixed)}}
    project.corpus(["x", "picky", "y", "nan"])
    assert project.run().returncode == 3
    fixed.touch()
    assert project.run().returncode == 3
    assert project.sql("SELECT count(*) FROM scores") == [(2,)]
    where = ["--where", "error_type = 'ValueError'"]
    dry = project.rescore("dlq", "redrive", str(project.output), *where, "--dry-run")
    assert "Would put back 1 dead letter" in dry.stdout
    redriven = project.rescore("dlq", "redrive", str(project.output), *where)
    assert redriven.returncode == 0, redriven.stderr
    again = project.rescore("dlq", "redrive", str(project.output), *where)
    assert "No dead letter matches" in again.stdout
    done = project.run()
    assert done.returncode == 3, done.stderr
    assert project.sql("SELECT doc_id FROM scores ORDER BY 1") == [("d0",), ("d1",), ("d2",)]
    states = project.sql("SELECT doc_id, state FROM dead_letters ORDER BY 1")
    assert states == [("d1", "resolved"), ("d3", "dead")]
    assert project.verify()["ok"]


def test_run_damaged_and_deleted_parts_are_found_and_scored_again(project: Project) -> None:
    project.corpus(["x"] * 40)
    assert project.run().returncode == 0
    parts = sorted(project.output.glob("scores/m1/*/*/*.g0.parquet"))
    data = bytearray(parts[0].read_bytes())
    data[len(data) // 3] ^= 1
    parts[0].write_bytes(bytes(data))
    parts[1].unlink()
    checked = project.verify()
    assert not checked["ok"]
    assert checked["damaged"] == [str(parts[0])]
    done = project.run()
    assert done.returncode == 0, done.stderr
    assert project.verify()["ok"]
    assert project.sql("SELECT count(*), count(DISTINCT doc_id) FROM scores") == [(40, 40)]


def test_run_manifest_deleted_is_rebuilt_and_nothing_is_scored_again(project: Project) -> None:
    project.corpus(["x"] * 25 + ["nan"])
    assert project.run().returncode == 3
    for path in [project.output / "manifest.duckdb", *(project.output / ".rescore").iterdir()]:
        path.unlink()
    done = project.run()
    assert done.returncode == 3, done.stderr
    assert "3 parts adopted" in done.stderr
    assert project.sql("SELECT count(*) FROM scores") == [(25,)]
    assert project.sql("SELECT doc_id FROM dead_letters") == [("d25",)]


def test_run_corpus_gone_opens_the_breaker_and_a_plain_rerun_has_a_full_budget(project: Project) -> None:
    project.corpus(["x"] * 100)
    corpus, fixed = project.root / "corpus" / "a.parquet", project.root / "fixed"
    options = {"corpus": str(corpus), "fixed": str(fixed)}
    project.config["ranker"] |= {"class": "tests.rankers:Thief", "options": options}
    stopped = project.run()
    assert stopped.returncode == 4, stopped.stderr
    assert "in a row and none succeeded" in stopped.stderr
    assert "FileNotFoundError" in stopped.stderr
    failed, given_back = project.sql(
        "SELECT count(*) FILTER (event = 'failed'), count(*) FILTER (error_type = 'FailureReturned') FROM attempts"
    )[0]
    assert failed == given_back >= 5
    assert project.sql("SELECT count(*) FROM dead_letters") == [(0,)]
    assert json.loads(project.rescore("status", str(project.output), "--json").stdout)["state"] == "stopped"
    corpus.with_name("a.parquet.gone").rename(corpus)
    fixed.touch()
    done = project.run()
    assert done.returncode == 0, done.stderr
    assert project.sql("SELECT count(*) FROM scores") == [(100,)]
    assert project.verify()["ok"]


def test_run_most_documents_dead_stops_and_says_why(project: Project) -> None:
    project.corpus(["nan", "nan", "x"] * 1000)
    project.config["corpus"]["shard_size"] = 200
    stopped = project.run()
    assert stopped.returncode == 4, stopped.stderr
    assert "retry.max_dead_fraction (0.5)" in stopped.stderr
    assert "NonFiniteScore" in stopped.stderr
    assert project.verify()["ok"]
    done = project.run("--set", "retry.max_dead_fraction=null")
    assert done.returncode == 3, done.stderr
    assert project.sql("SELECT count(*) FROM scores") == [(1000,)]


def test_run_users_permanent_error_is_not_tried_again(project: Project) -> None:
    project.corpus(["x"] * 10)
    corpus = project.root / "corpus" / "a.parquet"
    options = {"corpus": str(corpus), "fixed": str(project.root / "fixed")}
    project.config["ranker"] |= {"class": "tests.rankers:Thief", "options": options}
    project.config["retry"]["permanent"] = ["FileNotFoundError"]
    done = project.run()
    assert done.returncode == 3, done.stderr
    assert project.sql("SELECT event FROM attempts ORDER BY seq") == [("leased",), ("failed",), ("dead",)]


def test_run_shard_dead_as_a_whole_is_redriven_as_a_whole(project: Project) -> None:
    project.corpus(["x"] * 10)
    corpus, fixed = project.root / "corpus" / "a.parquet", project.root / "fixed"
    options = {"corpus": str(corpus), "fixed": str(fixed)}
    project.config["ranker"] |= {"class": "tests.rankers:Thief", "options": options}
    project.config["retry"]["permanent"] = ["FileNotFoundError"]
    assert project.run().returncode == 3
    assert project.sql("SELECT row, docs FROM dead_letters") == [(None, 10)]
    corpus.with_name("a.parquet.gone").rename(corpus)
    fixed.touch()
    redriven = project.rescore("dlq", "redrive", str(project.output))
    assert "1 dead letters (10 documents of 1 shards)" in redriven.stdout
    assert project.run().returncode == 0
    assert project.sql("SELECT count(*) FROM scores") == [(10,)]
    assert project.verify()["ok"]


def test_run_broken_device_ends_its_worker_and_costs_no_attempt(project: Project) -> None:
    project.config["ranker"] |= {"class": "tests.rankers:SickDevice", "options": {"marks": str(project.marks)}}
    project.config["workers"]["count"] = 1
    project.corpus(["x"] * 15 + ["sick"] + ["x"] * 34)
    done = project.run()
    assert done.returncode == 0, done.stderr
    pid = int((project.marks / "sick").read_text())
    wait_until(lambda: not psutil.pid_exists(pid))
    events = project.sql("SELECT event, error_type, message FROM attempts WHERE error_type <> '' ORDER BY seq")
    assert {event for event, _, _ in events} == {"released"}
    assert events[0][1:] == ("DeviceBroken", "CUDA error: an illegal memory access was encountered")
    assert ("w2",) in project.sql("SELECT DISTINCT worker FROM attempts WHERE event = 'done'")
    assert project.sql("SELECT count(*) FROM scores") == [(50,)]
