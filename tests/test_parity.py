"""Training over several ranks gives the parameters of one process that saw all the data."""

import contextlib
import functools

import fakes
import pytest
import ranks
import shardstep
import torch
import torch.distributed as dist
from torch import nn

pytestmark = pytest.mark.timeout(120)

STEPS = 50
BATCH = 288  # divisible by W * K for every combination below
TRANSPORTS = ["shm", "c10d", "nccl"]  # nccl: doubles of NCCL and of a GPU, see tests/fakes
EPSILON = torch.finfo(torch.float32).eps


class Softsign(torch.optim.Optimizer):
    """An elementwise optimizer that torch does not have: a momentum whose update is bounded."""

    def __init__(self, params, lr=1e-2, beta=0.9):
        super().__init__(params, dict(lr=lr, beta=beta))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("momentum", torch.zeros_like(p))
                m.lerp_(p.grad, 1 - group["beta"])
                p.sub_(group["lr"] * m / (1 + m.abs()))


class TorchSGD(torch.optim.SGD):
    """A class that shardstep does not know, so that torch itself runs the update."""


#: name -> (class, options, arguments of wrap). Where options maximise, the loss is negated.
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, dict(lr=0.1), {}),
    "sgd_momentum": (torch.optim.SGD, dict(lr=0.05, momentum=0.9), {}),
    "sgd_nesterov_decay": (torch.optim.SGD, dict(lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01), {}),
    "sgd_dampening": (torch.optim.SGD, dict(lr=0.05, momentum=0.9, dampening=0.3), {}),
    "sgd_maximize": (torch.optim.SGD, dict(lr=0.05, momentum=0.9, weight_decay=0.01, maximize=True), {}),
    "adam": (torch.optim.Adam, dict(lr=1e-3), {}),
    "adam_decay_amsgrad": (torch.optim.Adam, dict(lr=1e-3, weight_decay=0.01, amsgrad=True), {}),
    "adam_maximize": (torch.optim.Adam, dict(lr=1e-3, maximize=True), {}),
    "adamw": (torch.optim.AdamW, dict(lr=1e-3), {}),
    "adamw_amsgrad": (torch.optim.AdamW, dict(lr=1e-3, weight_decay=0.1, amsgrad=True), {}),
    "adamw_maximize": (torch.optim.AdamW, dict(lr=1e-3, betas=(0.8, 0.95), maximize=True), {}),
    "adagrad": (torch.optim.Adagrad, dict(lr=1e-2, lr_decay=0.01, weight_decay=0.01, fused=True), {}),
    "adadelta": (torch.optim.Adadelta, dict(lr=1.0), {}),
    "adamax": (torch.optim.Adamax, dict(lr=1e-3, foreach=True), {}),
    "nadam": (torch.optim.NAdam, dict(lr=1e-3, weight_decay=0.01, decoupled_weight_decay=True), {}),
    "radam": (torch.optim.RAdam, dict(lr=1e-3), {}),
    "rmsprop": (torch.optim.RMSprop, dict(lr=1e-3, alpha=0.9, momentum=0.5, centered=True, eps=1e-4), {}),
    "rprop": (torch.optim.Rprop, dict(lr=1e-3, etas=(0.5, 1.1), step_sizes=(1e-4, 1e-2)), {}),
    "asgd": (torch.optim.ASGD, dict(lr=0.05, t0=10, weight_decay=0.01), {}),
    "softsign": (Softsign, dict(), dict(elementwise=True)),
    "torch_sgd": (TorchSGD, dict(lr=0.05, momentum=0.9, nesterov=True), dict(elementwise=True)),
}
#: Every optimizer with one number of micro-batches, two of them with all. Their options are tried with 2 and 3 ranks
#: over shm only; nccl, and 4 ranks over c10d, try one optimizer of each kind: 50 steps are slow where ranks outnumber cores.
CASES = [(name, 3) for name in OPTIMIZERS] + [(name, k) for name in ("sgd_momentum", "adamw") for k in (1, 8)]
VARIANTS = {"sgd", "decay", "dampening", "maximize", "amsgrad"}
KINDS = {"sgd_momentum", "adamw", "rmsprop", "softsign", "torch_sgd"}


def cases_of(world, transport):
    if transport == "shm" and world in (2, 3):
        return CASES
    if transport == "nccl" or (transport == "c10d" and world == 4):
        return [(name, k) for name, k in CASES if name in KINDS]
    return [(name, k) for name, k in CASES if name.split("_")[-1] not in VARIANTS or name == "torch_sgd"]


CLIPPED = ("sgd_nesterov_decay", "adamw_amsgrad", "nadam")
MAX_NORM = 0.5


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(13, 37), nn.Tanh(), nn.Linear(37, 29), nn.Tanh(), nn.Linear(29, 3))


@functools.cache
def data():
    """Gradients stay far from zero (targets are far from what the model says), so that no rounding decides a sign."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(STEPS, BATCH, 13, generator=generator)
    return x, x @ torch.randn(13, 3, generator=generator) + 3.0


def error(model, x, y, maximize):
    value = (model(x) - y).square().mean()
    return -value if maximize else value


@functools.cache
def alone(name):
    """The parameters after one process has trained on all the data, without micro-batches."""
    cls, options, _ = OPTIMIZERS[name]
    x, y = data()
    model = network()
    optimizer = cls(model.parameters(), **options)
    for step in range(STEPS):
        error(model, x[step], y[step], options.get("maximize")).backward()
        if name in CLIPPED:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def micro_batches(rank, world, k, step):
    """This rank's micro-batches of a step."""
    x, y = data()
    return [(x[step].chunk(world * k)[rank * k + i], y[step].chunk(world * k)[rank * k + i]) for i in range(k)]


def train(model, optimizer, rank, world, k, maximize=False, clipped=False, steps=STEPS):
    for step in range(steps):
        for i, (x, y) in enumerate(micro_batches(rank, world, k, step)):
            with model.no_sync() if i + 1 < k else contextlib.nullcontext():
                (error(model, x, y, maximize) / k).backward()
        if clipped:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def train_sharded(rank, world, transport, cases, clipping=CLIPPED):
    results = []
    for name, k in cases:
        cls, options, arguments = OPTIMIZERS[name]
        model = network()
        optimizer = cls(model.parameters(), **options)
        model, optimizer = fakes.wrap(rank, model, optimizer, transport=transport, bucket_cap_mb=0.002, **arguments)
        results.append(train(model, optimizer, rank, world, k, options.get("maximize"), name in clipping))
        assert model.stats()["buckets"] > 2
        model.unwrap()
    return results


def relative_error(got, expected):
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, expected, strict=True))


def assert_equal_bits(got, expected, what=""):
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        different = int((a != b).sum()) if a.shape == b.shape else -1
        worst = float((a - b).abs().max()) if a.numel() and a.shape == b.shape else 0.0
        assert torch.equal(a, b), f"{what}: tensor {i} differs in {different} of {a.numel()} elements, by up to {worst}"


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_optimizer_trains_as_one_process(world, transport):
    cases = cases_of(world, transport)
    results = ranks.run(world, train_sharded, transport, cases, timeout=100)
    errors = {}
    for number, (name, k) in enumerate(cases):
        for rank in range(world):
            assert_equal_bits(results[rank][number], results[0][number], f"{name}, rank {rank} and rank 0")
        errors[name, k] = relative_error(results[0][number], alone(name))
    wrong = {case: value for case, value in errors.items() if not value <= 1e-5}
    assert not wrong, wrong


def test_the_optimizers_move_the_weights():
    """Or parity would say little: every run ends well away from where it began, and from where the others ended."""
    start = [p.detach() for p in network().parameters()]
    ends = {name: alone(name) for name in OPTIMIZERS}
    assert all(relative_error(end, start) > 1e-2 for end in ends.values())
    for a in OPTIMIZERS:
        for b in OPTIMIZERS:
            # the loss is negated where the optimizer maximises, which gives the same trajectory
            if a < b and {a, b} not in ({"adam", "adam_maximize"}, {"sgd_momentum", "torch_sgd"}):
                assert relative_error(ends[a], ends[b]) > 1e-5, (a, b)


# -- bit for bit --------------------------------------------------------------------------------------------------


#: These clip nowhere: DDP's and shardstep's norms are not rounded alike.
SGD_BITS = ["sgd", "sgd_momentum", "sgd_nesterov_decay", "sgd_dampening", "sgd_maximize", "torch_sgd"]


def train_as_torch_ddp(rank, world, k, name):
    cls, options, _ = OPTIMIZERS[name]
    inner = network()
    model = nn.parallel.DistributedDataParallel(inner) if world > 1 or dist.is_initialized() else inner
    optimizer = cls(inner.parameters(), **options)
    return train(model, optimizer, rank, world, k, options.get("maximize"))


def train_replicated(rank, world, k, name, transport):
    cls, options, _ = OPTIMIZERS[name]
    with fakes.gpus_for(transport, rank):
        model = shardstep.DistributedDataParallel(network(), transport=transport, bucket_cap_mb=0.002)
    assert isinstance(model, nn.parallel.DistributedDataParallel)
    optimizer = cls(model.parameters(), **options)
    result = train(model, optimizer, rank, world, k, options.get("maximize"))
    model.unwrap()
    return result


def sharded_beside_ddp(rank, world, names):
    found = {}
    for name in names:
        found[name] = [train_as_torch_ddp(rank, world, 3, name)]
        found[name] += [train_sharded(rank, world, transport, [(name, 3)], ())[0] for transport in TRANSPORTS]
    return found


def test_sgd_over_two_ranks_has_the_bits_of_torch_ddp():
    for rank, found in enumerate(ranks.run(2, sharded_beside_ddp, SGD_BITS)):
        for name, (ddp, *ours) in found.items():
            for transport, got in zip(TRANSPORTS, ours, strict=True):
                assert_equal_bits(got, ddp, f"{name} over {transport}, rank {rank}")


def replicated_beside_ddp(rank, world):
    found = {}
    for name, k in (("sgd_momentum", 1), ("adamw", 3)):
        found[name] = [train_as_torch_ddp(rank, world, k, name)]
        found[name] += [train_replicated(rank, world, k, name, transport) for transport in TRANSPORTS]
    return found


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_replicated_form_trains_as_torch_ddp(world):
    for rank, found in enumerate(ranks.run(world, replicated_beside_ddp)):
        for name, (ddp, *ours) in found.items():
            for transport, got in zip(TRANSPORTS, ours, strict=True):
                if world <= 2:  # a sum of two has one order only
                    assert_equal_bits(got, ddp, f"{name} over {transport}, rank {rank}")
                assert relative_error(got, ddp) <= 1e-5, transport


# -- one rank, beside torch's own fused kernels -------------------------------------------------------------------


def steps_beside_torch(rank, world, name, fused):
    """Gives both the same weights, state and gradient before every step; returns both after it."""
    cls, options, _ = OPTIMIZERS[name]
    torch.manual_seed(3)
    sizes = [(1003,), (64, 33), (), (7,)]
    model = nn.ParameterList([nn.Parameter(torch.randn(size)) for size in sizes])
    twin = [nn.Parameter(p.detach().clone()) for p in model]
    theirs = cls(twin, **options, **(dict(fused=True) if fused else {}))
    model, ours = shardstep.wrap(model, cls(model.parameters(), **options), transport="shm")
    pairs = []
    for step in range(20):
        before = [p.detach().clone() for p in twin]
        for p, q in zip(model, twin):
            gradient = torch.randn(p.shape) * 10.0 ** (step % 5 - 3)
            (p * gradient).sum().backward()
            q.grad = gradient.clone()
        ours.step()
        theirs.step()
        pairs.append([(b, p.detach().clone(), q.detach().clone()) for b, p, q in zip(before, model, twin)])
        for p, q in zip(model, twin):
            with torch.no_grad():
                q.copy_(p)
                for key, value in theirs.state[q].items():
                    if isinstance(value, torch.Tensor) and value.dim() == q.dim() and key != "step":
                        value.copy_(ours.state[p][key].view(value.shape))
        ours.zero_grad()
    model.unwrap()
    return pairs


@pytest.mark.parametrize("name", ["sgd", "sgd_momentum", "sgd_nesterov_decay", "sgd_dampening", "sgd_maximize"])
def test_sgd_in_c_has_the_bits_of_torch(name):
    (pairs,) = ranks.run(1, steps_beside_torch, name, fused=False)
    for step, tensors in enumerate(pairs):
        assert_equal_bits([p for _, p, _ in tensors], [q for _, _, q in tensors], f"step {step}")


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name.startswith("adam") and name != "adamax"])
def test_adam_in_c_is_torch_fused(name):
    """AdamW has its bits; Adam with decay added to the gradient, and amsgrad, are within 2 ulp of the larger of weight
    and update."""
    (pairs,) = ranks.run(1, steps_beside_torch, name, fused=True)
    for step, tensors in enumerate(pairs):
        for before, p, q in tensors:
            if name in ("adamw", "adamw_maximize"):
                assert_equal_bits([p], [q], f"step {step}")
            scale = torch.maximum(q.abs(), (q - before).abs())
            assert bool(((p - q).abs() <= 2 * EPSILON * scale).all()), step


def same_gradient_everywhere(rank, world, name):
    """Gradients and their sums are exact in FP32, so that nothing but the update can round."""
    cls, options, arguments = OPTIMIZERS[name]
    torch.manual_seed(3)
    model = nn.ParameterList([nn.Parameter(torch.randn(size)) for size in [(5003,), (64, 33), (), (7,), (129,)]])
    optimizer = cls(model.parameters(), **options)
    model, optimizer = shardstep.wrap(model, optimizer, transport="shm", bucket_cap_mb=0.01, **arguments)
    model.set_gradient_divide_factor(1.0)
    for step in range(10):
        generator = torch.Generator().manual_seed(step)
        for p in model:
            gradient = torch.randint(-64, 64, p.shape, generator=generator) / 8
            (p * (gradient if rank == step % world else -0.0)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    result = [p.detach().clone() for p in model]
    model.unwrap()
    return result


@pytest.mark.parametrize("name", ["adamw", "adamw_amsgrad", "adam_decay_amsgrad", "sgd_nesterov_decay", "torch_sgd"])
def test_cutting_parameters_into_shards_changes_no_bit_of_the_update(name):
    (expected,) = ranks.run(1, same_gradient_everywhere, name)
    for world in (2, 3, 4):
        for found in ranks.run(world, same_gradient_everywhere, name):
            assert_equal_bits(found, expected, f"{world} ranks")


# -- the class form, sharded --------------------------------------------------------------------------------------


def train_class_form(rank, world, name, transport):
    cls, options, _ = OPTIMIZERS[name]
    results = [train_sharded(rank, world, transport, [(name, 3)])[0]]
    with fakes.gpus_for(transport, rank):
        model = shardstep.DistributedDataParallel(network(), transport=transport, bucket_cap_mb=0.002)
        optimizer = shardstep.ShardedOptimizer(cls(model.parameters(), **options), model)
    results.append(train(model, optimizer, rank, world, 3, clipped=name in CLIPPED))
    assert model.stats()["step"]["reduce_scatters"] == model.stats()["step"]["all_gathers"] == model.stats()["buckets"]
    model.unwrap()
    return results


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("name", ["adamw_amsgrad", "rmsprop"])
def test_class_form_with_a_sharded_optimizer_is_the_same_engine(name, transport):
    for wrapped, class_form in ranks.run(2, train_class_form, name, transport):
        assert_equal_bits(class_form, wrapped)


# -- FP64 ---------------------------------------------------------------------------------------------------------


def train_double(rank, world, name, transport):
    cls, options, _ = OPTIMIZERS[name]
    model = network().double()
    if transport is not None:
        model, optimizer = fakes.wrap(rank, model, cls(model.parameters(), **options), transport=transport)
    else:
        optimizer, rank, world = cls(model.parameters(), **options), 0, 1
    for step in range(STEPS):
        ((x, y),) = micro_batches(rank, world, 1, step)
        error(model, x.double(), y.double(), False).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("name", ["sgd_momentum", "adamw", "nadam"])
def test_double_precision_is_kept_throughout(name, transport):
    expected = train_double(0, 1, name, None)
    for found in ranks.run(3, train_double, name, transport):
        assert all(p.dtype == torch.float64 for p in found)
        assert relative_error(found, expected) <= 1e-13


# -- low precision ------------------------------------------------------------------------------------------------


class Reference:
    """A model of low precision with FP32 masters, by hand: gradients are summed over micro-batches in FP32 for each
    rank, and then over ranks in rank order; torch updates the masters; the model gets them rounded."""

    def __init__(self, model, dtype, cls, options):
        self.model = model
        self.masters = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
        self.model.to(dtype)
        self.optimizer = cls(self.masters, **options)

    def step(self, losses_of_rank):
        total = None
        for losses in losses_of_rank:
            mine = [torch.zeros_like(m) for m in self.masters]
            for loss in losses:
                gradients = torch.autograd.grad(loss(), list(self.model.parameters()))
                for a, g in zip(mine, gradients):
                    a.add_(g.float())
            total = mine if total is None else [t + m for t, m in zip(total, mine)]
        for master, gradient in zip(self.masters, total):
            master.grad = gradient * (1 / len(losses_of_rank))  # as torch DDP divides
        self.optimizer.step()
        with torch.no_grad():
            for p, master in zip(self.model.parameters(), self.masters):
                p.copy_(master)


LOW_OPTIMIZERS = {
    "sgd": (torch.optim.SGD, dict(lr=0.05, momentum=0.9), {}),
    "adamw": (torch.optim.AdamW, dict(lr=1e-3), dict(fused=True)),
    "rmsprop": (torch.optim.RMSprop, dict(lr=1e-3, eps=1e-4), {}),
}
LOW_STEPS, LOW_K = 20, 3


def low_error(model, dtype, x, y):
    """Scaled down so that FP16 gradients stay finite."""
    return (model(x.to(dtype)).float() - y).square().mean() / LOW_K


def train_low(rank, world, dtype, transport):
    found = {}
    for name, (cls, options, _) in LOW_OPTIMIZERS.items():
        model = network()
        model, optimizer = fakes.wrap(
            rank, model, cls(model.parameters(), **options), param_dtype=dtype, transport=transport, bucket_cap_mb=0.004
        )
        for step in range(LOW_STEPS):
            for i, (x, y) in enumerate(micro_batches(rank, world, LOW_K, step)):
                with model.no_sync() if i + 1 < LOW_K else contextlib.nullcontext():
                    low_error(model, dtype, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
        state = optimizer.state_dict()["state"]
        pieces = [state[i]["master_param"].local.clone() for i in range(len(list(model.parameters())))]
        found[name] = ([p.detach().clone() for p in model.parameters()], pieces)
        model.unwrap()
    return found


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_low_precision_keeps_fp32_masters_and_sums(world, dtype, transport):
    results = ranks.run(world, train_low, dtype, transport)
    for name, (cls, options, fused) in LOW_OPTIMIZERS.items():
        reference = Reference(network(), dtype, cls, {**options, **fused})
        for step in range(LOW_STEPS):
            reference.step([
                [functools.partial(low_error, reference.model, dtype, x, y)
                 for x, y in micro_batches(rank, world, LOW_K, step)]
                for rank in range(world)
            ])
        for found in results:
            assert_equal_bits(found[name][0], results[0][name][0], name)
        masters = [torch.cat(pieces) for pieces in zip(*(found[name][1] for found in results))]
        expected = [m.detach().flatten() for m in reference.masters]
        assert relative_error(masters, expected) <= torch.finfo(dtype).eps / 2, name
        assert_equal_bits(results[0][name][0], [m.view_as(p).to(dtype) for m, p in zip(masters, results[0][name][0])])
        if world <= 2 or transport == "shm":  # summed in rank order
            assert_equal_bits(masters, expected, name)


class Mixed(nn.Module):
    """Parameters of three dtypes in one module."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.first = nn.Linear(13, 17).to(torch.bfloat16)
        self.second = nn.Linear(17, 11)
        self.third = nn.Linear(11, 3).double()

    def forward(self, x):
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x.bfloat16()).float()))).double())


def train_mixed(rank, world, name, transport):
    cls, options, _ = LOW_OPTIMIZERS[name]
    model = Mixed()
    model, optimizer = fakes.wrap(rank, model, cls(model.parameters(), **options), transport=transport)
    for step in range(LOW_STEPS):
        for i, (x, y) in enumerate(micro_batches(rank, world, LOW_K, step)):
            with model.no_sync() if i + 1 < LOW_K else contextlib.nullcontext():
                ((model(x) - y).square().mean() / LOW_K).backward()
        optimizer.step()
        optimizer.zero_grad()
    result = [p.detach().clone() for p in model.parameters()]
    model.unwrap()
    return result


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_parameters_of_three_dtypes_train_together(world, name, transport):
    """FP64 stays FP64 throughout, and BF16 has FP32 masters."""
    results = ranks.run(world, train_mixed, name, transport)
    cls, options, _ = LOW_OPTIMIZERS[name]
    model = Mixed()
    params = list(model.parameters())
    masters = [nn.Parameter(p.detach().float() if p.dtype == torch.bfloat16 else p.detach().clone()) for p in params]
    optimizer = cls(masters, **options)
    for step in range(LOW_STEPS):
        total = [torch.zeros_like(m) for m in masters]
        for rank in range(world):
            for x, y in micro_batches(rank, world, LOW_K, step):
                gradients = torch.autograd.grad((model(x) - y).square().mean() / LOW_K, params)
                for t, g in zip(total, gradients):
                    t.add_(g.to(t.dtype))
        for m, t in zip(masters, total):
            m.grad = t / world
        optimizer.step()
        with torch.no_grad():
            for p, m in zip(params, masters):
                p.copy_(m)
    for found in results:
        assert_equal_bits(found, results[0])
        for got, p in zip(found, params):
            assert got.dtype == p.dtype
            bound = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 2.0**-8}[p.dtype]
            assert relative_error([got.double()], [p.detach().double()]) <= bound


def small_updates(rank, world, transport):
    model = nn.ParameterList([nn.Parameter(torch.ones(300))])
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-17)
    model, optimizer = fakes.wrap(rank, model, optimizer, param_dtype=torch.bfloat16, transport=transport)
    for _ in range(1000):
        model[0].sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model[0].detach().clone()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_updates_below_one_ulp_of_bf16_add_up(transport):
    """B97. Half an ulp of BF16 below 1 is 2^-9; each update is 2^-17 of an exactly representable sum."""
    expected = torch.full((300,), 1 - 1000 * 2.0**-17).to(torch.bfloat16)
    assert expected[0] < 1
    for found in ranks.run(2, small_updates, transport):
        assert torch.equal(found, expected)


def writes_between_steps(rank, world, transport):
    """B58: a weights-only load and a plain write are where the next step starts from."""
    model = nn.Sequential(nn.Linear(40, 40))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = fakes.wrap(rank, model, optimizer, param_dtype=torch.bfloat16, transport=transport)

    def step():
        sum(p.sum() for p in model.parameters()).backward()
        optimizer.step()
        optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    step()
    other = {name: torch.full_like(p, 3.0) for name, p in model.named_parameters()}
    model.load_state_dict(other)
    loaded = step()
    for p in model.parameters():
        p.data.copy_(torch.full_like(p, 7.0))
    written = step()
    with torch.no_grad():
        model[0].weight[1, 2] = 11.0
    return loaded, written, step()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_masters_follow_weights_that_were_written(transport):
    for loaded, written, edited in ranks.run(2, writes_between_steps, transport):
        assert all(torch.equal(p, torch.full_like(p, 2.5)) for p in loaded)
        assert all(torch.equal(p, torch.full_like(p, 6.5)) for p in written)
        expected = [torch.full_like(p, 6.0) for p in edited]
        expected[0][1, 2] = 10.5
        assert_equal_bits(edited, expected)
