"""What a failure costs, and when to try again. All of retrying is in this file, and all of it is pure."""

from __future__ import annotations

import errno
from dataclasses import dataclass
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


# Looked up by the names of the exception's classes, most specific first; the first hit decides.
_VERDICTS: dict[str, Verdict] = {
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

# Writing meets these when the output's disk is full or not ours to write: every shard would meet them.
_FATAL_WRITES = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}


def classify(error: ErrorReport) -> Verdict:
    """Whose failure this is. See the table above; unknown errors are transient."""
    if error.stage is Stage.WRITE and error.errno in _FATAL_WRITES:
        return Verdict.FATAL
    for name in error.bases:
        if name in _VERDICTS:
            return _VERDICTS[name]
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
    breaker_after: int = 5
    """Shards in a row that fail, with none ever succeeding, before the run stops."""


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
