"""Which fields of a request reach the target: safe ones, those that its operator passes on, and no second limit."""

from __future__ import annotations

import json
from typing import Any, Final

import pytest
from support.serving import ENDPOINTS, ask, remote, serving

from llm_spec import ConfigError, SpeculativeConfig, SpeculativeDecoder
from llm_spec.contract.fields import LIMIT_FIELDS
from llm_spec.server import ModelConfig, load_config
from llm_spec.testing import ScriptedProvider
from llm_spec.testing.clock import run_virtual
from llm_spec.testing.server import ScriptedModelServer

CHAT: Final = "/v1/chat/completions"
SAFE: Final[dict[str, Any]] = {
    "reasoning_effort": "low",
    "user": "me",
    "mirostat": 1,
    "guided_json": {},
    "min_tokens": 1,
}
UNSAFE: Final[dict[str, Any]] = {
    "prompt_embeds": "AAAA",
    "chat_template": "{{ 1 }}",
    "chat_template_kwargs": {"chat_template": "x"},
    "lora": [{"id": 0}],
    "kv_transfer_params": {"remote_host": "169.254.169.254"},
    "priority": -1000,
    "id_slot": 0,
    "service_tier": "priority",
    "use_beam_search": True,
    "mystery": 1,
    "Model": "big",
}
LIMITS: Final[dict[str, Any]] = {
    "n_predict": 2000,
    "max_new_tokens": 2000,
    "num_predict": 2000,
    "options": {"num_predict": 2000},
    "MAX_TOKENS": 2000,
}


async def sent(model_fields: dict[str, Any], path: str = CHAT, **fields: Any) -> tuple[dict[str, Any], str]:
    """What reaches a target of a request with these fields, and what its client is told of the others."""
    async with (
        ScriptedModelServer("one two three four five six seven") as upstream,
        serving(remote(upstream.url, **model_fields)) as server,
    ):
        reply = await server.post(path, ask(path, **{"max_tokens": 5, **fields}))
        assert reply.status == 200, reply.data
        return upstream.requests[-1], reply.headers.get("x-llm-spec-left-out", "")


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_what_is_not_safe_is_left_out(path: str) -> None:
    """By every API; the client is told which fields those are."""
    if path.endswith("/responses"):
        reached, told = await sent({}, path, max_tokens=None, max_output_tokens=5, **UNSAFE)
    else:
        reached, told = await sent({}, path, **UNSAFE)
    assert not UNSAFE.keys() & reached.keys()
    assert {"prompt_embeds", "chat_template", "mystery", "Model"} <= set(told.split(", "))


async def test_what_is_safe_passes() -> None:
    """How to sample, think and keep to a form, and labels."""
    reached, told = await sent({}, **SAFE)
    assert reached.items() >= SAFE.items()
    assert told == ""


async def test_an_operator_passes_more_on() -> None:
    """Some by their names, or all."""
    reached, told = await sent({"extra_fields": ("lora", "mystery")}, **UNSAFE)
    assert reached.keys() & UNSAFE.keys() == {"lora", "mystery"}
    assert "lora" not in told
    assert "priority" in told
    reached, told = await sent({"extra_fields": ("*",)}, **UNSAFE)
    assert reached.items() >= UNSAFE.items()
    assert told == ""


@pytest.mark.parametrize("extra_fields", [(), ("*",)])
async def test_a_second_limit_never_passes(extra_fields: tuple[str, ...]) -> None:
    """Whatever the operator passes on: `max_tokens` and the server's own caps are the limit."""
    capped = SpeculativeConfig(max_total_tokens=3)
    for model_fields, limit in (({}, 5), ({"speculative": capped}, 3)):
        reached, told = await sent({"extra_fields": extra_fields, **model_fields}, **LIMITS)
        assert not LIMITS.keys() & reached.keys()
        assert reached["max_tokens"] == limit
        assert set(told.split(", ")) == LIMITS.keys()


async def test_an_odd_name_is_no_trouble() -> None:
    """What no header can carry is not told."""
    odd: dict[str, Any] = {"a\r\nSet-Cookie: b": 1, "名": 2, "x" * 500: 3}
    reached, told = await sent({}, CHAT, **odd)
    assert told == ""
    assert not {"名"} & reached.keys()


def test_a_decoders_caps_win_over_extra() -> None:
    """In a program, too: where a cap or a budget holds, no other word for it goes along."""
    for config in ({"max_total_tokens": 3}, {"max_request_tokens": 30}):
        target = ScriptedProvider("one two")
        extra = {"n_predict": 99, "max_tokens": 0, "mirostat": 1}
        decoder = SpeculativeDecoder(target=target, draft=None, config=SpeculativeConfig(**config))  # type: ignore[arg-type]
        run_virtual(decoder.decode("q", extra=extra))
        assert target.requests[0].extra == {"mirostat": 1}


@pytest.mark.parametrize("name", sorted(LIMIT_FIELDS))
def test_a_limit_cannot_be_passed_on(name: str) -> None:
    with pytest.raises(ConfigError, match="extra_fields has"):
        ModelConfig(target="t", extra_fields=(name,))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("extra_fields = 'lora'", "extra_fields is 'lora'; it must be a list of texts"),
        ("extra_fields = ['n_predict']", "extra_fields has 'n_predict'"),
        ("strategies = ['mystery']", "strategies has 'mystery'; each must be one of auto"),
        ("strategies = 'race'", "strategies is 'race'; it must be a list of texts"),
    ],
)
def test_the_config_says_what_is_wrong(line: str, told: str, tmp_path: Any) -> None:
    path = tmp_path / "server.toml"
    path.write_text(f"[models.m]\ntarget = 'rules:any'\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert told in str(caught.value)
    assert "line 3" in str(caught.value)


def test_the_config_is_read(tmp_path: Any) -> None:
    path = tmp_path / "server.toml"
    lists = {"strategies": ["race", "judge"], "extra_fields": ["lora"]}
    path.write_text(
        "[models.m]\ntarget = 'rules:any'\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in lists.items())
    )
    model = load_config(path).models["m"]
    assert (model.strategies, model.extra_fields) == (("race", "judge"), ("lora",))
