"""The expert store and its predictors in C++, with their ctypes binding; binds `llama_cpp` to our libllama.

Promises: the experts that a layer was routed to are in their slots when the layer multiplies, within the given number
of slots. Prefetches, scores and cancellations change nothing about this. Counters are incremented where the events
happen. The `llama_cpp` bindings call the libllama that calls this store, and get ggml's log levels right.
Knows layers, experts, slots and bytes. Does not know llama.cpp's models, budgets as users write them, or why one expert
has a higher score than another.
"""
