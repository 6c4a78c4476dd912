"""Makes a running `Llama` from a model, a memory budget and a machine.

Promises: a model generates the same tokens as with llama.cpp, the memory budget is kept, known failures become typed
errors, and close() releases everything. The package works with GGUF files, memory plans, llama.cpp's contexts and the
store. It does not know about chat requests, terminals, HTTP or how anything is displayed.
"""
