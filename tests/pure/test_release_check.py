"""Tests the checks before a release.

They cover the version in all places, the contents of wheels and of the source
distribution, checksums, and the workflow.
"""

import io
import os
import re
import shutil
import subprocess
import tarfile
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from moegguf.package import __version__
from tools import release_check, version
from tools.release_check import ReleaseError

ROOT = Path(__file__).resolve().parents[2]
WORKFLOW = pytest.importorskip("yaml").safe_load(
    (ROOT / ".github/workflows/release.yml").read_text()
)
WHEEL_NAME = (
    f"moegguf-{__version__}-py3-none-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl"
)
CONTENTS = (
    f"moegguf-{__version__}.dist-info/licenses/LICENSE", "moegguf/lib/LICENSE", "moegguf/lib/UPSTREAM",
    "moegguf/lib/libmoegguf.so", "moegguf/lib/libllama.so", "moegguf/bindings/LICENSE.md", "moegguf/demo/demo.gguf",
    "moegguf/server/static/index.html", "moegguf/server/static/vendor/LICENSE.txt",
    *(f"moegguf-{__version__}.dist-info/licenses/licenses/{name}.txt" for name in ("GCC-runtime-exception", "GPL-3.0")),
)  # fmt: skip
SOURCES = (
    "pyproject.toml", "PKG-INFO", "README.md", "LICENSE", "licenses/GCC-runtime-exception.txt", "licenses/GPL-3.0.txt",
    "patches/UPSTREAM", "patches/series",
)  # fmt: skip


def wheel_of(folder: Path, names: Sequence[str], name: str = WHEEL_NAME) -> Path:
    path = folder / name
    with zipfile.ZipFile(path, "w") as archive:
        for member in names:
            archive.writestr(member, "x")
    return path


def sdist_of(folder: Path, names: Sequence[str]) -> Path:
    path = folder / f"moegguf-{__version__}.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            archive.addfile(
                tarfile.TarInfo(f"moegguf-{__version__}/{name}"), io.BytesIO()
            )
    return path


@pytest.fixture
def places(tmp_path: Path) -> Path:
    """A folder with copies of the files that contain the version."""
    for name in (
        "pyproject.toml",
        "moegguf/package.py",
        "CITATION.cff",
        "CHANGELOG.md",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_version_is_equal_in_all_files_and_written_into_all(places: Path) -> None:
    assert version.read_version() == version.read_version(places) == __version__
    version.write_version("7.8.9", places)
    assert version.read_version(places) == "7.8.9"
    assert (places / "pyproject.toml").read_text().count("7.8.9") == 4, (
        "of the project and of three plug-ins"
    )


def test_read_version_names_a_file_with_another_version(places: Path) -> None:
    path = places / "moegguf/package.py"
    path.write_text(path.read_text().replace(__version__, "9.9.9"))
    with pytest.raises(ValueError, match=r"9\.9\.9 in moegguf/package\.py"):
        version.read_version(places)


def test_check_tag_requires_the_version_of_the_files_and_a_dated_section(
    places: Path,
) -> None:
    version.write_version("0.9.0", places)
    for tag in ("0.9.0", "v0.9", "v0.9.0-final", "vx"):
        with pytest.raises(ValueError, match=r"v1\.2\.3"):
            version.check_tag(tag, places)
    with pytest.raises(ValueError, match=r"files have version 0\.9\.0"):
        version.check_tag("v0.9.1", places)
    with pytest.raises(ValueError, match=r"section '## 0\.9\.0 "):
        version.check_tag("v0.9.0", places)
    changelog = places / "CHANGELOG.md"
    changelog.write_text("# Changelog\n\n## 0.9.0 (not published yet)\n")
    with pytest.raises(ValueError, match=r"section '## 0\.9\.0 "):
        version.check_tag("v0.9.0", places)
    changelog.write_text("# Changelog\n\n## 0.9.0 (2027-01-31)\n")
    assert version.check_tag("refs/tags/v0.9.0", places) == "0.9.0"


def test_notes_of_returns_only_the_section_of_the_version(places: Path) -> None:
    version.write_version("0.9.0", places)
    (places / "CHANGELOG.md").write_text(
        "# Changelog\n\n## 0.9.1 (not published yet)\n\n- new\n\n"
        "## 0.9.0 (2027-01-31)\n\n### Added\n- this\n\n## 0.8.0 (2026-01-31)\n\n- old\n"
    )
    assert version.notes_of("v0.9.0", places) == "### Added\n- this"
    with pytest.raises(ValueError, match=r"files have version 0\.9\.0"):
        version.notes_of("v0.8.0", places)


def test_changelog_describes_the_version_of_the_files() -> None:
    assert f"\n## {__version__} (" in (ROOT / "CHANGELOG.md").read_text()


def test_write_urls_writes_the_section_once_and_rejects_other_addresses(
    places: Path,
) -> None:
    before = tomllib.loads((places / "pyproject.toml").read_text())["project"]
    for owner in ("first", "second"):
        version.write_urls(f"https://host.example/{owner}/moegguf", places)
    project = tomllib.loads((places / "pyproject.toml").read_text())["project"]
    assert project.pop("urls")["Issues"] == "https://host.example/second/moegguf/issues"
    assert project == before
    for address in (
        "host.example/owner/name",
        "https://host.example/owner",
        'https://host.example/owner/"name',
    ):
        with pytest.raises(ValueError, match="https://host/owner/name"):
            version.write_urls(address, places)


def test_check_wheel_accepts_a_complete_wheel_and_a_plugin(tmp_path: Path) -> None:
    release_check.check_wheel(wheel_of(tmp_path, CONTENTS))
    plugin = [
        f"moegguf_backends/vulkan/{name}" for name in ("libggml-vulkan.so", "UPSTREAM")
    ]
    name = f"moegguf_vulkan-{__version__}-py3-none-manylinux_2_35_x86_64.whl"
    path = wheel_of(
        tmp_path,
        [*plugin, f"moegguf_vulkan-{__version__}.dist-info/licenses/LICENSE"],
        name,
    )
    release_check.check_wheel(path)
    release_check.check_version(path, __version__)
    assert not release_check.is_for_this_machine(path)


@pytest.mark.parametrize("missing", CONTENTS)
def test_check_wheel_rejects_a_missing_library_or_licence(
    tmp_path: Path, missing: str
) -> None:
    with pytest.raises(ReleaseError, match="must have"):
        release_check.check_wheel(
            wheel_of(tmp_path, [name for name in CONTENTS if name != missing])
        )


@pytest.mark.parametrize(
    "unwanted",
    [
        "moegguf/testing/faults.py",
        "moegguf/lib/libmoegguf-testing.so",
        "moegguf/native/hook.cpp",
        "tests/x.py",
    ],
)
def test_check_wheel_rejects_test_equipment_and_sources(
    tmp_path: Path, unwanted: str
) -> None:
    with pytest.raises(ReleaseError, match="must not have"):
        release_check.check_wheel(wheel_of(tmp_path, [*CONTENTS, unwanted]))


def test_check_wheel_rejects_another_platform_version_or_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ReleaseError, match="manylinux"):
        release_check.check_wheel(
            wheel_of(
                tmp_path, CONTENTS, f"moegguf-{__version__}-py3-none-linux_x86_64.whl"
            )
        )
    for name in (
        "moegguf-0.0.1.tar.gz",
        f"moegguf-{__version__}.post1.tar.gz",
        f"other-{__version__}.tar.gz",
    ):
        with pytest.raises(ReleaseError, match="version"):
            release_check.check_version(tmp_path / name, __version__)
    monkeypatch.setitem(release_check.MOST_BYTES, "wheel", 10)
    with pytest.raises(ReleaseError, match="MiB"):
        release_check.check_wheel(wheel_of(tmp_path, CONTENTS))


def test_check_source_requires_files_of_the_build_and_rejects_tests(
    tmp_path: Path,
) -> None:
    release_check.check_source(sdist_of(tmp_path, SOURCES))
    with pytest.raises(ReleaseError, match=r"patches/series|patches"):
        release_check.check_source(sdist_of(tmp_path, SOURCES[:-1]))
    with pytest.raises(ReleaseError, match="must not have"):
        release_check.check_source(
            sdist_of(tmp_path, [*SOURCES, "tests/pure/test_x.py"])
        )


def test_sums_of_writes_a_file_that_sha256sum_accepts(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("b", "a")]
    for path in paths:
        path.write_text(path.name)
    (tmp_path / "SHA256SUMS").write_text(release_check.sums_of(paths))
    subprocess.run(
        ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"],
        cwd=tmp_path,
        check=True,
    )


@pytest.mark.skipif(shutil.which("cmake") is None, reason="`make` installs cmake")
def test_toolchain_finds_clang_in_a_folder_named_after_clang(tmp_path: Path) -> None:
    """The path of the C++ compiler differs from the C compiler's path only in the
    file's name."""
    programs = tmp_path / "clang-19"
    programs.mkdir()
    for name in ("clang-21", "clang++-21"):
        (programs / name).touch(0o755)
    toolchain = ROOT / "tools/sysroot/toolchain.cmake"
    (tmp_path / "script").write_text(
        f"include({toolchain})\nmessage(${{CMAKE_CXX_COMPILER}})"
    )
    command = ["cmake", f"-DCMAKE_SYSROOT={tmp_path}", "-P", tmp_path / "script"]
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"}
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env=environment
    )
    assert done.stderr.strip() == str(programs / "clang++-21")


def test_release_workflow_publishes_only_after_all_builds_and_tests() -> None:
    jobs = WORKFLOW["jobs"]
    assert {row["arch"] for row in jobs["wheel"]["strategy"]["matrix"]["include"]} == {
        "x86_64",
        "aarch64",
    }
    assert "make wheel SYSROOT=1 " in str(jobs["wheel"]["steps"])
    assert {row["name"] for row in jobs["plugin"]["strategy"]["matrix"]["include"]} == {
        "cuda13",
        "cuda12",
        "vulkan",
    }
    assert set(jobs["publish"]["needs"]) == set(jobs) - {"check", "publish", "image"}
    assert jobs["image"]["needs"] == "publish"
    for name in ("publish", "image"):
        assert jobs[name]["if"] == "github.ref_type == 'tag'"
    writers = {
        name
        for name, job in jobs.items()
        if "write" in job.get("permissions", {}).values()
    }
    assert writers == {"publish", "image"} and WORKFLOW["permissions"] == {
        "contents": "read"
    }


def test_release_workflow_tries_old_systems_and_an_image_before_publishing() -> None:
    jobs = WORKFLOW["jobs"]
    for image in ("python:3.11-bullseye", "almalinux:8"):
        assert image in str(jobs["old-systems"])
    assert "docker build " in str(jobs["image-build"])
    # The other jobs also run if the workflow is started by hand.
    assert {name for name in jobs if "if" in jobs[name]} == {"publish", "image"}


def test_release_workflow_publishes_notes_of_one_version_after_pypi() -> None:
    *_, pypi, page = WORKFLOW["jobs"]["publish"]["steps"]
    assert pypi["uses"].startswith("pypa/gh-action-pypi-publish@")
    assert pypi["with"]["skip-existing"] is True
    assert "tools.version --notes" in page["run"]
    assert '--prerelease="$PRERELEASE"' in page["run"]


def test_release_workflow_marks_prereleases_and_keeps_the_latest_image() -> None:
    mark = WORKFLOW["env"]["PRERELEASE"]
    parts = re.findall(r"contains\(github\.ref_name, '(\w+)'\)", mark)
    for tag in ("v1.2.3", "v1.2.3a1", "v1.2.3b1", "v1.2.3rc1"):
        assert version.version_of(tag)
        assert any(part in tag for part in parts) == (tag != "v1.2.3")
    text = str(WORKFLOW["jobs"]["image"])
    assert re.findall(r"\S+ \S+ \S+ && \S*:latest", text) == [
        "env.PRERELEASE == 'false' && format('{0}:latest"
    ]


def test_release_workflow_calls_only_files_and_targets_that_exist() -> None:
    text = (ROOT / ".github/workflows/release.yml").read_text()
    for module in re.findall(r"-m (tools\.\w+)", text):
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file()
    for file in re.findall(r"(?:file: |python )((?:deploy|examples|tools)/\S+)", text):
        assert (ROOT / file).is_file()
    made = set(
        re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    )
    assert set(re.findall(r"^ +make ([a-z-]+)", text, re.MULTILINE)) <= made


def test_readme_states_that_nothing_is_published_until_a_release_is_dated() -> None:
    """The README and the page about installation name a wheel first, then the sources.

    Both state that no release is published until CHANGELOG.md has a version with a
    date.
    """
    is_published = re.search(
        r"^## \d\S+ \(\d{4}-\d\d-\d\d\)$",
        (ROOT / "CHANGELOG.md").read_text(),
        re.MULTILINE,
    )
    for page in ("README.md", "docs/install.md"):
        text = (ROOT / page).read_text()
        assert text.index("pip install moegguf") < text.index("pip install ."), (
            "wheels come before the sources"
        )
        assert "uvx moegguf run demo" in text
        assert ("No release is published yet" in text) == (is_published is None), page
