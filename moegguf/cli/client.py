"""A small client for a running `moegguf serve`: JSON there and back, and answers line by line.

It asks where MOEGGUF_HOST or OLLAMA_HOST say, with their API key. Knows addresses and errors, no command's words.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from http.client import HTTPException, HTTPResponse
from typing import Any

from moegguf.errors import MoeggufError
from moegguf.settings import Host, Settings, read_settings

Json = dict[str, Any]

GET_TIMEOUT_S = 10.0
POST_TIMEOUT_S = 600.0  # the server may load a model first
MOST_ERROR_BYTES = 64 << 10
ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # where a server listens, but nobody can be reached


class ServerError(MoeggufError):
    """A server refused or failed, in its own words. `status`: of HTTP; 0 when the answer broke off."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class NoServerError(MoeggufError, ConnectionError):
    """Nobody answers at the server's address."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The key goes to nobody but the server that was asked."""

    def redirect_request(self, *_: Any) -> None:
        return None


class Client:
    """Asks the server of `settings` (default: the environment's)."""

    def __init__(self, settings: Settings | None = None) -> None:
        settings = settings or read_settings()
        self.host = reachable(settings.host)
        self._headers = {"Accept": "application/json"}
        if settings.api_key:
            self._headers["Authorization"] = f"Bearer {settings.api_key}"
        proxies = [urllib.request.ProxyHandler({})] if self.host.is_loopback else []
        self._opener = urllib.request.build_opener(_NoRedirect, *proxies)

    def get(self, path: str, timeout_s: float = GET_TIMEOUT_S) -> Any:
        """The JSON at `path`. Raises NoServerError and ServerError, as do the others."""
        with self._open(path, None, timeout_s) as response:
            return _parsed(response.read())

    def post(self, path: str, body: Mapping[str, Any], timeout_s: float = POST_TIMEOUT_S) -> Any:
        """What the server answers to `body`; of an answer in lines the last one."""
        with self._open(path, body, timeout_s) as response:
            lines = [line for line in response.read().splitlines() if line.strip()]
        return _checked(_parsed(lines[-1])) if lines else None

    def stream(
        self, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = POST_TIMEOUT_S
    ) -> Generator[Json]:
        """The lines of an answer as they come; closing it ends the request."""
        with self._open(path, body, timeout_s) as response:
            for line in response:
                if line.strip():
                    yield _checked(_parsed(line))

    @contextmanager
    def _open(self, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> Generator[HTTPResponse]:
        data = None if body is None else json.dumps(body).encode()
        headers = self._headers if data is None else {**self._headers, "Content-Type": "application/json"}
        request = urllib.request.Request(self.host.url + path, data, headers)
        try:
            response = self._opener.open(request, timeout=timeout_s)
        except urllib.error.HTTPError as error:
            raise ServerError(_complaint(error), error.code) from None
        except (OSError, HTTPException) as error:
            raise self._nobody(error) from None
        with response:
            try:
                yield response
            except (OSError, HTTPException):
                raise NoServerError(f"the server at {self.host.url} has gone.") from None

    def _nobody(self, error: Exception) -> NoServerError:
        reason = getattr(error, "reason", error)
        if isinstance(reason, TimeoutError):
            return NoServerError(f"the server at {self.host.url} does not answer.")
        return NoServerError(f"no server is running at {self.host.url}; start one with `moegguf serve`.")


def reachable(host: Host) -> Host:
    """The address to ask a server that listens at `host`."""
    return replace(host, host=ANY_ADDRESS.get(host.host, host.host))


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        raise ServerError("the server's answer is not JSON; is another program at its address?") from None


def _checked(line: Any) -> Any:
    """`line`, unless it tells of an error."""
    if isinstance(line, dict) and "error" in line:
        raise ServerError(str(line["error"]))
    return line


def _complaint(error: urllib.error.HTTPError) -> str:
    """What the server said, in Ollama's form or OpenAI's."""
    with error:
        try:
            said = json.loads(error.read(MOST_ERROR_BYTES))["error"]
            return str(said["message"] if isinstance(said, dict) else said)
        except (OSError, HTTPException, ValueError, KeyError, TypeError):
            return f"the server answers {error.code} {error.reason}."
