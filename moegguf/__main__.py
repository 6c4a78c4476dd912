"""`python -m moegguf` is the `moegguf` command."""

import sys

from moegguf.cli.app import main

sys.exit(main())
