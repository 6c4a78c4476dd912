"""The expert store in C++ and its ctypes binding.

Promises: the experts that a layer was routed to are in their slots when the layer multiplies, within the given number
of slots, whatever was prefetched, scored or cancelled meanwhile; counters are incremented where the events happen.
Knows layers, experts, slots and bytes. Does not know llama.cpp's models, tokens, budgets as users write them, or why
one expert has a higher score than another.
"""
