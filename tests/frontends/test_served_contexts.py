"""Contexts on disk as users have them: after unloading, after a killed server, in the reports, and the command."""

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import psutil
import pytest
from command_line import Command
from servers import Server, serving

TEXT = "The history of the mill beside the river is long. " * 12
ASKED = {
    "model": "demo",
    "raw": True,
    "stream": False,
    "options": {"num_thread": 1, "temperature": 0, "num_predict": 9},
}


def generate(server: Server, text: str = TEXT, **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = server.call("/api/generate", {**ASKED, "prompt": text, "logprobs": True, **more}).json
    return found


def counts(answer: dict[str, Any]) -> tuple[int, int]:
    n_cached = answer.get("prompt_cached_count", 0)
    return answer["prompt_eval_count"] - n_cached, n_cached


def kill(server: Server) -> None:
    workers = psutil.Process(server.pid).children(recursive=True)
    os.kill(server.pid, signal.SIGKILL)
    for worker in workers:
        worker.kill()
    psutil.wait_procs(workers)
    server.process.wait()


def test_a_conversation_outlives_unloading_and_killing(tmp_path: Path) -> None:
    store = {"MOEGGUF_CONTEXT_STORE": "100MiB"}
    with serving(tmp_path, **store) as server:
        first = generate(server)
        n_prompt, n_cached = counts(first)
        assert n_prompt > 128 and n_cached == 0
        generate(server, "", keep_alive=0)
        again = generate(server)
        n_kept = n_prompt - 1
        assert counts(again) == (n_prompt - n_kept, n_kept)
        assert (again["response"], again["logprobs"]) == (first["response"], first["logprobs"])
        kill(server)
    with serving(tmp_path, **store) as server:
        again = generate(server)
        assert counts(again) == (n_prompt - n_kept, n_kept)
        assert (again["response"], again["logprobs"]) == (first["response"], first["logprobs"])
        generate(server)
        (loaded,) = server.call("/api/ps").json["models"]
        memory, computed = n_prompt - 1, n_prompt - n_kept + 1
        assert loaded["moe"]["prompt_tokens"] == {"computed": computed, "memory": memory, "disk": n_kept}
        metrics = server.call("/metrics").text
        assert f'moegguf_prompt_tokens_disk_total{{model="demo:latest"}} {n_kept}.0' in metrics
        assert f'moegguf_prompt_tokens_cached_total{{model="demo:latest"}} {n_kept + memory}.0' in metrics


@pytest.fixture
def mine(here: Command, tmp_path: Path) -> Callable[..., CompletedProcess[str]]:
    own = {"MOEGGUF_HOME": str(tmp_path / "home"), "MOEGGUF_HOST": "127.0.0.1:9"}
    return lambda *arguments: here(*arguments, **own)


def test_run_goes_on_and_the_command_lists_and_clears(mine: Callable[..., CompletedProcess[str]]) -> None:
    assert mine("contexts").stdout.split() == ["MODEL", "TOKENS", "LONGEST", "SIZE", "USED"]
    run = ("run", "demo", "--verbose", "--temperature", "0", "-n", "5", "--context-store", "100MiB", TEXT)
    first, second = mine(*run), mine(*run)
    assert first.stdout == second.stdout
    assert "prompt cached" not in first.stderr
    found = re.search(r"prompt cached: +(\d+) token\(s\), \1 from disk\n", second.stderr)
    assert found and int(found[1]) >= 128
    (listed,) = json.loads(mine("contexts", "--json").stdout)
    assert listed["longest_tokens"] > int(found[1])
    row = rf"\n{listed['model']} +{listed['tokens']} +{listed['longest_tokens']} +\d.* [KM]B +.* ago\n"
    assert re.search(row, mine("contexts").stdout)
    missing = mine("contexts", "clear", "unknown")
    assert missing.returncode == 1 and "`moegguf contexts` lists the models" in missing.stderr
    assert re.fullmatch(r"deleted \d.* [KM]B of contexts\n", mine("contexts", "clear", listed["model"]).stdout)
    assert json.loads(mine("contexts", "--json").stdout) == []
    assert mine("contexts", "clear").stdout == "deleted 0 B of contexts\n"


def test_a_folder_that_cannot_be_used_is_a_warning(mine: Callable[..., CompletedProcess[str]], tmp_path: Path) -> None:
    (tmp_path / "home" / "cache").mkdir(parents=True)
    (tmp_path / "home" / "cache" / "contexts").write_text("not a folder")
    run = ("run", "demo", "--temperature", "0", "-n", "5", "--context-store")
    without, done = mine(*run, "0", TEXT), mine(*run, "auto", TEXT)
    assert done.stdout == without.stdout
    assert done.returncode == 0
    assert done.stderr.count("not kept on disk") == 1
