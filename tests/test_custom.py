from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ranker.errors import RankerError
from ranker.fingerprint import components
from ranker.load import load
from ranker.types import Pair, RankerSpec, Scored


class Overlap:
    """Words in common, times `weight`. A few texts misbehave on purpose."""

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight

    @classmethod
    def fingerprint(cls, weight: float = 1.0) -> str:
        return "overlap-1"

    def score(self, pairs: list[Pair]) -> list[float]:
        if any("boom" in text for _, text in pairs):
            raise ZeroDivisionError("boom")
        return [
            float("nan") if text == "nan" else self.weight * len({*query.split()} & {*text.split()})
            for query, text in pairs
        ]


class Forgetful(Overlap):
    def score(self, pairs: list[Pair]) -> list[float]:
        return [0.0] * (len(pairs) - 1)


class Wordy(Overlap):
    def score(self, pairs: list[Pair]) -> Any:
        return ["high"] * len(pairs)


class Strict(Overlap):
    def __init__(self) -> None:
        raise FileNotFoundError("no weights")


class NoScore:
    @classmethod
    def fingerprint(cls) -> str:
        return "x"


class EmptyFingerprint(Overlap):
    @classmethod
    def fingerprint(cls, weight: float = 1.0) -> str:
        return ""


def spec(name: str = "Overlap", **options: Any) -> RankerSpec:
    return RankerSpec(kind="custom", class_path=f"{__name__}:{name}", options=options)


def score(pairs: list[Pair], name: str = "Overlap", **options: Any) -> Scored:
    ranker = load(spec(name, **options), threads=1)
    prepared = ranker.prepare(pairs)
    assert list(ranker.score(prepared))[-1] == len(pairs)
    return ranker.result(prepared)


def test_custom_ranker_with_options_scores_in_order() -> None:
    pairs = [("copy a file", f"a file {i}" if i % 2 else f"copy a file {i}") for i in range(200)]
    scored = score(pairs, weight=2.0)
    assert scored.scores.tolist() == [4.0 if i % 2 else 6.0 for i in range(200)]
    assert scored.n_tokens.tolist() == [0] * 200
    assert not scored.truncated.any()
    assert scored.label_scores is None


def test_custom_ranker_that_raises_for_one_pair_fails_that_pair() -> None:
    pairs = [("q", f"boom {i}" if i == 77 else f"q {i}") for i in range(150)]
    scored = score(pairs)
    assert [(f.index, f.stage, f.error_type) for f in scored.failures] == [(77, "score", "ZeroDivisionError")]
    assert "in score" in scored.failures[0].traceback
    assert np.isfinite(np.delete(scored.scores, 77)).all()


def test_custom_ranker_is_not_given_a_document_over_the_limit() -> None:
    ranker = load(replace(spec(), max_document_bytes=9), threads=1)
    prepared = ranker.prepare([("copy", "copy file"), ("copy", "boom boom.")])
    assert list(ranker.score(prepared))[-1] == 2
    assert [(f.index, f.error_type) for f in ranker.result(prepared).failures] == [(1, "DocumentTooLarge")]


def test_custom_ranker_with_nan_fails_that_pair() -> None:
    assert [f.index for f in score([("q", "q"), ("q", "nan")]).failures] == [1]


@pytest.mark.parametrize("name", ["Forgetful", "Wordy"])
def test_custom_ranker_that_returns_something_else_fails_the_batch(name: str) -> None:
    failures = score([("q", str(i)) for i in range(10)], name).failures
    assert len(failures) == 10
    assert {f.error_type for f in failures} == {"PromiseError"}


@pytest.mark.parametrize(
    ("class_path", "message"),
    [
        ("Overlap", "write it as module:Name"),
        ("no_such_module:Overlap", "cannot import module 'no_such_module'"),
        (f"{__name__}:Missing", "has no class 'Missing'"),
        (f"{__name__}:spec", "has no class 'spec'"),
        (f"{__name__}:NoScore", "has no method 'score'"),
        (f"{__name__}:Strict", "FileNotFoundError: no weights"),
    ],
)
def test_custom_class_that_cannot_be_used_is_refused_in_one_line(class_path: str, message: str) -> None:
    with pytest.raises(RankerError, match=message) as caught:
        load(RankerSpec(kind="custom", class_path=class_path), threads=1)
    assert "\n" not in str(caught.value)


def test_custom_class_with_unknown_option_is_refused() -> None:
    with pytest.raises(RankerError, match="unexpected keyword argument 'wieght'"):
        load(spec(wieght=1.0), threads=1)


def test_custom_fingerprint_changes_with_class_and_options() -> None:
    base = components(spec())
    assert components(spec()) == base
    assert components(spec(weight=2.0))["options"] != base["options"]
    assert components(spec("Forgetful"))["class"] != base["class"]


def test_custom_fingerprint_that_is_empty_is_refused() -> None:
    with pytest.raises(RankerError, match="must return a non-empty text"):
        components(spec("EmptyFingerprint"))


def test_import_of_the_plane_without_a_transformer_leaves_torch_out(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "class R:\n"
        "    fingerprint = classmethod(lambda cls: 'r')\n"
        "    def score(self, pairs): return [1.0] * len(pairs)\n"
    )
    program = """
import sys
import ranker, ranker.types, ranker.custom, ranker.fingerprint, ranker.batching, ranker.hub
from ranker.load import load
ranker = load(ranker.types.RankerSpec(kind="custom", class_path="mine:R"), threads=1)
prepared = ranker.prepare([("q", "d")])
assert list(ranker.score(prepared)) == [1]
loaded = {"torch", "transformers", "sentence_transformers"} & set(sys.modules)
assert not loaded, loaded
"""
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parent.parent)])
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "PYTHONPATH": path})
