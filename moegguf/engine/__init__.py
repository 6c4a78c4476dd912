"""The engine room: a model, a budget and a machine become a running `Llama`.

Promises: the same tokens as llama.cpp, the budget kept, every failure a typed error, everything released at close.
Knows GGUF files, plans, llama.cpp's contexts and the store. Does not know terminals, HTTP or how anything is shown.
"""
