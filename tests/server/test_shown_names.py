"""What clients are told of a model: what it is, not where."""

from __future__ import annotations

import pytest
from support.serving import ask, serving
from support.tiny_models import BUILTIN

from llm_spec.decoder.entry_points import NamedProvider
from llm_spec.server import ModelConfig, ServerConfig
from llm_spec.server.models import ServedModels
from llm_spec.server.problems import get_public_name


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("vllm:org/name@http://host/v1", "vllm:org/name"),
        ("ollama:llama3:8b", "ollama:llama3:8b"),
        ("generic:@cf/x@http://u:p@host/v1", "generic:@cf/x"),
        ("torch:org/name@refs", "torch:org/name@refs"),
        ("onnx:/srv/secret/tiny", "onnx:tiny"),
        ("torch:~/models/tiny?dtype=float32", "torch:tiny"),
        ("torch:org/name?batched=true", "torch:org/name"),
        ("lookup+onnx:./models/tiny", "lookup+onnx:tiny"),
        (r"onnx:\srv\tiny", "onnx:tiny"),
        ("lookup", "lookup"),
    ],
)
def test_of_a_path_only_the_last_part_is_shown(text: str, shown: str) -> None:
    assert get_public_name(text) == shown


def test_where_servers_and_files_are_is_hidden() -> None:
    models = {
        "a": ModelConfig(target="onnx:/srv/secret/tiny", draft="lookup+torch:/srv/other?dtype=float32"),
        "b": ModelConfig(target="vllm:x@http://gpu7.example:9000/v1", draft="big:x"),
        "c": ModelConfig(target="vllm:@cf/x@http://u:p@gpu8:9000/v1?a=1", draft="lookup+vllm:y@http://gpu9:9000/v1"),
    }
    big = NamedProvider(type="generic", base_url="http://ollama:11434/v1")
    secret_texts = ServedModels(ServerConfig(models=models, providers={"big": big})).secret_texts
    assert set(secret_texts) == {
        "/srv/secret/tiny",
        "/srv/other",
        "http://gpu7.example:9000/v1",
        "gpu7.example:9000",
        "gpu7.example",
        "http://ollama:11434/v1",
        "ollama:11434",
        "http://gpu8:9000/v1",
        "gpu8:9000",
        "http://gpu9:9000/v1",
        "gpu9:9000",
    }
    assert [*secret_texts] == sorted(secret_texts, key=len, reverse=True)  # or a part of one would remain


async def test_an_error_does_not_tell_where_a_model_is() -> None:
    """A model in this process is called by its folder."""
    folder = str(BUILTIN / "target")
    async with serving({"fast": ModelConfig(target=f"onnx:{folder}")}) as server:
        (model,) = (await server.get("/v1/models")).json["data"]
        refused = await server.chat("x" * 1_000_000)
        traced = await server.post(
            "/v1/chat/completions", ask("/chat", stream=True, max_tokens=1), x_llm_spec_trace="1"
        )
    assert model["llm_spec"]["target"] == "onnx:target"
    assert refused.status == 400
    for reply in (refused, traced):
        assert folder not in reply.data.decode()
