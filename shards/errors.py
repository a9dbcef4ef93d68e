"""The errors of the data plane. Each line says when it is raised."""


class RescoreError(Exception):
    """The root of every error that `rescore` raises on purpose."""


class UsageError(RescoreError):
    """The user asked for something that cannot be done; the message is one line that says what to change."""


class CorpusError(UsageError):
    """The corpus cannot be planned: no file, an unreadable file, a missing column, a wrong type, duplicate ids."""


class PlanError(UsageError):
    """The output already holds a plan, and this run would plan otherwise (the message names the difference)."""


class OutputError(UsageError):
    """The output directory cannot be used: not writable, no create-only publish, not an output of rescore."""


class LockedError(UsageError):
    """Another driver (or a redrive) holds the output; the message names its pid, host and start time."""


class ManifestError(RescoreError):
    """The live manifest cannot be written (or read): the disk is full, read-only or failing."""


class ManifestRefused(ManifestError, UsageError):  # noqa: N818
    """The live manifest is newer than this program, or another process has it open."""


class PartDamaged(RescoreError):  # noqa: N818
    """A part is not what its writer wrote: its hash, its footer or its Parquet structure is wrong."""


class CorpusChanged(RescoreError):  # noqa: N818
    """A planned file is no longer the file that was planned; noticed while a shard was read."""


class ShardUnreadable(RescoreError):  # noqa: N818
    """A shard's rows cannot be read, and trying again would not help (a damaged page, a missing column)."""
