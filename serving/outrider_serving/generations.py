"""Counters by settings generation, of which only the newest have series.

Each change of the settings is a generation: their series would become more for as long as a pod lives, and
every scrape longer. The SDK's instruments, observed ones too, keep a place for each series there ever was,
and fold those beyond a limit, the newest, into one. So these go to Prometheus' client without the SDK.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from outrider_serving.instruments import Instrument

NEWEST = 8
"""Generations that have series of their own."""

OLDER = "older"
"""The label of what is counted for an older one.

What such a generation had counted before is not moved here, but vanishes as series do with their pod: so none
ever goes down, and none jumps.
"""

_Counts = dict[str, dict[tuple[str, ...], int]]
"""By instrument and the values of its labels, without the generation."""


class GenerationCounters(Collector):
    """The counters of one process. Safe to use from any thread."""

    def __init__(self, instruments: Iterable[Instrument]) -> None:
        """`instruments` are those that have the label `generation`."""
        self._instruments = {line.name: line for line in instruments}
        self._labels = {
            name: tuple(label for label in line.labels if label != "generation")
            for name, line in self._instruments.items()
        }
        self._newest: dict[int, _Counts] = {}
        self._older = self._nothing()
        # Reentrant: what the garbage collector ends, at any moment, may be a request that then counts.
        self._lock = threading.RLock()

    def add(self, generation: int, name: str, amount: int, labels: Mapping[str, str]) -> None:
        """Count `amount` for an instrument; `labels` has its other labels, all of them."""
        values = tuple(labels[label] for label in self._labels[name])
        with self._lock:
            series = self._counts_of(generation)[name]
            series[values] = series.get(values, 0) + amount

    def collect(self) -> Iterator[CounterMetricFamily]:
        """What Prometheus' client asks of a collector."""
        with self._lock:
            counted = {str(generation): _copy(counts) for generation, counts in self._newest.items()}
            counted[OLDER] = _copy(self._older)
        for name, line in self._instruments.items():
            labels = [*self._labels[name], "generation"]
            family = CounterMetricFamily(name.replace(".", "_"), line.description, labels=labels)
            for generation, counts in counted.items():
                for values, count in counts[name].items():
                    family.add_metric([*values, generation], count)
            yield family

    def _counts_of(self, generation: int) -> _Counts:
        counts = self._newest.get(generation)
        if counts is not None:
            return counts
        if len(self._newest) == NEWEST:
            oldest = min(self._newest)
            if generation < oldest:
                return self._older
            del self._newest[oldest]
        return self._newest.setdefault(generation, self._nothing())

    def _nothing(self) -> _Counts:
        return {name: {} for name in self._instruments}


def _copy(counts: _Counts) -> _Counts:
    return {name: series.copy() for name, series in counts.items()}
