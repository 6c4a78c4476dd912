"""The native room: the expert store in C++ and its ctypes door.

Promises: experts asked for by a layer are in their slots when the layer multiplies, within the given number of slots,
whatever was prefetched, scored or cancelled meanwhile; figures are counted where they happen. Knows layers, experts,
slots and bytes. Does not know llama.cpp's models, tokens, budgets in words, or why one expert is worth more than
another.
"""
