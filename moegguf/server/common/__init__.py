"""What the APIs share: the conversation, request bodies, limits, options, model lookup, reply objects, lists in pages,
errors, streams, access checks."""
