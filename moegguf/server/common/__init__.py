"""What the APIs share: the conversation and its messages, request bodies, limits, options, model lookup, reply objects,
lists in pages, errors, streams, access checks."""
