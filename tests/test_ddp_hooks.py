"""Communication hooks of the replicated class form, against torch DDP with the same hooks."""

import copy

import pytest
import ranks
import shardstep
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms import ddp_comm_hooks
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks, post_localSGD_hook, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

DDP = shardstep.DistributedDataParallel


class Net(nn.Module):
    """A kernel in channels_last order, odd sizes, and a layer that rank 1 does not use in every second step."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.sometimes = nn.Linear(3, 3)
        self.head = nn.Linear(3, 5)

    def forward(self, x, use=True):
        x = self.conv(x).tanh().mean((2, 3))
        return self.head(x + self.sometimes(x) if use else x)


def data(rank, step):
    return torch.randn(4, 2, 5, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def train(ddp, rank, steps=3, uneven=False):
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    grads = []
    for step in range(steps):
        for k in range(2):
            with ddp.no_sync() if k == 0 else torch.enable_grad():
                ddp(data(rank, 2 * step + k), not uneven or (rank + step) % 2 == 0).square().mean().backward()
        grads.append([p.grad.clone() for p in ddp.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return grads


def plain_mean(state, bucket):
    """A hook of the user's, with its own communication."""
    tensor = bucket.buffer()
    return dist.all_reduce(tensor, async_op=True).get_future().then(lambda future: future.value()[0] / dist.get_world_size())


def mean_by_parts(state, bucket):
    """Works on the views and returns another tensor."""
    assert len(bucket.gradients()) == len(bucket.parameters())
    for gradient, parameter in zip(bucket.gradients(), bucket.parameters()):
        assert gradient.shape == parameter.shape
        dist.all_reduce(gradient.div_(dist.get_world_size()))
    state.append((bucket.index(), bucket.is_last()))
    future = torch.futures.Future()
    future.set_result(bucket.buffer().clone())
    return future


#: torch's quantization hooks and its batched PowerSGD fail over Gloo, with torch DDP too.
HOOKS = {
    "allreduce": lambda: (None, default_hooks.allreduce_hook),
    "fp16": lambda: (None, default_hooks.fp16_compress_hook),
    "fp16 wrapper": lambda: (None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "noop": lambda: (None, debugging_hooks.noop_hook),
    "own": lambda: (None, plain_mean),
    "own, by parts": lambda: ([], mean_by_parts),
    "post-local SGD": lambda: (post_localSGD_hook.PostLocalSGDState(None, dist.group.WORLD, 2),
                               post_localSGD_hook.post_localSGD_hook),
    "post-local SGD without": lambda: (post_localSGD_hook.PostLocalSGDState(None, None, 2, False),
                                       post_localSGD_hook.post_localSGD_hook),
}


def hook_body(rank, world, name):
    results = []
    for cls in (TorchDDP, DDP):
        torch.manual_seed(0)
        ddp = cls(Net())
        ddp.register_comm_hook(*HOOKS[name]())
        results.append(train(ddp, rank))
    for theirs, mine in zip(*results):
        for a, b in zip(theirs, mine):
            torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-7)
    assert ddp._get_ddp_logging_data()["comm_hook"] == HOOKS[name]()[1].__qualname__


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", HOOKS)
def test_hook_gives_what_it_gives_in_torch(name):
    ranks.run(2, hook_body, name)


def average(rank, world, uneven=False):
    torch.manual_seed(0)
    ddp = DDP(Net())
    return train(ddp, rank, uneven=uneven)


def close_body(rank, world, name):
    """torch refuses BF16 without NCCL, and PowerSGD's random start depends on the order of its buckets; at full rank it is
    the average."""
    expected = average(rank, world)
    torch.manual_seed(0)
    ddp = DDP(Net())
    if name == "bf16":
        ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)
        tolerance = dict(rtol=2e-2, atol=1e-3)
    else:
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=5, start_powerSGD_iter=2, min_compression_rate=0.01)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        tolerance = dict(rtol=1e-3, atol=1e-5)
    grads = train(ddp, rank)
    for a, b in zip(expected, grads):
        for x, y in zip(a, b):
            torch.testing.assert_close(y, x, **tolerance)
    if name != "bf16":
        assert state.iter == 3
    return [g.tolist() for g in grads[-1]]


@pytest.mark.parametrize("name", ["bf16", "PowerSGD"])
def test_compressing_hooks_stay_close_to_the_average(name):
    first, second = ranks.run(2, close_body, name)
    assert first == second


def builtin_body(rank, world):
    for kind in (dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS):
        results = []
        for cls in (TorchDDP, DDP):
            torch.manual_seed(0)
            ddp = cls(Net())
            ddp._register_builtin_comm_hook(kind)
            results.append(train(ddp, rank))
        for theirs, mine in zip(*results):
            for a, b in zip(theirs, mine):
                torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-5)
    torch.manual_seed(0)
    ddp = DDP(Net())
    ddp_comm_hooks.register_ddp_comm_hook(ddp_comm_hooks.DDPCommHookType.ALLREDUCE, ddp, None)
    for a, b in zip(average(rank, world)[0], train(ddp, rank)[0]):
        torch.testing.assert_close(b, a)


def test_builtin_hooks_and_registration_by_name():
    ranks.run(2, builtin_body)


def buckets_body(rank, world):
    """Every bucket once per window, in order, whoever uses what; a parameter that nobody uses keeps no gradient."""
    expected = average(rank, world, uneven=True)
    torch.manual_seed(0)
    net = Net()
    net.never = nn.Linear(2, 2)
    ddp = DDP(net, bucket_cap_mb=0.00001)
    seen = []
    ddp.register_comm_hook(seen, mean_by_parts)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        for k in range(2):
            with ddp.no_sync() if k == 0 else torch.enable_grad():
                ddp(data(rank, 2 * step + k), (rank + step) % 2 == 0).square().mean().backward()
        assert net.never.weight.grad is None
        for a, b in zip(expected[step], [p.grad for p in ddp.parameters()]):
            torch.testing.assert_close(b, a)
        optimizer.step()
        optimizer.zero_grad()
    n = ddp._engine.n_buckets
    assert n > 2 and seen == [(b, b + 1 == n) for b in range(n)] * 3


def test_hook_sees_every_bucket_once_per_window():
    ranks.run(2, buckets_body)


def misuse_body(rank, world):
    def annotated(state, bucket: int):
        return None

    def returning(state, bucket) -> torch.Tensor:
        return bucket.buffer()

    for cls in (TorchDDP, DDP):
        ddp = cls(Net())
        for hook, error in ((3, TypeError), (annotated, ValueError), (returning, ValueError)):
            with pytest.raises(error):
                ddp.register_comm_hook(None, hook)
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
        with pytest.raises(RuntimeError, match="only be called once"):
            ddp.register_comm_hook(None, default_hooks.allreduce_hook)

    messages = []
    for hook in (lambda state, bucket: bucket.buffer(), lambda state, bucket: done(bucket.buffer()[:3])):
        ddp = DDP(Net())
        ddp.register_comm_hook(None, hook)
        with pytest.raises(shardstep.UsageError) as caught:
            ddp(data(rank, 0)).sum().backward()
        messages.append(str(caught.value))
    return messages


def done(value):
    future = torch.futures.Future()
    future.set_result(value)
    return future


def test_misuse_of_hooks_raises_torchs_exceptions():
    for first, second in ranks.run(2, misuse_body):
        assert "<lambda> returned Tensor, not a torch.futures.Future" in first
        assert "bucket 0 holds (3,), not one tensor" in second


def sharded_body(rank, world):
    messages = []
    for first in (True, False):
        ddp = DDP(Net())
        with pytest.raises(shardstep.UsageError) as caught:
            if first:
                ddp.register_comm_hook(None, powerSGD_hook.powerSGD_hook)
            optimizer = shardstep.ShardedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1), ddp)
            ddp.register_comm_hook(None, powerSGD_hook.powerSGD_hook)
        messages.append(str(caught.value))
    ddp = DDP(Net())
    optimizer = shardstep.ShardedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1), ddp)
    with pytest.raises(shardstep.UsageError) as caught:
        ddp.register_comm_hook(None, default_hooks.fp16_compress_wrapper(plain_mean))
    messages.append(str(caught.value))
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    ddp(data(rank, 0)).sum().backward()
    optimizer.step()
    return messages


def test_hooks_on_a_sharded_model_are_refused_by_name():
    for messages in ranks.run(2, sharded_body):
        assert len(messages) == 3 and all("powerSGD_hook cannot run on a sharded model" in m for m in messages[:2])
        assert "fp16_compress_wrapper_hook cannot run on a sharded model" in messages[2]


COMPRESSED = {
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
    "fp16 wrapper": default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
    "bf16 of fp16": default_hooks.bf16_compress_wrapper(default_hooks.fp16_compress_hook),
}


def steps(ddp, optimizer, rank):
    for step in range(4):
        ddp(data(rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in ddp.parameters()]


def compressed_body(rank, world, name, first):
    """torch refuses BF16 without NCCL; there the hook's rounding is that of an FP32 average."""
    hook = COMPRESSED[name]
    theirs = TorchDDP(Net())
    start = copy.deepcopy(theirs.module)
    if "bf16" not in name:
        theirs.register_comm_hook(None, hook)
    expected = steps(theirs, torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9), rank)
    averages = TorchDDP(copy.deepcopy(start))
    exact = steps(averages, torch.optim.SGD(averages.parameters(), lr=0.1, momentum=0.9), rank)
    ddp = DDP(copy.deepcopy(start))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    if first:
        ddp.register_comm_hook(None, hook)
    optimizer = shardstep.ShardedOptimizer(optimizer, ddp)
    if not first:
        ddp.register_comm_hook(None, hook)
    got = steps(ddp, optimizer, rank)
    for mine, compressed, average in zip(got, expected, exact):
        torch.testing.assert_close(mine, compressed, rtol=0.0, atol=4 * torch.finfo(torch.float16).eps)
        torch.testing.assert_close(mine, average, rtol=1e-5, atol=1e-6)
    assert any(not torch.equal(a, b) for a, b in zip(got, start.parameters()))
    assert ddp._get_ddp_logging_data()["comm_hook"] == hook.__qualname__


@pytest.mark.parametrize("first", [True, False], ids=["hook first", "sharded first"])
@pytest.mark.parametrize("name", COMPRESSED)
def test_compressing_hooks_of_a_sharded_model_leave_the_fp32_average(name, first):
    ranks.run(2, compressed_body, name, first)


def raising_body(rank, world):
    def hook(state, bucket):
        raise ValueError("no")

    ddp = DDP(Net())
    ddp.register_comm_hook(None, hook)
    with pytest.raises(ValueError, match="no"):
        ddp(data(rank, 0)).sum().backward()
    ddp._comm_hooks.clear()
    ddp.abort_window()
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    ddp(data(rank, 0)).sum().backward()
    alone = copy.deepcopy(ddp)
    for r in range(world):
        (alone(data(r, 0)).sum() / world).backward()
    for p, q in zip(ddp.parameters(), alone.parameters()):
        torch.testing.assert_close(p.grad, q.grad)


def test_exception_in_a_hook_reaches_the_user_and_the_next_window_is_clean():
    ranks.run(2, raising_body)


def local_sgd_body(rank, world):
    """torch's own recipe: average gradients for two steps, then every second step average the weights. That replaces
    ``p.data`` by contiguous memory, after which torch DDP is wrong about kernels in channels_last order; so it has none."""
    from torch.distributed.algorithms.model_averaging import averagers
    from torch.distributed.optim import PostLocalSGDOptimizer

    results = []
    for cls in (TorchDDP, DDP):
        torch.manual_seed(0)
        ddp = cls(Net().to(memory_format=torch.contiguous_format) if cls is TorchDDP else Net())
        state = post_localSGD_hook.PostLocalSGDState(None, None, 2, False)
        ddp.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
        optimizer = PostLocalSGDOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9),
                                          averagers.PeriodicModelAverager(period=2, warmup_steps=2))
        for step in range(6):
            ddp(data(rank, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([p.detach().clone() for p in ddp.parameters()])
    for a, b in zip(*results):
        torch.testing.assert_close(b, a)


def test_post_local_sgd_trains_as_in_torch():
    ranks.run(2, local_sgd_body)
