"""Lets `python -m moegguf` run the `moegguf` command."""

import sys

from moegguf.cli.app import main

sys.exit(main())
