"""Fixtures for tests of models and downloads.

huggingface_hub is slow to import, so only the fixtures import it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from fake_hub import FakeHub

    from moegguf.models.catalog import Catalog

# No example has a time limit, because any example can be slow on a busy machine.
settings.register_profile("any-speed", deadline=None)
settings.load_profile("any-speed")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A fake Hugging Face hub, which this process uses during one test.

    Downloads wait only briefly before they retry.
    """
    from fake_hub import hub_in_use

    from moegguf.models import hub as downloads

    monkeypatch.setattr(downloads, "WAIT_S", 0.01)
    monkeypatch.setattr(downloads, "POLL_S", 0.01)
    monkeypatch.setattr(downloads, "MAX_WAIT_S", 0.05)
    with hub_in_use(tmp_path) as made:
        yield made


@pytest.fixture
def repo(hub: FakeHub) -> FakeHub:
    """The hub of the fixture `hub`, plus the repository User/Repo-GGUF with the files
    of `pull_helpers.FILES`."""
    from pull_helpers import FILES

    hub.add("User/Repo-GGUF", dict(FILES))
    return hub


@pytest.fixture
def catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Catalog:
    """A catalog whose data folder, Hugging Face cache and Ollama store are in the
    test's folder."""
    from moegguf.models.catalog import Catalog

    for name, folder in (
        ("MOEGGUF_HOME", "home"),
        ("HF_HOME", "hf"),
        ("OLLAMA_MODELS", "ollama"),
    ):
        monkeypatch.setenv(name, str(tmp_path / folder))
    for name in ("MOEGGUF_MODELS", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    return Catalog()


@pytest.fixture
def any_file_is_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the catalog and downloads accept files with any contents as models."""
    from moegguf.models import catalog
    from moegguf.models import hub as downloads

    monkeypatch.setattr(catalog, "is_other_kind", lambda _path: False)
    monkeypatch.setattr(downloads, "MAGIC", b"")
