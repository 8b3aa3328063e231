"""Answers that are errors, in OpenAI's format. This file does not import JAX, before which flags are checked."""

from starlette.responses import JSONResponse


class ApiError(Exception):
    """An answer that is an error, in OpenAI's format.

    Attributes:
      status: code of HTTP.
      body: what is sent.
      retry_after: seconds after which another attempt may succeed; `None` means that it would fail again.
    """

    def __init__(
        self,
        message: str,
        param: str | None = None,
        *,
        status: int = 400,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        """Describes an error.

        Args:
          message: what is wrong, and what to do.
          param: the parameter of the request that is wrong.
          code: OpenAI's name of the error, for programs.
          retry_after: see the class.
        """
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after
        kind = "server_error" if status >= 500 else "invalid_request_error"
        kind = "rate_limit_error" if status == 429 else kind
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def too_late(seconds: float) -> ApiError:
    """Returns the error of a request that takes too long."""
    return ApiError(f"the request has taken more than {seconds:g} s. Ask for less.", status=504, code="timeout")


def too_slow(seconds: float) -> ApiError:
    """Returns the error of a request that does not become complete."""
    return ApiError(f"the request has not arrived within {seconds:g} s. Send it faster, or less.", status=408)


def error_response(error: ApiError) -> JSONResponse:
    """Returns the response that is an error."""
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    if error.status == 504:
        headers["x-should-retry"] = "false"  # OpenAI's clients would send the same again
    return JSONResponse(error.body, error.status, headers)
