"""Gateway: requests over HTTP to decoders, and their answers back."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Awaitable, Callable
from functools import lru_cache, partial
from importlib.resources import files
from typing import Final, TypeAlias
from urllib.parse import urlsplit

from aiohttp import hdrs, web

from llm_spec._clock import now
from llm_spec.errors import LlmSpecError
from llm_spec.json_text import dumps
from llm_spec.server.apis import APIS, Api, Naming
from llm_spec.server.bodies import Asked, read_model
from llm_spec.server.clients import Client, Clients
from llm_spec.server.config import ServerConfig, is_loopback
from llm_spec.server.exchange import Exchange
from llm_spec.server.fields import left_out_header
from llm_spec.server.intake import Intake, Received
from llm_spec.server.metrics import CONTENT_TYPE, Metrics
from llm_spec.server.models import ServedModel, ServedModels
from llm_spec.server.parsing import apart
from llm_spec.server.problems import Problem, problem_of
from llm_spec.server.token_count import count_tokens
from llm_spec.telemetry import log_event, new_request_id

__all__ = ["NAME", "Gateway"]

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]

_OPENAI: Final = APIS["/v1/chat/completions"]
_MESSAGES: Final = APIS["/v1/messages"]
_BETAS: Final = "anthropic-beta"  # features that some of its fields need
NAME: Final = "llm-spec"  # not which version of what
_NAME: Final = {"Server": NAME}
_PAGE_HEADERS: Final = {
    **_NAME,
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
_TRACE: Final = "x-llm-spec-trace"


class Gateway:
    """Serves the models of a config to its clients."""

    def __init__(self, config: ServerConfig, models: ServedModels, clients: Clients, metrics: Metrics) -> None:
        self._config = config
        self._models = models
        self._clients = clients
        self._metrics = metrics
        self._hidden = models.hidden
        self._num_open = 0
        self._intake = Intake(config)
        self._page = files("llm_spec.server").joinpath("page.html").read_bytes()
        self._origin_refusal = lru_cache(1024)(self._find_origin_refusal)  # nearly always the same host
        self.is_ending = False

    def app(self) -> web.Application:
        """The application, with every path also without its /v1."""
        app = web.Application(middlewares=[self._guard], client_max_size=self._config.max_body_bytes)
        for path, api in APIS.items():
            for place in (path, path.removeprefix("/v1")):
                app.router.add_post(place, partial(self._answer, api))
        for prefix in ("/v1", ""):
            app.router.add_post(f"{prefix}/messages/count_tokens", self._count_tokens)
            app.router.add_get(f"{prefix}/models", self._list_models)
            app.router.add_get(f"{prefix}/models/{{name:.+}}", self._one_model)
        app.router.add_get("/health", self._ready)
        app.router.add_get("/health/live", self._live)
        app.router.add_get("/health/ready", self._ready)
        app.router.add_get("/metrics", self._tell_metrics)
        app.router.add_get("/", self._show_page)
        return app

    # ------------------------------------------------------------------------------------------ all requests

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse what comes from other pages, and tell of errors in the API's own form."""
        try:
            self._check_origin(request)
            if request.method == hdrs.METH_OPTIONS:
                return web.Response(status=204, headers=self._headers(request))
            return await handler(request)
        except Problem as problem:
            return self._refuse(request, problem)
        except web.HTTPException as error:
            refusal = self._refuse(request, Problem(error.status, error.reason or "not served here"))
            if hdrs.ALLOW in error.headers:
                refusal.headers[hdrs.ALLOW] = error.headers[hdrs.ALLOW]
            return refusal
        except LlmSpecError as error:
            return self._refuse(request, self._problem(error))
        except asyncio.CancelledError:
            self._metrics.left.inc()
            raise
        except ConnectionError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the client hears of it
            return self._refuse(request, self._problem(error))

    def _problem(self, error: Exception) -> Problem:
        """What a client hears of an error; a log hears its type, and where it happened if it is nobody's doing."""
        problem = problem_of(error, self._hidden)
        if not isinstance(error, LlmSpecError):
            where = "".join(traceback.format_tb(error.__traceback__))  # its message may quote the request
            logging.getLogger("llm_spec").error("a request failed: %s\n%s", type(error).__name__, where)
        return problem

    def _refuse(self, request: web.Request, problem: Problem) -> web.Response:
        self._metrics.errors.labels(str(problem.status)).inc()
        request_id = new_request_id()
        log_event(
            "refused",
            level=logging.WARNING,
            request_id=request_id,
            path=request.path,
            status=problem.status,
            code=problem.code,
        )
        path = request.path.removesuffix("/count_tokens")
        api = APIS.get(path) or APIS.get(f"/v1{path}") or _OPENAI
        headers = {"x-request-id": request_id, **problem.headers}
        return self._json(request, api.problem(problem), status=problem.status, headers=headers)

    def _json(
        self, request: web.Request, body: object, *, status: int = 200, headers: dict[str, str] | None = None
    ) -> web.Response:
        return web.Response(
            body=dumps(body),
            status=status,
            content_type="application/json",
            headers={**(headers or {}), **self._headers(request)},
        )

    def _check_origin(self, request: web.Request) -> None:
        """A page from elsewhere may not ask through its reader's browser, nor by a name that it made point here."""
        told = self._origin_refusal(request.headers.get(hdrs.HOST, ""), request.headers.get(hdrs.ORIGIN))
        if told is not None:
            raise Problem(403, told[0], code=told[1])

    def _find_origin_refusal(self, host: str, origin: str | None) -> tuple[str, str] | None:
        """Why, and the code for it."""
        if origin is not None and origin not in self._config.cors_origins and not _is_same(origin, host):
            return "pages from other origins may not ask here; see cors_origins", "origin"
        name = _name_in(host)
        if not self._config.keys and not (is_loopback(name) or name == self._config.host):
            return "without keys this server answers to its loopback address alone", "host"
        return None

    def _headers(self, request: web.Request) -> dict[str, str]:
        """What every answer has; its origin's page may read it where the config says so."""
        origin = request.headers.get(hdrs.ORIGIN)
        if origin is None or origin not in self._config.cors_origins:
            return _NAME
        return {
            **_NAME,
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Allow-Headers": "authorization, *",  # SDKs have many; the star is not for this one
            "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
            "Access-Control-Expose-Headers": "*",
            "Vary": "Origin",
        }

    # ------------------------------------------------------------------------------------------ small things

    async def _list_models(self, request: web.Request) -> web.Response:
        client = self._clients.find(request.headers)
        models = [model.describe() for model in self._models.all_for(client)]
        return self._json(request, {"object": "list", "data": models})

    async def _one_model(self, request: web.Request) -> web.Response:
        client = self._clients.find(request.headers)
        return self._json(request, self._models.find(request.match_info["name"], client).describe())

    async def _live(self, request: web.Request) -> web.Response:
        return self._json(request, {"status": "ok"})

    async def _ready(self, request: web.Request) -> web.Response:
        if self.is_ending:
            return self._json(request, {"status": "ending"}, status=503)
        return self._json(request, {"status": "ok"})

    async def _tell_metrics(self, request: web.Request) -> web.Response:
        client = self._clients.find(request.headers)
        text = self._metrics.text(self._models.all, self._models.all_for(client))
        return web.Response(body=text, headers={**_NAME, "Content-Type": CONTENT_TYPE})

    async def _show_page(self, _: web.Request) -> web.Response:
        return web.Response(body=self._page, content_type="text/html", charset="utf-8", headers=_PAGE_HEADERS)

    # ------------------------------------------------------------------------------------------ answers

    async def _count_tokens(self, request: web.Request) -> web.StreamResponse:
        client = self._clients.find(request.headers)
        self._begin(client)
        try:
            async with self._intake.body(request) as received:
                body = {**received.fields, "max_tokens": 1}  # it has no such field
                model = self._models.find(read_model(body), client)
                asked, _ = await self._read(_MESSAGES, request, received._replace(fields=body), model)
                counted = await count_tokens(model.target, asked[0].request)
        finally:
            self._end(client)
        return self._json(request, {"input_tokens": counted})

    async def _answer(self, api: Api, request: web.Request) -> web.StreamResponse:
        started_s = now()
        client = self._clients.find(request.headers)
        self._begin(client)
        try:
            async with self._intake.body(request) as received:
                return await self._exchange(api, request, received, client, started_s)
        finally:
            self._end(client)

    async def _exchange(
        self, api: Api, request: web.Request, received: Received, client: Client, started_s: float
    ) -> web.StreamResponse:
        model = self._models.find(read_model(received.fields), client)
        self._metrics.count_request(api.name, model.name)
        asked, left_out = await self._read(api, request, received, model)
        naming = Naming(
            answer_id=new_request_id(),
            model=model.name,
            trace=request.headers.get(_TRACE) == "1",
            started_s=started_s,
        )
        exchange = Exchange(
            request,
            config=self._config,
            metrics=self._metrics,
            api=api,
            model=model,
            client=client,
            asked=asked,
            naming=naming,
            headers={**self._headers(request), **left_out_header(left_out)},
            problem_of=self._problem,
        )
        return await exchange.respond()

    async def _read(
        self, api: Api, request: web.Request, received: Received, model: ServedModel
    ) -> tuple[list[Asked], list[str]]:
        """What is asked, and the names of fields that the target is not sent."""
        body = received.fields
        if api is _MESSAGES and _BETAS in request.headers:
            body["betas"] = [name.strip() for name in request.headers[_BETAS].split(",")]
        reading = partial(api.read, body, model.speaks)
        return model.leave_out(await apart(reading) if received.is_long else reading())

    def _begin(self, client: Client) -> None:
        """Let a request in; raises Problem where there are too many."""
        if self._num_open >= self._config.max_requests:
            raise Problem(503, "the server answers as many requests as it may", code="overloaded", retry_after_s=1.0)
        client.begin()
        self._num_open += 1
        self._metrics.count_open(self._num_open)

    def _end(self, client: Client) -> None:
        client.end()
        self._num_open -= 1
        self._metrics.count_open(self._num_open)


def _is_same(origin: str, host: str) -> bool:
    try:
        return urlsplit(origin).netloc == host
    except ValueError:
        return False


def _name_in(host: str) -> str:
    """A Host header without its port; "" where it is no address."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
