"""Names as a terminal may see them: whoever may store a file chooses its name; pure text."""


def printable(text: str) -> str:
    """Return *text* with what is not printable, line breaks and ESC first of all, escaped."""
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text
    )
