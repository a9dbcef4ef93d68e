"""Which shard a worker takes next."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jobs.spans import Spans
from tests.fakes import a_shard


def test_spans_one_worker_takes_neighbours_in_corpus_order() -> None:
    spans = Spans([a_shard(i, row_group=i // 3) for i in range(6)])
    taken = [spans.take("w1") for _ in range(6)]
    assert [s.start for s in taken if s] == [0, 10, 20, 30, 40, 50]
    assert spans.take("w1") is None


def test_spans_two_workers_take_a_row_group_each() -> None:
    spans = Spans([a_shard(i, row_group=i // 3) for i in range(6)])
    first, second = spans.take("w1"), spans.take("w2")
    assert first is not None
    assert second is not None
    assert (first.row_group, second.row_group) == (0, 1)


def test_spans_one_row_group_idle_worker_takes_the_back_half() -> None:
    spans = Spans([a_shard(i) for i in range(100)])
    first, second = spans.take("w1"), spans.take("w2")
    assert first is not None
    assert second is not None
    assert first.start == 0
    assert second.start == 500
    following = spans.take("w1")
    assert following is not None
    assert following.start == 10


def test_spans_worker_gone_its_rest_is_taken_by_others() -> None:
    spans = Spans([a_shard(i) for i in range(4)])
    spans.take("w1")
    spans.release("w1")
    taken = [spans.take("w2") for _ in range(3)]
    assert [s.start for s in taken if s] == [10, 20, 30]
    assert len(spans) == 0


@given(
    st.lists(st.integers(0, 3), max_size=60), st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=400)
)
def test_spans_any_order_of_takes_and_losses_every_shard_is_taken_once(
    groups: list[int], moves: list[tuple[int, bool]]
) -> None:
    shards = [a_shard(i, row_group=g) for i, g in enumerate(sorted(groups))]
    spans = Spans(shards)
    taken = []
    for worker, dies in [*moves, *[(0, False)] * len(shards)]:
        if dies:
            spans.release(f"w{worker}")
        elif (shard := spans.take(f"w{worker}")) is not None:
            taken.append(shard.start)
    assert sorted(taken) == [s.start for s in shards]
    assert len(spans) == 0
