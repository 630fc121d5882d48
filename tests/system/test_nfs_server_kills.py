"""Clients of NFS-Ganesha at work while the server below it is killed: none notices.

Ganesha runs on, with its handles and what it has open (docs/nfs.md).
"""

import json
import random
from collections.abc import Iterator
from typing import Final

import pytest

from tests.fuse.conftest import require_passthrough
from tests.support.clients.stamped import seed_of, stamped
from tests.support.kills.server_kills import skip_without_takeover
from tests.support.mounts.supervised import Supervised
from tests.support.nfs.pool import NfsPool, nfs_pool

pytestmark = pytest.mark.needs_fuse

#: libnfs writes NFSv4 in small parts, so that such a block takes as long.
BLOCK_BYTES: Final = {3: 4 << 20, 4: 128 << 10}


@pytest.fixture
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NfsPool]:
    """A pool whose server is supervised, behind a Ganesha with its default settings."""
    logs = tmp_path_factory.mktemp("logs")
    with nfs_pool(logs, "--capacity=500MiB", kind=Supervised) as made:
        require_passthrough(made.mounted)
        yield made


@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.proof)])
def test_a_store_over_a_killed_server(pool: NfsPool, kills: int) -> None:
    """[taken-over] Clients of v3 and v4 store, load, list and keep a file open."""
    mounted, chance = pool.mounted, random.Random(kills)
    assert isinstance(mounted, Supervised)
    skip_without_takeover(mounted)
    with pool.client(3) as three, pool.client(4) as four:
        clients = {3: three, 4: four}
        kept = {}
        for version, client in clients.items():
            client.call("store", f"/kept-{version}", stamped("kept", BLOCK_BYTES[version]))
            kept[version] = client.call("open", f"/kept-{version}")
        for kill in range(kills):
            data = {version: stamped("block", BLOCK_BYTES[version], kill) for version in clients}
            for version, client in clients.items():
                client.begin("store", f"/block-{version}", data[version])
            mounted.server_ends(chance.uniform(0, 0.1))
            mounted.kill_server()
            for client in clients.values():
                client.answer()
            mounted.follow()
            for version, client in clients.items():
                name, size_bytes = f"block-{version}", BLOCK_BYTES[version]
                assert seed_of(client.call("read_file", f"/{name}"), "block", size_bytes) == kill
                assert seed_of((pool.path / name).read_bytes(), "block", size_bytes) == kill
                assert (
                    seed_of(client.call("pread", kept[version], size_bytes, 0), "kept", size_bytes)
                    == 0
                )
                assert {name, f"kept-{version}"} <= set(client.call("listdir", "/"))
    print(json.dumps({"kills": kills, "failed": 0}))
