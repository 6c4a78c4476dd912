"""Tests access control, mostly over a real socket: hosts, origins, API keys and
headers. Also tests a port that is in use."""

import asyncio
import base64
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_manager import FakeManager, server_of
from servers import Command, Server, call, connected, serving
from starlette.responses import PlainTextResponse
from starlette.types import Message, Receive, Scope, Send

from moegguf.server.common.access import AccessControl, is_own_host, origin_pattern
from moegguf.settings import parse_host, parse_networks

KEY = "a-long-key"
EVIL = "https://evil.example"


@pytest.fixture
def guarded(manager: FakeManager) -> Iterator[str]:
    """A server with an API key. Its settings name the public host 0.0.0.0, but its
    socket listens on loopback."""
    host, origins = parse_host("0.0.0.0"), ("https://friend.example",)
    with server_of(manager, host=host, api_keys=(KEY,), origins=origins) as found:
        yield found


HOSTS = {
    True: (
        "", "localhost", "LOCALHOST:11434", "127.0.0.1", "127.0.0.1:11434", "127.3.4.5", "[::1]", "[::1]:11434",
        "0.0.0.0:1", "192.168.1.5", "10.0.0.1:80", "[fe80::1%25eth0]", "box.local", "box.internal:1", "a.localhost",
        "localhost.", socket.gethostname(),
    ),
    False: (
        "evil.com", "evil.com:11434", "localhost.evil.com", "evil-localhost", "notlocal", "8.8.8.8",
        "[2001:4860::8888]", "2130706433", "0x7f000001", "127.1", "0177.0.0.1", "localhost@evil.com", "[::1",
        "local host", "localhost:11434:1", "localhost/../evil", "evil.com#.local", "evil.com?.local",
        "127.0.0.1.evil.com", "\xe9vil",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("host", "own"), [(host, own) for own, hosts in HOSTS.items() for host in hosts]
)
def test_is_own_host_accepts_only_names_and_addresses_of_this_network(
    host: str, own: bool
) -> None:
    assert is_own_host(host) is own


def test_origin_pattern_matches_the_whole_origin() -> None:
    pattern = origin_pattern(["http://localhost:*", "app://*", "https://a.example"])
    for good in (
        "http://localhost:3000",
        "app://obsidian.md",
        "https://a.example",
        "HTTPS://A.example",
    ):
        assert pattern.fullmatch(good)
    for bad in (
        "http://localhost:3000.evil", "http://localhost:", "https://axexample", "https://a.example.evil", "null",
    ):  # fmt: skip
        assert not pattern.fullmatch(bad)


@pytest.mark.parametrize("path", ["/api/tags", "/v1/models", "/", "/api/nothing"])
def test_a_foreign_host_header_gets_a_403_on_every_path(url: str, path: str) -> None:
    reply = call(f"{url}{path}", Host="evil.com")
    assert reply.status == 403
    assert "not allowed" in str(reply.json["error"])
    assert call(f"{url}/api/tags", Host="localhost:11434").status == 200


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        ("http://127.0.0.1:1/api/version", "localhost", 200),
        ("http://localhost/api/version?x=1", "evil.com", 200),
        ("HTTPS://[::1]:11434/api/version/", "localhost", 200),
        ("http://localhost/v1/models/demo%3Alatest", "localhost", 200),
        ("http://localhost", "localhost", 200),
        ("http://localhost?x=/api", "localhost", 200),
        ("http://localhost/nothing", "localhost", 404),
        ("http://evil.com/api/version", "localhost", 403),
        ("http://evil.com", "localhost", 403),
        ("http://user@localhost/api/version", "localhost", 400),
        ("http:///api/version", "localhost", 400),
        ("ftp://localhost/api/version", "localhost", 400),
        ("api/version", "localhost", 400),
        ("*", "localhost", 404),
    ],
)
def test_the_authority_of_a_request_target_overrides_the_host_header(
    url: str, target: str, host: str, status: int
) -> None:
    with connected(url) as connection:
        connection.sendall(
            f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
        )
        assert connection.recv(1 << 16).startswith(f"HTTP/1.1 {status} ".encode())


def test_a_post_with_an_absolute_url_requires_the_api_key(guarded: str) -> None:
    body = b'{"model": "demo", "prompt": "a", "stream": false}'
    for key, status in (("wrong", 401), (KEY, 200)):
        head = (
            f"POST {guarded}/api/generate HTTP/1.1\r\nHost: x\r\n"
            f"Authorization: Bearer {key}\r\nConnection: close\r\n"
        )
        with connected(guarded) as connection:
            connection.sendall(
                f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
            )
            assert connection.recv(1 << 16).startswith(f"HTTP/1.1 {status} ".encode())


@pytest.mark.parametrize("path", ["/health/", "/v1/health", "/v1/health/", "/"])
def test_aliases_of_open_paths_need_no_key(guarded: str, path: str) -> None:
    assert call(f"{guarded}{path}").status == 200


@pytest.mark.parametrize("origin", [EVIL, "null", "http://localhost.evil.example"])
def test_requests_from_a_foreign_origin_get_a_403_without_cors_headers(
    url: str, origin: str
) -> None:
    for method, path, body in (
        ("GET", "/api/tags", None),
        ("POST", "/api/chat", {"model": "demo"}),
        ("OPTIONS", "/", None),
    ):
        reply = call(f"{url}{path}", body, method=method, Origin=origin)
        assert reply.status == 403
        assert "access-control-allow-origin" not in reply.headers


@pytest.mark.parametrize(
    "origin",
    ["http://localhost:3000", "http://127.0.0.1", "app://obsidian.md", "tauri://x"],
)
def test_local_origins_get_cors_headers(url: str, origin: str) -> None:
    reply = call(f"{url}/api/tags", Origin=origin)
    assert (
        reply.status == 200 and reply.headers["access-control-allow-origin"] == origin
    )
    asked = {
        "Access_Control_Request_Method": "DELETE",
        "Access_Control_Request_Headers": "authorization, x-stainless-lang",
    }
    reply = call(f"{url}/v1/chat/completions", method="OPTIONS", Origin=origin, **asked)
    assert (
        reply.status == 200 and reply.headers["access-control-allow-origin"] == origin
    )
    assert (
        reply.headers["access-control-allow-headers"]
        == "authorization, x-stainless-lang"
    )
    assert "DELETE" in reply.headers["access-control-allow-methods"]


def test_own_and_configured_origins_are_accepted_on_a_public_host(guarded: str) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    assert call(f"{guarded}/api/tags", Origin=guarded, **headers).status == 200
    assert (
        call(f"{guarded}/api/tags", Origin="https://friend.example", **headers).status
        == 200
    )
    assert call(f"{guarded}/api/tags", Origin=EVIL, **headers).status == 403


def test_an_api_key_is_required_except_on_open_paths(guarded: str) -> None:
    for path in ("/api/tags", "/v1/models", "/metrics", "/live", "/props"):
        for sent in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": KEY},
            {"Authorization": f"Basic {KEY}"},
        ):
            reply = call(f"{guarded}{path}", **sent)
            assert reply.status == 401 and "API key" in str(reply.json["error"])
            assert KEY not in reply.text
    assert call(f"{guarded}/").text == "Ollama is running"
    assert call(f"{guarded}/health").status == 200
    assert call(f"{guarded}/api/tags", Authorization=f"Bearer {KEY}").status == 200
    # A request with the right key may have any Host header.
    assert (
        call(
            f"{guarded}/api/tags", Host="box.example.com", Authorization=f"Bearer {KEY}"
        ).status
        == 200
    )


TRUSTING = {"trusted": parse_networks("192.168.1.0/24, fd00::/8"), "loopback": False}


def status_of(
    client: str,
    host: str = "192.168.1.5:11434",
    key: str = "",
    added: tuple[bytes, bytes] | None = None,
    **options: Any,
) -> int:
    """Returns the status of the reply to a request from the IP address `client`.
    `added` is an additional header."""
    statuses: list[int] = []

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse("in")(scope, receive, send)

    async def send(message: Message) -> None:
        statuses.append(message.get("status", 0))

    headers = [
        (b"host", host.encode()),
        *([(b"authorization", f"Bearer {key}".encode())] if key else []),
    ]
    headers += [added] if added else []
    scope = {
        "type": "http",
        "method": "GET",
        "path": "/api/tags",
        "headers": headers,
        "client": (client, 5),
    }
    control = AccessControl(application, **{**TRUSTING, **options})
    asyncio.run(control(scope, receive=None, send=send))  # type: ignore[arg-type]
    return statuses[0]


@pytest.mark.parametrize(
    ("client", "status"),
    [("192.168.1.7", 200), ("fd00::1", 200), ("::ffff:192.168.1.7", 200), ("127.0.0.1", 200), ("::1", 200),
     ("192.168.2.7", 403), ("8.8.8.8", 403), ("2001:db8::1", 403), ("::ffff:8.8.8.8", 403)],
)  # fmt: skip
def test_only_clients_of_trusted_networks_need_no_key(client: str, status: int) -> None:
    assert status_of(client) == status
    assert status_of(client, api_keys=(KEY,)) == (401 if status == 403 else 200)
    assert status_of(client, key=KEY, api_keys=(KEY,), host="box.example.com") == 200


KEYS = ("of-ann", "of-bob")


def test_requests_of_each_api_key_get_their_own_owner_and_log_label(
    manager: FakeManager, caplog: pytest.LogCaptureFixture
) -> None:
    with server_of(manager, api_keys=KEYS) as url, caplog.at_level("INFO", "moegguf"):
        for header in [{"authorization": f"Bearer {key}"} for key in KEYS] + [
            {"x_api_key": key} for key in KEYS
        ]:
            assert (
                call(
                    f"{url}/api/generate", {"model": "demo", "prompt": "hi"}, **header
                ).status
                == 200
            )
        assert call(f"{url}/api/tags", x_api_key=",".join(KEYS)).status == 401
    ann, bob, *same = (request.owner for request in manager.requests)
    assert same == [ann, bob] and ann != bob and "" not in (ann, bob)
    labels = [line for line in caplog.messages if "/api/generate" in line]
    assert [line.split(" POST")[0] for line in labels] == [
        f"127.0.0.1 key {n}" for n in (1, 2, 1, 2)
    ]
    assert not any(key in text for key in KEYS for text in (ann, bob, caplog.text))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [((), [0, 1, 0, 1, 1]), (("--share-contexts",), [0, 1, 1, 1, 1])],
)
def test_contexts_of_a_key_are_reused_by_other_keys_only_with_share_contexts(
    tmp_path: Path, arguments: tuple[str, ...], expected: list[bool]
) -> None:
    """Requests in OpenAI's and Anthropic's APIs reuse contexts of their own key from
    memory and disk. They reuse contexts of other keys only with --share-contexts.
    """
    ann, bob = ({"authorization": f"Bearer {key}"} for key in KEYS)
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": "How are you? " * 100}],
        "max_tokens": 1,
    }
    settings = {
        "MOEGGUF_API_KEY": "\n".join(KEYS),
        "MOEGGUF_CONTEXT_STORE": "100MiB",
        "XDG_CACHE_HOME": str(tmp_path),
    }
    with serving(tmp_path, "--parallel", "2", *arguments, **settings) as server:

        def n_reused(key: dict[str, str]) -> int:
            usage = server.call("/v1/chat/completions", body, **key).json["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        reused = [n_reused(ann), n_reused(ann)]
        server.call("/api/generate", {"model": "demo", "keep_alive": 0}, **ann)
        reused += [n_reused(bob), n_reused(ann)]
        reused.append(
            server.call("/v1/messages", body, **bob).json["usage"][
                "cache_read_input_tokens"
            ]
        )
    assert [n > 200 for n in reused] == expected and min(reused) in (0, reused[0])


@pytest.mark.parametrize(
    "arguments", [(), ("--share-contexts",)], ids=["apart", "shared"]
)
def test_live_and_ps_show_a_key_only_its_own_requests(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    """Another key's requests change neither a client's map of experts in /live nor its
    times in /api/ps."""
    ann, bob = ({"authorization": f"Bearer {key}"} for key in KEYS)
    settings = {"MOEGGUF_API_KEY": "\n".join(KEYS), "OMP_NUM_THREADS": "1"}

    def ask(server: Server, key: dict[str, str], text: str) -> None:
        body = {
            "model": "demo",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 24,
        }
        assert server.call("/v1/chat/completions", body, **key).status == 200

    def state(server: Server, key: dict[str, str]) -> bytes:
        (model,) = server.call("/live?once=1", **key).json["models"]
        return base64.b64decode(model["snapshot"]["state"])

    with serving(tmp_path, "--expert-cache", "30%", *arguments, **settings) as server:
        ask(server, ann, "Hello")
        before = state(server, ann)
        assert any(before) and not any(state(server, bob))
        ask(server, bob, "What is an expert?")
        assert any(state(server, bob)) and state(server, ann) == before, (
            "a key's map stays as its last request left it"
        )
        last = [
            server.call("/api/ps", **key).json["models"][0]["moe"]["last_answer"]
            for key in (ann, bob)
        ]
        assert last[0]["eval_duration"] != last[1]["eval_duration"]


def test_a_trusted_network_without_keys_refuses_foreign_host_headers() -> None:
    for host in (
        "evil.com",
        "evil.com:11434",
        "192.168.1.5.evil.com",
        "evil.com#.local",
    ):
        assert status_of("192.168.1.7", host) == 403
    for host in ("192.168.1.5", "box.local:11434", "box", "box:11434", "localhost"):
        assert status_of("192.168.1.7", host) == 200
    assert (
        status_of("192.168.1.7", "box.lan:11434", origins=("http://box.lan:*",)) == 200
    )


FORWARDED = (
    "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Forwarded-Port", "X-Forwarded-Server", "X-Forwarded",
    "X-Forwarded-Prefix", "X-Forwarded-Client-Cert", "X-Forwarded-Whatever", "Forwarded", "Forwarded-For", "Via",
    "X-Forward-For", "X-Real-IP", "X-Client-IP", "Client-IP", "True-Client-IP", "X-True-Client-IP", "X-Remote-Addr",
    "X-Cluster-Client-IP", "X-Original-Forwarded-For", "X-Original-Host", "X-Original-URL", "X-Rewrite-URL", "X-Scheme",
    "X-ProxyUser-Ip", "WL-Proxy-Client-IP", "Proxy-Connection", "X-Originating-IP", "X-Remote-IP", "X-BlueCoat-Via",
    "CF-Connecting-IP", "CF-Connecting-IPv6", "CF-Ray", "CF-Visitor", "CF-IPCountry", "CDN-Loop", "Cdn-Src-Ip",
    "Fastly-Client-IP", "Fastly-FF", "Fly-Client-IP", "Fly-Forwarded-Proto", "X-Akamai-Edgescape", "Incap-Client-IP",
    "Akamai-Origin-Hop", "X-Sucuri-ClientIP", "X-Azure-ClientIP", "X-Azure-FDID", "X-ARR-LOG-ID", "X-Amz-Cf-Id",
    "X-Amzn-Trace-Id", "CloudFront-Viewer-Address", "X-Appengine-User-IP", "X-Goog-IAP-JWT-Assertion", "X-Vercel-Id",
    "X-Envoy-External-Address", "X-Envoy-Attempt-Count", "X-NF-Client-Connection-IP", "DO-Connecting-IP", "X-Varnish",
    "Tailscale-User-Login", "Ngrok-Trace-Id", "X-Railway-Edge", "X-Pomerium-Assertion", "L5d-Client-Id",
)  # fmt: skip


@pytest.mark.parametrize("name", FORWARDED)
def test_forwarding_headers_of_a_proxy_remove_trust(name: str) -> None:
    added = (name.lower().encode(), b"8.8.8.8")
    for client in ("127.0.0.1", "192.168.1.7"):
        assert status_of(client, "127.0.0.1:11434", added=added) == 403
        assert status_of(client, "127.0.0.1:11434", added=added, api_keys=(KEY,)) == 401
        assert (
            status_of(client, "127.0.0.1:11434", added=added, api_keys=(KEY,), key=KEY)
            == 200
        )


def test_usual_client_headers_keep_trust() -> None:
    for name in (
        "User-Agent", "Accept-Encoding", "Cache-Control", "Origin-Agent-Cluster", "Sec-Fetch-User", "X-Requested-With",
        "X-Stainless-Arch", "X-Request-Id", "OpenAI-Organization", "OpenAI-Project", "Anthropic-Version", "Traceparent",
        "Anthropic-Dangerous-Direct-Browser-Access", "X-OpenWebUI-User-Id", "Idempotency-Key", "Priority", "Upgrade",
    ):  # fmt: skip
        assert status_of("192.168.1.7", added=(name.lower().encode(), b"x")) == 200, (
            name
        )


BOTH = b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n"
HIDDEN = b"GET /api/version HTTP/1.1\r\nHost: localhost\r\n\r\n"
AMBIGUOUS = {
    "length first": BOTH % 5 + b"0\r\n\r\n",
    "length of both requests": BOTH % (5 + len(HIDDEN)) + b"0\r\n\r\n",
    "coding first": b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "no body by its length": BOTH % 0,
    "two lengths": b"Content-Length: 0\r\nContent-Length: 51\r\n\r\n",
    "two lengths in a line": b"Content-Length: 0, 51\r\n\r\n",
    "two codings": b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
    "another coding": b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "a space before the colon": b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "a chunk that is none": b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
}


@pytest.mark.parametrize("method", [b"GET /api/version", b"POST /api/show"])
@pytest.mark.parametrize("name", AMBIGUOUS)
def test_an_ambiguous_body_length_gets_a_400_and_closes_the_connection(
    url: str, caplog: pytest.LogCaptureFixture, name: str, method: bytes
) -> None:
    with connected(url) as connection, connection.makefile("rb") as file:
        connection.sendall(
            method + b" HTTP/1.1\r\nHost: localhost\r\n" + AMBIGUOUS[name] + HIDDEN
        )
        answer = file.read()  # reads until the server closes the connection
    assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1") == 1
    assert b"\r\nconnection: close\r\n" in answer and b'{"error":' in answer
    assert not [record for record in caplog.records if record.exc_info]


def test_an_invalid_chunk_after_a_reply_closes_the_connection(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with connected(url) as connection, connection.makefile("rb") as file:
        connection.sendall(b"POST /api/show HTTP/1.1\r\nHost: localhost\r\n" + BOTH % 5)
        assert b" 400 " in file.readline()
        connection.sendall(b"zz\r\n" + HIDDEN)
        assert b"HTTP/1.1" not in file.read()
    assert not [record for record in caplog.records if record.exc_info]


def test_large_headers_and_compressed_bodies_are_refused(url: str) -> None:
    reply = call(f"{url}/api/tags", X_Large="x" * 20_000)
    assert reply.status in (400, 431) and reply.error
    reply = call(f"{url}/api/chat", b"\x1f\x8b", Content_Encoding="gzip")
    assert reply.status == 415 and "Content-Encoding" in reply.error


def test_serve_on_a_port_in_use_fails_and_names_the_address(here: Command) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = here("serve", "--port", port)
    assert found.returncode == 1
    assert f"127.0.0.1:{port}" in found.stderr and "in use" in found.stderr
