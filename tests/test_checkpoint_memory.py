"""A save needs no memory to speak of; one in the background a copy of the rank's own part."""

import ctypes
import gc
import threading
import time

import pytest
import ranks
import shardstep
import torch
import torch.distributed as dist
from shardstep import checkpoint
from torch import nn

pytestmark = pytest.mark.timeout(60)
WIDTH, LAYERS = 1536, 4
NUMEL = LAYERS * WIDTH * WIDTH  # 9.4 M parameters
WORLD = 2
MB = 2**20
SHARD = 12 * NUMEL // WORLD  # bytes: weights, and two moments
BUCKET = 8 * MB


def kernel_bytes():
    """This process's memory; of pages that are shared, its part; of files that are mapped, nothing."""
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) * 1024 for line in file if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


class Watch:
    """The most that the kernel counted while it was open, above what it was before."""

    def __enter__(self):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        dist.barrier()
        self.before = self.most = kernel_bytes()
        dist.barrier()
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.sample)
        self.thread.start()
        return self

    def sample(self):
        while not self.stop.is_set():
            self.most = max(self.most, kernel_bytes())
            time.sleep(0.001)

    def __exit__(self, *exception):
        self.stop.set()
        self.thread.join()
        self.extra = self.most - self.before
        dist.barrier()


def costs(rank, world, folder, options):
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    model, optimizer = shardstep.wrap(model, torch.optim.AdamW(model.parameters()), bucket_cap_mb=BUCKET / MB)
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    checkpoint.save(folder / "first", model, optimizer, step=0, **options).result()  # imports, and opens its channel
    with Watch() as saving:
        checkpoint.save(folder / "second", model, optimizer, step=1, **options).result()
    return saving.extra


#: What else a process may take meanwhile: the interpreter's and the allocator's own.
NOISE = 4 * MB

CASES = {
    "sync": ({}, BUCKET),
    "full": ({"full": True}, BUCKET),
    "async": ({"async_": True}, SHARD + BUCKET),
}


@pytest.mark.parametrize("case", CASES)
def test_save_needs_at_most_a_bucket_or_in_the_background_a_shard(case, tmp_path):
    options, bound = CASES[case]
    for saving in ranks.run(WORLD, costs, tmp_path, options):
        assert saving <= bound + NOISE, f"{saving / MB:.1f} MB; a shard has {SHARD / MB:.1f}"
        assert case != "async" or saving > SHARD // 2  # so it is seen at all
