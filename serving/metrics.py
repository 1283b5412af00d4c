"""Prometheus metrics under vLLM's names, so that dashboards made for it work here.

Gauges and counters are read from ``Engine.stats()`` when somebody asks; histograms are filled as
requests end, from the moments that the engine took.  Numbers that vLLM has no name for appear as
``glmjax:<name>``.  Each ``Metrics`` has a registry of its own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from glmjax.serving.draft_counts import ACCEPTED_AT
from glmjax.serving.request import OutputDelta, RequestMetrics
from glmjax.types import SamplingParams

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST

_ENGINE = "0"
_LABELS = ("model_name", "engine")

_GAUGES = {
    "num_running": ("vllm:num_requests_running", "Sequences that are being computed."),
    "num_waiting": ("vllm:num_requests_waiting", "Sequences that wait for their turn."),
    "hisparse_pending_page_transfers": ("vllm:hisparse_pending_page_transfers", "KV pages on their way to the host."),
}
_COUNTERS = {
    "num_preemptions": ("vllm:num_preemptions", "Sequences put back to free their KV blocks."),
    "prefix_cache_queries": ("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("vllm:prefix_cache_hits", "Tokens found in the prefix cache."),
    "prompt_tokens": ("vllm:prompt_tokens", "Prompt tokens taken in."),
    "cached_tokens": ("vllm:prompt_tokens_cached", "Prompt tokens whose KV was cached."),
    "generation_tokens": ("vllm:generation_tokens", "Tokens generated."),
    "num_drafts": ("vllm:spec_decode_num_drafts", "Drafts made."),
    "num_draft_tokens": ("vllm:spec_decode_num_draft_tokens", "Tokens drafted."),
    "hisparse_cache_hits": ("vllm:hisparse_cache_hits", "Selected KV rows found in hot regions."),
    "hisparse_cache_misses": ("vllm:hisparse_cache_misses", "Selected KV rows that had to come from the host."),
    "hisparse_host_to_device_bytes": ("vllm:hisparse_host_to_device_bytes", "KV bytes copied from the host."),
    "num_accepted_tokens": ("vllm:spec_decode_num_accepted_tokens", "Drafted tokens accepted."),
}
# Numbers that vLLM has no name for: "since the start" ones only grow, the others are of this moment.
_OWN = {
    "compilations": "Programs compiled, all of them before the first request.",
    "program_runs": "Runs of compiled programs since the start, one or more a step.",
    "hisparse_total_pages": "Pages of the device's KV row pool, each of one block's rows.",
    "hisparse_pages_free": "Pages of the device's KV row pool with nothing in them.",
    "hisparse_pages_unpinned": "Pages that no running request wants to stay, and whose rows the host has too.",
    "hisparse_pages_hot": "Pages in the hot regions of running requests.",
    "kv_transfer_leases_offered": "Prompts whose KV was offered to another engine, since the start.",
    "kv_transfer_leases_done": "Offered prompts whose KV the other engine has fetched, since the start.",
    "kv_transfer_leases_expired": "Offered prompts given up as no engine gave a sign of life in time, since the start.",
    "kv_transfer_leases_failed": "Offered prompts whose fetch failed or that were withdrawn, since the start.",
    "kv_transfer_leases_held": "Offered prompts whose KV is kept at this moment for another engine to fetch.",
    "kv_transfer_fetches_done": "Prompts whose KV was fetched from another engine, since the start.",
    "kv_transfer_fetches_failed": "Prompts whose KV could not be fetched from another engine, since the start.",
    "kv_transfer_fetches_running": "Prompts whose KV is being fetched from another engine at this moment.",
    "kv_transfer_bytes_fetched": "Bytes of KV fetched from other engines since the start, failed fetches included.",
    "kv_transfer_recomputed": "Prompts computed here since the start because their KV could not be fetched.",
    "kv_transfer_stage_free": "Free KV blocks of the memory for KV on its way to or from other engines.",
}
_OF_PREFILL = "prefill_"  # before the names of another engine's numbers, in the statistics of two engines as one
_FINISHED = "finished_"
_ACCEPTED_AT = ("vllm:spec_decode_num_accepted_tokens_per_pos", "Drafted tokens accepted, by position of the draft.")
_BLOCKS = ("free_blocks", "total_blocks", "hisparse_host_blocks", "hisparse_host_blocks_used")
_HANDLED = {*_GAUGES, *_COUNTERS, *_BLOCKS}
_TEXTS = {
    **_OWN,
    **{key: text for key, (_, text) in (*_GAUGES.items(), *_COUNTERS.items())},
    "free_blocks": "Free KV blocks.",
    "total_blocks": "KV blocks.",
    "hisparse_host_blocks": "KV blocks that the host's memory holds.",
    "hisparse_host_blocks_used": "KV blocks in use in the host's memory.",
}

_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKENS = tuple(step * 10**power for power in range(7) for step in (1, 2, 5))
_HISTOGRAMS: Mapping[str, tuple[str, Sequence[float]]] = {
    "time_to_first_token_seconds": ("From arrival to the first token.", _SECONDS),
    "inter_token_latency_seconds": ("Between outputs of one completion.", _SECONDS),
    "request_time_per_output_token_seconds": ("Mean time of a token after the first.", _SECONDS),
    "e2e_request_latency_seconds": ("From arrival to the end.", _SECONDS),
    "request_queue_time_seconds": ("From arrival to the first step.", _SECONDS),
    "request_prefill_time_seconds": ("From the first step to the first token.", _SECONDS),
    "request_decode_time_seconds": ("From the first token to the last.", _SECONDS),
    "request_inference_time_seconds": ("From the first step to the last token.", _SECONDS),
    "request_prompt_tokens": ("Prompt tokens of a request.", _TOKENS),
    "request_generation_tokens": ("Tokens generated for a request.", _TOKENS),
    "request_prefill_kv_computed_tokens": ("Prompt tokens that were not cached.", _TOKENS),
    "request_params_n": ("Completions asked for.", (1, 2, 5, 10, 20, 50, 100)),
    "request_params_max_tokens": ("max_tokens, where given.", _TOKENS),
}


class Metrics:
    """All metrics of one server.

    Args:
      stats: the engine's ``stats``.
      model_name: label of every metric.
      cache_info: labels of ``vllm:cache_config_info``.
    """

    def __init__(
        self,
        stats: Callable[[], Mapping[str, Any]],
        model_name: str,
        cache_info: Mapping[str, object] | None = None,
    ) -> None:
        self.registry = prometheus_client.CollectorRegistry()
        self.registry.register(_EngineCollector(stats, model_name, cache_info or {}))
        labels = (model_name, _ENGINE)
        self._histograms = {
            name: prometheus_client.Histogram(
                f"vllm:{name}", text, _LABELS, buckets=buckets, registry=self.registry
            ).labels(*labels)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        self._rejections = prometheus_client.Counter(
            "vllm:admission_rejections",
            "Requests refused because the queue was full.",
            _LABELS,
            registry=self.registry,
        ).labels(*labels)

    def exposition(self) -> bytes:
        """The text that Prometheus reads."""
        return prometheus_client.generate_latest(self.registry)

    def reject(self) -> None:
        self._rejections.inc()

    def watch(self, sampling: SamplingParams) -> Callable[[OutputDelta], None]:
        """What wants to see every delta of one request."""
        last: dict[int, float] = {}
        num_output = 0

        def see(delta: OutputDelta) -> None:
            nonlocal num_output
            num_output += len(delta.token_ids)
            if delta.token_ids:
                if delta.index in last:
                    self._observe("inter_token_latency_seconds", delta.time - last[delta.index])
                last[delta.index] = delta.time
            if delta.metrics is not None:
                self._observe("request_params_n", sampling.n)
                if sampling.max_tokens is not None:
                    self._observe("request_params_max_tokens", sampling.max_tokens)
                self._end(delta, delta.metrics, num_output)

        return see

    def _end(self, delta: OutputDelta, moments: RequestMetrics, num_output: int) -> None:
        computed = delta.num_prompt_tokens - delta.num_cached_tokens
        self._observe("request_prompt_tokens", delta.num_prompt_tokens)
        self._observe("request_prefill_kv_computed_tokens", computed)
        self._observe("request_generation_tokens", num_output)
        self._span("e2e_request_latency_seconds", moments.arrival, moments.finished)
        self._span("request_queue_time_seconds", moments.arrival, moments.first_scheduled)
        self._span("time_to_first_token_seconds", moments.arrival, moments.first_token)
        self._span("request_prefill_time_seconds", moments.first_scheduled, moments.first_token)
        self._span("request_decode_time_seconds", moments.first_token, moments.last_token)
        self._span("request_inference_time_seconds", moments.first_scheduled, moments.last_token)
        first, final = moments.first_token, moments.last_token
        if first is not None and final is not None and num_output > 1:
            per_token = (final - first) / (num_output - 1)
            self._observe("request_time_per_output_token_seconds", per_token)

    def _span(self, name: str, start: float | None, end: float | None) -> None:
        if start is not None and end is not None:
            self._observe(name, end - start)

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)


class _EngineCollector(Collector):
    """Reads the engine when Prometheus does."""

    def __init__(
        self,
        stats: Callable[[], Mapping[str, Any]],
        model_name: str,
        cache_info: Mapping[str, object],
    ) -> None:
        self._stats = stats
        self._labels = (model_name, _ENGINE)
        self._cache_info = {name: str(value) for name, value in cache_info.items()}

    def describe(self) -> list[Metric]:
        return []  # the names depend on the engine; nothing else is in the registry

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for key, (name, text) in _GAUGES.items():
            if key in stats:
                yield self._gauge(name, text, stats[key])
        for key, (name, text) in _COUNTERS.items():
            if key in stats:
                counter = CounterMetricFamily(name, text, labels=_LABELS)
                counter.add_metric(self._labels, stats[key])
                yield counter
        total = stats.get("total_blocks")
        if total:
            used = 1.0 - stats["free_blocks"] / total
            yield self._gauge("vllm:kv_cache_usage_perc", "Used share of the KV blocks.", used)
        if blocks := stats.get("hisparse_host_blocks"):
            used = stats["hisparse_host_blocks_used"] / blocks
            yield self._gauge("vllm:hisparse_host_cache_usage_perc", "Used share of the host's KV blocks.", used)
        yield self._finished(stats)
        if accepted := {key: value for key, value in stats.items() if key.startswith(ACCEPTED_AT)}:
            by_position = CounterMetricFamily(*_ACCEPTED_AT, labels=(*_LABELS, "position"))
            for key, value in accepted.items():
                by_position.add_metric((*self._labels, key.removeprefix(ACCEPTED_AT)), value)
            yield by_position
        if self._cache_info:
            names = (*_LABELS, *self._cache_info)
            info = GaugeMetricFamily("vllm:cache_config_info", "The KV cache.", labels=names)
            info.add_metric((*self._labels, *self._cache_info.values()), 1)
            yield info
        for key, value in stats.items():
            own = key not in _HANDLED and not key.startswith((_FINISHED, ACCEPTED_AT))
            if own and key.isidentifier() and isinstance(value, (int, float)):
                yield self._gauge(f"glmjax:{key}", _text_of(key), value)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(name, text, labels=_LABELS)
        gauge.add_metric(self._labels, value)
        return gauge

    def _finished(self, stats: Mapping[str, Any]) -> Metric:
        success = CounterMetricFamily(
            "vllm:request_success", "Completions that ended.", labels=(*_LABELS, "finished_reason")
        )
        for key, value in stats.items():
            if key.startswith(_FINISHED):
                success.add_metric((*self._labels, key.removeprefix(_FINISHED)), value)
        return success


def _text_of(key: str) -> str:
    """What a number of the engine's counts, and its unit."""
    if key.startswith(_OF_PREFILL):
        return f"Prefill engine: {_text_of(key.removeprefix(_OF_PREFILL))}"
    if key.startswith(_FINISHED):
        return f"Completions that ended with {key.removeprefix(_FINISHED)}, since the start."
    if key.startswith(ACCEPTED_AT):
        return f"Drafted tokens accepted at position {key.removeprefix(ACCEPTED_AT)}."
    return _TEXTS.get(key, "From the engine's statistics.")
