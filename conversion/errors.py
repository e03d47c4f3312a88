class CheckpointError(ValueError):
    """A checkpoint cannot be converted: one line that says what was found, where, and what to do."""


def shown(value, most: int = 200) -> str:
    """A name or message from outside, fit for a line: without control characters, cut to a length."""
    text = " ".join(str(value).split())
    text = text if text.isprintable() else ascii(text)[1:-1]
    return text if len(text) <= most else text[:most] + "..."
