"""What bounds an answer bounds it on every way to the target, and no request can hold up the others."""

from __future__ import annotations

import time
from typing import Any, Final

import pytest
import structlog
from support.serving import ask, remote, serving

from llm_spec import ConfigError, SpeculativeConfig
from llm_spec.contract.errors import InvalidRequestError
from llm_spec.decoder.telemetry import RequestLogContext
from llm_spec.server import KeyConfig, ModelConfig, ServerConfig
from llm_spec.server.apis.relay import ChunkMerger
from llm_spec.server.clients import ApiClient
from llm_spec.server.problems import convert_error_to_problem, redact_server_details
from llm_spec.testing.server import ScriptedModelServer, ServerLatency

CHAT: Final = "/v1/chat/completions"
KEY: Final = "sk-alice-0123"
TOLD: Final = {"Authorization": f"Bearer {KEY}"}
WORDS: Final = " ".join(f"word{i}" for i in range(200))


@pytest.mark.parametrize("number", [1, 3])
async def test_the_operators_caps_hold_for_several_choices(number: int) -> None:
    """`max_total_tokens` reaches the target, however many choices are asked for, whatever the client says."""
    capped = SpeculativeConfig(max_total_tokens=7)
    async with ScriptedModelServer(WORDS) as upstream, serving(remote(upstream.url, speculative=capped)) as server:
        assert (await server.chat(n=number, max_tokens=5000)).status == 200
    assert upstream.requests[-1]["max_tokens"] == 7


async def test_a_deadline_ends_several_choices_too() -> None:
    """A target's own chunks are waited for no longer than any answer."""
    soon = SpeculativeConfig(deadline_s=0.2)
    async with (
        ScriptedModelServer(WORDS, latency=ServerLatency(token_s=0.05)) as upstream,
        serving(remote(upstream.url, speculative=soon)) as server,
    ):
        reply = await server.chat(n=2)
    assert reply.status in (502, 504)
    assert "deadline" in reply.error["message"]


@pytest.mark.parametrize("number", [1, 2])
async def test_who_leaves_pays_for_what_came(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that goes away in the middle has used tokens, whether its answer is one or several."""
    spent: list[int] = []
    keys = {"alice": KeyConfig(key=KEY, max_tokens=100_000)}
    original = ApiClient.can_use_model

    def watched(client: ApiClient, model: str) -> bool:
        if client.budget is not None:
            spent.append(client.budget.spent_tokens)
        return original(client, model)

    monkeypatch.setattr(ApiClient, "can_use_model", watched)
    async with (
        ScriptedModelServer(WORDS, latency=ServerLatency(token_s=0.01)) as upstream,
        serving(remote(upstream.url), keys=keys) as server,
    ):
        body = ask(CHAT, n=number, stream=True)
        async with server.session.post(server.url + CHAT, json=body, headers=TOLD) as response:
            for _ in range(5):
                await response.content.readany()
            response.close()
        for _ in range(50):
            await server.get("/v1/models", **TOLD)
            if spent[-1]:
                break
    assert spent[-1] > 5


async def test_a_budget_too_small_for_the_prompt_is_said() -> None:
    """An empty answer would be taken for one."""
    keys = {"alice": KeyConfig(key=KEY, max_tokens=10)}
    async with serving(ModelConfig(target="rules:any"), keys=keys) as server:
        reply = await server.post(CHAT, ask(CHAT, "word " * 50), **TOLD)
    assert (reply.status, reply.error["code"]) == (429, "insufficient_quota")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/responses", {"max_tokens": 5000}),
        ("/v1/responses", {"messages": [{"role": "user", "content": "else"}]}),
        ("/v1/responses", {"n": 64}),
        ("/v1/messages", {"max_completion_tokens": 5000}),
        ("/v1/messages", {"stream_options": {"include_usage": False}}),
        ("/v1/completions", {"best_of": 20}),
        (CHAT, {"models": ["dearer"]}),
    ],
)
async def test_what_this_library_says_to_a_target_is_not_the_clients(path: str, fields: dict[str, Any]) -> None:
    """A field of another API would pass by caps, budgets and the names of models."""
    async with ScriptedModelServer(WORDS) as upstream, serving(remote(upstream.url)) as server:
        reply = await server.post(path, ask(path, **fields))
    assert reply.status == 400
    assert next(iter(fields)) in reply.data.decode()
    assert not upstream.requests


async def test_prompts_are_counted() -> None:
    """A list of prompts is bounded, since each is an answer."""
    async with serving(ModelConfig(target="rules:any")) as server:
        assert (await server.post("/v1/completions", {"model": "fast", "prompt": ["a"] * 129})).status == 400
        assert (await server.post("/v1/completions", {"model": "fast", "prompt": ["a"] * 3})).status == 200


async def test_log_probabilities_of_a_prompt_are_asked_for() -> None:
    """`echo` goes to the target with `logprobs`, also where none but those of the text itself are wanted."""
    async with ScriptedModelServer(WORDS) as upstream, serving(remote(upstream.url)) as server:
        body = {"model": "fast", "prompt": "word0", "echo": True, "logprobs": 0, "max_tokens": 2}
        await server.post("/v1/completions", body)
    assert (upstream.requests[-1]["echo"], upstream.requests[-1]["logprobs"]) == (True, 0)


def test_a_long_error_takes_no_time() -> None:
    """What quotes a client is cut, and searched in no more than linear time."""
    for text in ("(aError: " * 100_000, " at https://" * 100_000, "(aError: (" * 100_000):
        started_s = time.process_time()
        problem = convert_error_to_problem(InvalidRequestError(f"role is {text!r}"))
        assert time.process_time() - started_s < 30.0  # in quadratic time each takes minutes
        assert len(problem.message) < 1100
    assert (
        redact_server_details("vllm:a at http://1.2.3.4:5/v1 broke (OSError: [Errno 1] ('1.2.3.4', 5))")
        == "vllm:a broke"
    )


@pytest.mark.parametrize("choices", [[1, 0], [0, 1]])
def test_choices_in_any_order(choices: list[int]) -> None:
    """A chunk's choices go where their index says."""
    merger = ChunkMerger()
    merger.add_chunk({"choices": [{"index": index, "text": f"text {index}"} for index in choices]})
    whole = merger.build_response_body(answer_id="a", model="m", kind="text_completion")
    assert [choice["text"] for choice in whole["choices"]] == ["text 0", "text 1"]


def test_two_clients_with_one_key_are_refused() -> None:
    """The second's limits would never hold."""
    keys = {name: KeyConfig(key=KEY) for name in ("alice", "bob")}
    with pytest.raises(ConfigError, match="twice"):
        ServerConfig(models={"a": ModelConfig(target="rules:any")}, keys=keys)


async def test_a_number_beyond_all_is_refused() -> None:
    """What JSON can write and no number holds does not come back as Infinity."""
    async with serving(ModelConfig(target="rules:any")) as server:
        body = b'{"model": "fast", "input": "Hi", "metadata": {"a": 1e999}}'
        assert (await server.post("/v1/responses", body)).status == 400


def test_a_context_within_itself() -> None:
    """A request's log context may be entered where it is open already."""
    context = RequestLogContext()
    with context, context:
        assert "llm_request_id" in structlog.contextvars.get_contextvars()
    assert "llm_request_id" not in structlog.contextvars.get_contextvars()
