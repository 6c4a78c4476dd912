"""tools/size.py: the repository is within its limits, and a package that grows or has none is named."""

from tools import size


def test_a_package_over_its_limit_or_without_one_is_named() -> None:
    found = size.faults({"a": 5, "b": 6, "c": 1}, {"a": 5, "b": 5})
    assert [text.split(",")[0] for text in found] == ["b has 6 lines", "c has 1 lines"]


def test_a_file_counts_for_its_package() -> None:
    assert [size.package_of(path) for path in ("moegguf/a.py", "moegguf/cli/report/b.py", "tools/gpu/c.py")] == [
        "moegguf", "moegguf/cli", "tools",
    ]  # fmt: skip
