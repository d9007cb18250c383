"""llm: models that its extra-openai-models.yaml names, over chat completions and over responses."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("llm")

import llm
from support.two_servers import MODEL

pytestmark = pytest.mark.filterwarnings("default")


def get_weather(city: str) -> str:
    """The weather."""
    return f"sunny in {city}"


@pytest.fixture(params=["chat", "responses"])
def model(request: pytest.FixtureRequest, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> llm.Model:
    config = (
        f"- {{model_id: served, model_name: {MODEL}, api_base: '{url}/v1', supports_tools: true, supports_schema: true"
    )
    extra = ", responses: true}" if request.param == "responses" else "}"
    (tmp_path / "extra-openai-models.yaml").write_text(config + extra, encoding="utf-8")
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    return llm.get_model("served")


@pytest.mark.parametrize("stream", [False, True])
def test_text(model: llm.Model, stream: bool) -> None:
    answer = model.prompt("Good morning", system="Be kind", stream=stream)
    pieces = list(answer)
    assert "".join(pieces) == "You said: Good morning"
    assert (sum(map(bool, pieces)) > 1) == stream
    assert answer.usage().output == 5


@pytest.mark.parametrize("stream", [False, True])
def test_tool(model: llm.Model, stream: bool) -> None:
    chain = model.chain("What is the weather in 'Paris'?", tools=[get_weather], stream=stream)
    assert chain.text().endswith("The tool said: sunny in Paris")


@pytest.mark.parametrize("stream", [False, True])
def test_json(model: llm.Model, stream: bool) -> None:
    answer = model.prompt("The sum is 42", schema=llm.schema_dsl("total int"), stream=stream)
    assert answer.json() is not None
    assert '"total": 42' in answer.text()
