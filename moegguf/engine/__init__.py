"""Makes a running `Llama` from a model, a memory budget and a machine.

Promises: the memory budget is kept, a budget never changes a token, known failures
become typed errors, and close() releases everything. The package works with GGUF files,
memory plans, llama.cpp's contexts and the store. This package does not know about chat
requests, terminals, HTTP or display.
"""
