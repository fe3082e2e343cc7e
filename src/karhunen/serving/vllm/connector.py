"""The KV connector of vLLM 0.32: karhunen's two halves behind the engine's interface.

                    scheduler process                              worker process (one for each rank)
    request ──▶ which pages has the store? ──▶ Load ─────────▶ thread: read, decode ──▶ paged cache ──▶ finished
    step    ──▶ which pages are complete?  ──▶ Save ─────────▶ copy blocks, thread: encode ──▶ store

The engine keeps its own format on the device. What fails to load it computes itself.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, final

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.version import __version__ as engine_version

from karhunen.hf.checkpoint import checkpoint_fingerprint, checkpoint_folder, checkpoint_identity
from karhunen.serving.settings import ServingSettings
from karhunen.serving.vllm.metrics import KarhunenMetrics, KarhunenStats
from karhunen.serving.vllm.orders import Orders
from karhunen.serving.vllm.scheduling import SchedulerHalf
from karhunen.serving.vllm.startup import check_engine, check_model, plan, recent_tokens
from karhunen.serving.vllm.stats import added
from karhunen.serving.vllm.worker import WorkerHalf

_LOG = logging.getLogger("vllm.karhunen")  # below the engine's own logger, which has a handler


@final
@dataclass
class StepOrders(KVConnectorMetadata):  # pyright: ignore[reportUntypedBaseClass]
    """`Orders`, as the engine wants them called."""

    orders: Orders = field(default_factory=Orders)


@final
class KarhunenConnector(KVConnectorBase_V1, SupportsHMA):  # pyright: ignore[reportUntypedBaseClass]
    """Named in `--kv-transfer-config`; `kv_connector_extra_config` holds `ServingSettings`.

    ValueError at start, with the reason, for an engine, a model or a codec that do not go together.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        check_engine(engine_version, vllm_config)
        transfer = vllm_config.kv_transfer_config
        settings = ServingSettings.from_dict(transfer.kv_connector_extra_config)
        codec = settings.load_codec()
        self._plan = plan(vllm_config, kv_cache_config, settings, codec)
        self._store = settings.open_store()
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._invalid_blocks = set[int]()
        if role != KVConnectorRole.SCHEDULER:
            return
        model = vllm_config.model_config
        folder = checkpoint_folder(model.model, model.revision)
        check_model(codec, *checkpoint_identity(folder, model.trust_remote_code))
        weights = checkpoint_fingerprint(folder)
        self._scheduler = SchedulerHalf(
            self._plan.layout, self._plan.page_names(weights), self._store, self._plan.shard.all_suffixes, weights,
            settings.lookup_seconds, recent_tokens(settings, codec), saves=transfer.is_kv_producer,
            loads=transfer.is_kv_consumer,
        )  # fmt: skip
        _LOG.info(
            "karhunen: pages of %d tokens in %s, codec %s (%s), weights %s",
            self._plan.layout.page_tokens, settings.store, settings.codec, codec.origin.recipe, weights,
        )  # fmt: skip

    # the worker's half

    @property
    def requires_kv_delivery(self) -> bool:
        """A page that is not stored is read again: nothing waits for it."""
        return False

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The engine's cache is there."""
        layers = self._vllm_config.compilation_config.static_forward_context
        self._worker = WorkerHalf(self._plan, self._store, layers, kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads of this step's orders begin, in threads."""
        if (worker := self._worker) is not None:
            worker.start_loads(self._orders())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request is scheduled after its load has ended."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: all layers are copied after the forward."""

    def wait_for_save(self) -> None:
        """Blocks of pages that are complete now are copied."""
        if (worker := self._worker) is not None:
            worker.save(self._orders())

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Loads that have ended."""
        if self._worker is None:
            return KVConnectorTransferResults()
        outcome = self._worker.ended(self._orders())
        self._invalid_blocks = outcome.invalid_blocks
        return KVConnectorTransferResults(finished_recving=outcome.finished, failed_recving=outcome.failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Of the loads that `get_transfer_results` has just told of."""
        invalid, self._invalid_blocks = self._invalid_blocks, set[int]()
        return invalid

    # the scheduler's half

    def on_new_request(self, request: Any) -> None:
        """The lookup begins."""
        self._half.add(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """As `SchedulerHalf.matched`."""
        return self._half.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """As `SchedulerHalf.allocated`."""
        self._half.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepOrders:
        """As `SchedulerHalf.orders`."""
        state = scheduler_output.kv_connector_block_state
        return StepOrders(self._half.orders(scheduler_output.num_scheduled_tokens, state.get_block_ids))

    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers say."""
        self._half.loaded(
            set(connector_output.finished_recving or ()), set(connector_output.failed_recving or ()),
            set(connector_output.invalid_block_ids or ()),
        )  # fmt: skip

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Its blocks may go: what is stored was copied."""
        self._half.end(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished`."""
        return self.request_finished(request, [])

    def take_events(self) -> Iterable[Any]:
        """None."""
        return ()

    # both

    def shutdown(self) -> None:
        """What is copied is stored first."""
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()

    def get_kv_connector_stats(self) -> Any:
        """Since the last step; None if nothing happened."""
        halves = [half for half in (self._scheduler, self._worker) if half is not None]
        data: dict[str, Any] = {}
        for half in halves:
            data = added(data, half.recorder.take())
        return KarhunenStats(data=data) if data else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        """Of what another process has sent."""
        return KarhunenStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> Any:
        """The series on the engine's `/metrics`."""
        return KarhunenMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def _orders(self) -> Orders:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepOrders), f"the engine handed over {type(metadata).__name__}"
        return metadata.orders

    @property
    def _half(self) -> SchedulerHalf:
        assert self._scheduler is not None, "the engine asks the worker's connector what only the scheduler's knows"
        return self._scheduler
