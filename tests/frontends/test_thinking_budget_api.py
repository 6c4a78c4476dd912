"""Tests the thinking budget in the HTTP APIs, in `moegguf run`, in a Modelfile and in a
server's settings."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_manager import HI, FakeManager, server_of
from servers import Command, Server, call

Json = dict[str, Any]

N, MESSAGE = 6, " So be it."
ASKED: Json = {"model": "thinker", "temperature": 0, "max_tokens": 30, "stream": False}
CHAT: Json = {**ASKED, "messages": HI, "think": True}
LIMIT: Json = {"reasoning_budget_tokens": N, "reasoning_budget_message": MESSAGE}
EFFORT: Json = {"reasoning": {"effort": "high"}}
OF_OLLAMA: Json = {"temperature": 0, "num_predict": 30, **LIMIT}


def of_chat(reply: Json) -> tuple[str, str]:
    message = reply["choices"][0]["message"]
    return message.get("reasoning_content") or "", message["content"]


def of_responses(reply: Json) -> tuple[str, str]:
    texts = {
        item["type"]: "".join(part["text"] for part in item["content"])
        for item in reply["output"]
    }
    return texts.get("reasoning", ""), texts["message"]


def of_anthropic(reply: Json) -> tuple[str, str]:
    blocks = {block["type"]: block for block in reply["content"]}
    return blocks.get("thinking", {}).get("thinking", ""), blocks["text"]["text"]


def of_ollama(reply: Json) -> tuple[str, str]:
    return reply["message"].get("thinking", ""), reply["message"]["content"]


DIALECTS: list[tuple[str, Json, Callable[[Json], tuple[str, str]]]] = [
    ("/v1/chat/completions", CHAT | LIMIT, of_chat),
    ("/v1/responses", {**ASKED, "input": "hi", "max_output_tokens": 30, **EFFORT, **LIMIT}, of_responses),
    (
        "/v1/messages",
        {
            **CHAT, "thinking": {"type": "enabled", "budget_tokens": N},
            "options": {"reasoning_budget_message": MESSAGE},
        },
        of_anthropic,
    ),
    ("/api/chat", {**CHAT, "options": OF_OLLAMA}, of_ollama),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "parts_of"), DIALECTS, ids=[path for path, *_ in DIALECTS]
)
def test_thinking_ends_within_its_budget_in_every_dialect(
    served: Server, path: str, body: Json, parts_of: Callable[[Json], tuple[str, str]]
) -> None:
    limited = served.call(path, body)
    assert limited.status == 200, limited.text
    thinking, text = parts_of(limited.json)
    free = served.call("/v1/chat/completions", CHAT).json
    assert thinking.endswith(MESSAGE) and text
    assert (
        of_chat(free)[0].startswith(thinking.removesuffix(MESSAGE))
        and not of_chat(free)[1]
    )


def test_the_thinking_budget_applies_to_a_raw_prompt(served: Server) -> None:
    prompt = served.call("/apply-template", CHAT).json["prompt"]
    assert prompt.rstrip().endswith("<think>")
    body = {"model": "thinker", "prompt": prompt, "temperature": 0, "n_predict": 30}
    limited = served.call("/completion", {**body, "thinking_budget_tokens": N}).json[
        "content"
    ]
    free = served.call("/completion", body).json["content"]
    before, mark, after = limited.partition("</think>")
    assert mark and after and free.startswith(before)
    own = {
        "reasoning_budget_tokens": 0,
        "reasoning_budget_start_tag": prompt[:1],
        "reasoning_budget_end_tags": ["#"],
    }
    assert served.call("/completion", {**body, **own}).json["content"].startswith("#")


def test_requests_without_a_thinking_budget_use_the_budget_of_the_server(
    manager: FakeManager,
) -> None:
    own = {"reasoning_budget_tokens": 9, "reasoning_budget_message": "own"}
    with server_of(
        manager, reasoning_budget_tokens=5, reasoning_budget_message="Enough."
    ) as url:
        for fields in (
            {},
            own,
            {"reasoning_budget_tokens": -1},
            {"reasoning_budget_tokens": 0},
        ):
            assert (
                call(
                    f"{url}/v1/chat/completions",
                    {"model": "demo", "messages": HI, **fields},
                ).status
                == 200
            )
    found = [
        (r.sampling.reasoning_budget_tokens, r.sampling.reasoning_budget_message)
        for r in manager.requests
    ]
    assert found == [(5, "Enough."), (9, "own"), (5, "Enough."), (0, "Enough.")]
    assert [request.think for request in manager.requests] == [None, None, None, False]


def test_run_prefers_the_budget_flag_to_the_model_and_the_environment(
    here: Command, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    home = {"MOEGGUF_HOME": str(tmp_path / "home")}
    file = tmp_path / "Modelfile"
    file.write_text(
        f"FROM {tiny(template='deepseek')}\nPARAMETER reasoning_budget_tokens 4\nPARAMETER temperature 0\n"
    )
    assert here("create", "thinker", "-f", file, **home).returncode == 0

    def answered(*flags: object, **extra: str) -> str:
        done = here(
            "run",
            "thinker",
            "hi",
            "-t",
            1,
            "-c",
            256,
            "-n",
            40,
            "--think",
            "--hidethinking",
            *flags,
            **home,
            **extra,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    by_name = answered()
    assert by_name
    assert answered(MOEGGUF_THINK_BUDGET="0") == by_name, (
        "a name counts before the environment"
    )
    assert answered("--reasoning-budget", -1) == "", "it thinks for 40 tokens"
    assert answered("--reasoning-budget", 4) == by_name
    longer = answered("--reasoning-budget", 0)
    assert longer and longer != by_name
    shown = json.dumps(here("show", "thinker", "--modelfile", **home).stdout)
    assert "PARAMETER reasoning_budget_tokens 4" in shown
