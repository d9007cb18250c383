"""Passes HTTP requests to decoders, and answers back to clients."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Awaitable, Callable
from functools import lru_cache, partial
from typing import Final, TypeAlias
from urllib.parse import urlsplit

from aiohttp import hdrs, web

from llm_spec.contract.errors import LlmSpecError
from llm_spec.decoder.telemetry import log_event, make_request_id
from llm_spec.kit.json import dumps
from llm_spec.measure.clock import now
from llm_spec.server.apis import APIS, AnswerEncodingContext, ApiDefinition
from llm_spec.server.apis.fields import ParsedRequest, build_dropped_fields_header, get_requested_model_name
from llm_spec.server.apis.system_placement import build_changes_header, place_system_texts_of_request
from llm_spec.server.apis.tool_images import place_images_of_request
from llm_spec.server.body_reader import BodyReader, RequestBody
from llm_spec.server.clients import ApiClient, ClientRegistry
from llm_spec.server.config import ServerConfig, is_loopback
from llm_spec.server.connections import SERVER_NAME
from llm_spec.server.json_decoder import run_in_body_thread
from llm_spec.server.metrics import CONTENT_TYPE, ServerMetrics
from llm_spec.server.models import ServedModel, ServedModels
from llm_spec.server.page import build_page
from llm_spec.server.problems import HttpProblem, convert_error_to_problem
from llm_spec.server.responder import Responder
from llm_spec.server.session_ids import add_session_id
from llm_spec.server.token_count import count_request_tokens

__all__ = ["Gateway"]

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]

_CHAT_API: Final = APIS["/v1/chat/completions"]
_MESSAGES_API: Final = APIS["/v1/messages"]
_RESPONSES_API: Final = APIS["/v1/responses"]
_ANTHROPIC_HEADER: Final = "anthropic-version"  # sent by every client of Anthropic's API
_BETAS_HEADER: Final = "anthropic-beta"  # features that some request fields need
_SERVER_HEADER: Final = {"Server": SERVER_NAME}
_PAGE_HEADERS: Final = {
    **_SERVER_HEADER,
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
_OPENAI_STATUSES: Final = {529: 503}  # Anthropic's own status for "overloaded"
_TRACE_HEADER: Final = "x-llm-spec-trace"


class Gateway:
    """Serves the models of a config to its clients."""

    def __init__(
        self, config: ServerConfig, models: ServedModels, clients: ClientRegistry, metrics: ServerMetrics
    ) -> None:
        self._config = config
        self._models = models
        self._clients = clients
        self._metrics = metrics
        self._secret_texts = models.secret_texts
        self._num_open = 0
        self._body_reader = BodyReader(config)
        self._page = build_page().encode()
        self._cached_origin_refusal = lru_cache(1024)(self._find_origin_refusal)  # nearly always the same host
        self.is_shutting_down = False
        self.wait_for_last_bodies = self._body_reader.wait_for_last_bodies

    def build_app(self) -> web.Application:
        """Build the application; every path also works without its /v1."""
        app = web.Application(
            middlewares=[self._check_origin_and_report_errors], client_max_size=self._config.max_body_bytes
        )
        for path, api in APIS.items():
            for route in (path, path.removeprefix("/v1")):
                app.router.add_post(route, partial(self._handle_answer_request, api))
                if api is _RESPONSES_API:
                    app.router.add_get(route, self._refuse_websocket, allow_head=False)
        for prefix in ("/v1", ""):
            app.router.add_post(f"{prefix}/messages/count_tokens", self._handle_count_tokens)
            app.router.add_get(f"{prefix}/models", self._handle_list_models)
            app.router.add_get(f"{prefix}/models/{{name:.+}}", self._handle_get_model)
            app.router.add_get(f"{prefix}/budget", self._handle_budget)
        app.router.add_get("/health", self._handle_readiness)
        app.router.add_get("/health/live", self._handle_liveness)
        app.router.add_get("/health/ready", self._handle_readiness)
        app.router.add_get("/metrics", self._handle_metrics)
        app.router.add_get("/", self._handle_page)
        return app

    # --------------------------------------------------------------------------------- all requests

    @web.middleware
    async def _check_origin_and_report_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse requests from other origins, and report errors in the API's own form."""
        try:
            self._check_origin(request)
            if request.method == hdrs.METH_OPTIONS:
                return web.Response(status=204, headers=self._build_common_headers(request))
            return await handler(request)
        except HttpProblem as problem:
            return self._build_error_response(request, problem)
        except web.HTTPException as error:
            refusal = self._build_error_response(request, HttpProblem(error.status, error.reason or "not served here"))
            if hdrs.ALLOW in error.headers:
                refusal.headers[hdrs.ALLOW] = error.headers[hdrs.ALLOW]
            return refusal
        except asyncio.CancelledError:
            self._metrics.cancelled.inc()
            raise
        except ConnectionError:
            self._metrics.cancelled.inc()
            # Nobody receives this; if it were raised, aiohttp would log it with a traceback
            return web.Response(status=499)
        except Exception as error:  # noqa: BLE001 - every error becomes an answer
            return self._build_error_response(request, self._convert_error_to_problem(error))

    def _convert_error_to_problem(self, error: Exception) -> HttpProblem:
        """Convert an error to what a client sees; log type and traceback of an unexpected one."""
        problem = convert_error_to_problem(error, self._secret_texts)
        if not isinstance(error, LlmSpecError):
            # Its message is not logged, since it may quote the request
            where = "".join(traceback.format_tb(error.__traceback__))
            logging.getLogger("llm_spec").error("a request failed: %s\n%s", type(error).__name__, where)
        return problem

    def _build_error_response(self, request: web.Request, problem: HttpProblem) -> web.Response:
        path = request.path.removesuffix("/count_tokens")
        default_api = _MESSAGES_API if _ANTHROPIC_HEADER in request.headers else _CHAT_API
        api = APIS.get(path) or APIS.get(f"/v1{path}") or default_api
        status = problem.status if api is _MESSAGES_API else _OPENAI_STATUSES.get(problem.status, problem.status)
        self._metrics.errors.labels(str(status)).inc()
        request_id = make_request_id()
        log_event(
            "refused",
            level=logging.WARNING,
            llm_request_id=request_id,
            path=request.path,
            status=status,
            code=problem.code,
        )
        headers = {"x-request-id": request_id, **problem.retry_headers}
        return self._build_json_response(request, api.build_error(problem), status=status, headers=headers)

    def _build_json_response(
        self, request: web.Request, body: object, *, status: int = 200, headers: dict[str, str] | None = None
    ) -> web.Response:
        return web.Response(
            body=dumps(body),
            status=status,
            content_type="application/json",
            headers={**(headers or {}), **self._build_common_headers(request)},
        )

    def _check_origin(self, request: web.Request) -> None:
        """Refuse requests that pages of other origins send in a browser, also by DNS rebinding."""
        refusal = self._cached_origin_refusal(request.headers.get(hdrs.HOST, ""), request.headers.get(hdrs.ORIGIN))
        if refusal is not None:
            raise HttpProblem(403, refusal[0], code=refusal[1])

    def _find_origin_refusal(self, host: str, origin: str | None) -> tuple[str, str] | None:
        """Return the reason and the code of a refusal, or None if the origin is allowed."""
        if origin is not None and origin not in self._config.cors_origins and not _is_same_origin(origin, host):
            return "pages from other origins are not allowed; see cors_origins", "origin"
        name = _get_hostname(host)
        if not self._config.keys and not (is_loopback(name) or name == self._config.host):
            return "without keys this server only answers on its loopback address", "host"
        return None

    def _build_common_headers(self, request: web.Request) -> dict[str, str]:
        """Build the headers of every answer, with those of CORS if the config lists its origin."""
        origin = request.headers.get(hdrs.ORIGIN)
        if origin is None or origin not in self._config.cors_origins:
            return _SERVER_HEADER
        return {
            **_SERVER_HEADER,
            "Access-Control-Allow-Origin": origin,
            # SDKs send many headers; the star does not cover `authorization`
            "Access-Control-Allow-Headers": "authorization, *",
            "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
            "Access-Control-Expose-Headers": "*",
            "Vary": "Origin",
        }

    # --------------------------------------------------------------------------------- small things

    async def _handle_list_models(self, request: web.Request) -> web.Response:
        client = self._clients.authenticate(request.headers)
        models = self._models.list_for_client(client)
        if _ANTHROPIC_HEADER not in request.headers:
            listed = [model.to_openai_model() for model in models]
            return self._build_json_response(request, {"object": "list", "data": listed})
        ends = {"first_id": models[0].name, "last_id": models[-1].name} if models else {}
        listed = [model.to_anthropic_model() for model in models]
        return self._build_json_response(request, {"data": listed, "has_more": False, **ends})

    async def _handle_get_model(self, request: web.Request) -> web.Response:
        client = self._clients.authenticate(request.headers)
        model = self._models.find_for_client(request.match_info["name"], client)
        is_anthropics = _ANTHROPIC_HEADER in request.headers
        return self._build_json_response(
            request, model.to_anthropic_model() if is_anthropics else model.to_openai_model()
        )

    async def _handle_budget(self, request: web.Request) -> web.Response:
        """What the budget of the client's own key has left."""
        client = self._clients.authenticate(request.headers)
        return self._build_json_response(request, {"object": "budget", **client.describe_budget()})

    async def _handle_liveness(self, request: web.Request) -> web.Response:
        return self._build_json_response(request, {"status": "ok"})

    async def _handle_readiness(self, request: web.Request) -> web.Response:
        if self.is_shutting_down:
            return self._build_json_response(request, {"status": "ending"}, status=503)
        return self._build_json_response(request, {"status": "ok"})

    async def _handle_metrics(self, request: web.Request) -> web.Response:
        client = self._clients.authenticate(request.headers)
        text = self._metrics.render_prometheus_text(self._models.all_models, self._models.list_for_client(client))
        return web.Response(body=text, headers={**_SERVER_HEADER, "Content-Type": CONTENT_TYPE})

    async def _handle_page(self, _: web.Request) -> web.Response:
        return web.Response(body=self._page, content_type="text/html", charset="utf-8", headers=_PAGE_HEADERS)

    # -------------------------------------------------------------------------------------- answers

    async def _handle_count_tokens(self, request: web.Request) -> web.StreamResponse:
        client = self._clients.authenticate(request.headers)
        self._admit_request(client)
        try:
            async with self._body_reader.read_body(request) as request_body:
                body = {**request_body.fields, "max_tokens": 1}  # this API has no such field
                model = self._models.find_for_client(get_requested_model_name(body), client)
                parsed_requests, _ = await self._parse_body_to_requests(
                    _MESSAGES_API, request, request_body._replace(fields=body), model
                )
                num_tokens = await count_request_tokens(model.target, parsed_requests[0].request)
        finally:
            self._release_request(client)
        return self._build_json_response(request, {"input_tokens": num_tokens})

    async def _refuse_websocket(self, request: web.Request) -> web.Response:
        """Answer with the one status on which clients fall back from WebSockets to HTTP at once."""
        if request.headers.get(hdrs.UPGRADE, "").lower() != "websocket":
            raise web.HTTPMethodNotAllowed(request.method, [hdrs.METH_POST])
        problem = HttpProblem(
            426, "this server does not support WebSockets; send a POST request over HTTP", code="upgrade_required"
        )
        refusal = self._build_error_response(request, problem)
        refusal.headers.update({hdrs.UPGRADE: "HTTP/1.1", hdrs.CONNECTION: "Upgrade"})
        return refusal

    async def _handle_answer_request(self, api: ApiDefinition, request: web.Request) -> web.StreamResponse:
        started_s = now()
        client = self._clients.authenticate(request.headers)
        self._admit_request(client)
        try:
            async with self._body_reader.read_body(request) as request_body:
                return await self._parse_and_respond(api, request, request_body, client, started_s)
        finally:
            self._release_request(client)

    async def _parse_and_respond(
        self, api: ApiDefinition, request: web.Request, request_body: RequestBody, client: ApiClient, started_s: float
    ) -> web.StreamResponse:
        model = self._models.find_for_client(get_requested_model_name(request_body.fields), client)
        self._metrics.count_request(api.name, model.name)
        parsed_requests, dropped_fields = await self._parse_body_to_requests(api, request, request_body, model)
        if model.session_header is not None:
            given_id, key = request.headers.get(model.session_header), self._config.session_key
            parsed_requests = [add_session_id(parsed, given_id, client, key) for parsed in parsed_requests]
        context = AnswerEncodingContext(
            answer_id=make_request_id(),
            model=model.name,
            trace=request.headers.get(_TRACE_HEADER) == "1",
            started_s=started_s,
        )
        responder = Responder(
            request,
            config=self._config,
            metrics=self._metrics,
            api=api,
            model=model,
            client=client,
            parsed_requests=parsed_requests,
            context=context,
            headers={
                **self._build_common_headers(request),
                **build_dropped_fields_header(dropped_fields),
                **build_changes_header(parsed_requests),
            },
            to_problem=self._convert_error_to_problem,
        )
        return await responder.respond_whole_or_streamed()

    async def _parse_body_to_requests(
        self, api: ApiDefinition, request: web.Request, request_body: RequestBody, model: ServedModel
    ) -> tuple[list[ParsedRequest], list[str]]:
        """Return a body's requests, and the names of tools, items and fields that are not sent."""
        body = request_body.fields
        if api is _MESSAGES_API and _BETAS_HEADER in request.headers:
            body["betas"] = [name.strip() for name in request.headers[_BETAS_HEADER].split(",")]
        if request_body.is_long:
            parsed_requests = await run_in_body_thread(api.parse, body, model.target_api)
        else:
            parsed_requests = api.parse(body, model.target_api)
        is_translated = api.target_api != model.target_api
        # Targets of the messages API take images of tools
        if model.target_api != "messages" and (is_translated or not model.sees_images):
            parsed_requests = [
                place_images_of_request(parsed, sees_images=model.sees_images) for parsed in parsed_requests
            ]
        if is_translated:
            parsed_requests = [place_system_texts_of_request(parsed, model.target_api) for parsed in parsed_requests]
        parsed_requests, dropped_fields = model.select_fields(parsed_requests, client_api=api.target_api)
        return parsed_requests, [*parsed_requests[0].left_out, *dropped_fields]

    def _admit_request(self, client: ApiClient) -> None:
        """Count a new request; raises HttpProblem if there are too many."""
        if self._num_open >= self._config.max_requests:
            raise HttpProblem(
                503, "the server already answers as many requests as it can", code="overloaded", retry_after_s=1.0
            )
        client.begin_client_request()
        self._num_open += 1
        self._metrics.set_open_requests(self._num_open)

    def _release_request(self, client: ApiClient) -> None:
        client.end_request()
        self._num_open -= 1
        self._metrics.set_open_requests(self._num_open)


def _is_same_origin(origin: str, host: str) -> bool:
    try:
        return urlsplit(origin).netloc == host
    except ValueError:
        return False


def _get_hostname(host: str) -> str:
    """Return a Host header without its port, or "" if it is not an address."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
