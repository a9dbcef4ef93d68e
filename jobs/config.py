"""The configuration: YAML in, checked values out, every mistake one line that names its key."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from shards import template
from shards.errors import UsageError
from shards.formats import Format


class ConfigError(UsageError):
    """The configuration cannot be used; the message names the key and says what to change."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


def _class_name(value: str) -> str:
    if not value.isidentifier():
        # Only the class's own name travels with an error: a dotted one would never match.
        raise ValueError(
            f"{value!r} is no name of an exception class; write ThrottlingError, not errors.ThrottlingError"
        )
    return value


ExceptionName = Annotated[str, AfterValidator(_class_name)]


class Corpus(_Section):
    """What is scored, and against which query. Exactly one of the three query keys is set."""

    path: str = Field(description="File, directory or glob: Parquet, JSON Lines, CSV, TSV or Arrow.")
    format: Format = Field(
        default="auto", description="parquet, jsonl, csv, tsv or arrow; auto: by each file's extension."
    )
    id_column: str = Field(default="doc_id", description="Column of document ids: integers or strings.")
    text_column: str = Field(default="text", description="Column of document texts.")
    text_template: str | None = Field(
        default=None,
        description='Makes the text of several columns instead: `"{title}\\n{body}"`; a brace is written twice.',
    )
    query: str | None = Field(default=None, description="One query for every document.")
    query_column: str | None = Field(default=None, description="Column with each document's own query.")
    queries: str | None = Field(
        default=None,
        description="File (.parquet .jsonl .csv .tsv) with columns query_id and text; "
        "every document is scored against every query.",
    )
    duplicates: Literal["fail", "keep_first", "keep_last"] = Field(
        default="fail", description="What to do when a doc_id stands more than once in the corpus."
    )
    shard_size: Annotated[int, Field(ge=1, le=100_000)] = Field(
        default=1000, description="Documents in one shard: the unit that is leased, written and acknowledged."
    )
    skip_unreadable: bool = Field(
        default=False, description="Plan around unreadable files: each becomes one dead letter."
    )

    @field_validator("text_template")
    @classmethod
    def _template(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                template.parse(value)
            except UsageError as error:
                raise ValueError(str(error)) from None
        return value

    @model_validator(mode="after")
    def _one_text(self) -> Corpus:
        if self.text_template is not None and "text_column" in self.model_fields_set:
            raise ValueError("set text_column or text_template, not both")
        return self

    @model_validator(mode="after")
    def _one_query(self) -> Corpus:
        given = [k for k in ("query", "query_column", "queries") if getattr(self, k) is not None]
        if len(given) != 1:
            raise ValueError(
                "set exactly one of query, query_column and queries"
                + (f" (set: {', '.join(given)})" if given else "")
            )
        return self


class RankerConfig(_Section):
    """The model, and every option that decides a score."""

    kind: Literal["cross-encoder", "bi-encoder", "custom"] = Field(
        default="cross-encoder", description="How pairs are scored."
    )
    checkpoint: str | None = Field(default=None, description="Directory of a checkpoint, or a Hub id (org/name).")
    revision: str | None = Field(default=None, description="Branch, tag or commit of a Hub id.")
    class_: str | None = Field(
        default=None, alias="class", description="`module:Name` of your own ranker (kind: custom)."
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of that class.")
    model_version: str = Field(description="The name of this ranker: half of the key of every result.")
    max_length: Annotated[int, Field(ge=4)] | None = Field(
        default=None, description="Tokens of query and document together; default: the checkpoint's own."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="auto: float32 on CPUs, bfloat16 on CUDA; "
        "to go on with scores of the other kind of device, name it.",
    )
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2"] = Field(
        default="auto", description="eager, sdpa or flash_attention_2; auto: what transformers picks."
    )
    batch_tokens: Annotated[int, Field(ge=16)] | None = Field(
        default=None,
        description="Padded tokens in one forward pass; default: 1024 on a CPU, found by trying on a GPU.",
    )
    truncation: Literal["document", "reference"] = Field(
        default="document",
        description="document: a long pair loses only document tokens. "
        "reference: as the reference library does it (the longer side loses first).",
    )
    score_label: int | str | None = Field(default=None, description="Which label ranks, for a model with several.")
    trust_remote_code: bool = Field(default=False, description="Run code that comes with the checkpoint.")
    max_document_bytes: Annotated[int, Field(ge=1)] | None = Field(
        default=16_777_216, description="A larger document (in UTF-8) is a dead letter at once; null: no limit."
    )

    @field_validator("model_version", mode="before")
    @classmethod
    def _name(cls, value: Any) -> Any:
        # An unquoted 2026.11 is a float in YAML, and 2026.10 would silently become 2026.1.
        if not isinstance(value, str):
            raise ValueError("must be text; put it in quotes")
        return value

    @model_validator(mode="after")
    def _what_kind_needs(self) -> RankerConfig:
        if self.kind == "custom":
            if not self.class_ or ":" not in self.class_:
                raise ValueError("kind: custom needs class: module:Name")
            if self.checkpoint or self.revision:
                raise ValueError("kind: custom takes no checkpoint; pass what your class needs as options")
        elif not self.checkpoint:
            raise ValueError(f"kind: {self.kind} needs a checkpoint")
        elif self.class_ or self.options:
            raise ValueError(f"class and options are for kind: custom, not {self.kind}")
        return self


class Output(_Section):
    """Where results, plan and manifest go."""

    path: str = Field(description="A directory that the driver and every worker see under this path.")


class Workers(_Section):
    """The actors, one a device."""

    count: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default="auto", description="auto: as many as the cluster has room for."
    )
    cpus: Annotated[float, Field(gt=0)] | Literal["auto"] = Field(
        default="auto",
        description="CPUs of one worker; auto: a node's CPUs over its GPUs, or 1 without GPUs.",
    )
    gpus: Annotated[float, Field(ge=0)] | Literal["auto"] = Field(
        default="auto",
        description="GPUs of one worker; auto: 1 where the cluster has or can get any, else 0.",
    )
    in_flight: Annotated[int, Field(ge=1, le=16)] = Field(
        default=2,
        description="Shards a worker holds: one is scored, the others are read and tokenised ahead.",
    )
    accelerator_type: str | None = Field(default=None, description="Ray's name of a GPU type, such as A100.")
    resources: dict[str, float] = Field(default_factory=dict, description="Custom Ray resources of one worker.")


class Retry(_Section):
    """What failures may cost."""

    max_attempts: Annotated[int, Field(ge=1)] = Field(
        default=3, description="Attempts charged to a shard before it is a dead letter."
    )
    lease_s: Annotated[float, Field(gt=0)] = Field(
        default=120.0, description="Seconds without progress after which a worker is killed and replaced."
    )
    backoff_s: Annotated[float, Field(ge=0)] = Field(
        default=1.0, description="Base of the exponential backoff, in seconds; full jitter."
    )
    backoff_max_s: Annotated[float, Field(ge=0)] = Field(default=60.0, description="Its cap, in seconds.")
    grace_s: Annotated[float, Field(ge=0)] = Field(
        default=30.0, description="Seconds in-flight shards may take after SIGTERM or Ctrl-C."
    )
    dead_letters_ok: Annotated[int, Field(ge=0)] = Field(
        default=0, description="Up to this many dead letters, the exit code is 0 instead of 3."
    )
    transient: tuple[ExceptionName, ...] = Field(
        default=(), description="Names of exception classes that may pass: the shard is tried again."
    )
    permanent: tuple[ExceptionName, ...] = Field(
        default=(), description="Names of exception classes that will not pass: the shard is dead at once."
    )
    breaker_after: Annotated[int, Field(ge=1)] | None = Field(
        default=5,
        description="Failures in a row, with nothing ever succeeding, after which the run stops; null: never.",
    )
    max_dead_fraction: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=0.5,
        description="The run stops when more than this share of the documents it has judged is dead; null: never.",
    )

    @model_validator(mode="after")
    def _one_verdict(self) -> Retry:
        both = sorted(set(self.transient) & set(self.permanent))
        if both:
            raise ValueError(f"a name cannot be both transient and permanent: {', '.join(both)}")
        return self


class Config(_Section):
    """One run, whole."""

    corpus: Corpus
    ranker: RankerConfig
    output: Output
    workers: Workers = Workers()
    retry: Retry = Retry()


def load_config(path: str, overrides: Sequence[str] = ()) -> Config:
    """The configuration in file `path` with `key.sub=value` overrides laid over it.

    Raises ConfigError: no such file, broken YAML (with its line), an unknown key, a wrong value.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{path}: cannot read the configuration: {reason}") from None
    data = _parse_yaml(text, path)
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: the configuration must be a mapping with corpus, ranker and output")
    for override in overrides:
        _apply(data, override)
    try:
        return Config.model_validate(data)
    except ValidationError as e:
        raise ConfigError(f"{path}: {_one_line(e)}") from None


def _parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.MarkedYAMLError as e:
        line = f" line {e.problem_mark.line + 1}" if e.problem_mark else ""
        raise ConfigError(f"{where}:{line} not valid YAML: {e.problem or e.context}") from None
    except yaml.YAMLError as e:
        raise ConfigError(f"{where}: not valid YAML: {' '.join(str(e).split())}") from None


def _apply(data: dict[str, Any], override: str) -> None:
    key, equals, raw = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"--set {override}: write it as key.sub=value, such as ranker.dtype=bfloat16")
    node = data
    for part in parts[:-1]:
        child = node.setdefault(part, {})
        if not isinstance(child, dict):
            raise ConfigError(f"--set {override}: {part} is a value, not a section")
        node = child
    node[parts[-1]] = _parse_yaml(raw, f"--set {key}")


def _one_line(error: ValidationError) -> str:
    """Every problem as `key: what is wrong`, joined to one line."""
    problems: dict[str, str] = {}
    for e in error.errors():
        # A union reports one problem per branch; the branch's name is no key of the user's.
        where = ".".join(str(p) for p in e["loc"] if not _is_branch(p)) or "configuration"
        if e["type"] == "extra_forbidden":
            text = "unknown key" + _known_keys(e["loc"])
        elif e["type"] == "missing":
            text = "missing"
        else:
            text = e["msg"].removeprefix("Value error, ")
            text = text[0].lower() + text[1:]
        problems[where] = f"{problems[where]}, or {text}" if where in problems else text
    return "; ".join(f"{where}: {text}" for where, text in problems.items())


def _is_branch(part: int | str) -> bool:
    return isinstance(part, str) and (
        part.startswith(("constrained", "literal[")) or part in {"int", "float", "str"}
    )


def _known_keys(loc: tuple[int | str, ...]) -> str:
    section: type[BaseModel] = Config
    for part in loc[:-1]:
        field = section.model_fields.get(str(part))
        if field is None or not isinstance(field.annotation, type) or not issubclass(field.annotation, BaseModel):
            return ""
        section = field.annotation
    return " (known: " + ", ".join(f.alias or n for n, f in section.model_fields.items()) + ")"


def resolve_paths(config: Config, *, root: str | None, environ: Mapping[str, str] = os.environ) -> Config:
    """`config` with every relative path made absolute: against `root`, or else the current directory.

    Under a Ray job the current directory is an unpacked copy that vanishes with the job, so without
    `root` a relative path is refused there: results written into it would be lost.

    Raises ConfigError.
    """
    base = Path(root).expanduser().absolute() if root else Path.cwd()
    in_job = root is None and bool(environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR"))
    sections: dict[str, dict[str, str]] = {}
    for key, path in _paths(config):
        if in_job and not Path(path).is_absolute() and not (key == "ranker.checkpoint" and is_hub_id(path)):
            raise ConfigError(
                f"{key}: {path} is relative, but a Ray job runs in a temporary copy of its working "
                "directory: give an absolute path, or --root DIR that relative paths start from"
            )
        here = base / Path(path).expanduser()
        if key == "ranker.checkpoint" and is_hub_id(path) and not here.exists():
            continue
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = os.path.normpath(here)
    return config.model_copy(
        update={s: getattr(config, s).model_copy(update=changed) for s, changed in sections.items()}
    )


def _paths(config: Config) -> list[tuple[str, str]]:
    corpus = config.corpus
    paths = {"corpus.path": corpus.path, "output.path": config.output.path}
    if corpus.queries is not None:
        paths["corpus.queries"] = corpus.queries
    if config.ranker.checkpoint is not None:
        paths["ranker.checkpoint"] = config.ranker.checkpoint
    return list(paths.items())


def is_hub_id(checkpoint: str) -> bool:
    """Whether `checkpoint` has the form of a Hub id, `org/name`. A directory of that name goes first."""
    return checkpoint.count("/") == 1 and not checkpoint.startswith((".", "/", "~")) and checkpoint[-1] != "/"
