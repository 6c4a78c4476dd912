"""Tests `moegguf run`: its stdout, stderr and exit codes, answers from a running
server, and its HTTP client."""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from chat_terminal import ANSWER, ECHO, QUESTION
from fake_hub import FakeHub, running_hub
from fake_manager import running
from servers import Command, Server, TinyModel, completed, environment, started
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from terminal import Terminal, control, moegguf_command

from moegguf.chat.client import Client, NoServerError, ServerError
from moegguf.errors import MoeggufError
from moegguf.models.catalog import demo_path
from moegguf.settings import Host, Settings, parse_host

QUICK = ("-t", "1", "-c", "256")
DEMO = ("--temperature", "0", "-t", "1", "-c", "512")


def test_stdout_has_only_the_answer_which_repeats_at_temperature_0(
    moegguf: Command, tiny: TinyModel
) -> None:
    ask = (
        "run",
        tiny(),
        "hello",
        "there",
        "--temperature",
        0,
        "-n",
        12,
        "--expert-cache",
        "50%",
        *QUICK,
    )
    first, second = moegguf(*ask), moegguf(*ask)
    assert first.returncode == second.returncode == 0, first.stderr
    assert first.stdout == second.stdout
    assert first.stdout.strip()
    assert first.stdout.endswith("\n")
    assert first.stderr == ""


def test_run_accepts_llama_cpp_option_names(here: Command, tiny: TinyModel) -> None:
    sampling = (
        "--temp",
        0.7,
        "--top-k",
        1,
        "--top-p",
        0.9,
        "--min-p",
        0.05,
        "--repeat-penalty",
        1.1,
        "-s",
        3,
    )
    loading = (
        "-ctk",
        "q8_0",
        "-ctv",
        "f16",
        "-ngl",
        0,
        "-c",
        0,
        "-t",
        1,
        "--expert-cache",
        "50%",
    )
    done = here("run", "-m", tiny(), "-p", "hello", "-n", 4, *sampling, *loading)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_piped_input_precedes_the_prompt(here: Command) -> None:
    out = here("run", "demo", "moegguf do?", *DEMO, stdin="What does\n").stdout
    assert ANSWER in out
    assert here("run", "demo", *DEMO, stdin=f"{QUESTION}\n").stdout == out
    utf16 = f"\ufeff{QUESTION}\n".encode("utf-16-le").decode(errors="surrogateescape")
    assert here("run", "demo", *DEMO, stdin=utf16).stdout == out
    assert here("run", "demo", *QUESTION.split(), *DEMO).stdout == out


SCREEN, PIPE = "screen", "pipe"


@pytest.mark.parametrize(("stdin", "stdout", "prompt", "outcome"), [
    (SCREEN, SCREEN, "", "chat"), (SCREEN, SCREEN, QUESTION, "answer"),
    (SCREEN, PIPE, "", "usage"), (SCREEN, PIPE, QUESTION, "answer"),
    (PIPE, SCREEN, "", "answer"), (PIPE, SCREEN, QUESTION, "answer"),
    (PIPE, PIPE, "", "answer"), (PIPE, PIPE, QUESTION, "answer"),
])  # fmt: skip
def test_run_chats_or_answers_by_its_terminals_and_pipes(
    tmp_path: Path, stdin: str, stdout: str, prompt: str, outcome: str
) -> None:
    command = f"{sys.executable} -m moegguf run demo {' '.join(DEMO)}" + (
        f" '{prompt}'" if prompt else ""
    )
    before = (
        f"printf '{'Tell me.' if prompt else QUESTION}' | " if stdin == PIPE else ""
    )
    after = f" > {tmp_path}/out" if stdout == PIPE else ""
    script = f"{before}{command} 2> {tmp_path}/err{after}; echo code $?"
    with Terminal(
        ["/bin/sh", "-c", script], environment(MOEGGUF_HOME=str(tmp_path)), columns=200
    ) as terminal:
        if outcome == "chat":
            terminal.prompt()
            terminal.send(control("d"))
        terminal.expect("code ")
        terminal.exit_code()
        assert f"code {2 if outcome == 'usage' else 0}" in terminal.text
        out = (tmp_path / "out").read_text() if stdout == PIPE else terminal.text
    errors = (tmp_path / "err").read_text()
    assert ("there is no prompt" in errors) == (outcome == "usage")
    assert bool(re.search(r"\w{3}", out.partition("code ")[0])) == (
        outcome in ("answer", "chat")
    )
    if outcome == "answer" and not (prompt and stdin == PIPE):
        assert out.startswith(ANSWER)


@pytest.mark.parametrize(("words", "printed"), [
    (["--think"], "think=True"), (["--think=high"], "think=high"), (["--think=false"], "think=False"),
    (["--think", "--insecure", "--keepalive", "5m"], "think=True"), (["--format", "json"], "format=json"),
    (['--format={"type":"object"}'], "format={'type': 'object'}"), (["--seed", "3"], "seed=3"),
    (["-n", "5"], "max_tokens=5"), (["--temperature", "0.5"], "temperature=0.5"), ([], "format=None think=None"),
])  # fmt: skip
def test_options_of_run_reach_the_model(words: list[str], printed: str) -> None:
    done = echo("settings", *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert printed in done.stdout


def echo(*arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
    return completed(
        [sys.executable, str(ECHO), "run", "demo", *arguments, *QUICK], **extra
    )


def test_system_options_put_a_system_message_first() -> None:
    for flag in ("--system", "--system-prompt", "-sys"):
        assert (
            echo("messages", flag, "Be brief.").stdout
            == "[system: Be brief.] [user: messages]\n"
        )


def test_format_reads_a_schema_file_and_refuses_other_values(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        file.write_text('{"type": "array"}', encoding)
        assert (
            "format={'type': 'array'}" in echo("settings", "--format", str(file)).stdout
        )
    file.write_text("[]")
    for wrong in (str(file), str(tmp_path / "nothing"), "{", "xml"):
        done = echo("settings", "--format", wrong)
        assert (done.returncode, done.stdout) == (2, "")
        assert "--format" in done.stderr
    assert echo("settings", "--think=maybe").returncode == 2


def test_thinking_is_plain_text_without_a_terminal() -> None:
    asked = "think: deep thought|the answer"
    assert (
        echo(asked).stdout
        == "Thinking...\ndeep thought\n...done thinking.\n\nthe answer\n"
    )
    assert echo(asked, "--hidethinking").stdout == "the answer\n"


def test_an_error_during_an_answer_exits_with_code_1() -> None:
    done = echo("fail ExpertIOError half an answer")
    assert (done.returncode, done.stdout) == (1, "half an answer\n")
    assert done.stderr == "error: as scripted\n"


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    """Yields a fake Hugging Face hub whose repository `some/demo-GGUF` contains the
    demo's file."""
    path = demo_path()
    with running_hub() as found:
        found.add("some/demo-GGUF", {"demo-Q4_0.gguf": path.read_bytes()})
        yield found


def test_run_pulls_a_missing_model_first(
    here: Command, hub: FakeHub, tmp_path: Path
) -> None:
    names = hub.environment(tmp_path)
    for model in (("hf.co/some/demo-GGUF",), ("-hf", "some/demo-GGUF")):
        done = here("run", *model, *QUESTION.split(), *DEMO, **names)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(ANSWER)
        assert done.stderr == ""
    assert len(hub.gets("demo-Q4_0.gguf")) == 1
    missing = here("run", "hf.co/some/other-GGUF", QUESTION, *DEMO, **names)
    assert (missing.returncode, missing.stdout) == (1, "")
    assert missing.stderr.startswith("error: ")


def test_run_shows_a_pull_on_a_terminal(hub: FakeHub, tmp_path: Path) -> None:
    command = moegguf_command("run", "some/demo-GGUF", QUESTION, *DEMO)
    with Terminal(command, environment(**hub.environment(tmp_path))) as terminal:
        assert terminal.exit_code() == 0
        assert "pulling manifest" in terminal.text
        assert re.search(r"pulling [0-9a-f]{12}: +100% ━+", terminal.text)
        assert "success" in terminal.text
        assert ANSWER[:60] in terminal.text


def test_stdout_is_utf8_in_any_locale(moegguf: Command, tiny: TinyModel) -> None:
    ask = ("run", tiny(), "é", "-n", 40, "--seed", 1, *QUICK)
    # The fixture `moegguf` fails unless the output is UTF-8.
    done = moegguf(*ask, PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and done.stdout, done.stderr


def test_a_low_budget_prints_a_warning_of_one_line(
    here: Command, tiny: TinyModel
) -> None:
    done = here(
        "run", tiny("tiny-mix"), "hello", "-n", 2, "--expert-cache", "10%", *QUICK
    )
    assert done.returncode == 0
    assert re.fullmatch(r"warning: .* hit rate will be low\n", done.stderr)


def test_run_uses_less_than_two_seconds_of_processor_time() -> None:
    """Measures CPU time instead of elapsed time, because other processes may use the
    same cores."""
    command = moegguf_command("run", "demo", "hi", "-t", 1, "-n", 1)
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environment()
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    assert used.ru_utime + used.ru_stime < 2


def test_a_closed_stdout_ends_run_without_a_message(tiny: TinyModel) -> None:
    with started("run", tiny(), "hello", "-n", 100, *QUICK) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        assert process.wait(60) != 0
        assert process.stderr.read() == ""


@pytest.mark.parametrize(
    ("prompt", "shown"),
    [
        ("stubborn mule", "mule mule"),
        ("progress", "reading the prompt 1,024/6,300 tokens · 47 t/s · 1m53s left"),
    ],
)
def test_ctrl_c_ends_a_long_prompt_and_an_unresponsive_answer(
    prompt: str, shown: str
) -> None:
    with Terminal(
        [sys.executable, str(ECHO), "run", "demo", prompt, *QUICK], environment()
    ) as terminal:
        terminal.expect(shown)
        terminal.send(control("c"))
        assert terminal.exit_code() == 130
        assert "reading" not in terminal.text


@pytest.mark.parametrize(
    ("after", "is_shown"), [("", True), ("> /dev/null", True), ("| cat", False)]
)
def test_progress_is_shown_unless_the_answer_goes_into_a_pipe(
    after: str, is_shown: bool
) -> None:
    script = f"{sys.executable} {ECHO} run demo hello {' '.join(QUICK)} {after}"
    with Terminal(["/bin/sh", "-c", script], environment()) as terminal:
        assert terminal.exit_code() == 0
        assert (b"\x1b[" in terminal.raw) is is_shown
        assert ("hello" in terminal.text) is ("null" not in after)


@contextmanager
def begun_answer() -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """Yields a `moegguf run` process that has begun a very long answer, and its
    worker's process."""
    endless = '{"type": "string", "minLength": 100000}'
    with started("run", "demo", QUESTION, "--format", endless, *QUICK) as process:
        assert process.stdout
        process.stdout.read(1)
        (worker,) = psutil.Process(process.pid).children()
        yield process, worker


def test_no_worker_outlives_a_killed_command() -> None:
    with begun_answer() as (process, worker):
        process.kill()
    assert psutil.wait_procs([worker], timeout=30)[1] == []


def test_a_killed_worker_ends_the_answer_with_an_error() -> None:
    with begun_answer() as (process, worker):
        worker.kill()
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert re.fullmatch(
        r"error: the model's worker process has ended \(killed by SIGKILL\);.*\n",
        stderr,
    )


ASKED = ("run", "demo", "What does moegguf do?", "--temperature", 0, "-n", 8)


@pytest.fixture
def unused(server: Server) -> Iterator[Server]:
    """Yields the shared server after unloading all its models. Unloads `demo` after the
    test."""
    for name in server.loaded():
        server.call("/api/generate", {"model": name, "keep_alive": 0})
    yield server
    server.call("/api/generate", {"model": "demo", "keep_alive": 0})


def labels(stderr: str) -> list[str]:
    return [line.partition(":")[0] for line in stderr.splitlines()]


def test_an_answer_by_the_server_looks_like_a_local_answer(
    here: Command, unused: Server
) -> None:
    served = here(*ASKED, "-v", "--keepalive", "9m", MOEGGUF_HOST=unused.url)
    assert (served.returncode, unused.loaded().keys()) == (0, {"demo:latest"}), (
        served.stderr
    )
    alone = here(*ASKED, "-v", "--local", MOEGGUF_HOST=unused.url)
    assert served.stdout == alone.stdout
    # Only the local answer prints a note, which warns of a second copy of the model in
    # memory.
    of_alone = [label for label in labels(alone.stderr) if label != "note"]
    assert labels(served.stderr) == [*of_alone, "answered by"]
    assert re.search(rf"answered by: +{unused.url}\n", served.stderr)
    quiet = here(
        *ASKED,
        "--format",
        "json",
        "--system-prompt",
        "Be brief.",
        MOEGGUF_HOST=unused.url,
    )
    assert (quiet.returncode, quiet.stderr) == (0, "") and quiet.stdout.startswith("{")
    assert unused.call("/api/ps").json["models"][0]["moe"]["pid"]


def test_local_options_and_models_run_without_the_server(
    here: Command, unused: Server, tiny: TinyModel, tmp_path: Path
) -> None:
    for option in (
        ("--local",),
        ("--expert-cache", "50%"),
        ("-t", "1"),
        ("--policy", "lru"),
        ("--no-prefetch",),
    ):
        assert here(*ASKED, *option, MOEGGUF_HOST=unused.url).returncode == 0
    assert here("run", tiny(), "x", "-n", 2, MOEGGUF_HOST=unused.url).returncode == 0
    own = {"MOEGGUF_HOME": str(tmp_path), "MOEGGUF_HOST": unused.url}
    here("cp", "demo", "unknown-to-the-server", **own)
    assert here("run", "unknown-to-the-server", "x", "-n", 2, **own).returncode == 0
    assert not unused.loaded()


def test_an_empty_prompt_loads_the_model_in_the_server(
    here: Command, unused: Server
) -> None:
    done = here("run", "tiny", "", "--keepalive", "7m", MOEGGUF_HOST=unused.url)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert unused.loaded().keys() == {"tiny:latest"}


def test_a_second_copy_of_a_loaded_model_prints_a_note(
    here: Command, unused: Server
) -> None:
    words = f"note: the server at {unused.url} has demo in memory, too."
    assert words not in here(*ASKED, "--local", MOEGGUF_HOST=unused.url).stderr, (
        "it has loaded nothing yet"
    )
    unused.call("/api/generate", {"model": "demo"})
    assert words in here(*ASKED, "--local", MOEGGUF_HOST=unused.url).stderr
    assert words not in here(*ASKED, MOEGGUF_HOST=unused.url).stderr


def test_a_context_beyond_training_gets_a_warning_here_and_in_a_server(
    here: Command, unused: Server
) -> None:
    for place in ((), ("--local",)):
        done = here(*ASKED, "--ctx", 4096, *place, MOEGGUF_HOST=unused.url)
        assert (
            "a context of 4,096 tokens is more than the 2,048 that the model was trained on"
            in done.stderr
        )


def test_errors_of_the_server_end_run_with_code_1(
    here: Command, unused: Server
) -> None:
    done = here("run", "demo", "hello", "--think", MOEGGUF_HOST=unused.url)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"error: .*does not support thinking.*\n", done.stderr)
    for name in ("nothing-of-that-name", "~nobody-of-that-name/x", "x" * 300):
        done = here("run", name, "hello", MOEGGUF_HOST=unused.url)
        assert (done.returncode, done.stdout) == (
            1,
            "",
        ) and "unexpected" not in done.stderr


def test_options_have_the_same_effect_in_the_server(
    here: Command, unused: Server
) -> None:
    ask = (
        "run",
        "demo",
        "count " * 220,
        "--temperature",
        0,
        "--ctx",
        256,
        "-n",
        60,
        "-v",
    )
    full = [
        here(*ask, "--no-context-shift", *more, MOEGGUF_HOST=unused.url)
        for more in ((), ("--local",))
    ]
    assert full[0].stdout == full[1].stdout and "answered by" in full[0].stderr
    assert "the context was full" in here(*ask, MOEGGUF_HOST=unused.url).stderr
    here("run", "demo", "x", "-n", 2, "--ctx", 0, MOEGGUF_HOST=unused.url)
    own = unused.call("/api/show", {"model": "demo"}).json["model_info"]
    length = own[f"{own['general.architecture']}.context_length"]
    assert unused.call("/api/ps").json["models"][0]["context_length"] == length


def test_invalid_utf8_in_a_prompt_becomes_replacement_characters(
    here: Command, unused: Server
) -> None:
    given = os.fsdecode(b"caf\xe9")
    ask = ("run", "demo", "--temperature", 0, "-n", 8, "-v", "--system-prompt")
    asked = here(*ask, given, given, MOEGGUF_HOST=unused.url)
    assert asked.returncode == 0 and "answered by" in asked.stderr
    replaced, alone = (
        here(*ask, "caf\ufffd", "caf\ufffd", MOEGGUF_HOST=unused.url),
        here(*ask, given, given, "--local"),
    )
    assert asked.stdout == replaced.stdout == alone.stdout


def test_cut_prompts_and_context_shifts_are_reported(
    here: Command, unused: Server
) -> None:
    options = (
        "-c",
        256,
        "-n",
        300,
        "--format",
        '{"type": "string", "minLength": 4000}',
    )
    done = here("run", "demo", "word " * 400, *options, MOEGGUF_HOST=unused.url)
    assert done.returncode == 0 and re.fullmatch(
        r"prompt cut: \d+ tokens left out\nthe context was full.*: the model no longer knows the older half\n",
        done.stderr,
    )
    done = here(
        "run", "demo", "hello", *options, "--no-context-shift", MOEGGUF_HOST=unused.url
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_run_ignores_the_server_of_another_program(
    here: Command, client: Client
) -> None:
    done = here(*ASKED, MOEGGUF_HOST=client.host.url)
    assert (done.returncode, done.stderr) == (0, "")


RESPONSES: dict[str, tuple[int, bytes]] = {
    "/api/ps": (200, b'{"models": []}'),
    # Not a version of moegguf, so the client does not use this server.
    "/api/version": (200, b'{"version": "0.33.0"}'),
    "/lines": (200, b'{"a": 1}\n\n{"a": 2}\n'),
    "/faulty": (200, b'{"a": 1}\n{"error": "the process has ended"}\n'),
    "/missing": (404, b'{"error": "model \'x\' not found"}'),
    "/v1/missing": (
        404,
        b'{"error": {"message": "no such model", "type": "not_found_error"}}',
    ),
    "/html": (200, b"<html>"),
    "/moved": (302, b""),
    "/cut": (200, b'{"a": 1}\n'),
}


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    """Yields a client of a server that answers each path with its entry in RESPONSES.

    `client.requests` lists the method, path, headers and body of each request that the
    server received.
    """
    # The client must not use this proxy for loopback addresses.
    monkeypatch.setenv("http_proxy", "http://192.0.2.1:9")
    requests: list[tuple[str, str, Mapping[str, str], bytes]] = []

    async def respond(request: Request) -> Response:
        path = request.url.path
        requests.append((request.method, path, request.headers, await request.body()))
        status, body = RESPONSES[path]
        length = len(body) + 90 * (path == "/cut")
        return Response(
            body,
            status,
            {"Location": "http://192.0.2.1/", "Content-Length": str(length)},
        )

    with running(
        Starlette(routes=[Route("/{path:path}", respond, methods=["GET", "POST"])])
    ) as url:
        client = Client(Settings(host=parse_host(url), api_keys=("s3cret",)))
        client.requests = requests  # type: ignore[attr-defined]
        yield client


def test_client_get_sends_the_key_and_returns_json(client: Client) -> None:
    assert client.get("/api/ps") == {"models": []}
    method, path, headers, body = client.requests[0]  # type: ignore[attr-defined]
    assert (method, path, body) == ("GET", "/api/ps", b"")
    assert headers["Authorization"] == "Bearer s3cret"


def test_client_post_returns_the_last_line_and_stream_each_line(client: Client) -> None:
    assert client.post("/lines", {"model": "dämo"}) == {"a": 2}
    assert (
        list(client.stream("/lines"))
        == list(client.stream("/lines", {"q": 1}))
        == [{"a": 1}, {"a": 2}]
    )
    method, _, headers, body = client.requests[0]  # type: ignore[attr-defined]
    assert (method, headers["Content-Type"], json.loads(body)) == (
        "POST",
        "application/json",
        {"model": "dämo"},
    )


def test_client_raises_for_error_lines_and_cut_responses(client: Client) -> None:
    lines = client.stream("/faulty")
    assert next(lines) == {"a": 1}
    with pytest.raises(ServerError, match="the process has ended"):
        next(lines)
    with pytest.raises(ServerError, match="the process has ended"):
        client.post("/faulty", {})
    assert next(client.stream("/cut")) == {"a": 1}
    with pytest.raises(NoServerError, match="lost the connection"):
        client.get("/cut")


@pytest.mark.parametrize(
    ("path", "message", "status"),
    [
        ("/missing", "model 'x' not found", 404), ("/v1/missing", "no such model", 404),
        # Replies that another program may send. The client does not follow redirects,
        # so the API key is not sent elsewhere.
        ("/html", "not JSON", None), ("/moved", "302", 302),
    ],
)  # fmt: skip
def test_client_raises_for_error_replies_and_invalid_ones(
    client: Client, path: str, message: str, status: int | None
) -> None:
    with pytest.raises(ServerError, match=message) as caught:
        client.get(path)
    assert status is None or caught.value.status == status
    assert isinstance(caught.value, MoeggufError)


def test_client_times_out_on_a_silent_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = Client(Settings(host=Host(port=silent.getsockname()[1])))
        with pytest.raises(NoServerError, match="does not answer"):
            client.get("/api/ps", timeout_s=0.05)


def test_client_replaces_wildcard_addresses_by_loopback() -> None:
    for listens, host in (
        ("0.0.0.0:8080", "127.0.0.1"),
        ("[::]:8080", "[::1]"),
        ("example.com:8080", "example.com"),
    ):
        assert (
            Client(Settings(host=parse_host(listens))).host.url == f"http://{host}:8080"
        )
