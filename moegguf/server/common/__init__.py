"""What the APIs share: the conversation, request bodies, limits, options, model lookup, reply objects, errors, streams,
access checks."""
