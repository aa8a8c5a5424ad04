"""mixed_precision= of the class form. torch's own needs streams and does not run on the CPU, so what it does is written out:
a copy of the model in low precision computes, and the parameters get its gradients in their own dtype."""

import copy
import pickle

import pytest
import ranks
import shardstep
import torch
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision
from torch.nn.utils import clip_grad_norm_

DDP = shardstep.DistributedDataParallel
MICRO_BATCHES = 2


class Net(nn.Module):
    """With tied weights, a frozen parameter, a buffer of each kind, and parameters that a forward may leave out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 5)
        self.norm = nn.BatchNorm1d(5)
        self.second = nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.last = nn.Linear(5, 3)
        self.first.bias.requires_grad_(False)
        self.unused = nn.Linear(2, 2)
        self.seen = None

    def forward(self, x):
        self.seen = x.dtype, self.last.weight.dtype, self.norm.running_mean.dtype
        return self.last(torch.tanh(self.second(self.norm(self.first(x)))))


def batch(rank, step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(6, 5, generator=generator), torch.randn(6, 3, generator=generator)


def loss_of(output, target):
    return nn.functional.mse_loss(output.float(), target)


def reference_gradients(model, dtype, world, steps):
    """By name: the mean over ranks of the sum over micro-batches of the gradients that copies in low precision find."""
    found = {name: None for name, _ in model.named_parameters()}
    for rank in range(world):
        for step in steps:
            low = copy.deepcopy(model).to(dtype)
            inputs, target = batch(rank, step)
            loss_of(low(inputs.to(dtype)), target).backward()
            for name, p in low.named_parameters():
                if p.grad is not None:
                    grad = p.grad.float() / world
                    found[name] = grad if found[name] is None else found[name] + grad
    return found


def train(rank, world, dtype, sharded, steps=3):
    reference = Net()
    config = _MixedPrecision(param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=dtype)
    model = DDP(Net(), mixed_precision=config, broadcast_buffers=False)
    assert model.mixed_precision is config
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (model, reference)]
    if sharded:
        optimizers[0] = shardstep.ShardedOptimizer(optimizers[0], model)
    for step in range(steps):
        windows = [MICRO_BATCHES * step + k for k in range(MICRO_BATCHES)]
        for k, at in enumerate(windows):
            inputs, target = batch(rank, at)
            model.require_backward_grad_sync = k + 1 == MICRO_BATCHES
            output = model(inputs)
            assert output.dtype == dtype and model.module.seen == (dtype, dtype, dtype)
            loss_of(output, target).backward()
        wanted = reference_gradients(reference, dtype, world, windows)
        for name, p in reference.named_parameters():
            p.grad = wanted[name]
        for name, p in model.module.named_parameters():
            assert p.dtype == torch.float32, name
            if not sharded:
                assert (p.grad is None) == (wanted[name] is None), name
            if not sharded and p.grad is not None:
                torch.testing.assert_close(p.grad, wanted[name], rtol=1e-6, atol=1e-7)
        norms = [clip_grad_norm_(m.parameters(), 0.5) for m in (model, reference)]
        torch.testing.assert_close(norms[0], norms[1], rtol=1e-5, atol=0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for (name, p), q in zip(model.module.named_parameters(), reference.parameters()):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
            q.data.copy_(p)  # rounding of sums is not to grow over steps
    assert {value.dtype for key, value in model.state_dict().items() if "norm.running" not in key and "num" not in key} == {
        torch.float32}
    assert model.module.norm.num_batches_tracked.dtype == torch.int64
    pickle.loads(pickle.dumps(model.module))


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
def test_a_copy_in_low_precision_computes_and_full_precision_is_trained(world, sharded):
    ranks.run(world, train, torch.bfloat16, sharded)


def test_float16_and_no_parameter_dtype():
    ranks.run(1, train, torch.float16, False, 1)
    ranks.run(1, only_buffers)


def only_buffers(rank, world):
    model = DDP(Net(), mixed_precision=_MixedPrecision(buffer_dtype=torch.float32, reduce_dtype=torch.bfloat16))
    assert model(batch(0, 0)[0]).dtype == torch.float32 and model.module.seen == (torch.float32,) * 3


def refusals(rank, world):
    with pytest.raises(shardstep.UsageError, match="mixed_precision must be a torch.nn.parallel.distributed._MixedPrecision"):
        DDP(Net(), mixed_precision=torch.bfloat16)
    with pytest.raises(shardstep.UsageError, match="mixed_precision's param_dtype must be one of torch.bfloat16"):
        DDP(Net(), mixed_precision=_MixedPrecision(param_dtype=torch.int8))


def test_what_is_no_mixed_precision_is_refused_by_name():
    ranks.run(1, refusals)
