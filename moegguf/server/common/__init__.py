"""What every API of the server needs: checked bodies, limits, options, models by name, errors, streams, the guard."""
