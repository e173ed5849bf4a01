"""Fetch a model repository: config, tokenizer, and exactly the weight files that its index names.

The hub's cache keeps files by commit, so the branch or tag is resolved to one commit first, and every file is asked
for at that commit: a push during the download cannot mix two versions. The token goes with every request and into no
message.
"""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path

from ligermodels.checkpoints_convert.files import (
    CONFIG,
    INDEX,
    PICKLE,
    PICKLE_INDEX,
    PICKLES,
    SINGLE,
    TOKENIZER_FILES,
    other_layout,
    read_index,
    read_json,
)
from ligermodels.errors import CheckpointError, ConfigError, HubError

__all__ = ["download", "fetch_headers"]

# What a model needs beside its weights; taken where present. Nothing else is ever fetched.
_NAMED_TEMPLATE = re.compile(r"additional_chat_templates/[^/\\]+\.jinja")
_TEXT_FILES = (*TOKENIZER_FILES, "generation_config.json", "preprocessor_config.json", "processor_config.json")

_WEIGHTS = (INDEX, SINGLE, PICKLE_INDEX, PICKLE)  # the first that is there says which files the weights are in


def download(
    repo_id: str,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike | None = None,
    local_files_only: bool = False,
    weights: bool = True,
) -> Path:
    """Fetch ``repo_id`` at ``revision`` (branch, tag or commit; default: main) into the hub's cache, return its folder.

    Files that are cached already are not fetched again. ``token`` defaults to the one that ``hf auth login`` stored
    (False: none). ``weights=False`` takes config and tokenizer only. Without a network a complete cached copy is used,
    with a warning; ``local_files_only`` uses the cache without asking the network.

    Raises HubError, with the cause chained, telling apart: no such repository, a gated one, a refused token, no such
    revision, no network and no (complete) cached copy, and repositories that hold no weights in this layout.
    """
    # Imported here: it takes a third of a second, and most programs only read local folders.
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    transport_error = HfHubHTTPError.__bases__[0]  # the HTTP client's base class; the client itself changed over time
    api = HfApi(token=token)
    request = _Request(api, repo_id, revision, token)
    if local_files_only:
        return _from_cache(request, cache_dir, weights, "local_files_only was given")
    try:
        info = api.model_info(repo_id, revision=revision)
        present = {sibling.rfilename for sibling in info.siblings or ()}
        return _fetch(request, info.sha, present, cache_dir, weights)
    except HFValidationError as error:
        hint = "; to load a folder, use from_pretrained" if os.path.isdir(repo_id) else ""
        raise HubError(f"{repo_id!r} is not the name of a repository: expected 'owner/name'{hint}") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, transport_error, OSError) as error:
        answer = _http_error(error)
        if answer is not None and answer.response.status_code < 500:
            raise _explain(request, answer) from error
        reason = "the hub is having trouble" if answer is not None else "the hub cannot be reached"
        if isinstance(error, OfflineModeIsEnabled):
            reason = "offline mode is on (HF_HUB_OFFLINE)"
        elif isinstance(error, OSError) and error.filename is not None:  # the disk, not the network
            raise HubError(f"could not store {repo_id} in the cache: {error}") from error
        try:
            folder = _from_cache(request, cache_dir, weights, reason)
        except HubError as second:
            raise second from error
        warnings.warn(f"{reason}: using the cached copy {folder}", stacklevel=2)
        return folder


def fetch_headers(
    repo_id: str, *, revision: str | None = None, token: str | bool | None = None
) -> tuple[dict, dict[str, dict[str, tuple[str, tuple[int, ...]]]]]:
    """config.json and, per weight file, ``{tensor: (dtype, shape)}`` of a repository, without fetching its weights.

    config.json and the index go to the hub's cache; of each safetensors file the header is asked for alone. Raises
    HubError as ``download`` does, also for a repository of pickles (their shapes are all over the file).
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        SafetensorsParsingError,
    )
    from tqdm import tqdm

    transport_error = HfHubHTTPError.__bases__[0]
    api = HfApi(token=token)
    request = _Request(api, repo_id, revision, token)
    try:
        info = api.model_info(repo_id, revision=revision)
        present = {sibling.rfilename for sibling in info.siblings or ()}
        if CONFIG not in present or not {INDEX, SINGLE} & present:
            raise _no_weights(request, present)

        def get(file: str) -> Path:
            return Path(api.hf_hub_download(repo_id, file, revision=info.sha, etag_timeout=30))

        folder = get(CONFIG).parent
        files = [SINGLE]
        if INDEX in present:
            files = _shards(request, get(INDEX).parent, INDEX)
        headers = {}
        for file in tqdm(files, desc="reading headers", unit="file", disable=None if len(files) > 1 else True):
            found = api.parse_safetensors_file_metadata(repo_id, file, revision=info.sha).tensors
            headers[file] = {name: (str(t.dtype), tuple(t.shape)) for name, t in found.items()}
        return read_json(folder / CONFIG, ConfigError), headers
    except HFValidationError as error:
        raise HubError(
            f"{repo_id!r} is neither a folder nor the name of a repository: expected 'owner/name'"
        ) from error
    except SafetensorsParsingError as error:
        raise HubError(f"{request.name} holds a broken weight file: {str(error).splitlines()[0]}") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, transport_error, OSError) as error:
        answer = _http_error(error)
        if answer is not None and answer.response.status_code < 500:
            raise _explain(request, answer) from error
        what = "is having trouble" if answer is not None else "cannot be reached"
        raise HubError(f"the hub {what}, so {request.name} cannot be looked at; give a folder instead") from error


class _Request:
    """Whom we asked for what: enough to word a message, without the token itself."""

    def __init__(self, api, repo_id: str, revision: str | None, token: str | bool | None) -> None:
        from huggingface_hub import get_token

        self.api, self.repo_id, self.revision = api, repo_id, revision
        self.has_token = bool(token) if token is not None else get_token() is not None
        self.name = f"{repo_id} (revision {revision})" if revision else repo_id
        self.page = f"{api.endpoint}/{repo_id}"


def _fetch(
    request: _Request, commit: str, present: set[str], cache_dir: str | os.PathLike | None, weights: bool
) -> Path:
    def get(file: str) -> Path:
        return Path(
            request.api.hf_hub_download(request.repo_id, file, revision=commit, cache_dir=cache_dir, etag_timeout=30)
        )

    first = [file for file in (CONFIG, *_TEXT_FILES) if file in present]
    if weights and CONFIG not in present:
        hint = other_layout({file for file in present if "/" not in file})
        raise HubError(
            f"{request.name} holds no {CONFIG}: it is not a model in Hugging Face layout ({request.page})"
            + (f"; {hint}" if hint else "")
        )
    if not first:
        raise HubError(f"{request.name} holds neither {CONFIG} nor a tokenizer ({request.page})")
    kind = next((name for name in _WEIGHTS if name in present), None)
    if weights and kind is None:
        raise _no_weights(request, present)
    folder = get(first[0]).parent
    shards = []
    if weights and kind in (INDEX, PICKLE_INDEX):
        folder = get(kind).parent
        shards = _shards(request, folder, kind)
        absent = [file for file in shards if file not in present]
        if absent:
            raise HubError(f"{request.name} lacks files that its own {kind} names: {', '.join(absent)}")
    elif weights:
        shards = [kind]
    templates = sorted(file for file in present if _NAMED_TEMPLATE.fullmatch(file))
    for file in (*first[1:], *templates, *shards):
        get(file)
    _remember(request, folder, commit)
    return folder


def _shards(request: _Request, folder: Path, index: str) -> list[str]:
    try:
        return sorted(set(read_index(folder, index).values()))
    except CheckpointError as error:
        raise HubError(f"{request.name}: {error}") from error


def _remember(request: _Request, folder: Path, commit: str) -> None:
    """Note which commit the branch stood at, as the hub's client does, so that the cache can be used offline."""
    revision = request.revision or "main"
    if revision == commit or re.fullmatch(r"[0-9a-f]{40}", revision):
        return
    reference = folder.parent.parent / "refs" / revision
    if folder.parent.name == "snapshots":
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text(commit)


def _from_cache(request: _Request, cache_dir: str | os.PathLike | None, weights: bool, reason: str) -> Path:
    """The cached snapshot, if it is complete. The network is not asked."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    def cached(file: str) -> str | None:
        try:
            found = try_to_load_from_cache(request.repo_id, file, cache_dir=cache_dir, revision=request.revision)
        except HFValidationError as error:
            raise HubError(f"{request.repo_id!r} is not the name of a repository: expected 'owner/name'") from error
        return found if isinstance(found, str) else None  # else None, or a marker that the hub lacks the file

    anchor = next(filter(None, map(cached, (CONFIG, *_TEXT_FILES, *_WEIGHTS))), None)
    if anchor is None:
        here = "" if Path(request.repo_id).exists() else f". There is no folder {request.repo_id} either"
        raise HubError(
            f"{request.name} is not in the cache, and {reason}. Connect once to download it, or pass the cache_dir "
            f"that holds it{here}"
        )
    folder = Path(anchor).parent
    wanted = [CONFIG] if weights else []
    if weights:
        kind = next((name for name in _WEIGHTS if (folder / name).is_file()), SINGLE)
        wanted += _shards(request, folder, kind) if kind in (INDEX, PICKLE_INDEX) else [kind]
    missing = [file for file in wanted if not (folder / file).is_file()]
    if missing:
        raise HubError(
            f"the cached copy of {request.name} is incomplete, and {reason}. It lacks: {', '.join(missing)}. "
            f"Connect to finish the download ({folder})"
        )
    return folder


def _http_error(error: BaseException | None):
    """The HTTP answer behind an error: the client wraps some answers in "not found in the cache"."""
    from huggingface_hub.errors import HfHubHTTPError

    while error is not None and not isinstance(error, HfHubHTTPError):
        error = error.__cause__
    return error


def _explain(request: _Request, error) -> HubError:
    from huggingface_hub.errors import DisabledRepoError, EntryNotFoundError, GatedRepoError, RevisionNotFoundError

    name, page, status = request.name, request.page, error.response.status_code
    if isinstance(error, GatedRepoError):
        if request.has_token:
            return HubError(
                f"{name} is gated, and the token in use has no access to it. Request access on the repository's page "
                f"({page}) with the account that the token belongs to, or wait for its approval"
            )
        return HubError(
            f"{name} is gated: accept its licence on the repository's page ({page}), then pass token= or run "
            "`hf auth login`"
        )
    if isinstance(error, RevisionNotFoundError):
        return HubError(f"{request.repo_id} has no revision {request.revision!r}: check the branch, tag or commit")
    if isinstance(error, DisabledRepoError):
        return HubError(f"{name} has been disabled by the hub ({page})")
    if status == 401 and request.has_token:
        return HubError(f"the token in use was refused (expired, revoked or mistyped) when asking for {name}; renew it")
    if status == 403:
        return HubError(
            f"access to {name} is forbidden: the token in use may not read it (a fine-grained token needs the "
            f"permission to read this repository, {page})"
            if request.has_token
            else f"access to {name} is forbidden without a token: pass token= or run `hf auth login`"
        )
    if isinstance(error, EntryNotFoundError):
        return HubError(f"{name} lists a file that it does not hold ({error.response.url.path})")
    if status in (401, 404):
        private = "" if request.has_token else ", or it is private and needs token="
        seen = " for the account of the token in use" if request.has_token else ""
        return HubError(f"there is no repository {name}{seen}: check the spelling ('owner/name'){private}")
    if status == 429:
        return HubError(f"the hub limits how often it is asked (429) and refused {name}: wait a few minutes")
    return HubError(f"the hub answered {status} when asked for {name} ({page})")


def _no_weights(request: _Request, present: set[str]) -> HubError:
    hint = other_layout({file for file in present if "/" not in file})
    pickles = sorted(file for file in present if "/" not in file and file.endswith(PICKLES))
    if hint:
        hint = f": download it, and {hint}" if hint.startswith("convert") else f": {hint}"
    elif pickles:
        hint = f": {', '.join(pickles[:3])} are not named as a model's weights are ({PICKLE})"
    return HubError(f"{request.name} holds no weights, neither {' nor '.join(_WEIGHTS)} ({request.page}){hint}")
