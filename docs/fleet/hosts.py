"""A line a mount of many hosts: python3 hosts.py HOST.json ..., each of `kvfs status --json`."""

import json
import sys
from pathlib import Path

print(f"{'HOST':12} {'MOUNT':16} {'VERSION':9} {'USED':>5} {'HIT RATE':>8}  DATA PATH")
for file in map(Path, sys.argv[1:]):
    for mount in json.loads(file.read_text()):
        used, rate = mount["used_bytes"] / mount["capacity_bytes"], mount["cache"]["hit_rate"] or 0
        named = f"{file.stem:12} {mount['mountpoint']:16} {mount['version']:9}"
        print(f"{named} {used:5.0%} {rate:8.1%}  {mount['data_path']}")
