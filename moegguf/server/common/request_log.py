"""The server's log on stderr: a line for each request at its end, and what went wrong; as text or JSON."""

from __future__ import annotations

import json
import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger(__name__)

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class _JsonFormatter(logging.Formatter):
    """A record as one JSON object: time, level, message, and for a request its parts."""

    def format(self, record: logging.LogRecord) -> str:
        found = {"time": self.formatTime(record), "level": record.levelname.lower(), "message": record.getMessage()}
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return json.dumps(found | getattr(record, "request", {}))


def start_logging(level: str, form: str) -> None:
    """Writes moegguf's records of this level and above to stderr; of uvicorn, which says less, warnings."""
    handler = logging.StreamHandler()
    text = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(_JsonFormatter() if form == "json" else text)
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("moegguf").setLevel(LEVELS[level])


class RequestLog:
    """ASGI middleware that logs each request when its response has ended: who, what, the status, how long it took."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not log.isEnabledFor(logging.INFO):
            return await self._app(scope, receive, send)
        start_s, status, n_bytes = time.perf_counter(), 0, 0

        async def counted(message: Message) -> None:
            nonlocal status, n_bytes
            status = message.get("status", status)
            n_bytes += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, counted)
        finally:
            key = {"key": scope["key"]} if scope.get("key") else {}
            request = {
                "client": scope["client"][0] if scope["client"] else "-",
                **key,
                "method": scope["method"],
                "path": scope["path"],
                "status": status,  # 0: the client left before there was one
                "seconds": round(time.perf_counter() - start_s, 3),
                "bytes": n_bytes,
            }
            who = "%(client)s key %(key)d" if key else "%(client)s"
            text = f"{who} %(method)s %(path)s %(status)d %(seconds).3fs %(bytes)d bytes"
            log.info(text, request, extra={"request": request})
