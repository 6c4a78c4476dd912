"""From a request to an answer: prompt, sampling, constraints, and the text taken apart while it is written.

Promises: an answer is the same in a process of its own, in the chat and through a server; templates and schemas are
untrusted and bounded in time and memory; a stop string never appears in an answer; an answer can be cancelled between
any two tokens. Requests and deltas are plain data that fits in JSON. Does not know HTTP, terminals, processes or
experts one by one.
"""
