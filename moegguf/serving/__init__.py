"""The serving room: loaded models, each in a worker process of its own, and who may use them when.

Promises: an abort in native code ends one request with a clear error and nothing else; unloading gives all memory
back; requests of a model are answered in the order they came, none ever interrupts another; models together stay
within one memory budget, the least recently used idle one leaves first; what nobody waits for any more stops within a
token. Knows processes, queues, budgets and `Ask`s. Does not know HTTP, terminals or experts one by one.
"""
