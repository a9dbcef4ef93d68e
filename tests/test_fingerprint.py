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
    (path / "1_LogitScore").mkdir()
    (path / "model.safetensors").write_bytes(bytes(range(256)) * 50)
    (path / "vocab.txt").write_text("[PAD]\na\n")
    (path / "chat_template.jinja").write_text("{{ messages }}")
    for name, value in {
        "config.json": CONFIG,
        "tokenizer.json": TOKENIZER,
        "modules.json": [{"idx": 0}],
        "config_sentence_transformers.json": ST_CONFIG,
        "1_Pooling/config.json": {"pooling_mode": "mean"},
        "1_LogitScore/config.json": {"true_token_id": 7, "false_token_id": 8},
        "tokenizer_config.json": {"model_max_length": 128},
    }.items():
        (path / name).write_text(json.dumps(value))
    return path


ST_CONFIG = {
    "__version__": {"sentence_transformers": "5.0.0"},
    "prompts": {"query": "query: "},
    "default_prompt_name": "query",
    "activation_fn": "torch.nn.modules.activation.Sigmoid",
}


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


def edit(name: str, **values: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        (path / name).write_text(json.dumps(json.loads((path / name).read_text()) | values))

    return change


def inline_template(path: Path) -> None:
    """Move the chat template into the tokenizer's configuration, where older libraries keep it."""
    text = (path / "chat_template.jinja").read_text()
    (path / "chat_template.jinja").unlink()
    edit("tokenizer_config.json", chat_template=text)(path)


STATE = {
    "truncation": {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0},
    "padding": {
        "direction": "Right",
        "strategy": "BatchLongest",
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "[PAD]",
    },
}
LEFT = {name: state | {"direction": "Left"} for name, state in STATE.items()}
SAVED_STATE = {"max_length": 5, "stride": 0, "truncation_strategy": "longest_first", "pad_token_type_id": 0}


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
        (edit("config.json", sentence_transformers={"activation_fn": "torch.nn.Identity"}), "config.json"),
        (edit("config.json", sbert_ce_default_activation_function="torch.nn.Identity"), "config.json"),
        (edit("config_sentence_transformers.json", prompts={"query": "q: "}), "config_sentence_transformers.json"),
        (edit("config_sentence_transformers.json", default_prompt_name=None), "config_sentence_transformers.json"),
        (
            edit("config_sentence_transformers.json", activation_fn="torch.nn.Identity"),
            "config_sentence_transformers.json",
        ),
        (edit("1_LogitScore/config.json", true_token_id=8, false_token_id=7), "1_LogitScore/config.json"),
        (write("sentence_bert_config.json", '{"max_seq_length": 64}'), "sentence_bert_config.json"),
        (write("quantization.json", "{}"), "quantization.json"),
        (write("unheard_of.xyz", "?"), "file:unheard_of.xyz"),
        (write("additional_chat_templates/rag.jinja", "{{ y }}"), "chat_template"),
        (lambda path: (path / "chat_template.jinja").unlink(), "chat_template"),
        (edit("tokenizer.json", truncation=LEFT["truncation"]), "tokenizer"),
        (edit("tokenizer.json", padding=LEFT["padding"]), "tokenizer"),
        (edit("tokenizer_config.json", truncation_side="left"), "tokenizer"),
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
        write("trainer_state.json", "{}"),
        write("generation_config.json", '{"temperature": 0.1}'),
        write("eval/scores.json", "{}"),
        write("requirements.txt", "torch"),
        write("pytorch_model.bin", "the same weights, in the older format"),
        edit("tokenizer.json", **STATE),
        edit(
            "tokenizer_config.json", **SAVED_STATE, padding_side="right", tokenizer_file="/home/ann/tokenizer.json"
        ),
        edit("config_sentence_transformers.json", __version__={"sentence_transformers": "6.0.0"}),
        write("config_sentence_transformers.json", json.dumps(dict(reversed(ST_CONFIG.items())), indent=2)),
        inline_template,
        edit("tokenizer_config.json", chat_template="not read: there is a file"),
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


def test_fingerprint_of_an_inline_template_names_the_template(checkpoint: Path) -> None:
    inline_template(checkpoint)
    before = of(checkpoint)
    edit("tokenizer_config.json", chat_template="{{ other }}")(checkpoint)
    assert differing(before, of(checkpoint)) == {"chat_template"}
    named = [{"name": "default", "template": "{{ messages }}"}, {"name": "rag", "template": "{{ y }}"}]
    edit("tokenizer_config.json", chat_template=named)(checkpoint)
    inline = of(checkpoint)
    edit("tokenizer_config.json", chat_template=None)(checkpoint)
    write("chat_template.jinja", "{{ messages }}")(checkpoint)
    write("additional_chat_templates/rag.jinja", "{{ y }}")(checkpoint)
    assert differing(before, inline) == {"chat_template"}
    assert of(checkpoint) == inline


def test_fingerprint_of_a_left_sided_tokenizer_does_not_depend_on_its_state(checkpoint: Path) -> None:
    edit("tokenizer_config.json", truncation_side="left", padding_side="left")(checkpoint)
    before = of(checkpoint)
    edit("tokenizer.json", **LEFT)(checkpoint)
    assert of(checkpoint) == before


def test_fingerprint_of_a_tokenizer_used_and_saved_again_stays(cross_encoder_path: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    copy = shutil.copytree(cross_encoder_path, tmp_path / "copy")
    for _ in range(2):  # the second time it is loaded with the state of the first
        tokenizer = AutoTokenizer.from_pretrained(copy)
        tokenizer(["a b c", "a"], padding=True, truncation=True, max_length=4)
        tokenizer.save_pretrained(copy)
    assert json.loads((copy / "tokenizer.json").read_text())["truncation"] is not None
    assert of(copy) == of(Path(cross_encoder_path))


def test_tokenizer_state_with_a_left_side_decides_what_is_cut_off(cross_encoder_path: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    copy = shutil.copytree(cross_encoder_path, tmp_path / "copy")
    edit("tokenizer.json", **LEFT)(copy)
    assert AutoTokenizer.from_pretrained(copy).truncation_side == "left"


def test_fingerprint_follows_links_to_folders_and_not_in_circles(checkpoint: Path, tmp_path: Path) -> None:
    before = of(checkpoint)
    (checkpoint / "1_Pooling").rename(tmp_path / "pooling")
    (checkpoint / "1_Pooling").symlink_to(tmp_path / "pooling")
    (checkpoint / "loop").symlink_to(checkpoint)
    assert of(checkpoint) == before


def test_fingerprint_of_a_file_that_cannot_be_read_is_refused_in_one_line(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "model.safetensors").symlink_to("/proc/self/mem")  # not even root may read its beginning
    with pytest.raises(RankerError, match=r"ranker.checkpoint .*checkpoint: cannot read "):
        of(checkpoint)


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
        ("attention", "sdpa"),
    ],
)
def test_fingerprint_with_another_option_names_it(checkpoint: Path, option: str, value: Any) -> None:
    assert differing(of(checkpoint), of(checkpoint, **{option: value})) == {option}


def test_fingerprint_without_a_chosen_attention_has_no_such_component(checkpoint: Path) -> None:
    assert "attention" not in of(checkpoint)
    assert of(checkpoint, attention="eager")["attention"] == "eager"


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
