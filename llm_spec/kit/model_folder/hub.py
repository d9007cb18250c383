"""Fetches models of the Hugging Face hub through its own library.

The library's cache, token, endpoint and offline mode apply:
https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final, Protocol

from llm_spec.contract.errors import ModelLoadError

__all__ = [
    "FetchDisplay",
    "fetch_from_hub",
    "is_hub_name",
    "list_folder_files",
    "list_hub_files",
    "show_fetches_on",
    "tell_about_fetch",
]

_TOKENIZER: Final = "tokenizer.json"
_TEXT_FILES: Final = (
    "config.json",
    "generation_config.json",
    _TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)
_MB: Final = 1_000_000


class FetchDisplay(Protocol):
    """A place where a program shows what is fetched."""

    def change_line(self, line: str) -> None:
        """Show a line in place of the previous one."""
        ...

    def print_line(self, line: str) -> None:
        """Show a permanent line."""
        ...


_DISPLAY: Final[ContextVar[FetchDisplay | None]] = ContextVar("llm_spec_fetch_display", default=None)


@contextmanager
def show_fetches_on(display: FetchDisplay) -> Generator[None]:
    """Show on `display` what is fetched inside the `with` block.

    Without a display, the hub's library shows its own progress.
    """
    token = _DISPLAY.set(display)
    try:
        yield
    finally:
        _DISPLAY.reset(token)


def tell_about_fetch(line: str) -> None:
    """Show a permanent line, if a program shows what is fetched."""
    display = _DISPLAY.get()
    if display is not None:
        display.print_line(line)


def is_hub_name(model: str) -> bool:
    """Return True if a model's name can be one of the hub: `org/name`."""
    parts = model.split("/")
    return len(parts) == 2 and all(part and not part.startswith((".", "~")) for part in parts)


def fetch_from_hub(
    name: str, choose_weights: Callable[[Path], Sequence[str]], *, text_files: Sequence[str] = ()
) -> Path:
    """Fetch a model unless the cache has it; returns its folder, which is named for its commit.

    Many repositories have their weights in several forms. So the text files come first:
    `text_files` and the usual ones. Then `choose_weights(folder)` returns the paths of the weights
    to fetch. Raises ModelLoadError with what is wrong and what to do.
    """
    hub: Any = importlib.import_module("huggingface_hub")
    bar: Any = _make_progress_bar_class(name)
    try:
        folder = Path(hub.snapshot_download(name, allow_patterns=[*_TEXT_FILES, *text_files], tqdm_class=bar))
        if not (folder / _TOKENIZER).is_file():
            raise ModelLoadError(f"{name} of the Hugging Face hub has no {_TOKENIZER}; choose another model")
        for path in choose_weights(folder):
            # in this thread: with several threads, Ctrl-C would wait for the file that each is
            # fetching
            hub.hf_hub_download(name, path, revision=folder.name, tqdm_class=bar)
        return folder
    except ModelLoadError:
        raise
    except Exception as error:
        # the hub's errors and those of the network below it have no common base class
        raise ModelLoadError(_describe_failure(name, error)) from error


def list_hub_files(name: str, folder: Path) -> Mapping[str, int]:
    """Return the paths and sizes of a repository's files, fetched or not.

    Raises the errors of the hub's library.
    """
    hub: Any = importlib.import_module("huggingface_hub")
    entries = hub.HfApi().list_repo_tree(name, recursive=True, revision=folder.name)
    # a folder has none
    return {entry.path: entry.size for entry in entries if hasattr(entry, "size")}


def list_folder_files(folder: Path) -> Mapping[str, int]:
    """Return the paths and sizes of a folder's files."""
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()}


def _make_progress_bar_class(name: str) -> Any:
    """Make the library's progress bar show its progress on the program's display.

    Without a display, it is shown on a terminal only.
    """
    utils: Any = importlib.import_module("huggingface_hub.utils")
    display = _DISPLAY.get()

    class FetchBar(utils.tqdm):  # type: ignore[misc] # the library is loaded late: an unknown class
        def __init__(self, *args: Any, **options: Any) -> None:
            self._counts_bytes = options.get("unit") == "B"  # the library counts files as well
            self._num_done = 0
            utils.tqdm.__init__(self, *args, **options | {"disable": None if display is None else True})

        def update(self, n: float | None = 1) -> Any:
            if display is not None and self._counts_bytes:
                self._num_done += int(n or 0)
                total = f" of {self.total / _MB:.0f}" if self.total else ""
                display.change_line(f"fetching {name}: {self._num_done / _MB:.0f}{total} MB")
            return utils.tqdm.update(self, n)

    return FetchBar


def _describe_failure(name: str, error: Any) -> str:
    errors: Any = importlib.import_module("huggingface_hub.errors")
    cause = error.__cause__ or error
    if isinstance(error, errors.GatedRepoError):
        what = "is gated; accept its terms on its page of the hub, and set HF_TOKEN to a token of that account"
    elif isinstance(error, errors.RepositoryNotFoundError):
        what = "does not exist there, or is private; check the name, or set HF_TOKEN to a token that may read it"
    elif isinstance(error, errors.RemoteEntryNotFoundError):
        what = f"lacks a file that it names, {error.response.url.path.rpartition('/')[2]}; choose another model"
    elif isinstance(error, errors.HfHubHTTPError) and error.response.status_code == 401:
        what = "was not sent, because the hub does not know the token; check HF_TOKEN"
    elif isinstance(cause, errors.OfflineModeIsEnabled):
        what = "is not cached in whole, and HF_HUB_OFFLINE is set; fetch it once without HF_HUB_OFFLINE"
    elif isinstance(error, errors.LocalEntryNotFoundError):
        what = f"is not cached in whole, and the hub did not answer ({type(cause).__name__}); check the network"
    else:
        what = f"could not be fetched ({type(error).__name__}); try again"
    return f"{name} of the Hugging Face hub {what}"
