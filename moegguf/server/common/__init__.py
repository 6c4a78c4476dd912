"""The code that the APIs share: conversations and messages, request bodies, limits, options, model lookup, reply
objects, lists in pages, errors, streams, access checks."""
