"""Gets the output of `moegguf COMMAND --help` without starting a process."""

import functools

from typer.testing import CliRunner


@functools.cache
def help_of(*command: str) -> str:
    from moegguf.cli.app import app

    shown = CliRunner().invoke(app, [*command, "--help"])
    assert shown.exit_code == 0, shown.output
    return shown.output
