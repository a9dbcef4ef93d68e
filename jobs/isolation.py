"""Find the documents of one shard that end whatever process touches them. Pure.

A shard comes here when it has taken a worker with it although it was alone on it. Its documents then go
through fresh workers one by one, each in a call of its own that is answered before the next is sent: so
at every death the driver knows which document was in flight. A death accuses; only a death of another
fresh worker, which held nothing else and had just scored a warm-up pair, convicts. Nothing is published
until the end, then the shard once, without the convicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from jobs.protocol import Conviction, ErrorReport, Probe

_MAX_DEATHS = 50
"""Of one shard in isolation, before it is given up: something else is killing the workers."""


class Step(StrEnum):
    """walk: document by document. confirm: the accused again, on a fresh worker. final: the whole shard
    without the convicted. single: the same, one document a batch."""

    WALK = "walk"
    CONFIRM = "confirm"
    FINAL = "final"
    SINGLE = "single"


@dataclass(slots=True)
class Isolation:
    """Where the search through one shard stands. `documents` are offsets within the shard."""

    documents: Sequence[int]
    step: Step = Step.WALK
    position: int = 0
    warm: bool = False
    """Whether the present worker has scored its warm-up pair."""
    deaths: int = 0
    confirmations: int = 0
    needed: int = 1
    convicted: list[Conviction] = field(default_factory=list)

    def next(self) -> Probe:
        """What to ask of the worker now."""
        if not self.warm and self.step in (Step.WALK, Step.CONFIRM):
            return Probe(offset=None)
        match self.step:
            case Step.WALK | Step.CONFIRM:
                return Probe(offset=self.documents[self.position])
            case Step.FINAL:
                return Probe(whole=True, convicted=tuple(self.convicted))
            case Step.SINGLE:
                return Probe(whole=True, single=True, convicted=tuple(self.convicted))

    def survived(self) -> None:
        """The worker has answered the last probe, which was not of the whole shard."""
        if not self.warm:
            self.warm = True
            return
        self.step = Step.WALK  # the accused has lived: whatever took the first worker, it was not this
        self._advance()

    def died(self, error: ErrorReport, *, disturbances: int) -> bool:
        """The worker is gone, or hung, on the last probe; the next one goes to a fresh worker.

        `disturbances`: how many other workers have died without a cause since the search began; each asks
        for one more confirmation. False: the search is given up, and the shard is dead.
        """
        self.deaths += 1
        innocent, self.warm = not self.warm, False
        if self.deaths >= _MAX_DEATHS:
            return False
        match self.step:
            case Step.WALK if not innocent:
                self.step, self.confirmations, self.needed = Step.CONFIRM, 0, 1 + disturbances
            case Step.CONFIRM if not innocent:
                self.confirmations += 1
                if self.confirmations >= self.needed:
                    self._convict(error)
            case Step.FINAL:
                self.step = Step.SINGLE
            case Step.SINGLE:
                return False
        return True

    def _convict(self, error: ErrorReport) -> None:
        offset = self.documents[self.position]
        deaths = self.confirmations + 1
        words = f"it ended {deaths} workers that had nothing else to do: {error.message}"
        self.convicted.append(Conviction(offset=offset, deaths=deaths, error=replace(error, message=words)))
        self.step = Step.WALK
        self._advance()

    def _advance(self) -> None:
        self.position += 1
        if self.position == len(self.documents):
            # If none kills alone, it takes company: one document a batch gives them none.
            self.step = Step.FINAL if self.convicted else Step.SINGLE
