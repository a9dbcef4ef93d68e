"""What a failure costs, and when to try again. All of retrying is in this file, and all of it is pure."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random

from jobs.protocol import ErrorReport
from shards.types import History, Stage


class Verdict(StrEnum):
    """transient: try again later, charged to the shard. permanent: the shard is dead at once.
    infrastructure: try again, charged to the infrastructure budget. fatal: the run stops; nobody is charged."""

    TRANSIENT = "transient"
    PERMANENT = "permanent"
    INFRASTRUCTURE = "infrastructure"
    FATAL = "fatal"


TABLE: Mapping[str, Verdict] = {
    # The data: it would fail the same way again.
    "ShardUnreadable": Verdict.PERMANENT,
    "CorpusChanged": Verdict.PERMANENT,
    "ArrowInvalid": Verdict.PERMANENT,
    "ArrowNotImplementedError": Verdict.PERMANENT,
    # The model or its device, not the shard.
    "RankerError": Verdict.FATAL,
    "DeviceBroken": Verdict.INFRASTRUCTURE,
    # The world: it may pass.
    "OSError": Verdict.TRANSIENT,
    "MemoryError": Verdict.TRANSIENT,
    # Whatever nobody thought of gets its attempts before it becomes a dead letter.
    "Exception": Verdict.TRANSIENT,
}
"""Looked up by the names of the exception's classes, most specific first; the first hit decides.
docs/operations.md explains it row by row."""

FATAL_WRITES = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM})
"""Writing meets these when the output's disk is full or not ours to write: every shard would meet them."""


def table(transient: Iterable[str] = (), permanent: Iterable[str] = ()) -> Mapping[str, Verdict]:
    """The table with the user's names laid over it: under the same name, theirs win."""
    return {
        **TABLE,
        **dict.fromkeys(transient, Verdict.TRANSIENT),
        **dict.fromkeys(permanent, Verdict.PERMANENT),
    }


def classify(error: ErrorReport, verdicts: Mapping[str, Verdict] = TABLE) -> Verdict:
    """Whose failure this is, by `TABLE` or the user's `table`; unknown errors are transient.

    An output that cannot be written is no row of it: nobody may decide to go on there.
    """
    if error.stage is Stage.WRITE and error.errno in FATAL_WRITES:
        return Verdict.FATAL
    for name in error.bases:
        if name in verdicts:
            return verdicts[name]
    return Verdict.TRANSIENT


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Budgets and times; all in seconds or counts. Defaults as in the configuration."""

    max_attempts: int = 3
    max_deaths: int = 50
    """Workers that may die holding a shard, over all runs, before it is dead without a further search."""
    max_losses: int = 20
    """Losses charged to the infrastructure (nodes, memory kills) before the shard is dead."""
    lease_s: float = 120.0
    backoff_s: float = 1.0
    backoff_max_s: float = 60.0
    max_starts: int = 5
    """Workers in a row that cannot start, with none running, before the run stops."""
    breaker_after: int | None = 5
    """Failures in a row, with nothing ever succeeding, before the run stops; None: never."""
    max_dead_fraction: float | None = 0.5
    """Share of the documents judged in this run that may be dead; None: any."""
    verdicts: Mapping[str, Verdict] = field(default_factory=lambda: TABLE)


def backoff(failures: int, policy: RetryPolicy, random: Random) -> float:
    """Seconds to wait after the n-th failure (n ≥ 1): uniform over [0, min(cap, base · 2^(n-1))].

    Full jitter, as in Brooker, "Exponential Backoff and Jitter", AWS Architecture Blog, 2015: of the
    variants compared there it makes the fewest calls.
    """
    ceiling = min(policy.backoff_max_s, policy.backoff_s * 2.0 ** min(failures - 1, 60))
    return random.uniform(0.0, ceiling)


def exhausted(history: History, policy: RetryPolicy) -> bool:
    """Whether a shard's budget is spent."""
    return history.failed >= policy.max_attempts or history.died >= policy.max_deaths


def streak_limit(policy: RetryPolicy, *, trusted: bool) -> int | None:
    """Hopeless shards in a row, with no success among them, at which the run stops; None: never.

    Where something has succeeded before, the model works and a run of bad shards may be just that: the
    limit is four times as high.
    """
    if policy.breaker_after is None:
        return None
    return 4 * policy.breaker_after if trusted else policy.breaker_after


MEANT_KEYS, MEANT_SHARDS = 1000, 5
"""The first documents of a corpus are no sample of it: a share says nothing before so many are judged."""


def too_many_dead(*, dead: int, judged: int, shards: int, policy: RetryPolicy) -> bool:
    """Whether `dead` of `judged` keys, in `shards` shards, say that something is wrong with all of it."""
    if policy.max_dead_fraction is None or judged < MEANT_KEYS or shards < MEANT_SHARDS:
        return False
    return dead > policy.max_dead_fraction * judged
