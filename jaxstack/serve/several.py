"""The server of models that do not continue texts, one or several: embeddings, labels, translations and pictures.

One thread has the models and answers one request after the other.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jaxstack.common.counts import plural
from jaxstack.config import ConfigError, ModelConfig
from jaxstack.serve.access import Access, Guard
from jaxstack.serve.answer import SHUTTING_DOWN
from jaxstack.serve.app import Limits, LogRequests, read_body, send_error, send_failure
from jaxstack.serve.catalog import Catalog
from jaxstack.serve.errors import ApiError, error_response, too_late
from jaxstack.serve.kinds import EMBEDDINGS, IMAGES, MODELS, Kind, kinds_of
from jaxstack.serve.requests import JsonValue, RequestFields, shown_value


class OneThread:
    """The thread that has the models, with what `http.run` asks of a worker.

    Attributes:
      error: what ended the thread; nothing does.
      on_failure: is never called.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.on_failure: Callable[[], object] = lambda: None
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="jaxstack-models")

    def stop(self) -> None:
        """Ends the thread once its request is answered."""
        self.pool.shutdown(cancel_futures=True)


class SeveralModels:
    """Answers requests for the models of a catalog; `app` is the ASGI application."""

    def __init__(
        self,
        catalog: Catalog,
        models: dict[str, ModelConfig],
        limits: Limits,
        log: Callable[[str], None] = print,
        access: Access | None = None,
    ) -> None:
        """Makes the application.

        Args:
          models: the configuration of each model by its name.
          limits: what is refused. Its `texts` are requests that are answered or wait.
          log: prints a line for each request.
          access: see `app.Server`.
        """
        self.catalog = catalog
        self.kinds = {name: kinds_of(model) for name, model in models.items()}
        self.limits = limits
        self.worker = OneThread()
        self.closing = False
        self.waiting = 0
        self._started = int(time.time())
        routes = [
            Route(EMBEDDINGS, self._named, methods=["POST"]),
            Route(IMAGES, self._named, methods=["POST"]),
            Route(f"{MODELS}/{{name:path}}", self._hugging_face, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._models),
            Route("/health", self._health),
        ]
        self.app = Starlette(
            routes=routes,
            middleware=[Middleware(LogRequests, log=log), Middleware(Guard, access=access or Access())],
            exception_handlers={ApiError: send_error, HTTPException: _send_http_error, Exception: send_failure},
        )

    def close(self, grace: float) -> None:
        """Refuses new requests. `http.run` waits for those that are answered."""
        self.closing = True

    async def _named(self, request: Request) -> Response:
        """Answers a request that names its model in the body, as OpenAI's do."""
        fields = RequestFields(await read_body(request, self.limits))
        only = next(iter(self.kinds)) if len(self.kinds) == 1 else None
        name = fields.take("model", only)
        return await self._answer(name, request.url.path, fields)

    async def _hugging_face(self, request: Request) -> Response:
        """Answers a request that names its model in the address, as Hugging Face's do."""
        fields = RequestFields(await read_body(request, self.limits))
        return await self._answer(request.path_params["name"], MODELS, fields)

    async def _answer(self, name: JsonValue, route: str, fields: RequestFields) -> Response:
        kind = self._kind(name, route)
        if self.closing:
            raise SHUTTING_DOWN
        if self.waiting >= self.limits.texts:
            raise ApiError(
                f"{plural(self.waiting, 'request is', 'requests are')} answered or wait, and this server takes "
                f"{self.limits.texts}. Try again later.",
                status=429, code="rate_limit_exceeded", retry_after=1,
            )  # fmt: skip
        self.waiting += 1
        work = asyncio.get_running_loop().run_in_executor(self.worker.pool, self._work, name, kind, fields)
        work.add_done_callback(self._count_down)
        try:
            return JSONResponse(await asyncio.wait_for(asyncio.shield(work), self.limits.seconds))
        except TimeoutError:
            work.cancel()  # one that waits is not begun any more
            raise too_late(self.limits.seconds) from None

    def _count_down(self, _: object) -> None:
        self.waiting -= 1

    def _work(self, name: str, kind: Kind, fields: RequestFields) -> JsonValue:
        """Returns the answer; runs in the thread of the models."""
        try:
            return kind.answer(self.catalog.get(name), fields)
        except ConfigError as error:  # a text that the model cannot read
            raise ApiError(str(error)) from None

    def _kind(self, name: JsonValue, route: str) -> Kind:
        if not isinstance(name, str) or name not in self.kinds:
            known = ", ".join(self.kinds)
            raise ApiError(
                f"the model {shown_value(name)} does not exist. This server has {known}.",
                "model", status=404, code="model_not_found",
            )  # fmt: skip
        for kind in self.kinds[name]:
            if kind.route == route:
                return kind
        does = " and ".join(f"{kind.task} at {_address(kind.route, name)}" for kind in self.kinds[name])
        raise ApiError(f"the model {name} is not for {route}. It does {does}.", "model", code="wrong_endpoint")

    async def _models(self, request: Request) -> Response:
        loaded = self.catalog.resident
        listed = [
            {
                "id": name, "object": "model", "created": self._started, "owned_by": "jaxstack",
                "tasks": [kind.task for kind in kinds], "loaded": name in loaded, "bytes": self.catalog.sizes[name],
            }
            for name, kinds in self.kinds.items()
        ]  # fmt: skip
        name = request.path_params.get("name")
        if name is None:
            return JSONResponse({"object": "list", "data": listed})
        if name not in self.kinds:
            self._kind(name, "")
        return JSONResponse(next(one for one in listed if one["id"] == name))

    async def _health(self, _: Request) -> Response:
        status = "closing" if self.closing else "ok"
        found = {"status": status, "requests": self.waiting, "loaded": self.catalog.resident}
        return JSONResponse(found, 503 if self.closing else 200)


def _address(route: str, name: str) -> str:
    return f"{route}/{name}" if route == MODELS else route


async def _send_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    routes = f"{EMBEDDINGS}, {IMAGES}, {MODELS}/NAME, /v1/models and /health"
    reason = f"{request.method} {request.url.path[:100]}: {error.detail}. This server has {routes}."
    return error_response(ApiError(reason, status=error.status_code))
