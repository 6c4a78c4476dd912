"""Runs `moegguf.serving.ray:app` on a local Ray. As a program, prints the port once the
application is ready, and stops Ray when stdin closes."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from servers import environment

END_S = 60


@dataclass
class RayApplication:
    """A Ray application that runs in another process."""

    url: str
    process: psutil.Process

    def replicas(self, deployment: str) -> list[psutil.Process]:
        """Returns the processes of a deployment's replicas."""
        title = f"ray::ServeReplica:moegguf:{deployment}"
        return [
            each
            for each in self.process.children(recursive=True)
            if title in " ".join(command_line(each))
        ]


def command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # the process has exited in the meantime
        return []


@contextmanager
def ray_application(
    arguments: Mapping[str, Any], home: Path
) -> Iterator[RayApplication]:
    """Runs the application with `arguments` in another process, on loopback, and yields
    it.

    At the end, stops Ray and removes its folder. Fails if a Ray process is still
    running.
    """
    # Ray's sockets are in this folder. Their paths may be at most 107 bytes long, so
    # the folder is directly below /tmp.
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    own = {
        "HOME": str(home),
        "MOEGGUF_HOME": str(home),
        "RAY_TMPDIR": folder,
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    process = subprocess.Popen(
        [sys.executable, __file__, json.dumps(arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        encoding="utf-8",
        env=environment(**own, HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1"),
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None
    started: set[psutil.Process] = set()
    try:
        port = process.stdout.readline().strip()
        assert port, f"Ray has ended with exit code {process.wait(END_S)}"
        yield RayApplication(f"http://127.0.0.1:{port}", psutil.Process(process.pid))
    finally:
        started.update(
            psutil.Process(process.pid).children(recursive=True)
            if process.poll() is None
            else ()
        )
        process.stdin.close()
        process.stdout.close()
        process.wait(END_S)
        _, alive = psutil.wait_procs(started, END_S)
        shutil.rmtree(folder, ignore_errors=True)
    assert not alive


def main() -> None:
    """Runs the application until stdin closes. The program's only argument is a JSON
    object with the application's arguments."""
    import ray
    from ray import serve
    from ray.serve.config import HTTPOptions

    from moegguf.serving.ray import app

    # stdout is for the port; Ray prints to stderr.
    said, sys.stdout = sys.stdout, sys.stderr
    ray.init(
        num_cpus=8,
        include_dashboard=False,
        object_store_memory=80 << 20,
        log_to_driver=False,
    )
    port = free_port()
    serve.start(http_options=HTTPOptions(host="127.0.0.1", port=port))
    serve.run(app(json.loads(sys.argv[1])), name="moegguf", route_prefix="/")
    print(port, file=said, flush=True)
    sys.stdin.read()
    serve.shutdown()
    ray.shutdown()


def free_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


if __name__ == "__main__":
    os.environ.pop("RAY_ADDRESS", None)
    main()
