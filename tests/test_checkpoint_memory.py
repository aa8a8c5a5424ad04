"""A save and a load need no memory to speak of; a save in the background a copy of the rank's own part."""

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


M_MMAP_THRESHOLD = -3


def made():
    # Freed memory goes back to the kernel at once: the allocator would keep the more of it the larger it was.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 128 * 1024)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    model, optimizer = shardstep.wrap(model, torch.optim.AdamW(model.parameters()), bucket_cap_mb=BUCKET / MB)
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def costs(rank, world, folder, options):
    model, optimizer = made()
    checkpoint.save(folder / "first", model, optimizer, step=0, **options).result()  # imports, and opens its channel
    with Watch() as saving:
        checkpoint.save(folder / "second", model, optimizer, step=1, **options).result()
    checkpoint.load(folder / "first", model, optimizer)
    with Watch() as loading:
        checkpoint.load(folder / "second", model, optimizer)
    return saving.extra, loading.extra


def costs_of_load(rank, world, folder):
    model, optimizer = made()
    checkpoint.load(folder / "first", model, optimizer)
    with Watch() as loading:
        checkpoint.load(folder / "second", model, optimizer)
    return loading.extra


#: What else a process may take meanwhile: the interpreter's and the allocator's own.
NOISE = 4 * MB

CASES = {
    "sync": ({}, BUCKET),
    "full": ({"full": True}, BUCKET),
    "async": ({"async_": True}, SHARD + BUCKET),
}


@pytest.mark.parametrize("case", CASES)
def test_save_and_load_need_at_most_a_bucket_and_a_save_in_the_background_a_shard(case, tmp_path):
    options, bound = CASES[case]
    for saving, loading in ranks.run(WORLD, costs, tmp_path, options, fresh=True):
        assert saving <= bound + NOISE, f"{saving / MB:.1f} MB; a shard has {SHARD / MB:.1f}"
        assert case != "async" or saving > SHARD // 2  # so it is seen at all
        assert loading <= BUCKET + NOISE, f"{loading / MB:.1f} MB"
    if case == "sync":  # one process loads the parts that two have written
        loading = ranks.run(1, costs_of_load, tmp_path, fresh=True)[0]
        assert loading <= BUCKET + NOISE, f"{loading / MB:.1f} MB"
