"""Who may send requests: the names under which this server may be called, and the key that a request must have."""

import hmac
import ipaddress
import os
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxstack.config import ConfigError
from jaxstack.serve.errors import ApiError, error_response

LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""Names that only programs on the same machine can use."""
KEY_VARIABLE = "JAXSTACK_API_KEY"
OPEN_PATHS = ("/health", "/")
"""Paths that need no key: the probes of orchestrators have none, and the chat page asks its reader for it."""

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\s:/\[\]@]+)(:[0-9]{1,5})?")
_NAME = re.compile(r"[^\s:/\[\]@*]+")
_KEY = re.compile(r"[!-~]+")
_MOST_BYTES = 4096


@dataclass(frozen=True)
class Access:
    """Who may send requests.

    Attributes:
      hosts: names of the server in lower case, besides the address of the connection; `*` means any.
      key: what requests must have; `None` means nothing.
    """

    hosts: frozenset[str] = frozenset(LOOPBACK)
    key: str | None = field(default=None, repr=False)


class Guard:
    """Refuses a request before its body is read: for another host, without the key, or framed in two ways.

    A page of the web can make its own name resolve to the address of this server (DNS rebinding). The browser then
    counts the server as a part of the page, but sends the page's name in the header `Host`.
    """

    def __init__(self, app: ASGIApp, access: Access) -> None:
        """Makes the guard.

        Args:
          app: answers the requests that pass.
          access: which requests pass.
        """
        self._app = app
        self._hosts = access.hosts
        self._key = None if access.key is None else access.key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, or lets the application do so."""
        headers = Headers(scope=scope)
        app = self._app
        if "content-length" in headers and "transfer-encoding" in headers:
            # Something between client and server may have read other bytes as the body (RFC 9112, section 6.3).
            app = _refusal("Content-Length and Transfer-Encoding exclude each other. Send one.", connection="close")
        elif not self._is_named(headers, scope):
            shown = ascii(headers.get("host", ""))[:100]
            app = _refusal(
                f"the header Host={shown} is not a name of this server. Start it with --allowed_hosts to add names.",
                status=421,
            )
        elif self._key is not None and scope["path"] not in OPEN_PATHS and not self._has_key(headers):
            app = _refusal(
                "the request does not have the key of this server. Send it as Authorization: Bearer KEY.",
                status=401,
                code="invalid_api_key",
                www_authenticate="Bearer",
            )
        await app(scope, receive, send)

    def _is_named(self, headers: Headers, scope: Scope) -> bool:
        if "*" in self._hosts:
            return True
        name = host_name(headers.get("host", ""))
        local = (scope.get("server") or ("",))[0].removeprefix("::ffff:")  # an address cannot be made to resolve
        return name is not None and (name in self._hosts or name == local)

    def _has_key(self, headers: Headers) -> bool:
        kind, _, sent = headers.get("authorization", "").partition(" ")
        assert self._key is not None
        return hmac.compare_digest(sent.strip().encode(), self._key) and kind.lower() == "bearer"


def _refusal(message: str, *, status: int = 400, code: str | None = None, **headers: str) -> ASGIApp:
    """Returns an application that answers with an error and some headers."""
    response = error_response(ApiError(message, status=status, code=code))
    for name, value in headers.items():
        response.headers[name.replace("_", "-")] = value
    return response


def host_name(host: str) -> str | None:
    """Returns the name or the address in a header `Host`, without port and brackets. `None` means that it has none."""
    found = _HOST.fullmatch(host.strip().lower())
    if found is None:
        return None
    return _address(found[1].strip("[]")) if found[1].startswith("[") else found[1].removesuffix(".")


def _address(text: str) -> str | None:
    """Returns an address of IP in its usual spelling, or `None` for another text."""
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return None


def read_access(host: str, allowed: Collection[str], key_file: str | None) -> Access:
    """Returns who may send requests, by the flags of a server and its environment.

    Args:
      host: address or name at which it listens.
      allowed: more names; `*` means any.
      key_file: file with the key. `None` means the variable `JAXSTACK_API_KEY`, if it is set.

    Raises:
      ConfigError: one of the names or the key cannot be used.
    """
    return Access(host_names(host, allowed), read_key(key_file))


def host_names(host: str, allowed: Collection[str]) -> frozenset[str]:
    """Returns the names under which a server may be called.

    Args:
      host: address or name at which it listens.
      allowed: more names; `*` means any.

    Raises:
      ConfigError: one of these is neither a name nor an address.
    """
    names = {*LOOPBACK, _address(host) or host.lower()}
    for one in allowed:
        if one != "*" and _address(one.strip("[]")) is None and not _NAME.fullmatch(one):
            raise ConfigError(
                f"--allowed_hosts={one} is neither a name nor an address. Give it without scheme, port and path, such "
                f"as example.org."
            )
        names.add(_address(one.strip("[]")) or one.lower())
    return frozenset(names)


def read_key(path: str | None) -> str | None:
    """Returns the key that requests must have, from a file or from the environment. `None` means that there is none.

    Neither is shown in the list of processes, unlike a flag.

    Raises:
      ConfigError: there are two sources, the file cannot be read, or the key is not a word of ASCII.
    """
    value = os.environ.get(KEY_VARIABLE)
    if path is None and value is None:
        return None
    if path is not None and value is not None:
        raise ConfigError(f"--api_key_file={path} and the variable {KEY_VARIABLE} both set a key. Use one of them.")
    source = KEY_VARIABLE if path is None else f"--api_key_file={path}"
    key = (_read_word(Path(path), source) if path is not None else value or "").strip()
    if not _KEY.fullmatch(key) or len(key) > _MOST_BYTES:
        raise ConfigError(
            f"{source} is not a key of 1 to {_MOST_BYTES} visible characters of ASCII. Make one with `openssl rand "
            f"-hex 32`."
        )
    return key


def _read_word(path: Path, source: str) -> str:
    if not path.is_file():  # reading a pipe or a device may never end
        raise ConfigError(f"{source} is not a file. Write the key into a file that only you can read.")
    try:
        with path.open("rb") as file:
            return file.read(_MOST_BYTES + 2).decode("ascii", "replace")
    except OSError as error:
        raise ConfigError(f"{source} cannot be read: {error.strerror}. Write the key into another file.") from None
