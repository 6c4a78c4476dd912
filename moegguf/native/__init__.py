"""The expert store and its predictors in C++, their ctypes binding, and the link from
`llama_cpp` to our libllama.

Promises: unless a pass fails, each matrix of a chosen expert is in a slot while the
layer multiplies by it. No tier uses more slots than its limit. Prefetches and scores
affect neither promise. The code that performs a counted action also increments its
counter. The `llama_cpp` bindings call the libllama that calls this store, and report
ggml's log levels correctly. The package knows layers, experts, slots and bytes. It does
not know about llama.cpp's models, the budgets that users enter, or the reasons for an
expert's score.
"""
