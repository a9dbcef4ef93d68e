"""A hash of everything that decides a score, part by part, so that a refusal can name the part that differs.

No torch: the driver compares fingerprints before any worker exists.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ranker import hub
from ranker.custom import class_fingerprint
from ranker.digests import DigestCache, default_path, stamp
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
_IGNORED_DIRS = {"onnx", "openvino", "coreml", "runs", "original", "eval", "__pycache__"}
_IGNORED_NAMES = {
    "LICENSE", "LICENSE.txt", "NOTICE", "README", "README.txt", "requirements.txt", "modelcard.json",
    "training_args.bin", "optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt", "trainer_state.json",
    "train_script.py", "data_config.json", "all_results.json", "train_results.json", "eval_results.json",
    "generation_config.json",  # how text is sampled; a ranker makes one forward pass and samples nothing
}  # fmt: skip
"""What is about the checkpoint, its training or other runtimes. Any file that is not listed counts: a refusal too
many is one line to read, a change that went unnoticed is a corpus of mixed scores."""
_TOKENIZER_NAMES = {
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt",
}  # fmt: skip
_NOT_DECIDING: Mapping[str, Iterable[str]] = {
    "tokenizer.json": ("truncation", "padding"),  # the state the last call left behind: set anew by every call
    "tokenizer_config.json": (
        "name_or_path", "is_local", "local_files_only", "special_tokens_map_file", "tokenizer_file",
        "transformers_version",
        # That state again, where a tokenizer that had it was saved once more; `_sides` looks at what counts.
        "max_length", "stride", "truncation_strategy", "pad_to_multiple_of", "pad_token_type_id",
        "truncation_side", "padding_side",
        "chat_template",  # see `_inline_templates`
    ),
    "config.json": ("_name_or_path", "transformers_version"),
    "config_sentence_transformers.json": ("__version__",),
}  # fmt: skip
"""Keys that say where a file came from, not what it does: the same checkpoint copied or re-saved stays the same."""

_TEMPLATE = "chat_template.jinja"
_MORE_TEMPLATES = "additional_chat_templates"


def components(spec: RankerSpec, cache: DigestCache | None = None) -> dict[str, str]:
    """Name → digest or value of each part of a ranker that decides its scores.

    The same for a copy of a checkpoint under another path; READMEs, pictures, other runtimes' weights and file
    times do not count. `batch_tokens` is not a part: it moves a score by less than the stated tolerance.
    `attention` is one only where it is set, so that a name bound before there was such a key stays as it is.

    Args:
        spec: the ranker, with its dtype resolved.
        cache: what is known of large files; None: the one in the user's cache directory.

    Raises:
        RankerError: there is no such checkpoint, it cannot be read, or the custom class has no usable fingerprint.
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
    try:
        parts = _file_parts(Path(path), cache or digest_cache())
    except OSError as error:
        raise RankerError(
            f"ranker.checkpoint {spec.checkpoint}: cannot read {error.filename}: {error.strerror}"
        ) from error
    if not parts:
        raise RankerError(f"ranker.checkpoint {spec.checkpoint}: the directory holds no checkpoint")
    options = ["kind", "max_length", "dtype", "truncation", "score_label", "trust_remote_code"]
    if spec.attention != "auto":
        options.append("attention")
    return parts | {name: str(getattr(spec, name)) for name in options}


def digest_cache() -> DigestCache:
    """What is known of large files in the user's cache directory."""
    return DigestCache(default_path(), kind=f"blake2b/{CHUNK}")


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


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class _Piece:
    """What one file, or something that stands in a file, gives to a part."""

    name: str
    """Relative to the checkpoint, with slashes."""
    part: str
    digest: bytes


def _file_parts(root: Path, cache: DigestCache) -> dict[str, str]:
    """Digest of each part that is made of files."""
    paths = list(_deciding_files(root))
    pieces = [
        _Piece(name=(name := path.relative_to(root).as_posix()), part=_part(name, path), digest=digest)
        for path, digest in zip(paths, _hash_files(paths, cache), strict=True)
    ]
    for folder in {path.parent for path in paths if path.name in ("tokenizer.json", "tokenizer_config.json")}:
        pieces += _tokenizer_pieces(folder, folder.relative_to(root))
    parts: dict[str, list[bytes]] = {}
    for piece in sorted(pieces):
        parts.setdefault(piece.part, []).extend([piece.name.encode(), piece.digest])
    return {part: _digest(content) for part, content in sorted(parts.items())}


def _tokenizer_pieces(folder: Path, where: Path) -> Iterator[_Piece]:
    """What a tokenizer's files say together: the sides, and the chat templates that a configuration holds."""
    config, state = (_dict(folder / name) for name in ("tokenizer_config.json", "tokenizer.json"))
    sides = _sides(config, state)
    if sides != ("right", "right"):
        yield _Piece(
            name=(where / "sides").as_posix(), part="tokenizer", digest=_raw_digest(side.encode() for side in sides)
        )
    if not (folder / _TEMPLATE).is_file() and not (folder / _MORE_TEMPLATES).is_dir():
        for name, text in _inline_templates(config).items():
            # As if it stood in a file: where a re-save puts it.
            digest = _raw_digest([hashlib.blake2b(text.encode(), digest_size=32).digest()])
            yield _Piece(name=(where / name).as_posix(), part="chat_template", digest=digest)


def _sides(config: Mapping[str, Any], state: Mapping[str, Any]) -> tuple[str, str]:
    """(truncation side, padding side). The one thing in a tokenizer's state that can outlive a call: where the
    configuration names no side, transformers takes that of the state, and the left end of texts is cut off."""
    truncation, padding = (
        str(config.get(f"{what}_side") or (state.get(what) or {}).get("direction") or "right").lower()
        for what in ("truncation", "padding")
    )
    return truncation, padding


def _inline_templates(config: Mapping[str, Any]) -> dict[str, str]:
    """File name → chat template in a tokenizer's configuration; transformers ignores it beside such files."""
    value = config.get("chat_template")
    if isinstance(value, list):
        value = {str(item.get("name")): item.get("template") for item in value if isinstance(item, dict)}
    named = value if isinstance(value, dict) else {"default": value}
    return {
        _TEMPLATE if name == "default" else f"{_MORE_TEMPLATES}/{name}.jinja": str(text)
        for name, text in named.items()
        if text is not None
    }


def _deciding_files(root: Path) -> Iterator[Path]:
    paths = sorted(_walk(root))
    safetensors = {path.parent for path in paths if path.suffix == ".safetensors"}
    for path in paths:
        if path.suffix in _IGNORED_SUFFIXES or path.name in _IGNORED_NAMES or path.name.startswith("rng_state"):
            continue
        if path.name.startswith("pytorch_model") and path.parent in safetensors:
            continue  # the same weights once more; only the safetensors are loaded
        yield path


def _walk(folder: Path, above: frozenset[Path] = frozenset()) -> Iterator[Path]:
    """The files below, links to folders followed (not into what is above them); hidden ones left out."""
    here = folder.resolve()
    if here in above:
        return
    for item in folder.iterdir():
        if item.name.startswith(".") or item.name in _IGNORED_DIRS:
            continue
        if item.is_dir():
            yield from _walk(item, above | {here})
        elif item.is_file():
            yield item


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


def _hash_files(paths: list[Path], cache: DigestCache) -> list[bytes]:
    """Content hash of each file: a JSON file's canonical form, otherwise a hash over its chunks' hashes."""
    digests = {path: _raw_digest([_json_digest(path)]) for path in paths if path.suffix == ".json"}
    large = [path for path in paths if path not in digests]
    digests |= {path: digest for path in large if (digest := cache.get(path)) is not None}
    new = [path for path in large if path not in digests]
    before = {path: stamp(path) for path in new}
    chunks = [(path, start) for path in new for start in range(0, max(before[path][0], 1), CHUNK)]
    pieces: dict[Path, list[bytes]] = {path: [] for path in new}
    with ThreadPoolExecutor(8) as pool:
        for (path, _), piece in zip(chunks, pool.map(lambda chunk: _hash_chunk(*chunk), chunks), strict=True):
            pieces[path].append(piece)
    for path in new:
        digests[path] = _raw_digest(pieces[path])
        cache.put(path, before[path], digests[path])
    cache.save()
    return [digests[path] for path in paths]


def _hash_chunk(path: Path, start: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return hashlib.blake2b(file.read(CHUNK), digest_size=32).digest()


def _json_digest(path: Path) -> bytes:
    return hashlib.blake2b(_json_content(path), digest_size=32).digest()


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


def _dict(path: Path) -> dict[str, Any]:
    """A JSON file's object; empty if it is not there or is none."""
    try:
        value = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


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
