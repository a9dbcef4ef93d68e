"""From the configuration to what the planes are told. Pure."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

from pydantic import BaseModel

from jobs.config import Config
from jobs.retry import RetryPolicy
from jobs.retry import table as retry_table
from ranker.types import RankerSpec
from shards.types import CorpusSpec

T = TypeVar("T", CorpusSpec, RankerSpec, RetryPolicy)


def corpus(config: Config) -> CorpusSpec:
    return _spec(CorpusSpec, config.corpus)


def ranker(config: Config) -> RankerSpec:
    """The ranker as it is written: a Hub id and `auto` are still to be resolved."""
    wanted = config.ranker
    return _spec(RankerSpec, wanted, checkpoint=wanted.checkpoint or "", class_path=wanted.class_ or "")


def policy(config: Config) -> RetryPolicy:
    retry = config.retry
    return _spec(RetryPolicy, retry, verdicts=retry_table(retry.transient, retry.permanent))


def _spec(kind: type[T], section: BaseModel, **others: Any) -> T:
    """A spec that takes from a section what both have under the same name, so that no new key is left behind."""
    known = type(section).model_fields
    same = {field.name: getattr(section, field.name) for field in fields(kind) if field.name in known}
    return kind(**{**same, **others})
