"""The way from a request to an answer: prompt, sampling, constraints, and parsing of
the text while it is generated.

Promises: a request is answered in the same way in this process, in a worker process and
through a server. Templates and schemas are untrusted; the time and memory for them are
limited. A stop string never appears in an answer. An answer can be cancelled between
any two tokens. Requests and deltas are plain data that fits in JSON. The package does
not know about HTTP, terminals, worker processes or the expert cache.
"""
