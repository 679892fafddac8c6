"""Models of the Hugging Face hub: only the files that are read here, and no others.

`huggingface_hub` fetches them into its own cache, shared with other programs, and applies
the user's settings (HF_HOME, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE). What is cached is found
without a network.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimaran.core.errors import DownloadError, ModelNotFoundError, TrimaranError, nearest

if TYPE_CHECKING:
    from trimaran.models.store import Progress

_ANSWER_SECONDS = 15.0

_DESCRIPTIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
)
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")


def fetch_from_hub(
    name: str,
    *,
    progress: Progress | None = None,
    endpoint: str | None = None,
    cache_dir: Path | None = None,
) -> Path:
    """The folder of "owner/name", or the one GGUF file of "owner/name/file.gguf".

    A repository without safetensors and with exactly one GGUF file gives that file.

    Args:
        endpoint: of the hub, if not the user's.
        cache_dir: of huggingface_hub, if not the user's.

    Raises:
        ModelNotFoundError: the hub has no such repository or file.
        DownloadError: it could not be fetched; says what to do.
    """
    owner, repository, *rest = name.split("/")
    repo, wanted = f"{owner}/{repository}", "/".join(rest)
    sizes: Mapping[str, int] | None = None
    try:
        sizes = _list_files(repo, endpoint)
        files = _choose(repo, wanted, sizes)
    except TrimaranError:
        raise
    except Exception as error:
        files = _choose_cached(repo, wanted, cache_dir, error)
    folder = _download(repo, files, sizes, progress, endpoint, cache_dir)
    gguf = [file for file in files if file.endswith(".gguf")]
    return folder / gguf[0] if gguf else folder


def _list_files(repo: str, endpoint: str | None) -> dict[str, int]:
    """Sizes in bytes by name.

    Raises:
        ModelNotFoundError, DownloadError: the hub answered, and refused.
        Exception: of many kinds, where the hub can't be reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        info = HfApi(endpoint=endpoint).model_info(
            repo, files_metadata=True, timeout=_ANSWER_SECONDS
        )
    except GatedRepoError:
        raise DownloadError(
            f"{repo} is only for those who accepted its terms: do so on its page of the hub, then"
            " log in with `hf auth login`"
        ) from None
    except RepositoryNotFoundError:
        raise ModelNotFoundError(
            f"the hub has no model {repo}, or it is private; check the name, or log in with"
            " `hf auth login`"
        ) from None
    except HFValidationError as error:
        raise ModelNotFoundError(f"{repo} is no name of the hub: {error}") from None
    return {file.rfilename: file.size or 0 for file in info.siblings or ()}


def _choose(repo: str, wanted: str, names: Mapping[str, int] | Sequence[str]) -> list[str]:
    """The files of a repository that make its model."""
    gguf = sorted(name for name in names if name.endswith(".gguf"))
    listed = ", ".join(gguf[:20])
    if wanted:
        if wanted not in names:
            raise ModelNotFoundError(
                f"{repo} has no file {wanted}.{nearest(wanted, gguf)}"
                f" Its GGUF files are: {listed or 'none'}"
            )
        return [wanted]
    weights = _safetensors(names)
    if "config.json" in names and weights:
        return [*(name for name in _DESCRIPTIONS if name in names), *weights]
    if len(gguf) == 1:
        return gguf
    if gguf:
        raise ModelNotFoundError(
            f"{repo} has {len(gguf)} GGUF files; name one of them, as {repo}/{gguf[0]}: {listed}"
        )
    raise ModelNotFoundError(
        f"{repo} has neither config.json with safetensors nor a GGUF file, so it can't be loaded;"
        " give another model"
    )


def _safetensors(names: Mapping[str, int] | Sequence[str]) -> list[str]:
    if _SINGLE in names:
        return [_SINGLE]
    shards = sorted(name for name in names if _SHARD.fullmatch(name))
    return [_INDEX, *shards] if _INDEX in names and shards else []


def _choose_cached(repo: str, wanted: str, cache_dir: Path | None, error: Exception) -> list[str]:
    """The files of an earlier download, now that the hub can't be asked."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    failure = _failure(repo, error)
    try:
        folder = Path(snapshot_download(repo, local_files_only=True, cache_dir=cache_dir))
    except LocalEntryNotFoundError as missing:
        # A snapshot is incomplete to huggingface_hub when files are missing that aren't wanted.
        folder = Path(getattr(missing, "snapshot_path", None) or "")
        if folder == Path():
            raise failure from error
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    try:
        files = _choose(repo, wanted, names)
    except ModelNotFoundError:
        raise failure from error
    if _INDEX in files and not _has_all_shards(folder, files):
        raise failure from error
    return files


def _has_all_shards(folder: Path, files: Sequence[str]) -> bool:
    text = (folder / _INDEX).read_text("utf-8", "replace")
    return set(re.findall(_SHARD, text)) <= set(files)


def _download(
    repo: str,
    files: Sequence[str],
    sizes: Mapping[str, int] | None,
    progress: Progress | None,
    endpoint: str | None,
    cache_dir: Path | None,
) -> Path:
    from huggingface_hub import snapshot_download

    total = 0 if sizes is None else sum(sizes[name] for name in files)
    try:
        folder = snapshot_download(
            repo,
            # Names are taken for patterns: brackets would be a choice of characters.
            allow_patterns=[re.sub(r"([*?[])", r"[\1]", name) for name in files],
            local_files_only=sizes is None,
            endpoint=endpoint,
            cache_dir=cache_dir,
            tqdm_class=None if progress is None else _silent_bar(progress, total),
        )
    except Exception as error:
        raise _failure(repo, error) from error
    if progress is not None and sizes is not None:
        progress(total, total)
    return Path(folder)


def _failure(repo: str, error: Exception) -> DownloadError:
    said = " ".join(str(error).split())[:400]
    return DownloadError(
        f"{repo} could not be fetched from the Hugging Face hub ({type(error).__name__}: {said});"
        " check the network, the free space in HF_HOME and, behind a mirror, HF_ENDPOINT; or"
        " give the path of a model's file or folder"
    )


def _silent_bar(progress: Progress, total: int) -> Any:
    """A class of progress bars that draws nothing and reports bytes."""
    from huggingface_hub.utils.tqdm import tqdm

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counts_bytes = kwargs.get("unit") == "B"
            self._bytes = int(kwargs.get("initial") or 0)
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            if self._counts_bytes:
                self._bytes += int(n or 0)
                progress(min(self._bytes, total), total)
            super().update(n)

    return Bar
