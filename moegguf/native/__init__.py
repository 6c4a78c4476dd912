"""The expert store and its predictors in C++, their ctypes binding, and the link from `llama_cpp` to our libllama.

Promises: the experts that a layer was routed to are in their slots when the layer multiplies, within the given number
of slots. Prefetches, scores and cancellations change nothing about this. Counters are incremented where the events
happen. The `llama_cpp` bindings call the libllama that calls this store, and report ggml's log levels correctly.
Knows layers, experts, slots and bytes. Does not know llama.cpp's models, the budgets that users enter, or the reasons
for the scores of experts.
"""
