"""Test equipment: devices behind simulated links, operations that fail, and corrupted
bookkeeping.

Promises: wheels do not contain this package, and the store's own library contains no
test code. The native code is built as libmoegguf-testing, next to the store's library.
Tests, tools and `bench --simulate-link` use this package. It uses the native store, and
does not know about models or budgets.
"""
