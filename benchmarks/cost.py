"""An alpha-beta model of what a step costs beyond its micro-batches: a latency per message or wait, bytes over rates.

Per step every rank of W reads W - 1 segments of N / W gradients and sums them into its own, updates N / W parameters,
and copies the W - 1 segments of the others. FP32 throughout; nothing overlaps with computing.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Host:
    """Ranks on one host. Rates are of one rank alone, in bytes moved (read or written) per second; `shared` is how many
    ranks can stream at that rate at a time, which more ranks share."""

    latency: float  # seconds of a wait for peers
    sum_rate: float
    copy_rate: float
    update_rate: float
    shared: float

    def step(self, elements: int, buckets: int, world: int) -> float:
        own = 4 * elements / world
        crowded = max(1.0, world / self.shared)
        waits = 2 * buckets + 2 if world > 1 else 0  # per bucket: gradients, segments; per step: readers, release
        reduce = own * (world + 1) / self.sum_rate if world > 1 else 0.0
        gather = 2 * own * (world - 1) / self.copy_rate
        update = 7 * own / self.update_rate
        return self.latency * crowded * waits + crowded * (reduce + gather + update)


@dataclass(frozen=True)
class Network:
    """Ranks on hosts of their own, joined by rings: W - 1 messages per bucket and direction."""

    latency: float
    rate: float  # bytes per second of one rank's link, each way

    def step(self, elements: int, buckets: int, world: int) -> float:
        return 2 * (world - 1) * (buckets * self.latency + 4 * elements / world / self.rate)
