"""Models on several machines: a Ray Serve application in which each replica runs one
model in a worker process.

Ray Serve starts, restarts, scales and addresses replicas. This package has the code
that a replica runs, and decides which replica a request prefers. Promises: an answer
comes from one replica, whole or with an error at its end. If the preferred replica is
full, Ray Serve sends the request to another one. This package does not handle the
formats of HTTP APIs. At run time, only application.py imports Ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve import Application


def app(arguments: Mapping[str, Any]) -> Application:
    """Returns the application for `serve run moegguf.serving.ray:app`, or for
    `import_path` in Ray Serve's config file. `arguments` are the `args` of that file
    (`moegguf.serving.ray.config`). Raises OptionError or ModelNameError."""
    from moegguf.serving.ray.application import build
    from moegguf.serving.ray.config import read_config

    return build(read_config(arguments))
