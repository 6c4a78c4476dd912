"""Test equipment: devices behind simulated links, operations that fail, and bookkeeping that is wrong.

Promises: nothing of this is in a wheel, and the store's own library contains none of it; what is built here lies beside
that library as libmoegguf-testing. Tests, tools and `bench --simulate-link` use this package.
Knows the native store. Does not know models or budgets.
"""
