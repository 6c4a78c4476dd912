"""Downloads models from Hugging Face. `pull` takes a model's name and reports each step
with Ollama's status texts. `fetch` takes a pattern for file names, as
llama-cpp-python's `from_pretrained` does.

Files get their names after all files of the model have been downloaded, and `main` in
the cache is updated last. Only a file above PLAIN_LIMIT_BYTES gets its name as soon as
it is complete. If two pulls fetch the same file, in one process or in two, one of them
waits. If the first pull is stopped, the waiting pull continues from the bytes received
so far. It fetches a file above PLAIN_LIMIT_BYTES from the start.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from moegguf.errors import ModelNotFoundError, PullError
from moegguf.models.catalog import Catalog
from moegguf.models.entry import ModelEntry, PullStatus
from moegguf.models.names import (
    DEFAULT_TAG,
    Name,
    find_in_library,
    hub_hint,
    nearest_names,
    parse_name,
)
from moegguf.models.selection import (
    MAX_LISTED,
    first_of,
    is_model,
    models_in,
    select_files,
)
from moegguf.models.sources import (
    DEMO_NAME,
    Snapshot,
    cached_models,
    hub_cache,
    hub_offline,
    snapshots,
)

if TYPE_CHECKING:
    from moegguf.models.hub import HubFile

Report = Callable[[PullStatus], None]


def pull(
    name: str,
    catalog: Catalog,
    report: Report,
    cancelled: threading.Event | None = None,
) -> ModelEntry:
    """Downloads from Hugging Face the files of the model `name` that are not in the
    cache. `name` is a name on Hugging Face or a short name from the library. Returns
    the model's entry. If requests are forbidden (`hub_offline`), only searches the
    cache.

    Calls `report` in the calling thread. Raises ModelNameError for an invalid name, and
    ModelNotFoundError if `name` is neither kind of name, or the repository or file does
    not exist. Raises ModelFormatError for a .gguf file with other contents. Raises
    PullError if fetching fails or `cancelled` is set, and if requests are forbidden but
    the model is not in the cache. Received bytes are kept for the next pull, except for
    a file above PLAIN_LIMIT_BYTES.
    """
    model = find_in_library(name)
    parsed = parse_name(model.hub_name if model else name)
    if not parsed.is_hub:
        near = " or ".join(map(repr, nearest_names(name)))
        guess = f"; did you mean {near}?" if near else ": it is not in the library."
        if parsed.key == parse_name(DEMO_NAME).key:
            raise ModelNotFoundError(
                f"{name!r} ships with moegguf, so there is nothing to fetch."
            )
        raise ModelNotFoundError(
            f"{parsed.canonical!r} cannot be pulled{guess} {hub_hint(name)}"
        )
    if not hub_offline():
        entry = _fetch(parsed, report, cancelled or threading.Event())
    elif found := next(cached_models(parsed.canonical), None):
        entry = found
        report(PullStatus("success"))
    else:
        raise PullError(
            f"{parsed.canonical} is not in {str(hub_cache())!r}, and HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set;"
            " unset this variable to fetch the model."
        )
    catalog.unhide(entry.name)
    return entry


def _fetch(name: Name, report: Report, stopped: threading.Event) -> ModelEntry:
    from moegguf.models.hub import fetch_files, link_commit, read_repository

    report(PullStatus("pulling manifest"))
    known = read_repository(name.repo)
    selection = select_files(known, name.tag, repo=name.repo)
    files = [known[path] for path in selection.paths]
    reported: dict[HubFile, PullStatus] = {}
    for file in files:
        digest = f"sha256:{file.etag}" if file.is_large else ""
        reported[file] = PullStatus(
            f"pulling {file.etag[:12]}", digest, file.path, file.size_bytes
        )
        report(reported[file])

    def report_bytes(received: dict[HubFile, int]) -> None:
        for file, n_bytes in received.items():
            if reported[file].completed_bytes != n_bytes:
                reported[file] = replace(reported[file], completed_bytes=n_bytes)
                report(reported[file])

    fetch_files(files, name.canonical, stopped, report_bytes)
    report(PullStatus("verifying sha256 digest"))
    report(PullStatus("writing manifest"))
    found = Snapshot(files[0].repo, link_commit(files))
    tag = next(
        (
            tag
            for tag, other in models_in(found.paths())
            if other.files == selection.files
        ),
        DEFAULT_TAG,
    )
    report(PullStatus("success"))
    return found.entry(tag, selection)


Folder = str | os.PathLike[str] | None


def fetch(
    repo_id: str,
    filename: str | None = None,
    others: Sequence[str] = (),
    local_dir: Folder = None,
    cache: Folder = None,
) -> Path:
    """Downloads all shards of the model that the pattern `filename` selects, and the
    files that the patterns in `others` select. Returns the path of the first shard.

    Downloads into `local_dir`, or else into `cache` (default: the Hub's cache). Files
    that are already complete there are not fetched again. If the list of files cannot
    be read from the Hub, uses only files that are already there. Raises PullError if
    fetching fails, and ModelFormatError for a .gguf file with other contents. Raises
    ModelNotFoundError if the repository does not exist, if `filename` selects no model
    or several, or if one of `others` does not match exactly one file.
    """
    from huggingface_hub.utils import tqdm

    from moegguf.models.hub import (
        fetch_files,
        find_missing,
        link_commit,
        link_files,
        read_repository,
    )

    folder = Path(local_dir) if local_dir else None
    cache = folder / ".cache" / "moegguf" if folder else Path(cache or hub_cache())
    try:
        if hub_offline():
            raise PullError(
                f"{repo_id} is not in the cache, and HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set; unset this variable"
                " to fetch the model."
            )
        there = read_repository(repo_id, cache)
    except PullError:
        if here := folder or next(
            (snapshot.folder for snapshot in snapshots(cache, repo_id)), None
        ):
            known = sorted(
                path.relative_to(here) for path in here.rglob("*") if path.is_file()
            )
            paths = [path.as_posix() for path in known if path.parts[0] != ".cache"]
            if any(map(is_model, paths)):
                return here / _matching(paths, repo_id, filename, others)[0]
        raise
    files = [
        there[path] for path in _matching(sorted(there), repo_id, filename, others)
    ]
    missing = find_missing(files, folder) if folder else files
    with tqdm(
        total=sum(file.size_bytes for file in missing),
        desc=repo_id,
        unit="B",
        unit_scale=True,
    ) as bar:

        def report_bytes(received: dict[HubFile, int]) -> None:
            bar.update(sum(received.values()) - bar.n)

        fetch_files(missing, repo_id, threading.Event(), report_bytes)
    if folder is None:
        return link_commit(files) / files[0].path
    link_files(missing, folder)
    return folder / files[0].path


def _matching(
    paths: Sequence[str], repo_id: str, filename: str | None, others: Sequence[str]
) -> list[str]:
    """Returns the shards of one model in order, then one file for each pattern in
    `others`. `filename` is a pattern that files of only one model match. If no file
    matches, `filename` is taken as a tag; None means the tag `latest`.

    Raises ModelNotFoundError if no model or several models match `filename`, or if a
    pattern in `others` does not match exactly one file.
    """
    matching = [
        path
        for path in paths
        if is_model(path) and filename is not None and fnmatch(path, filename)
    ]
    models = {
        selection.files
        for _, selection in models_in(paths)
        if set(selection.files) & set(matching)
    }
    if len(models) > 1:
        some = first_of(sorted(files[0] for files in models), MAX_LISTED)
        raise ModelNotFoundError(
            f"{repo_id}: {len(models)} models match {filename!r}: {some}; give the name of one of them."
        )
    # No complete model matches the pattern: `select_files` finds a model by this tag,
    # or raises an error that lists the files or the missing shards.
    tag = (
        DEFAULT_TAG
        if filename is None
        else matching[0].rpartition("/")[2]
        if matching
        else filename
    )
    found = [
        *(models.pop() if models else select_files(paths, tag, repo=repo_id).files)
    ]
    for pattern in others:
        matching = [path for path in paths if fnmatch(path, pattern)]
        listed = first_of(matching or paths, MAX_LISTED)
        if not matching:
            raise ModelNotFoundError(
                f"{repo_id}: no file matches {pattern!r}; the files are {listed}; give the name of one of them."
            )
        if len(matching) != 1:
            raise ModelNotFoundError(
                f"{repo_id}: exactly one file must match {pattern!r}, but {len(matching)} do: {listed}; give the"
                " name of one file."
            )
        found += matching
    return found
