"""Every error leaves the server in OpenAI's shape, with the name of the field at fault."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from .output_stream import EngineFailed
from .refusals import QueueFull, RequestRefused
from .sampling_params import InvalidRequest

logger = logging.getLogger(__name__)

_CODES = {404: "unknown_url", 405: "method_not_allowed", 413: "body_too_large"}
# Codes after which a client may try again, and when.
_TRY_AGAIN = ("queue_full", "draining")
_RETRY_SECONDS = 1

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80
_short.maxlevel = 2


class ApiError(Exception):
    """An answer other than success: HTTP status, message, the field at fault, a machine's code."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """The JSON body, OpenAI's `{"error": {"message", "type", "param", "code"}}`."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }


def engine_error(error: EngineFailed) -> ApiError:
    """503: the engine has stopped, and its message says why."""
    return ApiError(503, str(error), code="engine_failed")


def refused(error: RequestRefused) -> ApiError:
    """429 or 503: a request that may be sent again, to this server or to another."""
    if isinstance(error, QueueFull):
        return ApiError(429, str(error), code="queue_full")
    return ApiError(503, "the server is shutting down", code="draining")


def refusal(error: InvalidRequest, param: str) -> ApiError:
    """400: the engine refused the request for what the client calls `param`."""
    message = str(error)
    if param not in message:
        message = f"`{param}`: {message}"
    return ApiError(400, message, param=param, code="invalid_value")


def validation_error(errors: list[Mapping[str, Any]]) -> ApiError:
    """400 from pydantic's findings: the first is described, the others are counted."""
    first = errors[0]
    kind, reason = first["type"], first["msg"]
    if kind == "json_invalid":
        reason = f"{first['ctx']['error']} at character {first['loc'][-1]}"
        return ApiError(400, f"the body is not valid JSON: {reason}", code="invalid_json")
    about_field = first.get("ctx", {}).get("param")
    where = [str(part) for part in (*first["loc"], about_field) if part not in ("body", None)]
    if not where:
        expected = "the body must be a JSON object sent with `Content-Type: application/json`"
        return ApiError(400, expected, code="invalid_body")
    param = ".".join(where)
    if kind == "extra_forbidden":
        message = f"`{param}` is not a field of this request, and none is ignored; leave it out"
        kind = "unknown_parameter"
    elif kind == "missing":
        message = f"`{param}` is missing"
    elif about_field:
        message = reason
    else:
        reason = reason[:1].lower() + reason[1:]
        message = f"`{param}`: {reason}; got {_short.repr(first['input'])}"
    more = f" (and {len(errors) - 1} more errors)" if len(errors) > 1 else ""
    return ApiError(400, message + more, param=param, code=kind)


def error_response(error: ApiError) -> JSONResponse:
    """The response for `error`; a refused body also closes the connection it is still coming on."""
    headers = {"Connection": "close"} if error.status == 413 else {}
    if error.code in _TRY_AGAIN:
        headers["Retry-After"] = str(_RETRY_SECONDS)
    return JSONResponse(error.body(), status_code=error.status, headers=headers)


def install_error_handlers(app: FastAPI) -> None:
    """Make `app` answer every error in OpenAI's shape."""

    @app.exception_handler(ApiError)
    async def on_api_error(request: Request, error: ApiError) -> JSONResponse:
        return error_response(error)

    @app.exception_handler(EngineFailed)
    async def on_engine_failed(request: Request, error: EngineFailed) -> JSONResponse:
        return error_response(engine_error(error))

    @app.exception_handler(RequestRefused)
    async def on_refused(request: Request, error: RequestRefused) -> JSONResponse:
        return error_response(refused(error))

    @app.exception_handler(RequestValidationError)
    async def on_validation_error(request: Request, error: RequestValidationError) -> JSONResponse:
        return error_response(validation_error(list(error.errors())))

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> JSONResponse:
        where = f"{request.method} {request.url.path}"
        message, code = error.detail, _CODES.get(error.status_code)
        if error.status_code == 404:
            message = f"there is no {where}"
        elif error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "another method")
            message = f"{where} is not possible; this path takes {allowed}"
        elif error.status_code == 400:  # FastAPI's, and only the cause says what was wrong
            reason = _short.repr(str(error.__cause__ or error.detail))[1:-1]
            message, code = f"the body cannot be read as JSON: {reason}", "invalid_json"
        api_error = ApiError(error.status_code, message, code=code)
        response = error_response(api_error)
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def on_bug(request: Request, error: Exception) -> JSONResponse:
        # Starlette logs the traceback and raises on; the client learns only that it happened.
        kind = type(error).__name__
        return error_response(ApiError(500, f"internal error ({kind}); the server's log has more"))
