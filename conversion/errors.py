class CheckpointError(ValueError):
    """A checkpoint cannot be converted: one line that says what was found, where, and what to do."""
