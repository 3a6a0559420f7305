"""/metrics in Prometheus's format: vLLM's names, behind the prefix "simplellm:".

Counts come from the engine when Prometheus asks, and times of a whole request from its
outputs. Only what passes between the parts of a stream is measured while these are
sent.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from simplellm.api.llm import LLM
from simplellm.api.outputs import ChatChoice, RequestOutput, Times, Usage
from simplellm.base.request import EngineError
from simplellm.base.request_spec import RequestSpec

PREFIX = "simplellm:"
LABELS = ("model_name", "engine")
FIRST_TOKEN = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75]
FIRST_TOKEN += [1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640]
BETWEEN_PARTS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3]
BETWEEN_PARTS += [0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80]
WHOLE_ANSWER = [0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30]
WHOLE_ANSWER += [40, 50, 60, 120, 240, 480, 960, 1920]
TOKENS = [m * 10**e for e in range(6) for m in (1, 2, 5)]
COUNTS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]
HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {
    "time_to_first_token_seconds": ("From arrival to first token.", FIRST_TOKEN),
    "request_time_per_output_token_seconds": (
        "From token to token, on a sample's average.",
        BETWEEN_PARTS,
    ),
    "inter_token_latency_seconds": ("Between two parts of a stream.", BETWEEN_PARTS),
    "e2e_request_latency_seconds": ("Until a request is answered.", WHOLE_ANSWER),
    "request_queue_time_seconds": ("From arrival to first step.", WHOLE_ANSWER),
    "request_prefill_time_seconds": ("From first step to first token.", WHOLE_ANSWER),
    "request_decode_time_seconds": ("From first token to last token.", WHOLE_ANSWER),
    "request_inference_time_seconds": ("From first step to last token.", WHOLE_ANSWER),
    "request_prompt_tokens": ("Tokens of a request's prompts.", TOKENS),
    "request_generation_tokens": ("Tokens of a request's answer.", TOKENS),
    "request_params_max_tokens": ("max_tokens of a prompt.", TOKENS),
    "request_params_n": ("Samples asked for of a prompt.", COUNTS),
}


@dataclass(eq=False)
class RequestTimer:
    """The times of one HTTP request."""

    times: dict[str, Histogram]
    start: float = field(default_factory=time.monotonic)
    latest: dict[int, float] = field(default_factory=dict)  # part, by its index

    def part(self, index: int) -> None:
        """Note the time of a part of reply ``index``."""
        now = time.monotonic()
        if (before := self.latest.get(index)) is not None:
            self.times["inter_token_latency_seconds"].observe(now - before)
        else:  # now: its client may leave before the end
            self.times["time_to_first_token_seconds"].observe(now - self.start)
        self.latest[index] = now

    def done(self, outputs: Sequence[RequestOutput | ChatChoice], usage: Usage) -> None:
        """Note that all replies are finished."""
        for output in outputs:
            if output.metrics is not None:
                self.observe(output.metrics, len(output.token_ids))
        seconds = time.monotonic() - self.start
        self.times["e2e_request_latency_seconds"].observe(seconds)
        self.times["request_prompt_tokens"].observe(usage.prompt_tokens)
        self.times["request_generation_tokens"].observe(usage.completion_tokens)

    def observe(self, times: Times, count: int) -> None:
        """Count a sample of ``count`` tokens with these ``times``."""
        came, begun = times.arrival_time, times.first_scheduled_time
        first, last = times.first_token_time, times.finished_time
        if begun is None or first is None or last is None:
            return
        spans = {} if self.latest else {"time_to_first_token_seconds": first - came}
        spans |= {
            "request_queue_time_seconds": begun - came,
            "request_prefill_time_seconds": first - begun,
            "request_decode_time_seconds": last - first,
            "request_inference_time_seconds": last - begun,
        }
        if count > 1:
            each = (last - first) / (count - 1)
            spans["request_time_per_output_token_seconds"] = each
        for name, seconds in spans.items():
            self.times[name].observe(seconds)


class ServerMetrics:
    """The metrics of one server. It is also the collector of the engine's counts.

    ``engine`` is its name among several.
    """

    def __init__(self, llm: LLM, model: str, engine: str) -> None:
        self.llm, self.labels = llm, (model, engine)
        self.registry = CollectorRegistry()
        self.times = {
            name: Histogram(
                f"{PREFIX}{name}", about, LABELS, registry=self.registry, buckets=bounds
            ).labels(*self.labels)
            for name, (about, bounds) in HISTOGRAMS.items()
        }
        self.registry.register(self)

    def timer(self, specs: Sequence[RequestSpec], n: int) -> RequestTimer:
        """A timer for an HTTP request that asks for ``n`` samples of each spec."""
        for spec in specs:
            self.times["request_params_max_tokens"].observe(spec.max_tokens)
            self.times["request_params_n"].observe(n)
        return RequestTimer(self.times)

    def text(self) -> bytes:
        """The metrics in Prometheus's text format."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """The engine's counts; none once it is dead."""
        try:
            stats = self.llm.stats()
        except EngineError:
            return
        usage = stats.cache_usage
        gauges = {
            "num_requests_running": ("Requests that run.", stats.running),
            "num_requests_waiting": ("Requests that wait.", stats.waiting),
            "kv_cache_usage_perc": ("Used share of the cache, 1 is all.", usage),
        }
        for name, (about, value) in gauges.items():
            gauge = GaugeMetricFamily(PREFIX + name, about, labels=LABELS)
            gauge.add_metric(self.labels, value)
            yield gauge
        drafted, right = stats.draft_tokens, stats.accepted_tokens  # by position
        counts = {
            "num_preemptions": ("Requests put back in line.", stats.preemptions),
            "generation_tokens": ("Generated tokens.", stats.generated_tokens),
            "prompt_tokens": ("Tokens of prompts.", stats.prompt_tokens),
            "prefix_cache_queries": ("Tokens looked up in cache.", stats.prompt_tokens),
            "prefix_cache_hits": ("Tokens found in the cache.", stats.cached_tokens),
            "external_prefix_cache_hits": (
                "Tokens that came back from the host's memory, to preempted ones too.",
                stats.loaded_tokens,
            ),
            "spec_decode_num_drafts": ("Times that drafts were checked.", stats.drafts),
            "spec_decode_num_draft_tokens": ("Checked drafts.", sum(drafted.values())),
            "spec_decode_num_accepted_tokens": ("Right drafts.", sum(right.values())),
            "request_refused": ("Requests that found the queue full.", stats.refused),
        }
        for name, (about, value) in counts.items():
            counter = CounterMetricFamily(PREFIX + name, about, labels=LABELS)
            counter.add_metric(self.labels, value)
            yield counter
        about = "Requests that ended, by how."
        ended = CounterMetricFamily(
            f"{PREFIX}request_success", about, labels=(*LABELS, "finished_reason")
        )
        for reason, count in stats.finished.items():
            ended.add_metric((*self.labels, reason), count)
        yield ended
        about = "Drafts that were right, by position."
        accepted = CounterMetricFamily(
            f"{PREFIX}spec_decode_num_accepted_tokens_per_pos",
            about,
            labels=(*LABELS, "position"),
        )
        for position, count in right.items():
            accepted.add_metric((*self.labels, str(int(position) - 1)), count)
        yield accepted


def join_texts(texts: Iterable[bytes]) -> bytes:
    """The metrics of several servers as one: each of their names comes once."""
    begin = b"# HELP "
    values: dict[bytes, list[bytes]] = {}
    for text in texts:
        for part in text.split(begin)[1:]:
            about, kind, *lines = part.splitlines(keepends=True)
            values.setdefault(begin + about + kind, []).extend(lines)
    return b"".join(head + b"".join(lines) for head, lines in values.items())
