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
_MAX_COLD_DEATHS = 5
"""In a row, before any document was touched: the shard cannot even be read."""
_MAX_DISTURBANCES = 3
_SINGLE_DEATHS = 3
"""At batch size 1, after no document has killed alone, before the whole shard is dead."""


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
    undisturbed: int = 0
    """The scheduler's count of unexplained deaths when the search began."""
    began: int = 0
    """Its count of all deaths then."""
    step: Step = Step.WALK
    position: int = 0
    warm: bool = False
    """Whether the present worker has read the shard and scored its warm-up pair."""
    deaths: int = 0
    cold_deaths: int = 0
    confirmations: int = 0
    needed: int = 1
    single_deaths: int = 0
    convicted: list[Conviction] = field(default_factory=list)

    @property
    def wants_fresh(self) -> bool:
        """Whether the next worker must not have done anything yet."""
        return self.step in (Step.WALK, Step.CONFIRM)

    @property
    def accuses(self) -> bool:
        """Whether the question now is if one document kills again."""
        return self.step is Step.CONFIRM and self.warm

    def next(self) -> Probe:
        """What to ask of the worker now."""
        if self.wants_fresh and not self.warm:
            return Probe()
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
            self.warm, self.cold_deaths = True, 0
            return
        self.step = Step.WALK  # the accused has lived: whatever took the first worker, it was not this
        self._advance()

    def interrupted(self) -> None:
        """The worker is gone, and the document in flight had nothing to do with it."""
        self.warm = False

    def died(self, error: ErrorReport, *, disturbances: int, deaths: int, asked: bool = True) -> bool:
        """The worker is gone, or hung, on the last probe; the next one goes to a fresh worker.

        `disturbances`: how many workers have died without a cause since the search began; each asks for one
        more confirmation. `deaths`: the scheduler's count of all deaths now. Not `asked`: the last probe had
        not been sent yet, so it accuses nobody. False: the search is given up, and the shard is dead.
        """
        self.deaths += 1
        if not asked:
            self.interrupted()
            return self.deaths < _MAX_DEATHS
        cold, self.warm = self.wants_fresh and not self.warm, False
        self.cold_deaths += cold
        if self.deaths >= _MAX_DEATHS or self.cold_deaths >= _MAX_COLD_DEATHS + disturbances:
            return False
        match self.step:
            case Step.WALK if not cold:
                self.step, self.confirmations = Step.CONFIRM, 0
                self.needed = 1 + min(disturbances, _MAX_DISTURBANCES)
            case Step.CONFIRM if not cold:
                self.confirmations += 1
                if self.confirmations >= self.needed:
                    self._convict(error)
            case Step.FINAL:
                self.step = Step.SINGLE
            case Step.SINGLE:
                # A whole shard is in flight much longer than a document, so a kill from outside hits it more
                # often: each death elsewhere, with or without a cause, excuses one here.
                self.single_deaths += 1
                return self.single_deaths < _SINGLE_DEATHS + deaths - self.began - self.deaths
        return True

    def _convict(self, error: ErrorReport) -> None:
        words = f"it ended {self.confirmations + 1} workers that held nothing else; the last: {error.message}"
        offset = self.documents[self.position]
        self.convicted.append(Conviction(offset=offset, error=replace(error, message=words)))
        self.step = Step.WALK
        self._advance()

    def _advance(self) -> None:
        self.position += 1
        if self.position == len(self.documents):
            # If none kills alone, it takes company: one document a batch gives them none.
            self.step = Step.FINAL if self.convicted else Step.SINGLE
