"""How a driver talks to its test: one JSON request a line on stdin, one JSON answer a line out.

Connectors print what they like on stdout and stderr, so the answers go to a descriptor of their
own, which the command line names.
"""

import json
import os
import sys
import traceback


def serve(connector: object, *verbs: str) -> None:
    """Call the named methods of ``connector`` as requests ask, until stdin ends.

    An exception is an answer too, with its traceback.
    """
    methods = {verb: getattr(connector, verb) for verb in verbs}
    with os.fdopen(int(sys.argv[1]), "w", encoding="utf-8") as answers:
        for line in sys.stdin:
            request = json.loads(line)
            try:
                answer = {"ok": True, "result": methods[request["do"]](**request["args"])}
            except Exception:
                answer = {"ok": False, "error": traceback.format_exc()}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
