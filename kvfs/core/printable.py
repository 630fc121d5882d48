"""Names made safe for a terminal, because any user who stores a file chooses its name."""


def printable(text: str) -> str:
    """Return *text* with all unprintable characters escaped, such as line breaks and ESC."""
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text
    )
