#!/usr/bin/python3 -I
import sys

sys.path.insert(0, "/usr/lib/kvfs")
from kvfs.cli.program import kvfs as run

sys.exit(run())
