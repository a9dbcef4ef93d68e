from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ranker import fingerprint
from ranker.errors import RankerError
from ranker.fingerprint import components, resolve_dtype
from ranker.types import RankerSpec

CONFIG = {"model_type": "bert", "hidden_size": 32, "_name_or_path": "/home/ann/bert"}
TOKENIZER = {"model": {"vocab": {"a": 0}}, "truncation": None, "padding": None}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Files with the names of a checkpoint; their contents are never loaded here."""
    path = tmp_path / "checkpoint"
    (path / "1_Pooling").mkdir(parents=True)
    (path / "model.safetensors").write_bytes(bytes(range(256)) * 50)
    (path / "vocab.txt").write_text("[PAD]\na\n")
    (path / "chat_template.jinja").write_text("{{ messages }}")
    for name, value in {
        "config.json": CONFIG,
        "tokenizer.json": TOKENIZER,
        "modules.json": [{"idx": 0}],
        "1_Pooling/config.json": {"pooling_mode": "mean"},
        "tokenizer_config.json": {"model_max_length": 128},
    }.items():
        (path / name).write_text(json.dumps(value))
    return path


def of(path: Path, **changes: Any) -> dict[str, str]:
    spec = RankerSpec(kind="cross-encoder", checkpoint=str(path), max_length=128, dtype="float32")
    return components(replace(spec, **changes))


def differing(left: dict[str, str], right: dict[str, str]) -> set[str]:
    return {name for name in left.keys() | right.keys() if left.get(name) != right.get(name)}


def flip_weight(path: Path) -> None:
    data = bytearray((path / "model.safetensors").read_bytes())
    data[5_000] ^= 1
    (path / "model.safetensors").write_bytes(data)


def write(name: str, content: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(content)

    return change


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (flip_weight, "weights"),
        (write("2_Dense/pytorch_model.bin", "more"), "weights"),
        (write("vocab.txt", "[PAD]\nb\n"), "tokenizer"),
        (write("tokenizer.json", '{"model": {"vocab": {"b": 0}}}'), "tokenizer"),
        (write("tokenizer_config.json", '{"model_max_length": 64}'), "tokenizer"),
        (write("config.json", '{"model_type": "bert", "hidden_size": 64}'), "config.json"),
        (write("1_Pooling/config.json", '{"pooling_mode": "cls"}'), "1_Pooling/config.json"),
        (write("config_sentence_transformers.json", '{"prompts": {}}'), "config_sentence_transformers.json"),
        (write("modules.json", "[]"), "modules"),
        (write("chat_template.jinja", "{{ x }}"), "chat_template"),
        (write("modeling_mine.py", "x = 1"), "code"),
    ],
)
def test_fingerprint_after_a_change_that_decides_scores_names_that_part(
    checkpoint: Path, change: Callable[[Path], None], part: str
) -> None:
    before = of(checkpoint)
    change(checkpoint)
    assert differing(before, of(checkpoint)) == {part}


@pytest.mark.parametrize(
    "change",
    [
        write("README.md", "better words"),
        write(".gitattributes", "*.bin"),
        write("logo.png", "pixels"),
        write("onnx/model.onnx", "other runtime"),
        write("openvino/openvino_model.bin", "other runtime"),
        write("training_args.bin", "how it was trained"),
        write("pytorch_model.bin", "the same weights, in the older format"),
        write("tokenizer.json", json.dumps(TOKENIZER | {"truncation": {"max_length": 5}, "padding": {"x": 1}})),
        write(
            "config.json",
            json.dumps(CONFIG | {"_name_or_path": "/x", "transformers_version": "9"}, indent=4),
        ),
        lambda path: os.utime(path / "model.safetensors", (1, 1)),
    ],
)
def test_fingerprint_after_a_change_that_decides_nothing_stays(
    checkpoint: Path, change: Callable[[Path], None]
) -> None:
    before = of(checkpoint)
    change(checkpoint)
    assert of(checkpoint) == before


def test_fingerprint_of_a_copy_under_another_path_is_the_same(checkpoint: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(checkpoint, tmp_path / "elsewhere" / "copy")
    assert of(copy) == of(checkpoint)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_length", 64),
        ("max_length", None),
        ("dtype", "bfloat16"),
        ("truncation", "reference"),
        ("score_label", 1),
        ("kind", "bi-encoder"),
        ("trust_remote_code", True),
    ],
)
def test_fingerprint_with_another_option_names_it(checkpoint: Path, option: str, value: Any) -> None:
    assert differing(of(checkpoint), of(checkpoint, **{option: value})) == {option}


def test_fingerprint_with_another_batch_size_stays(checkpoint: Path) -> None:
    assert of(checkpoint, batch_tokens=7) == of(checkpoint)


def test_fingerprint_with_another_limit_of_documents_stays(checkpoint: Path) -> None:
    assert of(checkpoint, max_document_bytes=7) == of(checkpoint)


def test_fingerprint_of_a_file_of_several_chunks_sees_every_chunk(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "CHUNK", 1_000)
    before = of(checkpoint)
    flip_weight(checkpoint)
    assert differing(before, of(checkpoint)) == {"weights"}


def test_fingerprint_of_a_file_moved_between_folders_changes(checkpoint: Path) -> None:
    before = of(checkpoint)
    (checkpoint / "model.safetensors").rename(checkpoint / "1_Pooling" / "model.safetensors")
    assert differing(before, of(checkpoint)) == {"weights"}


def test_fingerprint_of_an_empty_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RankerError, match="holds no checkpoint"):
        of(tmp_path)


@pytest.mark.parametrize(
    ("dtype", "device", "expected"),
    [("auto", "cpu", "float32"), ("auto", "cuda", "bfloat16"), ("float16", "cpu", "float16")],
)
def test_resolve_dtype_depends_on_the_device_only_for_auto(dtype: str, device: str, expected: str) -> None:
    assert resolve_dtype(dtype, device) == expected


@pytest.mark.parametrize("dtype", ["half", "int8", ""])
def test_resolve_dtype_with_an_unknown_name_is_refused(dtype: str) -> None:
    with pytest.raises(RankerError, match=r"use auto, float32, bfloat16, float16"):
        resolve_dtype(dtype, "cpu")
