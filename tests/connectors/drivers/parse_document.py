"""Reads configurations out of a document with the parsers of the connectors they are for."""

import argparse
import shlex
from typing import Any

import yaml
from json_lines import serve
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.distributed import config as lmcache_server
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config

SERVER_FLAGS = {"--chunk-size", "256"}
"""Flags of `lmcache server` that its storage layer leaves to the server's own parser."""


class Document:
    """The examples of a document."""

    def read(self, examples: list[str]) -> dict[str, list[Any]]:
        """Parse every example for LMCache; raises where a connector would refuse."""
        return {
            "servers": [self._server(one) for one in examples if one.startswith("lmcache server")],
            "adapters": [self._adapter(one) for one in examples if one.startswith("{")],
            "engines": [self._engine(one) for one in examples if one.startswith("chunk_size")],
        }

    def close(self) -> None:
        """Nothing is open."""

    def _server(self, command: str) -> list[str]:
        parser = argparse.ArgumentParser()
        lmcache_server.add_storage_manager_args(parser)
        words = shlex.split(command)[2:]
        known, rest = parser.parse_known_args(words)
        assert set(rest) <= SERVER_FLAGS, rest
        parsed = lmcache_server.parse_args_to_config(known)
        return [type(one).__name__ for one in parsed.l2_adapter_config.adapters]

    def _adapter(self, spec: str) -> str:
        parsed = parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[spec]))
        return type(parsed.adapters[0]).__name__

    def _engine(self, text: str) -> list[str]:
        named = yaml.safe_load(text)
        parsed = LMCacheEngineConfig.from_dict(named)
        for name, value in named.items():
            if name != "extra_config":
                assert getattr(parsed, name), f"{name}={value} is not taken"
        return sorted(parsed.extra_config)


if __name__ == "__main__":
    serve(Document(), "read", "close")
