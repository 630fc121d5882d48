"""Bridges: what is an engine's own way to speak of blocks (docs/hints.md, docs/events.md).

Those with the name of a class of an engine run inside of it: the engine's own file tier, and a few
calls more. They import the engine, and kvfs imports none of them. An engine never waits for a hint,
and none fails because of one.
"""
