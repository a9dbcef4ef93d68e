"""Checkpoints from the Hub, without the Hub: a prepared cache, and a server of a few lines on this machine."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ranker.errors import RankerError
from ranker.hub import resolve

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {"config.json": b"{}", "model.safetensors": b"weights", "onnx/model.onnx": b"other", "README.md": b"words"}


def in_fresh_process(calls: list[tuple[str, str | None]], **environment: str) -> list[Any]:
    """`resolve` of each call, or its error's text. A fresh process: huggingface_hub reads its settings once."""
    program = """
import json, sys
from ranker.errors import RankerError
from ranker.hub import resolve
for call in json.loads(sys.argv[1]):
    try:
        print(json.dumps(resolve(*call)))
    except RankerError as error:
        print(json.dumps(str(error)))
"""
    root = str(Path(__file__).parent.parent)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    result = subprocess.run(
        [sys.executable, "-c", program, json.dumps(calls)],
        check=True,
        capture_output=True,
        text=True,
        env={**clean, "PYTHONPATH": root, **environment},
    )
    return [json.loads(line) for line in result.stdout.splitlines()]


class Hub(http.server.BaseHTTPRequestHandler):
    """One repository, org/good; org/gated is gated, org/broken answers 500, the rest does not exist."""

    asked: list[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.asked.append(f"{self.command} {self.path}")
        path = self.path.partition("?")[0]
        tree = [{"type": "file", "path": name, "size": len(data), "oid": name} for name, data in FILES.items()]
        if path.startswith("/api/models/org/gated"):
            self.answer(403, b"", {"X-Error-Code": "GatedRepo"})
        elif path.startswith("/api/models/org/broken"):
            self.answer(500, b"oops")
        elif path == "/api/models/org/good/revision/main":
            self.answer(200, json.dumps({"id": "org/good", "sha": COMMIT, "siblings": []}).encode())
        elif path == f"/api/models/org/good/tree/{COMMIT}":
            self.answer(200, json.dumps(tree).encode())
        elif path.startswith("/api/models/org/good/revision/"):
            self.answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif path.startswith(f"/org/good/resolve/{COMMIT}/"):
            name = path.split("/", 5)[5]
            self.answer(200, FILES[name], {"X-Repo-Commit": COMMIT, "ETag": f'"{name}"'})
        else:
            self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[tuple[str, list[str]]]:
    """(address, what was asked)."""
    handler = type("Handler", (Hub,), {"asked": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", handler.asked
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A Hugging Face cache that already holds org/good."""
    snapshot = tmp_path / "models--org--good" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = tmp_path / "models--org--good" / "refs"
    refs.mkdir()
    (refs / "main").write_text(COMMIT)
    return tmp_path


def test_resolve_of_a_directory_stays_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve("org/name", "main") == (str(tmp_path / "org" / "name"), None)


def test_resolve_of_an_empty_name_is_refused() -> None:
    with pytest.raises(RankerError, match=r"ranker.checkpoint is missing"):
        resolve("")


@pytest.mark.parametrize("name", ["/no/such/dir", "./missing", "a/b/c", "~/missing", "missing", "..", "org/"])
def test_resolve_of_a_missing_path_says_so(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if name == "..":
        name = "../not-here-at-all"
    with pytest.raises(RankerError, match="no such directory"):
        resolve(name)


def test_resolve_of_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(RankerError, match="is a file: give the directory"):
        resolve(str(tmp_path / "model.safetensors"))


def test_resolve_offline_uses_the_cache_and_says_what_is_not_in_it(cache: Path) -> None:
    calls = [("org/good", None), ("org/good", COMMIT), ("org/other", None)]
    by_name, by_commit, other = in_fresh_process(calls, HF_HUB_CACHE=str(cache), HF_HUB_OFFLINE="1")
    snapshot = str(cache / "models--org--good" / "snapshots" / COMMIT)
    assert by_name == by_commit == [snapshot, COMMIT]
    assert "neither a directory here nor in the Hugging Face cache" in other


def test_resolve_of_a_hub_id_downloads_one_commit_and_explains_every_refusal(
    hub: tuple[str, list[str]], tmp_path: Path
) -> None:
    address, asked = hub
    calls = [(f"org/{name}", None) for name in ("good", "gated", "missing", "broken")]
    environment = {"HF_ENDPOINT": address, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
    good, gated, missing, broken, revision = in_fresh_process([*calls, ("org/good", "v9")], **environment)
    path, commit = good
    assert commit == COMMIT
    names = {file.relative_to(path).as_posix() for file in Path(path).rglob("*") if file.is_file()}
    assert names == {"config.json", "model.safetensors", "README.md"}
    assert not any("onnx" in line for line in asked if "resolve" in line)
    assert gated == "ranker.checkpoint org/gated is gated: accept its terms on the Hub and set HF_TOKEN"
    assert "ranker.checkpoint org/missing is neither a directory here nor a repository on the Hub" in missing
    assert revision == "ranker.checkpoint org/good at revision v9: the repository has no such revision"
    assert broken.startswith(
        "ranker.checkpoint org/broken is neither a directory here nor in the Hugging Face cache"
    )
