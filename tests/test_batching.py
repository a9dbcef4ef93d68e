import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranker.batching import batches

LENGTHS = st.lists(st.integers(min_value=0, max_value=600), max_size=200)
BUDGET = st.integers(min_value=1, max_value=5_000)


@given(LENGTHS, BUDGET)
def test_batches_hold_every_index_exactly_once(lengths: list[int], budget: int) -> None:
    cut = batches(lengths, budget)
    indices = np.concatenate(cut) if cut else np.array([], dtype=int)
    assert sorted(indices.tolist()) == list(range(len(lengths)))


@given(LENGTHS, BUDGET)
def test_batches_keep_the_budget_unless_one_row_is_wider(lengths: list[int], budget: int) -> None:
    for rows in batches(lengths, budget):
        width = max(lengths[row] for row in rows)
        assert len(rows) == 1 or len(rows) * width <= budget


@given(LENGTHS, BUDGET)
def test_batches_are_never_smaller_than_the_budget_asks(lengths: list[int], budget: int) -> None:
    cut = batches(lengths, budget)
    for rows in cut[:-1]:
        width = max(max(lengths[row] for row in rows), 1)
        assert (len(rows) + 1) * width > budget


@given(LENGTHS, BUDGET)
def test_batches_put_values_back_in_order(lengths: list[int], budget: int) -> None:
    values = np.arange(len(lengths)) * 10
    restored = np.empty_like(values)
    for rows in batches(lengths, budget):
        restored[rows] = values[rows]
    assert restored.tolist() == values.tolist()


def test_batches_start_with_the_widest_and_keep_ties_in_order() -> None:
    assert [rows.tolist() for rows in batches([3, 9, 3, 9], 18)] == [[1, 3], [0, 2]]


def test_batches_of_nothing_are_none() -> None:
    assert batches([], 100) == []


def test_batches_without_a_budget_are_refused() -> None:
    with pytest.raises(ValueError, match="holds nothing"):
        batches([1], 0)
