#!/usr/bin/python3 -I
import sys

sys.path.insert(0, "/usr/lib/kvfs")
from kvfs.cli.main import main as run

sys.exit(run())
