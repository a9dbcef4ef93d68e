"""What `rescore fingerprint` shows: the components of a binding, beside those that the output has."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from jobs.binding import Bound, other_dtype
from jobs.config import Config
from shards.plan import Difference, Standing


def gpus(config: Config) -> float:
    """GPUs of one worker, as a run from here would have it, without a Ray cluster being started to know."""
    if config.workers.gpus != "auto":
        return config.workers.gpus
    from jobs import pool  # loads Ray, only where it is asked

    return 1.0 if pool.would_have_gpus() else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A configuration's binding, and the plan that stands in its output (None: none of that name)."""

    config: Config
    bound: Bound
    standing: Standing | None

    @property
    def differences(self) -> tuple[Difference, ...]:
        return self.standing.differences if self.standing is not None else ()

    @property
    def refused(self) -> bool:
        """Whether the output has scores that are bound otherwise."""
        return bool(self.differences) and self.standing is not None and self.standing.scored

    def as_json(self) -> dict[str, Any]:
        found = self.standing
        return {
            "model_version": self.bound.binding.model_version,
            "fingerprint": self.bound.binding.digest,
            "components": dict(self.bound.binding.components),
            "plan": None
            if found is None
            else {
                "fingerprint": found.binding.digest,
                "scored": found.scored,
                "differs": [{"name": d.name, "plan": d.old, "here": d.new} for d in found.differences],
            },
        }

    def rows(self) -> list[tuple[str, str, str]]:
        """(name, value, remark) of each component, then of what only the plan has otherwise; the digest last."""
        differ = {difference.name: difference for difference in self.differences}
        components = dict(self.bound.binding.components)
        components |= {name: difference.new or "" for name, difference in differ.items() if name not in components}
        rows = [(name, self._value(name, value), self._remark(name, differ)) for name, value in components.items()]
        return [*rows, ("fingerprint", self.bound.binding.digest, "")]

    def lines(self) -> list[str]:
        """What that means for a run, in words."""
        name, where = self.bound.binding.model_version, self.config.output.path
        if self.standing is None:
            return [f"No plan of model_version {name!r} in {where}: the first run binds the name to this."]
        if not self.differences:
            return [f"The plan of model_version {name!r} in {where} is bound to the same."]
        which = ", ".join(difference.name for difference in self.differences)
        if not self.standing.scored:
            return [f"The plan in {where} differs ({which}), but nothing is scored yet: `rescore run` plans anew."]
        if which == "dtype" and self.config.ranker.dtype == "auto":
            scored = self.standing.binding.components["dtype"]
            return [f"{other_dtype(self.config, scored, gpus(self.config))}."]
        return [
            f"{where} has scores of model_version {name!r} that are bound otherwise ({which}): `rescore run` "
            "refuses this. Give this ranker another model_version, or use another output."
        ]

    def _value(self, name: str, value: str) -> str:
        if name == "query":
            return json.dumps(value, ensure_ascii=False)  # on one line, and a blank too much is to be seen
        return "–" if value in ("", "None") else " ".join(value.split())

    def _remark(self, name: str, differ: dict[str, Difference]) -> str:
        if name in differ:
            return f"≠ {differ[name].planned} in the plan"
        return "auto" if name == "dtype" and self.config.ranker.dtype == "auto" else ""
