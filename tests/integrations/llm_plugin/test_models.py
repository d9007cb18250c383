"""What `llm` gets from the plugin's models, asked from Python and from the command line."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("llm")

import llm
from llm.parts import ReasoningPart
from pydantic import BaseModel

from llm_spec import (
    ConfigError,
    Finish,
    ReasoningDelta,
    SpeculativeDecoder,
    TargetError,
    TextDelta,
    ToolCallDelta,
    Usage,
)
from llm_spec.integrations.llm_plugin import (
    _BRIDGE,
    AsyncSpeculativeModel,
    ModelSpec,
    SpeculativeModel,
    read_model_specs,
)
from llm_spec.testing import RuleBasedProvider, ScriptedProvider

PROMPT = "def area(radius):"
WORDS = "".join(f"word{i} " for i in range(30))
BUILTIN = ModelSpec(name="builtin", target="builtin:target", draft="lookup+builtin:draft", tools=False)
RULES = ModelSpec(name="rules", target="rules:any")


class Pet(BaseModel):
    name: str
    age: int


def add_numbers(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def scripted(provider: ScriptedProvider) -> ModelSpec:
    return ModelSpec(name="scripted", target=provider)


def until_closed(provider: ScriptedProvider) -> None:
    """Wait, a second at most: the upstream ends on another thread."""
    for _ in range(1000):
        if not provider.num_open:
            return
        time.sleep(0.001)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_is_the_decoders(temperature: float) -> None:
    """A prompt on the built-in pair is answered with the very text that the decoder gives, usage too."""

    async def alone() -> tuple[str, Usage | None]:
        async with SpeculativeDecoder(target="builtin:target", draft="lookup+builtin:draft") as decoder:
            result = await decoder.decode(PROMPT, max_tokens=48, temperature=temperature, seed=5)
            return result.content, result.usage

    text, usage = asyncio.run(alone())
    response = SpeculativeModel(BUILTIN).prompt(PROMPT, max_tokens=48, temperature=temperature, seed=5)
    assert response.text() == text
    assert usage is not None
    assert (response.usage().input, response.usage().output) == (usage.input_tokens, usage.output_tokens)
    assert response.response_json is not None
    assert (response.response_json["strategy"], response.response_json["guarantee"]) == ("tokens", "exact")
    assert json.dumps(response.response_json)


async def test_the_async_model_gives_the_same() -> None:
    """`AsyncSpeculativeModel` answers on any loop with the same text."""
    response = AsyncSpeculativeModel(BUILTIN).prompt(PROMPT, max_tokens=32)
    expected = await asyncio.to_thread(SpeculativeModel(BUILTIN).prompt(PROMPT, max_tokens=32).text)
    assert await response.text() == expected
    assert (await response.usage()).output


def test_a_strategy_may_be_asked_for() -> None:
    """`-o strategy plain` turns speculation off for one prompt, and the text stays."""
    model = SpeculativeModel(BUILTIN)
    plain = model.prompt(PROMPT, max_tokens=24, strategy="plain")
    assert plain.text() == model.prompt(PROMPT, max_tokens=24).text()
    assert plain.response_json is not None
    assert plain.response_json["strategy"] == "plain"
    with pytest.raises(llm.ModelError, match="strategy"):
        model.prompt(PROMPT, strategy="wishful").text()


def test_a_model_has_a_limit_of_its_own() -> None:
    """`max_tokens` of the model holds where the option says nothing; the built-in pair has one, others where given."""
    provider = ScriptedProvider("Hi")
    model = SpeculativeModel(ModelSpec(name="scripted", target=provider, max_tokens=500))
    model.prompt("Hello").text()
    model.prompt("Hello", max_tokens=7).text()
    assert [request.max_tokens for request in provider.requests] == [500, 7]
    given = '[{"name": "x", "target": "builtin:target", "max_tokens": %s}]'
    assert [spec.max_tokens for spec in read_model_specs(None, {"LLM_SPEC_TARGET": "a:b"})] == [128, None]
    assert read_model_specs(given % 9, {})[0].max_tokens == 9
    for wrong in ("0", "true", '"9"'):
        with pytest.raises(ConfigError, match="max_tokens"):
            read_model_specs(given % wrong, {})


def test_streaming_comes_in_pieces() -> None:
    """A response is iterated piece by piece; without streaming it is the same text."""
    model = SpeculativeModel(RULES)
    pieces = list(model.prompt("one two three"))
    assert "".join(pieces) == "You said: one two three" == model.prompt("one two three", stream=False).text()
    assert len(pieces) > 2


def test_a_conversation_goes_on() -> None:
    """What was said before is sent along, the system prompt once."""
    provider = ScriptedProvider("Fine.")
    conversation = SpeculativeModel(scripted(provider)).conversation()
    conversation.prompt("Hello", system="Be kind.").text()
    conversation.prompt("Again", system="Be kind.").text()
    told = [(m.role, m.text) for m in provider.requests[-1].messages]
    assert told == [("system", "Be kind."), ("user", "Hello"), ("assistant", "Fine."), ("user", "Again")]


def test_options_reach_the_provider() -> None:
    """Every option is the request's own field; JSON is read where the command line can give nothing else."""
    provider = ScriptedProvider("Hi")
    options = {"top_p": 0.9, "top_k": 5, "min_p": 0.1, "stop": "END", "logit_bias": '{"5": 1}', "json_object": True}
    SpeculativeModel(scripted(provider)).prompt("Go", presence_penalty=0.5, **options).text()
    [request] = provider.requests
    sampling = request.sampling
    assert (sampling.top_p, sampling.top_k, sampling.min_p, sampling.logit_bias) == (0.9, 5, 0.1, {5: 1.0})
    assert (sampling.presence_penalty, request.stop) == (0.5, ("END",))
    assert request.response_format == {"type": "json_object"}


def test_a_tool_is_called_and_answered() -> None:
    """A chain with a tool goes there and back."""
    chain = SpeculativeModel(RULES).chain("Add the numbers 3 and 4.", tools=[add_numbers])
    assert chain.text() == "The tool said: 7"


async def test_a_tool_round_trip_of_the_async_model() -> None:
    """The async chain does the same."""
    chain = AsyncSpeculativeModel(RULES).chain("Add the numbers 3 and 4.", tools=[add_numbers])
    assert await chain.text() == "The tool said: 7"


def test_a_call_without_an_id_gets_one() -> None:
    """Calls in one answer stay apart where the server gives them no id."""
    calls = [ToolCallDelta(n, None, "add_numbers", f'{{"a": {n}, "b": 1}}') for n in range(2)]
    provider = ScriptedProvider([*calls, Finish("tool_calls")])
    response = SpeculativeModel(scripted(provider)).prompt("Go", tools=[add_numbers])
    found = response.tool_calls()
    assert [call.arguments for call in found] == [{"a": 0, "b": 1}, {"a": 1, "b": 1}]
    assert len({call.tool_call_id for call in found}) == 2
    assert len(response.messages()[0].parts) == 2


def test_a_call_that_is_not_json_is_an_error() -> None:
    """Arguments that cannot be read are reported, not guessed."""
    provider = ScriptedProvider([ToolCallDelta(0, "call", "add_numbers", '{"a": '), Finish("tool_calls")])
    with pytest.raises(llm.ModelError, match="add_numbers"):
        SpeculativeModel(scripted(provider)).prompt("Go", tools=[add_numbers]).text()


def test_structured_output() -> None:
    """A schema, as a class or as JSON, is answered with JSON that fits."""
    text = SpeculativeModel(RULES).prompt("A dog named 'Rex', 3 years old.", schema=Pet).text()
    assert Pet.model_validate_json(text) == Pet(name="Rex", age=3)


def test_the_built_in_pair_keeps_to_a_schema() -> None:
    """With the extra `grammar` the local pair's answer is valid, tools it has none."""
    model = SpeculativeModel(BUILTIN)
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    answer = json.loads(model.prompt(PROMPT, schema={**schema, "additionalProperties": False}).text())
    assert type(answer["ok"]) is bool
    with pytest.raises(ValueError, match="does not support tools"):
        model.prompt(PROMPT, tools=[add_numbers])


def test_an_image_is_sent_along() -> None:
    """A model that is configured for images gets them as content parts."""
    provider = ScriptedProvider("A dot.")
    model = SpeculativeModel(ModelSpec(name="sees", target=provider, images=True))
    image = llm.Attachment(type="image/png", content=b"dot")
    model.prompt("What?", attachments=[image]).text()
    assert provider.requests[0].messages[0].content == (
        {"type": "text", "text": "What?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,ZG90"}},
    )


def test_reasoning_is_a_part() -> None:
    """What a provider shows of its reasoning is kept apart from the text, and its tokens counted."""
    usage = Usage(input_tokens=1, output_tokens=2, reasoning_tokens=1)
    provider = ScriptedProvider([ReasoningDelta("hm"), TextDelta("Yes."), Finish("stop", usage)])
    response = SpeculativeModel(scripted(provider)).prompt("Really?")
    assert response.text() == "Yes."
    assert response.messages()[0].parts[0] == ReasoningPart("hm")
    assert response.usage().details == {"reasoning_tokens": 1}


def test_leaving_early_closes_the_upstream() -> None:
    """Whoever drops a response after its first piece leaves no upstream generating."""
    provider = ScriptedProvider(WORDS, delay_piece_s=0.001)
    pieces = iter(SpeculativeModel(scripted(provider)).prompt("Go"))
    assert next(pieces) == "word0"
    assert provider.num_open == 1
    del pieces
    until_closed(provider)
    assert (provider.num_open, provider.num_closed) == (0, 1)


def test_a_forgotten_response_may_be_collected_on_any_thread() -> None:
    """The collector may run on the plugin's own thread; that closes the upstream and waits for nothing."""
    provider = ScriptedProvider(WORDS, delay_piece_s=0.001)
    pieces = SpeculativeModel(scripted(provider)).prompt("Go").__iter__()
    next(pieces)

    async def collect() -> None:
        pieces.close()  # type: ignore[attr-defined] # a generator

    _BRIDGE.run(collect)
    until_closed(provider)
    assert provider.num_open == 0


def test_a_process_ends_with_a_response_half_read() -> None:
    """Nothing waits at the end of the process for what nobody reads any more."""
    code = (
        "from llm_spec.integrations.llm_plugin import ModelSpec, SpeculativeModel\n"
        "pieces = iter(SpeculativeModel(ModelSpec(name='r', target='rules:any')).prompt('one two three'))\n"
        "print(next(pieces))\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "You\n", "")


async def test_cancellation_passes_through() -> None:
    """A cancelled task of the async model ends as cancelled, with the upstream closed."""
    provider = ScriptedProvider(WORDS, delay_piece_s=3600.0)
    task = asyncio.ensure_future(AsyncSpeculativeModel(scripted(provider)).prompt("Go").text())
    while not provider.num_open:  # noqa: ASYNC110 - a provider tells nobody when it is asked
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(until_closed, provider)
    assert provider.num_open == 0


@pytest.mark.parametrize("at", [0, 3])
def test_errors_are_llms_own(at: int) -> None:
    """What the target raises comes as llm.ModelError, which the command line shows, with the upstream closed."""
    provider = ScriptedProvider(WORDS, fail_at={at: TargetError("broken")})
    with pytest.raises(llm.ModelError, match="broken") as raised:
        SpeculativeModel(scripted(provider)).prompt("Go").text()
    assert isinstance(raised.value.__cause__, TargetError)
    assert provider.num_open == 0


async def test_errors_of_the_async_model() -> None:
    """The async model raises the same."""
    provider = ScriptedProvider(WORDS, fail_at={2: TargetError("broken")})
    with pytest.raises(llm.ModelError, match="broken"):
        await AsyncSpeculativeModel(scripted(provider)).prompt("Go").text()


def test_eight_prompts_at_once() -> None:
    """Prompts from eight threads share nothing but the pair."""
    model = SpeculativeModel(BUILTIN)
    prompts = [f"def f{i}(self):" for i in range(8)]

    def answer(prompt: str) -> str:
        return model.prompt(prompt, max_tokens=16).text()

    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(answer, prompts))
    assert together == list(map(answer, prompts))


def test_a_decoder_may_be_given() -> None:
    """A provider that is a decoder already answers itself."""
    decoder = SpeculativeDecoder(target=RuleBasedProvider(), draft=None)
    assert SpeculativeModel(ModelSpec(name="given", target=decoder)).prompt("one").text() == "You said: one"


# ------------------------------------------------------------------------------------------- configuration


def test_without_a_file_there_is_the_built_in_pair() -> None:
    """Nothing configured: one model."""
    assert [spec.name for spec in read_model_specs(None, {})] == ["builtin"]


def test_file_and_environment_name_models() -> None:
    """A file lists its models and no other; the environment adds one."""
    text = json.dumps([{"name": "code", "target": "rules:a", "draft": "lookup", "strategy": "plain", "tools": False}])
    environment = {"LLM_SPEC_TARGET": "rules:b", "LLM_SPEC_DRAFT": "suffix"}
    code, default = read_model_specs(text, environment)
    assert code == ModelSpec(name="code", target="rules:a", draft="lookup", strategy="plain", tools=False)
    assert default == ModelSpec(name="default", target="rules:b", draft="suffix")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "not valid JSON"),
        ("{}", "list"),
        ('["code"]', "code"),
        ('[{"name": "code"}]', "target"),
        ('[{"name": "code", "target": "rules", "speed": 9}]', "speed"),
        ('[{"name": "code", "target": 7}]', "target"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(text: str, told: str) -> None:
    """An entry that cannot be read is named."""
    with pytest.raises(ConfigError, match=told):
        read_model_specs(text, {})


def run_llm(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "llm", *arguments],
        env={"LLM_USER_PATH": str(folder), "PATH": "/usr/bin", "PYTHONPATH": os.environ["PYTHONPATH"], **environment},
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def test_the_command_answers_with_the_built_in_pair(tmp_path: Path) -> None:
    """`llm -m llm-spec/builtin …` streams an answer and logs how it came about."""
    ended = run_llm(tmp_path, "-m", "llm-spec/builtin", "-o", "max_tokens", "16", PROMPT)
    assert (ended.returncode, ended.stderr) == (0, "")
    [logged] = json.loads(run_llm(tmp_path, "logs", "-n", "1", "--json").stdout)
    assert logged["response"].strip() == ended.stdout.strip()
    assert logged["response_json"]["strategy"] == "tokens"
    assert logged["output_tokens"] <= 16


def test_the_command_knows_the_file_and_the_environment(tmp_path: Path) -> None:
    """Models of both are listed, and answer; an unknown provider is reported in one line."""
    entries = [{"name": "mine", "target": "rules:any"}, {"name": "odd", "target": "nowhere:at-all"}]
    (tmp_path / "llm_spec.json").write_text(json.dumps(entries))
    listed = run_llm(tmp_path, "models", LLM_SPEC_TARGET="rules:any").stdout
    assert {"llm-spec/mine", "llm-spec/odd", "llm-spec/default"} <= set(listed.split())
    assert run_llm(tmp_path, "-m", "llm-spec/mine", "one two").stdout.strip() == "You said: one two"
    odd = run_llm(tmp_path, "-m", "llm-spec/odd", "one two")
    assert odd.returncode == 1
    assert odd.stderr.startswith("Error: provider 'nowhere'")


def test_a_wrong_file_leaves_llm_usable(tmp_path: Path) -> None:
    """A broken configuration is reported on stderr; everything else of `llm` goes on."""
    (tmp_path / "llm_spec.json").write_text("{")
    ended = run_llm(tmp_path, "models")
    assert ended.returncode == 0
    assert ended.stderr.startswith("llm-spec: llm_spec.json is not valid JSON")
    assert "llm-spec/" not in ended.stdout
