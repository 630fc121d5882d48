"""vLLM's file tier ``fs`` with hints: a secondary tier that vLLM loads by its ``module_path``.

It is vLLM's own ``FileSystemTierManager``: same files, same names, so that engines with and without
hints share a directory. From the envelope of a request (``kv_hints``, or the ``kv_hint`` of
``kv_transfer_params``, in which Dynamo sends one today) it tells kvfs which blocks are worth
keeping. A block is hinted when its store has ended, for before it has no name; those that a request
found stored are hinted when it has finished, and what it wants to be fetched when it begins.

The facts about vLLM are of 0.33: ``vllm/v1/kv_offload/base.py`` (ReqContext) and
``vllm/v1/kv_offload/tiering``.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadKey,
    ReqContext,
    get_offload_block_hash,
)
from vllm.v1.kv_offload.tiering.base import (
    JobResult,
    RequestOffloadingContext,
    ScheduleEndContext,
    TransferJob,
)
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

from kvfs.bridges.block_hints import BlockHints
from kvfs.bridges.envelope import HASH_MASK, BlockWish, RequestHints, hints_of
from kvfs.core.hints import Do

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )

#: Where Dynamo's router puts the envelope until vLLM's HTTP server takes ``kv_hints``.
_TRANSFER_PARAM: Final = "kv_hint"
_METRIC: Final = "vllm:kvfs_hints"


class _HintedRequest:
    """A request whose envelope asks for something."""

    def __init__(self, context: ReqContext, hints: RequestHints) -> None:
        self.context, self.hints = context, hints
        #: Tokens in the whole blocks of its prompt; None until it is scheduled.
        self.prompt_tokens: int | None = None
        self.stored: set[OffloadKey] = set()

    def positions(self) -> dict[OffloadKey, int]:
        """Its blocks so far, and the token with which each ends."""
        found: dict[OffloadKey, int] = getattr(self.context, "_offload_key_positions", {})
        return found

    def wishes(self, keys: Iterable[OffloadKey]) -> Iterator[tuple[OffloadKey, BlockWish]]:
        """Yield what is asked for those of *keys* that it asks something for."""
        prompt_tokens = self.prompt_tokens
        if prompt_tokens is None:  # it stores before anybody said that it runs
            prompt_tokens = max(self.positions().values(), default=0)
        for key in keys:
            end_token = self.context.get_offload_key_position(key)
            if end_token is None:
                continue
            wish = self.hints.wish_for(end_token, prompt_tokens)
            if wish is not None:
                yield key, wish


class KvfsTierManager(FileSystemTierManager):
    """vLLM's tier ``fs`` that passes on hints. Called by one thread at a time, as vLLM promises."""

    def __init__(
        self, *given: object, root_dir: str, hints_socket: str | None = None, **settings: object
    ) -> None:
        """*hints_socket*: in place of the socket of the mount in which *root_dir* lies.

        Everything else is FileSystemTierManager's.
        """
        super().__init__(*given, root_dir=root_dir, **settings)
        self._hints = BlockHints(root_dir, hints_socket)
        self._hinted: dict[str, _HintedRequest] = {}
        self._stores: dict[int, list[tuple[OffloadKey, BlockWish]]] = {}
        self._counted: dict[str, int] = {}

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Read the envelope of the request."""
        envelope: object = getattr(req_context, "kv_hints", None)
        if envelope is None:
            envelope = (req_context.kv_transfer_params or {}).get(_TRANSFER_PARAM)
        if envelope is not None:
            hints = hints_of(envelope)
            self._hints.unknown += hints.unknown
            if not hints.says_nothing:
                self._hinted[req_context.req_id] = _HintedRequest(req_context, hints)
        return super().on_new_request(req_context)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """See how long new prompts are, and have fetched what they want."""
        if self._hinted:
            for name in context.new_req_ids:
                request = self._hinted.get(name)
                if request is not None and request.prompt_tokens is None:
                    self._begin(request)
        super().on_schedule_end(context)

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Note what is asked for the blocks of the job."""
        request = self._hinted.get(job_metadata.req_context.req_id)
        if request is not None:
            request.stored.update(job_metadata.keys)
            wishes = list(request.wishes(job_metadata.keys))
            if wishes:
                self._stores[job_metadata.job_id] = wishes
        super().submit_store(job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Hint the blocks that have a name now."""
        results = list(super().get_finished_jobs())
        if self._stores:
            for result in results:
                self._send(self._stores.pop(result.job_id, ()))
        return results

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Hint the blocks that were there before the request."""
        request = self._hinted.pop(req_context.req_id, None)
        if request is not None:
            self._send(
                request.wishes(key for key in request.positions() if key not in request.stored)
            )
        super().on_request_finished(req_context)

    def shutdown(self) -> None:
        """Hang up, too."""
        super().shutdown()
        self._hints.close()

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """Add the counter of hints."""
        said = (
            "Names in hints to kvfs by what became of them: sent, or dropped because no server "
            "took them; and unknown: actions of requests that are not understood."
        )
        own = {_METRIC: OffloadingCounterMetadata(documentation=said, labelnames=("result",))}
        return {**super().build_metric_definitions(extra_config), **own}

    def get_stats(self) -> "OffloadingConnectorStats | None":
        """Count the hints since the last call."""
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading import metrics

        stats: OffloadingConnectorStats | None = super().get_stats()
        counts = self._hints.counts
        now = {"sent": counts.sent, "dropped": counts.dropped, "unknown": self._hints.unknown}
        more = {result: count - self._counted.get(result, 0) for result, count in now.items()}
        if any(more.values()):
            if stats is None:
                stats = metrics.OffloadingConnectorStats()
            for result, count in more.items():
                if count:
                    stats.increase_counter(_METRIC, count, (result,))
            self._counted = now
        return stats

    def _begin(self, request: _HintedRequest) -> None:
        positions = request.positions()
        request.prompt_tokens = max(positions.values(), default=0)
        if request.hints.fetched:
            wanted = sorted(
                (key for key in positions if _in_envelopes(key) in request.hints.fetched),
                key=lambda key: positions[key],
            )
            self._send((key, BlockWish(Do.FETCH)) for key in wanted)

    def _send(self, wishes: Iterable[tuple[OffloadKey, BlockWish]]) -> None:
        self._hints.send((self.file_mapper.get_file_name(key), wish) for key, wish in wishes)


def _in_envelopes(key: OffloadKey) -> int:
    """Return the hash of *key* as routers know it (maybe_convert_block_hash of vLLM)."""
    return int.from_bytes(get_offload_block_hash(key), "big") & HASH_MASK
