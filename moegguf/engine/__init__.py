"""A model, a budget and a machine become a running `Llama`.

Promises: the same tokens as llama.cpp, the memory budget kept, every failure a typed error, everything released at
close. Works with GGUF files, memory plans, llama.cpp's contexts and the store. Does not know chat requests, terminals,
HTTP or how anything is displayed.
"""
