"""Where a checkpoint lies: a directory stays one, a Hub id becomes a commit and a local snapshot of it."""

from __future__ import annotations

import re
from pathlib import Path

from ranker.errors import NodeUnfit, RankerError
from ranker.verdict import one_line

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

IGNORED = (
    "onnx/*", "openvino/*", "coreml/*", "*.onnx", "*.onnx_data", "*.h5", "*.msgpack", "*.ot", "*.tflite", "*.gguf",
    "*.mlmodel", "*.png", "*.jpg", "*.jpeg", "*.gif", "*.pdf", "runs/*", "original/*",
)  # fmt: skip
"""Files of a repository that cannot decide a score here: other runtimes' weights, pictures, logs."""


def resolve(checkpoint: str, revision: str | None = None) -> tuple[str, str | None]:
    """Find the local directory of a checkpoint, and its commit where it came from the Hub.

    A local directory is returned as it is; the network is not asked about it. Anything of the form `org/name`
    is downloaded (or found in the Hugging Face cache, which is enough when the Hub cannot be reached).

    Args:
        checkpoint: a directory, or a Hub id `org/name`.
        revision: branch, tag or commit of a Hub id; None is its default branch.

    Returns:
        The absolute directory, and the 40-digit commit (None for a local directory).

    Raises:
        RankerError: there is neither such a directory nor such a repository, or it may not be downloaded.
    """
    if not checkpoint:
        raise RankerError("ranker.checkpoint is missing: give a directory or a Hub id (org/name)")
    path = Path(checkpoint).expanduser()
    if path.is_dir():
        return str(path.resolve()), None
    if path.exists():
        raise RankerError(f"ranker.checkpoint {checkpoint} is a file: give the directory it stands in")
    if not _HUB_ID.fullmatch(checkpoint):
        raise NodeUnfit(f"ranker.checkpoint {checkpoint}: no such directory, and a Hub id has the form org/name")
    snapshot = _download(checkpoint, revision)
    return str(snapshot), snapshot.name


def _download(repo: str, revision: str | None) -> Path:
    """Snapshot a repository into the Hugging Face cache; the last part of the path is the commit."""
    from huggingface_hub import errors, snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    where = f"ranker.checkpoint {repo}" + (f" at revision {revision}" if revision else "")
    try:
        return Path(snapshot_download(repo, revision=revision, ignore_patterns=list(IGNORED)))
    except errors.GatedRepoError as error:
        raise RankerError(f"{where} is gated: accept its terms on the Hub and set HF_TOKEN") from error
    except errors.RevisionNotFoundError as error:
        raise RankerError(f"{where}: the repository has no such revision") from error
    except errors.RepositoryNotFoundError as error:
        raise RankerError(
            f"{where} is neither a directory here nor a repository on the Hub that may be read "
            "(if it is private, set HF_TOKEN)"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise RankerError(
            f"{where} is neither a directory here nor in the Hugging Face cache, and the Hub cannot be reached "
            f"({type(error.__cause__ or error).__name__})"
        ) from error
    except Exception as error:  # the HTTP client's own errors have no common root with the Hub's
        raise RankerError(f"{where} could not be downloaded: {type(error).__name__}: {one_line(error)}") from error
