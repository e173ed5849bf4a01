"""``download`` against a small hub on 127.0.0.1 that demands a token on every request."""

import json
import re
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import huggingface_hub
import huggingface_hub.constants
import pytest
import torch

from ligermodels.checkpoints_convert.hf import open_checkpoint, save_checkpoint
from ligermodels.checkpoints_convert.hub import download
from ligermodels.errors import HubError

TOKEN = "hf_" + "secretsecret" * 3
COMMIT, OLD_COMMIT = "a" * 40, "b" * 40
INDEX = "model.safetensors.index.json"
TENSORS = {"model.embed_tokens.weight": torch.ones(8, 4), "lm_head.weight": torch.full((8, 4), 2.0)}


@dataclass
class Hub:
    """What the server holds and how it answers; ``refuse`` maps a path's beginning to (status, code, message)."""

    files: dict[str, bytes]
    commits: dict[str, str] = field(default_factory=lambda: {"main": COMMIT, "v1": OLD_COMMIT})
    refuse: dict[str, tuple[int, str, str]] = field(default_factory=dict)
    token: str | None = None
    requests: list[tuple[str, str]] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)  # bytes of each file

    def answer(self, path: str, token: str | None) -> tuple[int, dict[str, str], bytes]:
        if self.token is not None and token is not None and token != self.token:
            return 401, {"X-Error-Message": "Invalid credentials in Authorization header"}, b""
        if self.token is not None and token is None:
            return 401, {"X-Error-Code": "RepoNotFound"}, b""
        for start, (status, code, message) in self.refuse.items():
            if path.startswith(start):
                return status, {"X-Error-Code": code, "X-Error-Message": message}, b""
        if path.startswith("/api/models/org/model"):
            revision = path.partition("/revision/")[2] or "main"
            if revision not in self.commits:
                return 404, {"X-Error-Code": "RevisionNotFound"}, b""
            info = {
                "id": "org/model",
                "sha": self.commits[revision],
                "siblings": [{"rfilename": f} for f in self.files],
            }
            return 200, {"Content-Type": "application/json"}, json.dumps(info).encode()
        start, _, rest = path.partition("/resolve/")
        commit, _, file = rest.partition("/")
        if start != "/org/model":
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        if commit not in self.commits.values():
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        if file not in self.files:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        return 200, {"X-Repo-Commit": commit, "ETag": f'"{file}-1"'}, self.files[file]

    def fetched(self) -> set[str]:
        return {
            path.partition("/resolve/")[2].partition("/")[2] for method, path in self.requests if method == "GET"
        } - {""}


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Iterator[Hub]:
    save_checkpoint(tmp_path / "source", TENSORS, {"model_type": "llama"}, max_shard_size=128)
    files = {path.name: path.read_bytes() for path in (tmp_path / "source").iterdir()}
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
    ):
        files[name] = b"{}"
    for name in (
        "README.md",
        "pytorch_model.bin",
        "original/consolidated.00.pth",
        "consolidated.safetensors",
        "m.gguf",
    ):
        files[name] = b"never fetched"
    state = Hub(files)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            path = unquote(urlsplit(self.path).path)
            state.requests.append((self.command, path))
            authorization = self.headers.get("authorization")
            status, headers, body = state.answer(path, authorization.removeprefix("Bearer ") if authorization else None)
            part = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
            if part and status == 200:
                status, body = 206, body[int(part[1]) : int(part[2]) + 1]
            if self.command == "GET" and "/resolve/" in path:
                state.sent[path.rpartition("/")[2]] = len(body)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "default-cache"))
    huggingface_hub.close_session()
    yield state
    server.shutdown()
    server.server_close()
    huggingface_hub.close_session()


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "cache"


def fails(says: str, *arguments, **options) -> str:
    with pytest.raises(HubError, match=says) as error:
        download(*arguments, **options)
    text = str(error.value)
    chain = error.value
    while chain is not None:
        assert TOKEN not in str(chain) and TOKEN not in repr(chain)
        chain = chain.__cause__
    return text


def test_exactly_what_is_needed_is_fetched_and_loads(hub, cache):
    folder = download("org/model", cache_dir=cache)
    assert folder.name == COMMIT
    loaded = dict(open_checkpoint(folder).stream())
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())
    shards = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
    text = {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"}
    text |= {"additional_chat_templates/tool_use.jinja"}
    assert hub.fetched() == {"config.json", INDEX} | shards | text


def test_a_single_file_and_the_tokenizer_alone(hub, cache):
    download("org/model", cache_dir=cache, weights=False)
    assert not [file for file in hub.fetched() if "safetensors" in file]
    hub.files["model.safetensors"] = hub.files["model-00001-of-00002.safetensors"]
    del hub.files[INDEX]
    folder = download("org/model", cache_dir=cache / "other")
    assert sorted(open_checkpoint(folder).tensors) == ["model.embed_tokens.weight"]


def test_every_file_comes_from_one_commit_and_only_once(hub, cache):
    folder = download("org/model", revision="v1", cache_dir=cache)
    assert folder.name == OLD_COMMIT
    assert {path.split("/")[4] for _, path in hub.requests if "/resolve/" in path} == {OLD_COMMIT}
    hub.requests.clear()
    assert download("org/model", revision="v1", cache_dir=cache) == folder
    assert hub.requests == [("GET", "/api/models/org/model/revision/v1")]


def test_the_token_goes_with_every_request(hub, cache):
    hub.token = TOKEN
    assert open_checkpoint(download("org/model", token=TOKEN, cache_dir=cache)).tensors


# ---------------------------------------------------------------------------------------------------- what goes wrong


def test_a_mistyped_name(hub, cache):
    text = fails("no repository org/modle: check the spelling", "org/modle", cache_dir=cache)
    assert "private" in text
    text = fails("no repository org/modle for the account", "org/modle", token=TOKEN, cache_dir=cache)
    assert "needs token" not in text
    hub.token = TOKEN
    assert "token=" in fails("no repository org/model", "org/model", cache_dir=cache)


@pytest.mark.parametrize("name", ["a/b/c", "", "../x", "org/model/"])
def test_what_is_not_a_name(hub, cache, name):
    fails("expected 'owner/name'", name, cache_dir=cache)
    fails("expected 'owner/name'", name, cache_dir=cache, local_files_only=True)


def test_a_folder_is_not_a_repository(hub, cache, tmp_path):
    fails("use from_pretrained", str(tmp_path), cache_dir=cache)


@pytest.mark.parametrize("where", ["/api/models/", "/org/model/resolve/"])
@pytest.mark.parametrize("status", [401, 403])
def test_a_gated_repository(hub, cache, where, status):
    hub.refuse[where] = (status, "GatedRepo", "Access to model org/model is restricted")
    text = fails(
        "org/model is gated: accept its licence on the repository's page .*org/model", "org/model", cache_dir=cache
    )
    assert "pass token=" in text
    text = fails("the token in use has no access", "org/model", token=TOKEN, cache_dir=cache)
    assert "pass token" not in text and "auth login" not in text


@pytest.mark.parametrize("where", ["/api/models/", "/org/model/resolve/"])
def test_a_refused_token(hub, cache, where):
    hub.refuse[where] = (401, "", "Invalid credentials in Authorization header")
    text = fails("refused .expired, revoked or mistyped.*org/model", "org/model", token=TOKEN, cache_dir=cache)
    assert "pass token" not in text


def test_a_forbidden_repository(hub, cache):
    hub.refuse["/org/model/resolve/"] = (403, "", "Forbidden")
    fails("the token in use may not read it", "org/model", token=TOKEN, cache_dir=cache)
    fails("forbidden without a token", "org/model", cache_dir=cache)


def test_a_missing_revision(hub, cache):
    fails("org/model has no revision 'v9'", "org/model", revision="v9", cache_dir=cache)


def test_too_many_requests(hub, cache):
    hub.refuse["/api/"] = (429, "", "slow down")
    fails("429", "org/model", cache_dir=cache)


def only_pickles(hub) -> None:
    for name in [INDEX, *(name for name in hub.files if name.endswith(".safetensors"))]:
        hub.files.pop(name, None)


def test_pickles_are_fetched_where_there_is_nothing_better(hub, cache, tmp_path):
    only_pickles(hub)
    shards = {f"pytorch_model-0000{i}-of-00002.bin": {name: TENSORS[name]} for i, name in enumerate(TENSORS, 1)}
    for file, tensors in shards.items():
        torch.save(tensors, tmp_path / file)
        hub.files[file] = (tmp_path / file).read_bytes()
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    hub.files["pytorch_model.bin.index.json"] = json.dumps({"weight_map": weight_map}).encode()
    folder = download("org/model", cache_dir=cache)
    assert set(shards) < hub.fetched() and "pytorch_model.bin" not in hub.fetched()
    loaded = dict(open_checkpoint(folder).stream())
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())
    assert download("org/model", cache_dir=cache, local_files_only=True) == folder
    next(folder.glob("pytorch_model-*.bin")).unlink()
    fails(r"incomplete.*pytorch_model-0000\d-of-00002\.bin", "org/model", cache_dir=cache, local_files_only=True)


def test_no_weights_at_all(hub, cache):
    only_pickles(hub)
    del hub.files["pytorch_model.bin"]
    fails(r"holds no weights.*download it, and convert m\.gguf with", "org/model", cache_dir=cache)
    hub.files["params.json"] = hub.files["consolidated.00.pth"] = b"{}"
    del hub.files["config.json"]
    fails(r"holds no config\.json.*Meta's layout.*ligermodels convert", "org/model", cache_dir=cache)
    assert not hub.fetched()


def test_an_index_that_lies(hub, cache):
    del hub.files["model-00002-of-00002.safetensors"]
    fails(r"lacks files that its own .*model-00002-of-00002", "org/model", cache_dir=cache)
    hub.files[INDEX] = json.dumps({"weight_map": {"x": "../../../evil.safetensors"}}).encode()
    fails("not a file of the folder", "org/model", cache_dir=cache / "other")


# ------------------------------------------------------------------------------------------------------ without a net


def unplug(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there


def test_without_a_network_the_cached_copy_serves(hub, cache, monkeypatch):
    folder = download("org/model", cache_dir=cache)
    unplug(monkeypatch)
    with pytest.warns(UserWarning, match="cannot be reached: using the cached copy"):
        assert download("org/model", cache_dir=cache) == folder
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert download("org/model", cache_dir=cache, local_files_only=True) == folder
    fails("v1.* is not in the cache, and the hub cannot be reached", "org/model", revision="v1", cache_dir=cache)


def test_without_a_network_and_without_a_copy(hub, cache, monkeypatch):
    unplug(monkeypatch)
    fails("org/model is not in the cache, and the hub cannot be reached", "org/model", cache_dir=cache)
    fails("not in the cache, and local_files_only was given", "org/model", cache_dir=cache, local_files_only=True)


def test_offline_mode(hub, cache, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    huggingface_hub.close_session()
    fails("offline mode is on", "org/model", cache_dir=cache)
    assert not hub.requests


def test_a_hub_in_trouble(hub, cache):
    folder = download("org/model", cache_dir=cache)
    hub.refuse["/"] = (500, "", "")
    with pytest.warns(UserWarning, match="having trouble"):
        assert download("org/model", cache_dir=cache) == folder
    fails("the hub is having trouble", "org/model", cache_dir=cache / "other")


def test_a_half_downloaded_copy_names_what_is_missing(hub, cache, monkeypatch):
    folder = download("org/model", cache_dir=cache)
    for shard in folder.glob("model-*.safetensors"):
        shard.unlink()
    names = "model-00001-of-00002.safetensors, model-00002-of-00002.safetensors"
    fails(f"incomplete.*lacks: {names}", "org/model", cache_dir=cache, local_files_only=True)
    unplug(monkeypatch)
    fails(f"incomplete, and the hub cannot be reached.*{names}", "org/model", cache_dir=cache)


def test_config_alone_is_not_a_model_but_enough_for_a_tokenizer(hub, cache):
    folder = download("org/model", cache_dir=cache, weights=False)
    assert download("org/model", cache_dir=cache, weights=False, local_files_only=True) == folder
    fails(r"lacks: model\.safetensors", "org/model", cache_dir=cache, local_files_only=True)
