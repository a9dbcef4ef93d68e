"""How a run ended: for programs, and in a few lines for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum


class Exit(IntEnum):
    """What a run's end means to whoever started it."""

    COMPLETE = 0
    UNFORESEEN = 1
    USAGE = 2
    DEAD_LETTERS = 3
    BREAKER = 4
    INTERRUPTED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended. Counts are keys: documents × queries."""

    exit: Exit
    state: str
    message: str = ""
    output: str = ""
    model_version: str = ""
    expected: int = 0
    scored: int = 0
    dead: int = 0
    duplicates: int = 0
    scored_now: int = 0
    truncated: int = 0
    """Of those scored now, the keys whose document was cut to `max_length`."""
    seconds: float = 0.0
    scoring_seconds: float = 0.0
    shares: Mapping[str, float] = field(default_factory=dict)
    workers: Mapping[str, str] = field(default_factory=dict)
    preflight: Mapping[str, float] = field(default_factory=dict)
    """The worst that the workers' canaries said; see `ranker.types.Preflight`."""


def summary(outcome: Outcome) -> list[str]:
    """How a run ended, in a few lines."""
    if outcome.message and not outcome.model_version:
        return [f"rescore: {outcome.message}"]  # it ended before there was anything to count
    lines = [
        f"{outcome.state.replace('_', ' ').capitalize()}: {outcome.scored:,} scored, {outcome.dead:,} dead, "
        f"{outcome.expected - outcome.scored - outcome.dead:,} missing of {outcome.expected:,}"
        + (f" ({outcome.duplicates:,} duplicates left out)" if outcome.duplicates else "")
        + f"; {outcome.seconds:.1f} s in all."
    ]
    if outcome.scored_now and outcome.scoring_seconds:
        rate = outcome.scored_now / outcome.scoring_seconds
        lines.append(
            f"Scored {outcome.scored_now:,} now: {rate:,.0f} docs/s, the workers' start included"
            + where_time_went(outcome.shares)
        )
    if outcome.truncated:
        limit = outcome.workers.get("max_length", "max_length")
        lines.append(
            f"Cut to {limit} tokens: {outcome.truncated:,} ({outcome.truncated / outcome.scored_now:.1%})."
        )
    if outcome.preflight:
        lines.append(canaries(outcome.preflight))
    if outcome.message:
        lines.append(f"rescore: {outcome.message}" if outcome.exit in (2, 4) else outcome.message)
    if outcome.dead:
        lines.append(f"Read the dead letters: rescore dlq list {outcome.output}")
    return lines


def canaries(preflight: Mapping[str, float]) -> str:
    """What was tried before the first document, in one line."""
    found = {"alone and batched": "alone_against_batched", "beside float32": "against_float32"}
    said = [f"{what} within {preflight[name]:.1g}" for what, name in found.items() if name in preflight]
    return f"{preflight['canaries']:.0f} canaries scored{': ' if said else ''}{', '.join(said)}."


def where_time_went(shares: Mapping[str, float]) -> str:
    parts = ", ".join(f"{stage} {share:.0%}" for stage, share in shares.items() if share >= 0.005)
    return f". Of the workers' time: {parts}." if parts else "."
