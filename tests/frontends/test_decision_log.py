"""Tests MOEGGUF_LOG=debug: a worker's and a server's decisions appear on stderr, as
text or as JSON."""

import json
from pathlib import Path

from servers import Command, serving


def test_run_with_debug_log_prints_decisions_of_its_worker(moegguf: Command) -> None:
    done = moegguf(
        "run",
        "demo",
        "What is an expert?",
        "--expert-cache",
        "25%",
        MOEGGUF_LOG="debug",
    )
    assert done.returncode == 0
    assert "prefix_reused model=demo" in done.stderr and "n_reused=0" in done.stderr
    assert "experts_evicted model=demo" in done.stderr
    quiet = moegguf("run", "demo", "What is an expert?", "--expert-cache", "25%")
    assert quiet.stdout == done.stdout and "prefix_reused" not in quiet.stderr


def test_serve_with_json_log_writes_fields_of_decisions(tmp_path: Path) -> None:
    with serving(tmp_path, "--log-format", "json", MOEGGUF_LOG="debug") as server:
        for prompt in ("What is an expert?", "What is an expert, please?"):
            server.call(
                "/api/generate",
                {
                    "model": "demo",
                    "prompt": prompt,
                    "stream": False,
                    "options": {"num_predict": 4},
                },
            )
    found = [
        json.loads(line) for line in server.log().splitlines() if line.startswith("{")
    ]
    reused = [line for line in found if line.get("event") == "prefix_reused"]
    assert [line["model"] for line in reused] == ["demo:latest"] * 2
    assert reused[0]["n_reused"] == 0 < reused[1]["n_reused"] < reused[1]["n_prompt"]
