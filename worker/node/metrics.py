"""Metrics of a node: those of its workers on one page, each sample with its application and worker."""

import asyncio
from collections.abc import Iterable, Iterator, Mapping

import httpx
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

_TIMEOUT_S = 2.0

Labels = Mapping[str, str]


class _Pages(Collector):
    def __init__(self, pages: Iterable[tuple[Labels, str]]) -> None:
        self._merged: dict[str, Metric] = {}
        for labels, page in pages:
            for found in text_string_to_metric_families(page):
                metric = self._merged.setdefault(
                    found.name, Metric(found.name, found.documentation, found.type)
                )
                for sample in found.samples:
                    metric.add_sample(sample.name, {**sample.labels, **labels}, sample.value)

    def collect(self) -> Iterator[Metric]:
        yield from self._merged.values()


async def collect_metrics(sockets: Iterable[tuple[Labels, str]]) -> CollectorRegistry:
    """The metrics of workers that answer on their health sockets within 2 s."""
    wanted = list(sockets)
    found = await asyncio.gather(*(_fetch(path) for _, path in wanted))
    pages = ((labels, page) for (labels, _), page in zip(wanted, found, strict=True))
    registry = CollectorRegistry()
    registry.register(_Pages(pages))
    return registry


async def _fetch(path: str) -> str:
    """Empty where no worker answers yet or any more."""
    transport = httpx.AsyncHTTPTransport(uds=path)
    try:
        async with httpx.AsyncClient(transport=transport, timeout=_TIMEOUT_S) as client:
            return (await client.get("http://worker/metrics")).text
    except httpx.HTTPError:
        return ""
