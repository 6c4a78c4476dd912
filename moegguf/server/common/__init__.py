"""What the APIs share: conversation, bodies, limits, options, lookup, reply objects, errors, streams, access checks."""
