"""One rank of one peer of transport.py: the times of its collectives for every size."""

import argparse
import itertools
import os

import common
import native

#: Repetitions move about this many bytes, within bounds.
BYTES, FEWEST, MOST = 400e6, 2, 30
UNCACHED = 16e6


def repetitions(size: int, most: int) -> int:
    return max(min(FEWEST, most), min(most, int(BYTES / size)))


class Shm:
    """The embedded transport, and between its rounds the limit: a plain loop that moves the same bytes in memory of
    this rank's own while the other ranks do so too."""

    def __init__(self, args: argparse.Namespace):
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.native, self.bucket_mb, self.opened = native.load(args.library), args.bucket_mb, 0

    def measure(self, elements: int, most: int) -> dict:
        return {**self.measure_plane(elements, most, low=False), **self.measure_plane(elements, most, low=True)}

    def measure_plane(self, elements: int, most: int, low: bool) -> dict:
        ranks = self.open(elements, self.bucket_mb, low)
        own, kind, width = elements // self.world, "bf16" if low else "fp32", 2 if low else 4
        foreign = (self.world - 1) * own * width
        total, target = native.Array(own), native.Array(foreign // 4 + 1)
        # A peer's data is not in my caches: the loops read another part each time, of more than the caches of one core.
        parts = max(1, int(UNCACHED) // (4 * (self.world - 1) * own))
        others = [native.Array((self.world - 1) * own) for _ in range(parts)]
        part = itertools.cycle(array.address for array in others)
        stream_sum, stream_copy = self.native.bench_stream_sum, self.native.bench_stream_copy
        calls = {
            f"all_gather {kind}": lambda: ranks("all_gather"),
            f"limit of all_gather {kind}": lambda: stream_copy(target.address, next(part), foreign),
        }
        if not low:
            calls["reduce_scatter fp32"] = lambda: ranks("reduce_scatter")
            calls["limit of reduce_scatter fp32"] = lambda: stream_sum(total.address, next(part), self.world, own)
        times: dict[str, list[float]] = {name: [] for name in calls}
        for repetition in range(repetitions(elements * 4, most) + 1):
            for name, call in calls.items():
                if not name.startswith("limit"):
                    ranks.rewrite()
                ranks("barrier")
                seconds = call()
                if repetition > 0:  # the first one faults memory in
                    times[name].append(seconds)
        ranks("barrier")
        ranks.close()
        return times

    def open(self, elements: int, bucket_mb: float, low: bool) -> native.Ranks:
        self.opened += 1
        nonce = f"{os.environ['BENCH_NONCE']}-{self.opened}"
        return native.Ranks(self.native, nonce, self.rank, self.world, elements, bucket_mb, low)


class Gloo:
    def __init__(self, args: argparse.Namespace):
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        self.torch, self.dist = torch, dist
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def measure(self, elements: int, most: int) -> dict:
        from time import perf_counter

        torch, dist = self.torch, self.dist
        elements -= elements % self.world
        own = elements // self.world
        whole, part = torch.ones(elements), torch.ones(own)
        low_whole, low_part = whole.bfloat16(), part.bfloat16()
        measured = {
            "reduce_scatter fp32": (whole, lambda: dist.reduce_scatter_tensor(part, whole)),
            "all_gather fp32": (part, lambda: dist.all_gather_into_tensor(whole, part)),
            "all_gather bf16": (low_part, lambda: dist.all_gather_into_tensor(low_whole, low_part)),
            "all_reduce fp32": (whole, lambda: dist.all_reduce(whole)),
        }
        times: dict[str, list[float]] = {name: [] for name in measured}
        for repetition in range(repetitions(elements * 4, most) + 1):
            for name, (source, call) in measured.items():
                source.fill_(1.0)
                dist.barrier()
                started = perf_counter()
                call()
                if repetition > 0:
                    times[name].append(perf_counter() - started)
        return times


class MPI:
    def __init__(self, args: argparse.Namespace):
        import numpy
        from mpi4py import MPI

        self.numpy, self.mpi, self.comm = numpy, MPI, MPI.COMM_WORLD
        self.rank, self.world = self.comm.Get_rank(), self.comm.Get_size()

    def measure(self, elements: int, most: int) -> dict:
        from time import perf_counter

        numpy, comm = self.numpy, self.comm
        elements -= elements % self.world
        own = elements // self.world
        whole, part = numpy.ones(elements, numpy.float32), numpy.ones(own, numpy.float32)
        low_whole, low_part = numpy.ones(elements, numpy.uint16), numpy.ones(own, numpy.uint16)
        result = numpy.ones(elements, numpy.float32)
        measured = {
            "reduce_scatter fp32": (whole, lambda: comm.Reduce_scatter_block(whole, part)),
            "all_gather fp32": (part, lambda: comm.Allgather(part, whole)),
            "all_gather bf16": (low_part, lambda: comm.Allgather(low_part, low_whole)),
            "all_reduce fp32": (whole, lambda: comm.Allreduce(whole, result)),
        }
        times: dict[str, list[float]] = {name: [] for name in measured}
        for repetition in range(repetitions(elements * 4, most) + 1):
            for name, (source, call) in measured.items():
                source.fill(1)
                comm.Barrier()
                started = perf_counter()
                call()
                if repetition > 0:
                    times[name].append(perf_counter() - started)
        return times


PEERS = {"shm": Shm, "gloo": Gloo, "mpich": MPI}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", choices=PEERS, required=True)
    parser.add_argument("--library", help="native.py's")
    parser.add_argument("--bucket-mb", type=float, default=25.0)
    parser.add_argument("--repetitions", type=int, default=MOST, help="at most")
    parser.add_argument("--elements", type=int, nargs="+", required=True)
    args = parser.parse_args()
    peer = PEERS[args.peer](args)
    times = {str(elements): peer.measure(elements, args.repetitions) for elements in args.elements}
    common.report({"times": times}, peer.rank)


if __name__ == "__main__":
    main()
