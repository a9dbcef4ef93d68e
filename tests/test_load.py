"""What is refused before the first document, and that each refusal is one line that says what to do."""

from __future__ import annotations

import json
import logging
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ranker import preflight
from ranker.errors import NodeUnfit, RankerError
from ranker.load import load
from ranker.preflight import position_limit
from ranker.types import Kind, Ranker, RankerSpec
from tests import checkpoints
from tests.projects import REPO

CROSS: Kind = "cross-encoder"


def loaded(path: Path | str, kind: Kind = CROSS, device: str = "cpu", **options: Any) -> Ranker:
    return load(RankerSpec(kind=kind, checkpoint=str(path), **options), threads=1, device=device)


def refusal(path: Path | str, kind: Kind = CROSS, device: str = "cpu", **options: Any) -> str:
    with pytest.raises(RankerError) as caught:
        loaded(path, kind, device, **options)
    text = str(caught.value)
    assert "\n" not in text
    return text


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_load_of_a_cross_encoder_says_what_was_resolved(cross_encoder_path: str) -> None:
    info = loaded(cross_encoder_path).info
    assert info["device"] == "cpu"
    assert info["dtype"] == "float32"
    assert info["threads"] == "1"
    assert info["max_length"] == "128"
    assert info["checkpoint"] == cross_encoder_path
    assert info["commit"] == ""
    assert int(info["batch_tokens"]) > 0
    assert {"torch", "transformers", "sentence-transformers"} <= info.keys()


@pytest.mark.parametrize(("wanted", "found"), [("auto", "sdpa"), ("eager", "eager"), ("sdpa", "sdpa")])
def test_load_says_which_attention_it_uses(cross_encoder_path: str, wanted: str, found: str) -> None:
    assert loaded(cross_encoder_path, attention=wanted).info["attention"] == found


def test_load_with_an_attention_that_the_architecture_lacks_is_refused(tmp_path: Path) -> None:
    path = checkpoints.tiny_deberta(tmp_path)
    assert loaded(path).info["attention"] == "eager"
    message = refusal(path, attention="sdpa")
    assert message.startswith(f"ranker.attention is sdpa, but {path} cannot be loaded with it: DebertaV2")
    assert message.endswith("; use auto")


def test_load_with_flash_attention_on_a_cpu_is_refused(cross_encoder_path: str) -> None:
    assert "needs a GPU; this worker is on cpu" in refusal(cross_encoder_path, attention="flash_attention_2")


def test_load_hands_on_the_limit_of_documents(cross_encoder_path: str) -> None:
    ranker = loaded(cross_encoder_path, max_document_bytes=9)
    prepared = ranker.prepare([("copy", "copy file"), ("copy", "copy files")])
    assert list(ranker.score(prepared))[-1] == 2
    assert [(f.index, f.error_type) for f in ranker.result(prepared).failures] == [(1, "DocumentTooLarge")]


def test_load_sets_torch_threads(cross_encoder_path: str) -> None:
    load(RankerSpec(kind=CROSS, checkpoint=cross_encoder_path), threads=2)
    assert torch.get_num_threads() == 2
    load(RankerSpec(kind=CROSS, checkpoint=cross_encoder_path), threads=1)
    assert torch.get_num_threads() == 1


def test_device_that_only_emulates_bfloat16_is_unfit(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    preflight.check_dtype("float32", device)
    preflight.check_dtype("bfloat16", torch.device("cpu"))
    with pytest.raises(NodeUnfit, match="cuda cannot compute in bfloat16"):
        preflight.check_dtype("bfloat16", device)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_memory_that_a_pass_frees_is_there_for_the_next_one() -> None:
    program = """
import ctypes, resource
from ranker.load import keep_memory
keep_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
def touch():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(16 << 20)
    ctypes.memset(block, 1, 16 << 20)
    libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
touch()
print(touch())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=REPO)
    assert int(done.stdout) < 100  # of 4,096 pages


def test_load_is_silent(
    cross_encoder_path: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    loaded(cross_encoder_path)
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_load_from_a_missing_directory_is_refused() -> None:
    assert "no such directory" in refusal("/no/such/checkpoint")


def test_load_from_a_directory_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    assert "has neither config.json nor modules.json" in refusal(tmp_path)


def test_load_of_a_base_checkpoint_names_the_missing_weights(tmp_path: Path) -> None:
    message = refusal(checkpoints.headless(tmp_path))
    assert "2 weights are missing and would be random: classifier.bias, classifier.weight" in message


def test_load_with_a_missing_layer_names_it(tmp_path: Path) -> None:
    file = Path(checkpoints.tiny_cross_encoder(tmp_path)) / "model.safetensors"
    weights = {name: value for name, value in load_file(file).items() if "layer.1.output.dense" not in name}
    save_file(weights, file, metadata={"format": "pt"})
    assert "bert.encoder.layer.1.output.dense.bias" in refusal(tmp_path)


def test_load_with_a_cut_weights_file_is_refused(tmp_path: Path) -> None:
    file = Path(checkpoints.tiny_cross_encoder(tmp_path)) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1_000])
    assert "cannot be loaded" in refusal(tmp_path)


def test_load_without_weights_is_refused(tmp_path: Path) -> None:
    (Path(checkpoints.tiny_cross_encoder(tmp_path)) / "model.safetensors").unlink()
    assert "cannot be loaded: OSError" in refusal(tmp_path)


def test_load_of_an_adapter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "merge it into its base model" in refusal(tmp_path)


def test_load_of_several_labels_without_a_score_label_lists_them(tmp_path: Path) -> None:
    checkpoints.tiny_cross_encoder(tmp_path, labels=["contradiction", "entailment", "neutral"])
    message = refusal(tmp_path)
    assert "ranker.score_label is missing" in message
    assert "contradiction (0), entailment (1), neutral (2)" in message
    assert "'best'" in refusal(tmp_path, score_label="best")
    assert "is 3," in refusal(tmp_path, score_label=3)


def test_load_of_one_label_with_an_unknown_score_label_is_refused(cross_encoder_path: str) -> None:
    assert "ranker.score_label is 1" in refusal(cross_encoder_path, score_label=1)


def test_load_without_a_pad_token_is_refused(tmp_path: Path) -> None:
    assert "no pad token" in refusal(checkpoints.tiny_cross_encoder(tmp_path, pad_token=False))


def test_load_of_a_decoder_that_does_not_know_its_pad_token_is_refused(tmp_path: Path) -> None:
    checkpoints.tiny_llm_reranker(tmp_path, classifier=True)
    edit(tmp_path / "config.json", pad_token_id=None)
    assert "cannot score a pair: ValueError: Cannot handle batch sizes > 1" in refusal(tmp_path)


def test_load_of_a_decoder_with_another_pad_token_is_refused(tmp_path: Path) -> None:
    checkpoints.tiny_llm_reranker(tmp_path, classifier=True)
    edit(tmp_path / "config.json", pad_token_id=2)
    edit(tmp_path / "tokenizer_config.json", padding_side="right")
    assert "its padding is not masked" in refusal(tmp_path)  # the classifier would read the padding's end


def test_load_of_a_reranker_without_yes_and_no_is_refused(tmp_path: Path) -> None:
    message = refusal(checkpoints.tiny_llm_reranker(tmp_path, yes_no=False))
    assert "The tokenizer does not have 'yes' and/or 'no' tokens" in message


def test_load_of_a_reranker_whose_yes_and_no_are_unknown_words_is_refused(tmp_path: Path) -> None:
    checkpoints.tiny_llm_reranker(tmp_path, yes_no=False)
    edit(tmp_path / "tokenizer_config.json", unk_token="<system>")
    assert "every score would be the same" in refusal(tmp_path)


def test_load_of_a_reranker_with_equal_yes_and_no_is_refused(tmp_path: Path) -> None:
    checkpoints.tiny_llm_reranker(tmp_path / "raw")
    from sentence_transformers import CrossEncoder

    model = CrossEncoder(str(tmp_path / "raw"), device="cpu")
    model[1].false_token_id = model[1].true_token_id
    model.save_pretrained(str(tmp_path / "saved"))
    assert "every score would be the same" in refusal(tmp_path / "saved")


@pytest.mark.parametrize(
    ("build", "limit"), [(checkpoints.tiny_cross_encoder, 128), (checkpoints.tiny_roberta, 128)]
)
def test_load_with_max_length_up_to_the_true_limit(build: Any, limit: int, tmp_path: Path) -> None:
    ranker = loaded(build(tmp_path), max_length=limit)
    prepared = ranker.prepare([("copy a file", "word " * 1_000)])
    list(ranker.score(prepared))
    result = ranker.result(prepared)
    assert result.n_tokens.tolist() == [limit]
    assert not result.failures
    assert f"at most {limit} tokens" in refusal(tmp_path, max_length=limit + 1)


def test_load_of_a_roberta_that_states_too_much_is_capped_at_the_true_limit(tmp_path: Path) -> None:
    ranker = loaded(checkpoints.tiny_roberta(tmp_path))  # its tokenizer says 1000, its table has 130 positions
    assert ranker.info["max_length"] == "128"


@pytest.mark.parametrize("max_length", [0, -5])
def test_load_with_an_impossible_max_length_is_refused(cross_encoder_path: str, max_length: int) -> None:
    assert "must be positive" in refusal(cross_encoder_path, max_length=max_length)


def test_load_with_max_length_that_holds_no_document_is_refused(cross_encoder_path: str) -> None:
    assert "leaves no room for a document" in refusal(cross_encoder_path, max_length=4)


def test_position_limit_without_positions_is_none() -> None:
    assert position_limit(None) is None


def test_load_with_an_unknown_dtype_is_refused(cross_encoder_path: str) -> None:
    assert "ranker.dtype is 'half'" in refusal(cross_encoder_path, dtype="half")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_load_in_half_precision_scores_in_float32(cross_encoder_path: str, dtype: str) -> None:
    ranker = loaded(cross_encoder_path, dtype=dtype)
    prepared = ranker.prepare([("copy a file", "remove a file"), ("copy a file", "copy a directory")])
    list(ranker.score(prepared))
    assert ranker.info["dtype"] == dtype
    assert ranker.result(prepared).scores.dtype == "float32"
    assert not ranker.result(prepared).failures


def test_load_in_the_precision_asked_for_whatever_the_checkpoint_was_saved_in(tmp_path: Path) -> None:
    file = Path(checkpoints.tiny_cross_encoder(tmp_path)) / "model.safetensors"
    save_file({name: value.bfloat16() for name, value in load_file(file).items()}, file, metadata={"format": "pt"})
    edit(tmp_path / "config.json", dtype="bfloat16")
    ranker = loaded(tmp_path)
    prepared = ranker.prepare([("copy", f"a file {i}") for i in range(50)])
    list(ranker.score(prepared))
    scores = torch.from_numpy(ranker.result(prepared).scores)
    assert not torch.equal(scores, scores.bfloat16().float())


def test_load_on_a_device_that_is_not_there_is_refused(cross_encoder_path: str) -> None:
    assert "is unknown" in refusal(cross_encoder_path, device="gpu")
    if not torch.cuda.is_available():
        assert "no CUDA device" in refusal(cross_encoder_path, device="cuda")


def test_load_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(RankerError, match=r"ranker\.kind"):
        load(RankerSpec(kind="bm25"), threads=1)  # type: ignore[arg-type]


def test_load_of_a_cross_encoder_as_a_bi_encoder_is_refused(cross_encoder_path: str) -> None:
    assert "set ranker.kind: cross-encoder" in refusal(cross_encoder_path, kind="bi-encoder")


def test_load_of_a_bi_encoder_as_a_cross_encoder_is_refused(tmp_path: Path) -> None:
    assert "weights are missing" in refusal(checkpoints.tiny_biencoder(tmp_path))


def test_load_of_a_bi_encoder_without_a_pooler_is_fine_and_without_a_layer_is_not(tmp_path: Path) -> None:
    file = Path(checkpoints.tiny_biencoder(tmp_path)) / "model.safetensors"
    weights = {name: value for name, value in load_file(file).items() if "pooler" not in name}
    save_file(weights, file, metadata={"format": "pt"})
    loaded(tmp_path, kind="bi-encoder")
    weights = {name: value for name, value in weights.items() if "layer.0.attention.self.query" not in name}
    save_file(weights, file, metadata={"format": "pt"})
    assert "encoder.layer.0.attention.self.query.bias" in refusal(tmp_path, kind="bi-encoder")


def test_load_with_an_activation_from_elsewhere_is_refused(tmp_path: Path) -> None:
    checkpoints.tiny_cross_encoder(tmp_path)
    edit(tmp_path / "config.json", sentence_transformers={"activation_fn": "os.system"})
    assert "its activation os.system is code outside torch" in refusal(tmp_path)


def test_load_of_a_template_with_the_document_first_is_refused_unless_reference(tmp_path: Path) -> None:
    checkpoints.tiny_llm_reranker(tmp_path, template=checkpoints.DOCUMENT_FIRST_TEMPLATE)
    assert "set ranker.truncation: reference" in refusal(tmp_path)
    loaded(tmp_path, truncation="reference")


def test_load_of_a_model_whose_scores_are_nan_is_refused(tmp_path: Path) -> None:
    checkpoints.poison(checkpoints.tiny_cross_encoder(tmp_path), "[CLS]")
    assert "scores are not finite" in refusal(tmp_path)
