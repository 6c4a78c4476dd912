"""An HTTP client for a running `moegguf serve`: sends JSON requests and reads JSON or
JSON-lines responses.

By default, the address comes from MOEGGUF_HOST or OLLAMA_HOST, and the API key is the
first one in MOEGGUF_API_KEY. `Client` does not interpret the contents of requests.
"""

from __future__ import annotations

import json
import os
import socket
import urllib.error
import urllib.request
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http.client import HTTPException, HTTPResponse
from typing import Any

from moegguf.errors import MoeggufError
from moegguf.settings import Settings, read_settings
from moegguf.terminal.messages import print_message
from moegguf.text import to_utf8

Json = dict[str, Any]

GET_TIMEOUT_S = 10.0
POST_TIMEOUT_S = 600.0  # long, because the server may have to load a model first
CONNECT_S = 0.5
# Time limit in seconds for each request that checks whether a server has a model.
KNOWN_S = 10.0
# Maximum number of models that `running_server` looks up on the server.
MAX_ASKED_MODELS = 32
MAX_ERROR_BYTES = 64 << 10
# {address that a server binds to: address for clients}.
WILDCARD_ADDRESSES = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class ServerError(MoeggufError):
    """The server returned an error, or a response that is not JSON. `status`: the HTTP
    status of an error response; otherwise 0."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class NoServerError(MoeggufError, ConnectionError):
    """There is no server at the address, the server did not answer in time, or the
    connection was lost."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Does not follow redirects, because the API key must not be sent to another
    server."""

    def redirect_request(self, *_: Any) -> None:
        return None


class Client:
    """A client for the server in `settings`. If `settings` is None, reads the settings
    from the environment."""

    def __init__(self, settings: Settings | None = None) -> None:
        settings = settings or read_settings()
        self.host = replace(
            settings.host,
            host=WILDCARD_ADDRESSES.get(settings.host.host, settings.host.host),
        )
        self.headers = {"Accept": "application/json"}
        self.api_key = settings.api_keys[0] if settings.api_keys else ""
        if self.api_key:
            self.headers["Authorization"] = f"Bearer {self.api_key}"
        proxies = [urllib.request.ProxyHandler({})] if self.host.is_loopback else []
        self._opener = urllib.request.build_opener(_NoRedirect, *proxies)

    def get(self, path: str, timeout_s: float = GET_TIMEOUT_S) -> Any:
        """Sends a GET request and returns the JSON of the response. Like the other
        requests, raises NoServerError or ServerError."""
        with self._open(path, None, timeout_s) as response:
            return _parsed(response.read())

    def post(
        self,
        path: str,
        body: Mapping[str, Any],
        timeout_s: float = POST_TIMEOUT_S,
        method: str = "POST",
    ) -> Any:
        """Sends `body` and returns the JSON of the response. If the response has
        several lines, returns the JSON of the last line. Returns None for an empty
        response."""
        with self._open(path, body, timeout_s, method) as response:
            lines = [line for line in response.read().splitlines() if line.strip()]
        return _parsed(lines[-1]) if lines else None

    def stream(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        timeout_s: float = POST_TIMEOUT_S,
    ) -> Generator[Json]:
        """Sends a POST request with `body`, or a GET request if `body` is None. Yields
        the JSON of each line of the response as it arrives. Closing the generator
        aborts the request."""
        with self._open(path, body, timeout_s) as response:
            for line in response:
                if line.strip():
                    yield _parsed(line)

    @contextmanager
    def _open(
        self,
        path: str,
        body: Mapping[str, Any] | None,
        timeout_s: float,
        method: str | None = None,
    ) -> Generator[HTTPResponse]:
        data = None if body is None else to_utf8(json.dumps(body, ensure_ascii=False))
        headers = (
            self.headers
            if data is None
            else {**self.headers, "Content-Type": "application/json"}
        )
        request = urllib.request.Request(
            self.host.url + path, data, headers, method=method
        )
        try:
            response = self._opener.open(request, timeout=timeout_s)
        except urllib.error.HTTPError as error:
            raise ServerError(_error_message(error), error.code) from None
        except (OSError, HTTPException) as error:
            if isinstance(getattr(error, "reason", error), TimeoutError):
                raise NoServerError(
                    f"the server at {self.host.url} does not answer; wait, or restart it."
                ) from None
            raise self.no_server() from None
        with response:
            try:
                yield response
            except (OSError, HTTPException):
                raise self.lost_connection() from None

    def lost_connection(self) -> NoServerError:
        """Returns the error for a response that ended early."""
        return NoServerError(
            f"lost the connection to the server at {self.host.url}; check that it is running, and try again."
        )

    def no_server(self) -> NoServerError:
        """Returns the error for an address at which no server answers."""
        return NoServerError(
            f"no server is running at {self.host.url}; start one with `moegguf serve`."
        )


def running_server(models: Sequence[str]) -> Client | None:
    """Returns a client for the server at the default address (MOEGGUF_HOST or
    OLLAMA_HOST) if that server is moegguf and has the first MAX_ASKED_MODELS of
    `models`.

    Returns None if there is no such server, or if one of the names is an existing path.
    Also prints a note if the server rejects the API key.
    """
    if any(os.path.exists(os.path.expanduser(name)) for name in models):
        return None
    client = Client()
    try:
        with socket.create_connection((client.host.host, client.host.port), CONNECT_S):
            pass
        # Ollama uses the same port.
        if "moegguf" not in client.get("/api/version", KNOWN_S):
            return None
        for name in models[:MAX_ASKED_MODELS]:
            client.post("/api/show", {"model": name}, KNOWN_S)
        return client
    except ServerError as error:
        if error.status == 401:
            print_message(
                f"note: the server at {client.host.url} needs a key (MOEGGUF_API_KEY); loading the model here"
            )
        return None
    except (MoeggufError, OSError, TypeError):
        return None


def not_json() -> ServerError:
    """Returns the error for a response that is not JSON, which a moegguf or Ollama
    server never sends."""
    return ServerError(
        "the server's response is not JSON; is another program at its address?"
    )


def _parsed(data: bytes) -> Any:
    """Returns the JSON value in `data`. Raises ServerError if it is not JSON or is an
    error object."""
    try:
        found = json.loads(data)
    except ValueError:
        raise not_json() from None
    if isinstance(found, dict) and "error" in found:
        raise ServerError(str(found["error"]))
    return found


def _error_message(error: urllib.error.HTTPError) -> str:
    """Returns the message in an error response, in Ollama's or OpenAI's format. If
    there is none, returns a sentence with the HTTP status."""
    with error:
        try:
            detail = json.loads(error.read(MAX_ERROR_BYTES))["error"]
            text = str(detail["message"] if isinstance(detail, dict) else detail)
            return (
                f"{text}; set MOEGGUF_API_KEY to this key."
                if error.code == 401
                else text
            )
        except (OSError, HTTPException, ValueError, KeyError, TypeError):
            return f"the server returned {error.code} {error.reason}."
