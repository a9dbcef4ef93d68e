"""The retry table and the backoff."""

from __future__ import annotations

import errno
import re
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.retry import (
    FATAL_WRITES,
    TABLE,
    RetryPolicy,
    Verdict,
    backoff,
    classify,
    exhausted,
    streak_limit,
    table,
    too_many_dead,
)
from jobs.worker import describe
from ranker.errors import DeviceBroken, RankerError
from shards.errors import CorpusChanged, ShardUnreadable
from shards.types import History, ShardState, Stage


@pytest.mark.parametrize(
    ("error", "stage", "verdict"),
    [
        (ShardUnreadable("page 3"), Stage.READ, Verdict.PERMANENT),
        (CorpusChanged("a.parquet"), Stage.READ, Verdict.PERMANENT),
        (RankerError("no label"), Stage.SCORE, Verdict.FATAL),
        (DeviceBroken("CUDA error"), Stage.SCORE, Verdict.INFRASTRUCTURE),
        (ConnectionResetError(), Stage.READ, Verdict.TRANSIENT),
        (TimeoutError(), Stage.READ, Verdict.TRANSIENT),
        (FileNotFoundError(errno.ENOENT, "gone"), Stage.READ, Verdict.TRANSIENT),
        (MemoryError(), Stage.SCORE, Verdict.TRANSIENT),
        (KeyError("surprise"), Stage.SCORE, Verdict.TRANSIENT),
        (OSError(errno.ENOSPC, "full"), Stage.WRITE, Verdict.FATAL),
        (OSError(errno.EROFS, "read-only"), Stage.WRITE, Verdict.FATAL),
        (PermissionError(errno.EACCES, "no"), Stage.WRITE, Verdict.FATAL),
        (OSError(errno.ENOSPC, "full"), Stage.READ, Verdict.TRANSIENT),
        (OSError(errno.EIO, "disk"), Stage.WRITE, Verdict.TRANSIENT),
    ],
    ids=lambda value: value.name if isinstance(value, Verdict) else str(value),
)
def test_classify_each_row_gets_its_verdict(error: Exception, stage: Stage, verdict: Verdict) -> None:
    assert classify(describe(error, stage)) is verdict


def test_classify_subclass_of_a_known_error_inherits_its_verdict() -> None:
    class ThrottledError(ConnectionError):
        pass

    assert classify(describe(ThrottledError(), Stage.READ)) is Verdict.TRANSIENT


def test_operations_page_explains_the_table_row_by_row() -> None:
    page = (Path(__file__).parents[1] / "docs" / "operations.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| .+ \|$", page, re.MULTILINE)
    assert rows == [(name, str(verdict)) for name, verdict in TABLE.items()]
    for code in FATAL_WRITES:
        assert errno.errorcode[code] in page


@given(st.integers(1, 200), st.integers(0, 1000))
def test_backoff_any_failure_stays_within_its_ceiling(failures: int, seed: int) -> None:
    policy = RetryPolicy(backoff_s=1.0, backoff_max_s=60.0)
    assert 0.0 <= backoff(failures, policy, Random(seed)) <= min(60.0, 2.0 ** (failures - 1))


def test_backoff_full_jitter_spreads_over_the_whole_range() -> None:
    random = Random(1)
    waits = [backoff(4, RetryPolicy(), random) for _ in range(1000)]
    assert min(waits) < 0.5
    assert max(waits) > 7.5


@pytest.mark.parametrize(("failed", "died", "spent"), [(0, 0, False), (2, 49, False), (3, 0, True), (0, 50, True)])
def test_exhausted_either_budget_spent_says_so(failed: int, died: int, spent: bool) -> None:
    history = History(state=ShardState.PENDING, failed=failed, died=died)
    assert exhausted(history, RetryPolicy()) is spent


def test_classify_users_name_wins_over_the_same_name_and_loses_to_a_more_specific_one() -> None:
    verdicts = table(transient=["ArrowInvalid"], permanent=["OSError", "LookupError"])
    assert classify(describe(FileNotFoundError(), Stage.READ), verdicts) is Verdict.PERMANENT
    assert classify(describe(KeyError(), Stage.SCORE), verdicts) is Verdict.PERMANENT
    assert classify(describe(ValueError(), Stage.SCORE), verdicts) is Verdict.TRANSIENT
    assert classify(describe(CorpusChanged("a"), Stage.READ), table(transient=["Exception"])) is Verdict.PERMANENT


def test_classify_full_disk_cannot_be_talked_away() -> None:
    verdicts = table(transient=["OSError"])
    assert classify(describe(OSError(errno.ENOSPC, "full"), Stage.WRITE), verdicts) is Verdict.FATAL


@pytest.mark.parametrize(
    ("dead", "judged", "shards", "fraction", "stop"),
    [
        (999, 999, 9, 0.5, False),  # too few documents to mean it
        (1000, 1000, 4, 0.5, False),  # too few shards
        (500, 1000, 5, 0.5, False),
        (501, 1000, 5, 0.5, True),
        (1, 1000, 5, 0.0, True),
        (9000, 9000, 9, 1.0, False),
        (9000, 9000, 9, None, False),
    ],
)
def test_too_many_dead_needs_enough_documents_to_mean_it(
    dead: int, judged: int, shards: int, fraction: float | None, stop: bool
) -> None:
    policy = RetryPolicy(max_dead_fraction=fraction)
    assert too_many_dead(dead=dead, judged=judged, shards=shards, policy=policy) is stop


def test_streak_limit_is_higher_where_something_has_succeeded() -> None:
    assert streak_limit(RetryPolicy(breaker_after=3), trusted=False) == 3
    assert streak_limit(RetryPolicy(breaker_after=3), trusted=True) == 12
    assert streak_limit(RetryPolicy(breaker_after=None), trusted=False) is None
