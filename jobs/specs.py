"""From the configuration to what the planes are told. Pure."""

from __future__ import annotations

from jobs.config import Config
from jobs.retry import RetryPolicy
from jobs.retry import table as retry_table
from ranker.types import RankerSpec
from shards.types import CorpusSpec


def corpus(config: Config) -> CorpusSpec:
    corpus = config.corpus
    return CorpusSpec(
        path=corpus.path,
        id_column=corpus.id_column,
        text_column=corpus.text_column,
        query_column=corpus.query_column,
        shard_size=corpus.shard_size,
        duplicates=corpus.duplicates,
        skip_unreadable=corpus.skip_unreadable,
        format=corpus.format,
        text_template=corpus.text_template,
    )


def ranker(config: Config) -> RankerSpec:
    """The ranker as it is written: a Hub id and `auto` are still to be resolved."""
    wanted = config.ranker
    return RankerSpec(
        kind=wanted.kind,
        checkpoint=wanted.checkpoint or "",
        revision=wanted.revision,
        class_path=wanted.class_ or "",
        options=wanted.options,
        max_length=wanted.max_length,
        dtype=wanted.dtype,
        attention=wanted.attention,
        batch_tokens=wanted.batch_tokens,
        truncation=wanted.truncation,
        score_label=wanted.score_label,
        trust_remote_code=wanted.trust_remote_code,
        max_document_bytes=wanted.max_document_bytes,
    )


def policy(config: Config) -> RetryPolicy:
    retry = config.retry
    return RetryPolicy(
        max_attempts=retry.max_attempts,
        lease_s=retry.lease_s,
        backoff_s=retry.backoff_s,
        backoff_max_s=retry.backoff_max_s,
        breaker_after=retry.breaker_after,
        max_dead_fraction=retry.max_dead_fraction,
        verdicts=retry_table(retry.transient, retry.permanent),
    )
