"""Tests tools/size.py, which counts code without docstrings and comments."""

from __future__ import annotations

from tools.size import Size, faults, native_size, package_of, python_size


def test_python_size_leaves_out_docstrings_comments_and_imports() -> None:
    source = '"""A module."""\n\nimport os\n\n# a comment\ndef f(x):\n    """Returns it."""\n    return x + 1  # why\n'
    assert python_size(source) == Size(
        tokens=len("def f ( x ) : return x + 1".split()), lines=2
    )


def test_native_size_leaves_out_comments_but_not_strings_like_them() -> None:
    source = '// one\nint a;  // two\n/* three\n   four */\n\nchar b[] = "// text";\n'
    assert native_size(source).native_lines == 2


def test_package_of_separates_packages_within_moegguf() -> None:
    assert [
        package_of(path)
        for path in ("moegguf/errors.py", "moegguf/chat/chat.py", "tools/gpu/rig.py")
    ] == ["moegguf", "moegguf/chat", "tools"]


def test_faults_report_a_package_over_its_limit_or_without_one() -> None:
    sizes = {
        "a": Size(tokens=10),
        "b": Size(tokens=11, native_lines=3),
        "c": Size(native_lines=1),
    }
    found = faults(sizes, {"a": 10, "b": 10}, {"b": 3})
    assert [fault.partition(";")[0] for fault in found] == [
        "b has 11 code tokens of Python, and its limit is 10",
        "c has 1 native code lines, and its limit is 0",
    ]
