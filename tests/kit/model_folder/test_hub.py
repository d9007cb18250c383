"""Models fetched from a double of the hub: what is needed of them, once, and each failure as one clear error."""

from __future__ import annotations

import threading
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hub import COMMIT, HubDouble, use_hub

from llm_spec.contract.errors import ModelLoadError
from llm_spec.kit.model_folder.hub import (
    fetch_from_hub,
    list_folder_files,
    list_hub_files,
    show_fetches_on,
    tell_about_fetch,
)

NAME = "somebody/model"
WEIGHTS = "onnx/model.onnx"
TEXTS = {
    "config.json": b"{}",
    "tokenizer.json": b"{ }",
    "tokenizer_config.json": b"{  }",
    "chat_template.jinja": b"hello",
    "additional_chat_templates/tools.jinja": b"hello, tools",
}  # all of them differ, as the cache has equal files once
OTHERS = {"README.md": b"# A model", "onnx/model_q4.onnx": b"4" * 500, "vocab.json": b"{   }"}


@pytest.fixture
def hub() -> Iterator[HubDouble]:
    with HubDouble({NAME: TEXTS | OTHERS | {WEIGHTS: b"w" * 4000}}) as double:
        yield double


@pytest.fixture
def patched(hub: HubDouble, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    with use_hub(hub, tmp_path / "cache") as patched:
        yield patched


def fetch(name: str = NAME) -> Path:
    return fetch_from_hub(name, lambda _: [WEIGHTS])


def go_offline(patched: pytest.MonkeyPatch) -> None:
    """As HF_HUB_OFFLINE=1."""
    patched.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


class Display:
    def __init__(self) -> None:
        self.moving = list[str]()
        self.lines = list[str]()

    def change_line(self, line: str) -> None:
        self.moving.append(line)

    def print_line(self, line: str) -> None:
        self.lines.append(line)


@pytest.mark.usefixtures("patched")
def test_what_is_needed_is_fetched_once(hub: HubDouble) -> None:
    folder = fetch()
    fetched = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert fetched == TEXTS | {WEIGHTS: b"w" * 4000}
    assert (folder.name, hub.sent) == (COMMIT, {path: len(content) for path, content in fetched.items()})
    assert fetch() == folder
    assert sum(hub.sent.values()) == sum(map(len, fetched.values()))


@pytest.mark.usefixtures("patched")
def test_more_text_files_may_be_named() -> None:
    folder = fetch_from_hub(NAME, lambda _: [WEIGHTS], text_files=["vocab.json", "no_such.json"])
    assert (folder / "vocab.json").is_file()


def test_a_cached_model_needs_no_hub(hub: HubDouble, patched: pytest.MonkeyPatch) -> None:
    folder = fetch()
    sent = sum(hub.sent.values())
    go_offline(patched)
    assert fetch() == folder
    assert sum(hub.sent.values()) == sent


@pytest.mark.usefixtures("patched")
def test_files_are_listed_with_their_sizes() -> None:
    """Fetched or not; and of a folder those that are there."""
    folder = fetch()
    fetched = {path: len(content) for path, content in (TEXTS | {WEIGHTS: b"w" * 4000}).items()}
    assert list_folder_files(folder) == fetched
    assert list_hub_files(NAME, folder) == fetched | {path: len(content) for path, content in OTHERS.items()}


def test_offline_without_a_cache(hub: HubDouble, patched: pytest.MonkeyPatch) -> None:
    go_offline(patched)
    with pytest.raises(ModelLoadError, match=r"somebody/model .* is not cached in whole, and HF_HUB_OFFLINE is set"):
        fetch()
    assert hub.sent == {}


def test_offline_with_a_part_of_it(patched: pytest.MonkeyPatch) -> None:
    """The weights of another kind were fetched before."""
    fetch_from_hub(NAME, lambda _: ["onnx/model_q4.onnx"])
    go_offline(patched)
    with pytest.raises(ModelLoadError, match="is not cached in whole, and HF_HUB_OFFLINE is set"):
        fetch()


@pytest.mark.usefixtures("patched")
def test_no_network(hub: HubDouble) -> None:
    """Nothing listens there any more."""
    hub.close()
    try:
        with pytest.raises(
            ModelLoadError, match=r"not cached in whole, and the hub did not answer \(ConnectError\); check the net"
        ):
            fetch()
    finally:
        pass


@pytest.mark.usefixtures("patched")
def test_no_network_with_a_cache(hub: HubDouble) -> None:
    folder = fetch()
    hub.close()
    assert fetch() == folder


@pytest.mark.usefixtures("patched")
def test_a_name_that_the_hub_does_not_have() -> None:
    """It answers 401 to those without a key, as for private ones."""
    with pytest.raises(
        ModelLoadError, match=r"nobody/nothing of the Hugging Face hub does not exist there, or is private; .*HF_TOK"
    ):
        fetch("nobody/nothing")


@pytest.mark.usefixtures("patched")
def test_a_gated_model(hub: HubDouble) -> None:
    hub.gated.add(NAME)
    with pytest.raises(ModelLoadError, match=r"somebody/model .* is gated; accept its terms .* HF_TOKEN"):
        fetch()


def test_a_token_that_the_hub_does_not_know(hub: HubDouble, patched: pytest.MonkeyPatch) -> None:
    """The error does not show it."""
    patched.setenv("HF_TOKEN", "hf_secret")
    hub.tokens = {"hf_other"}
    with pytest.raises(
        ModelLoadError, match=r"somebody/model .* the hub does not know the token; check HF_T"
    ) as failed:
        fetch()
    assert "hf_secret" not in str(failed.value)
    patched.setenv("HF_TOKEN", "hf_other")
    assert fetch().name == COMMIT


@pytest.mark.usefixtures("patched")
def test_a_missing_tokenizer_is_found_before_the_weights(hub: HubDouble) -> None:
    del hub.files[NAME]["tokenizer.json"]
    with pytest.raises(ModelLoadError, match=r"somebody/model of the Hugging Face hub has no tokenizer\.json"):
        fetch()
    assert WEIGHTS not in hub.sent


@pytest.mark.usefixtures("patched")
def test_weights_that_the_repository_names_but_lacks() -> None:
    """As an index of parts may."""
    with pytest.raises(ModelLoadError, match=r"somebody/model .* lacks a file that it names, part\.safetensors"):
        fetch_from_hub(NAME, lambda _: ["weights/part.safetensors"])


def test_ctrl_c_ends_a_download_at_once(patched: pytest.MonkeyPatch) -> None:
    """Weights are fetched in the thread that is interrupted, so that none goes on with them."""
    threads = set[threading.Thread]()
    patched.setattr(Display, "change_line", lambda _, __: threads.add(threading.current_thread()))
    fetch_from_hub(NAME, lambda _: [])
    with show_fetches_on(Display()):
        fetch()
    assert threads == {threading.current_thread()}


@pytest.fixture
def patient(patched: pytest.MonkeyPatch) -> None:
    """The hub's library waits a second before it tries again, and keeps what it has by the piece."""
    patched.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 100)
    patched.setattr("huggingface_hub.file_download.time", types.SimpleNamespace(sleep=lambda _: None))


@pytest.mark.usefixtures("patient")
def test_a_download_that_breaks_off_goes_on(hub: HubDouble) -> None:
    """From where it was, and nothing is fetched twice."""
    hub.num_breaks = 2
    assert (fetch() / WEIGHTS).read_bytes() == b"w" * 4000
    assert hub.sent[WEIGHTS] == 4000


@pytest.mark.usefixtures("patient")
def test_a_download_that_breaks_off_again_and_again(hub: HubDouble) -> None:
    """No half file is taken for the weights, and the next try has all of them."""
    hub.num_breaks = 10_000
    with pytest.raises(
        ModelLoadError, match=r"somebody/model .* could not be fetched \(RemoteProtocolError\); try again"
    ):
        fetch()
    hub.num_breaks = 0
    assert (fetch() / WEIGHTS).read_bytes() == b"w" * 4000


@pytest.mark.usefixtures("patched")
def test_a_display_is_shown_how_much_is_fetched() -> None:
    display = Display()
    with show_fetches_on(display):
        fetch()
        tell_about_fetch("done")
    assert display.moving[-1] == f"fetching {NAME}: 0 of 0 MB"
    assert display.lines == ["done"]
    tell_about_fetch("nobody is told")
    assert display.lines == ["done"]


@pytest.mark.usefixtures("patched")
def test_nothing_is_shown_elsewhere_than_on_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    fetch()
    assert capfd.readouterr() == ("", "")
