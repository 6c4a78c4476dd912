"""The models of the application's config, with the part of `moegguf.models.catalog.Catalog` that the APIs read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from moegguf.errors import ModelNotFoundError
from moegguf.models.catalog import Catalog
from moegguf.models.entry import ModelEntry
from moegguf.models.names import parse_name
from moegguf.serving.ray.config import ModelConfig


class ConfiguredCatalog:
    """Names of the config, with files of this machine. Thread-safe."""

    def __init__(self, configs: Sequence[ModelConfig]) -> None:
        self._configs = {config.name.lower(): config for config in configs}
        self._files = Catalog(paths=True)  # the config's author may name any file

    def find(self, name: str | os.PathLike[str], *, even_missing: bool = False) -> ModelEntry:
        """The model of this name. Raises ModelNotFoundError, ModelNameError, and ModelFormatError."""
        config = self._configs.get(parse_name(os.fspath(name)).key)
        if config is None:
            raise ModelNotFoundError(
                f"there is no model named {os.fspath(name)!r:.200} in the config of this application; known are"
                f" {', '.join(each.name for each in self._configs.values())}."
            )
        return replace(self._files.find(config.model, even_missing=even_missing), name=config.name)

    def entries(self, prefix: str = "") -> list[ModelEntry]:
        """Those whose names start with `prefix` (in any case), in the config's order."""
        return [
            self.find(config.name, even_missing=True)
            for key, config in self._configs.items()
            if key.startswith(prefix.lower())
        ]

    def modelfile(self, entry: ModelEntry) -> str:
        """The Modelfile that makes the same model again."""
        return self._files.modelfile(entry)
