from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranker.batching import batches

LENGTHS = st.lists(st.integers(min_value=0, max_value=600), max_size=200)
OVERHEAD = st.integers(min_value=0, max_value=2_000)
BUDGET = st.integers(min_value=1, max_value=5_000)


@given(LENGTHS, BUDGET, OVERHEAD)
def test_batches_hold_every_index_exactly_once(lengths: list[int], budget: int, overhead: int) -> None:
    cut = batches(lengths, budget, overhead)
    indices = np.concatenate(cut) if cut else np.array([], dtype=int)
    assert sorted(indices.tolist()) == list(range(len(lengths)))


@given(LENGTHS, BUDGET, OVERHEAD)
def test_batches_keep_the_budget_unless_one_row_is_wider(lengths: list[int], budget: int, overhead: int) -> None:
    for rows in batches(lengths, budget, overhead):
        width = max(lengths[row] for row in rows)
        assert len(rows) == 1 or len(rows) * width <= budget


@given(LENGTHS, BUDGET, OVERHEAD)
def test_batches_end_only_where_the_next_row_would_cost_too_much(
    lengths: list[int], budget: int, overhead: int
) -> None:
    cut = batches(lengths, budget, overhead)
    for rows, following in pairwise(cut):
        width = max(max(lengths[row] for row in rows), 1)
        padding = sum(width - lengths[row] for row in [*rows, following[0]])
        assert (len(rows) + 1) * width > budget or padding > overhead


@given(LENGTHS, BUDGET, OVERHEAD)
def test_batches_pad_no_more_than_the_overhead(lengths: list[int], budget: int, overhead: int) -> None:
    for rows in batches(lengths, budget, overhead):
        width = max(lengths[row] for row in rows)
        assert len(rows) == 1 or sum(width - lengths[row] for row in rows) <= overhead


@given(LENGTHS, BUDGET, OVERHEAD)
def test_batches_put_values_back_in_order(lengths: list[int], budget: int, overhead: int) -> None:
    values = np.arange(len(lengths)) * 10
    restored = np.empty_like(values)
    for rows in batches(lengths, budget, overhead):
        restored[rows] = values[rows]
    assert restored.tolist() == values.tolist()


def test_batches_start_with_the_widest_and_keep_ties_in_order() -> None:
    assert [rows.tolist() for rows in batches([3, 9, 3, 9], 18, 0)] == [[1, 3], [0, 2]]


def test_batches_of_nothing_are_none() -> None:
    assert batches([], 100, 0) == []


def test_batches_without_a_budget_are_refused() -> None:
    with pytest.raises(ValueError, match="holds nothing"):
        batches([1], 0, 0)
