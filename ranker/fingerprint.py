"""A hash of everything that decides a score, part by part, so that a refusal can name the part that differs.

No torch: the driver compares fingerprints before any worker exists.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ranker import hub
from ranker.custom import class_fingerprint
from ranker.errors import RankerError
from ranker.types import RankerSpec

CHUNK = 16 << 20
"""Bytes hashed by one thread in one go; blake2b does about 1 GB/s a core and lets go of the GIL."""

DTYPES = ("float32", "bfloat16", "float16")

_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".npz", ".npy"}
_IGNORED_SUFFIXES = {
    ".md", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp", ".pdf", ".onnx", ".onnx_data", ".h5", ".msgpack",
    ".ot", ".tflite", ".gguf", ".mlmodel", ".ipynb", ".log", ".lock", ".html", ".csv",
}  # fmt: skip
_IGNORED_DIRS = {"onnx", "openvino", "coreml", "runs", "original", "__pycache__"}
_IGNORED_NAMES = {
    "LICENSE", "LICENSE.txt", "NOTICE", "training_args.bin", "optimizer.pt", "scheduler.pt", "trainer_state.json",
}  # fmt: skip
_TOKENIZER_NAMES = {
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt",
}  # fmt: skip
_NOT_DECIDING = {
    "tokenizer.json": ("truncation", "padding"),  # the state the last call left behind: set anew by every call
    "tokenizer_config.json": ("name_or_path", "is_local", "local_files_only"),
    "config.json": ("_name_or_path", "transformers_version"),
}
"""Keys that say where a file came from, not what it does: the same checkpoint copied or re-saved stays the same."""


def components(spec: RankerSpec) -> dict[str, str]:
    """Name → digest or value of each part of a ranker that decides its scores.

    The same for a copy of a checkpoint under another path; READMEs, pictures, other runtimes' weights and file
    times do not count. `batch_tokens` is not a part: it moves a score by less than the stated tolerance.

    Raises:
        RankerError: there is no such checkpoint, or the custom class has no usable fingerprint.
    """
    if spec.kind == "custom":
        return {
            "kind": "custom",
            "class": spec.class_path,
            "class.fingerprint": class_fingerprint(spec.class_path, spec.options),
            "options": _digest([_canonical(dict(spec.options))]),
        }
    assert spec.dtype in DTYPES, "resolve_dtype first: `auto` differs between devices"
    path, _ = hub.resolve(spec.checkpoint, spec.revision)
    parts = dict(sorted(_file_parts(Path(path)).items()))
    if not parts:
        raise RankerError(f"ranker.checkpoint {spec.checkpoint}: the directory holds no checkpoint")
    options = ("kind", "max_length", "dtype", "truncation", "score_label", "trust_remote_code")
    return parts | {name: str(getattr(spec, name)) for name in options}


def resolve_dtype(dtype: str, device_type: str) -> str:
    """The precision that `auto` means on a device: float32 on a CPU, bfloat16 on CUDA.

    Raises:
        RankerError: no such dtype.
    """
    if dtype == "auto":
        return "bfloat16" if device_type == "cuda" else "float32"
    if dtype not in DTYPES:
        raise RankerError(f"ranker.dtype is {dtype!r}: use auto, {', '.join(DTYPES)}")
    return dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    part: str
    name: str
    """Relative to the checkpoint, with slashes."""
    path: Path


def _file_parts(root: Path) -> dict[str, str]:
    """Digest of each part that is made of files."""
    files = sorted(_deciding_files(root), key=lambda file: file.name)
    with ThreadPoolExecutor(8) as pool:
        digests = _hash_files([file.path for file in files], pool)
    parts: dict[str, list[bytes]] = {}
    for file, digest in zip(files, digests, strict=True):
        parts.setdefault(file.part, []).extend([file.name.encode(), digest])
    return {part: _digest(content) for part, content in parts.items()}


def _deciding_files(root: Path) -> Iterator[_File]:
    safetensors = {path.parent for path in root.rglob("*.safetensors")}
    for path in root.rglob("*"):
        relative = path.relative_to(root)
        if not path.is_file() or any(part.startswith(".") or part in _IGNORED_DIRS for part in relative.parts):
            continue
        if path.suffix in _IGNORED_SUFFIXES or path.name in _IGNORED_NAMES or path.name.startswith("rng_state"):
            continue
        if path.name.startswith("pytorch_model") and path.parent in safetensors:
            continue  # the same weights once more; only the safetensors are loaded
        name = relative.as_posix()
        yield _File(part=_part(name, path), name=name, path=path)


def _part(name: str, path: Path) -> str:
    if path.suffix in _WEIGHTS or name.endswith((".safetensors.index.json", ".bin.index.json")):
        return "weights"
    if path.name in _TOKENIZER_NAMES or path.suffix == ".model":
        return "tokenizer"
    if path.suffix == ".jinja" or path.name == "chat_template.json":
        return "chat_template"
    if path.suffix == ".py":
        return "code"
    if path.name == "modules.json":
        return "modules"
    return name if path.suffix == ".json" else f"file:{name}"


def _hash_files(paths: list[Path], pool: ThreadPoolExecutor) -> list[bytes]:
    """Content hash of each file: a JSON file's canonical form, otherwise a hash over its chunks' hashes."""
    jobs = [(index, start) for index, path in enumerate(paths) for start in _starts(path)]
    pieces: list[list[bytes]] = [[] for _ in paths]
    for (index, _), digest in zip(
        jobs, pool.map(lambda job: _hash_chunk(paths[job[0]], job[1]), jobs), strict=True
    ):
        pieces[index].append(digest)
    return [_raw_digest(piece) for piece in pieces]


def _starts(path: Path) -> Iterable[int]:
    return (0,) if path.suffix == ".json" else range(0, max(path.stat().st_size, 1), CHUNK)


def _hash_chunk(path: Path, start: int) -> bytes:
    if path.suffix == ".json":
        return hashlib.blake2b(_json_content(path), digest_size=32).digest()
    with path.open("rb") as file:
        file.seek(start)
        return hashlib.blake2b(file.read(CHUNK), digest_size=32).digest()


def _json_content(path: Path) -> bytes:
    raw = path.read_bytes()
    try:
        value = json.loads(raw)
    except ValueError:
        return raw  # whoever loads it will say what is wrong with it
    if isinstance(value, dict):
        for key in _NOT_DECIDING.get(path.name, ()):
            value.pop(key, None)
    return _canonical(value)


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str).encode()


def _raw_digest(pieces: Iterable[bytes]) -> bytes:
    """Hash of a list: each piece with its length, so that no two lists share their bytes."""
    state = hashlib.blake2b(digest_size=16)
    for piece in pieces:
        state.update(len(piece).to_bytes(8, "little"))
        state.update(piece)
    return state.digest()


def _digest(pieces: Iterable[bytes]) -> str:
    return _raw_digest(pieces).hex()
