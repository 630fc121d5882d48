"""What a report of pytest in JUnit's XML says."""

import xml.etree.ElementTree as ElementTree


def outcome_of(case: ElementTree.Element) -> str:
    """Return how a test ended, by the element in its own."""
    return next(
        (each.tag for each in case if each.tag in ("failure", "error", "skipped")), "passed"
    )
