"""The code that the APIs share: conversations and messages, request bodies, limits,
options, model lookup, reply objects, paginated lists, errors, streams, access
checks."""
