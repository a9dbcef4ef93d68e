"""What a model_version is bound to: `run` binds it, `fingerprint` shows it, and both ask here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from jobs import specs
from jobs.config import Config, is_hub_id
from ranker import fingerprint, hub
from ranker.types import RankerSpec
from shards import plan
from shards.corpus import read_queries
from shards.layout import Layout
from shards.planfile import queries_digest
from shards.types import Binding, QuerySet


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A configuration with nothing left to resolve, and the binding that follows from it."""

    ranker: RankerSpec
    """As the workers get it: a Hub id is a local snapshot at one commit, `auto` a dtype."""
    queries: QuerySet | None
    binding: Binding


def bind(
    config: Config, *, gpus: Callable[[], float], note: Callable[[str], None], dtype: str | None = None
) -> Bound:
    """Resolve the ranker and the queries, and fingerprint them.

    Args:
        config: with absolute paths.
        gpus: GPUs of one worker; asked only where `ranker.dtype: auto` depends on it.
        note: takes a line for people before something slow.
        dtype: what `auto` means; None: what it means on the devices that `gpus` tells of.

    Raises:
        RankerError, CorpusError: the ranker or the query set is not there or cannot be used.
    """
    spec = specs.ranker(config)
    if spec.kind != "custom":
        if is_hub_id(spec.checkpoint):
            note(f"Resolving {spec.checkpoint} on the Hub.")
        path, commit = hub.resolve(spec.checkpoint, spec.revision)
        if spec.dtype == "auto":
            dtype = dtype or auto_dtype(gpus())
            spec = replace(spec, dtype=dtype)
        spec = replace(spec, checkpoint=path, revision=commit)
    queries = read_queries(config.corpus.queries) if config.corpus.queries else None
    components = dict(fingerprint.components(spec))
    if config.corpus.query is not None:
        components["query"] = config.corpus.query
    if queries is not None:
        components["queries"] = queries_digest(queries)
    binding = Binding(
        model_version=config.ranker.model_version,
        components=components,
        label_scores=spec.score_label is not None,
    )
    return Bound(ranker=spec, queries=queries, binding=binding)


def standing(config: Config, bound: Bound) -> plan.Standing | None:
    """The plan that the output has of this model_version, and how it differs. Raises PlanError if damaged."""
    return plan.compare(_layout(config), specs.corpus(config), bound.binding, bound.queries)


def scored_dtype(config: Config) -> str | None:
    """The dtype of the scores that the output has of this model_version. None: it has none yet, or the
    configuration does not leave the dtype open."""
    if config.ranker.kind == "custom" or config.ranker.dtype != "auto":
        return None
    found = plan.standing(_layout(config), config.ranker.model_version)
    return found.binding.components.get("dtype") if found is not None and found.scored else None


def auto_dtype(gpus: float) -> str:
    """What `ranker.dtype: auto` means for workers with so many GPUs."""
    return fingerprint.resolve_dtype("auto", "cuda" if gpus else "cpu")


def other_dtype(config: Config, scored: str, gpus: float) -> str | None:
    """Why `ranker.dtype: auto` must not go on with scores of dtype `scored` on workers with so many GPUs, in one
    line; None if it may. What one kind of device has decided is not silently done on another."""
    here = auto_dtype(gpus)
    if scored == here:
        return None
    return (
        f"model_version {config.ranker.model_version!r} has scores in {scored}, and ranker.dtype: auto means "
        f"{here} on {'GPUs' if gpus else 'CPUs'}: to go on with it here, write ranker.dtype: {scored}"
    )


def _layout(config: Config) -> Layout:
    return Layout(Path(config.output.path))
