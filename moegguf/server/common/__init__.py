"""What the APIs share: request bodies, limits, options, model lookup, reply objects, errors, streams, access checks."""
