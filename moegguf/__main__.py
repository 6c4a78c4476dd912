"""`python -m moegguf` is the `moegguf` command."""

import sys

from moegguf.faces.cli import main

sys.exit(main())
