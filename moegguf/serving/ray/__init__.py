"""Models on several machines: a Ray Serve application whose replicas are moegguf workers.

Ray Serve starts, restarts, scales and addresses replicas. This package has the code that a replica runs, and decides
which replica a request prefers. Promises: an answer comes from one replica, whole or with an error at its end. A
preference never keeps a request from a free replica. Does not know HTTP, and imports Ray only where a replica or a
handle exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve import Application


def app(arguments: Mapping[str, Any]) -> Application:
    """The application: `serve run moegguf.serving.ray:app`, or `import_path` in a config file of Ray Serve, whose
    `args` are `arguments` (`moegguf.serving.ray.config`). Raises OptionError, ModelNameError."""
    from moegguf.serving.ray.application import build
    from moegguf.serving.ray.config import read_config

    return build(read_config(arguments))
