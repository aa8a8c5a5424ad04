"""Parameters of every kind, several in one module, train as in one process: complex ones, sparse gradients, 0-dim and empty
ones, ones whose memory is in another order, and mixed dtypes. In every form, with accumulation and clipping."""

import contextlib

import pytest
import ranks
import shardstep
import torch
from torch import nn

FORMS = ["wrap", "class", "replicated"]
every_form = pytest.mark.parametrize("form", FORMS)


def real(x):
    return torch.view_as_real(x) if x.is_complex() else x


def square(x):
    return real(x).double().square().mean()


class Complex(nn.Module):
    """Two precisions, a kernel whose memory is transposed, a scalar, and a gradient that autograd hands over conjugated."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.randn(7, 5, dtype=torch.complex64))
        self.b = nn.Parameter(torch.randn(3, 5, dtype=torch.complex128).t())
        self.scale = nn.Parameter(torch.tensor(1.0 + 0.5j))
        self.real = nn.Parameter(torch.randn(7))

    def forward(self, x):
        y = (x.to(torch.complex64) @ self.a.t().conj()) * self.scale * self.real
        return square(y) + square(x.to(torch.complex128) @ self.b) + self.a.real.sum() * 0.1


class Ordered(nn.Module):
    """Memory in other orders than the dimensions'."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(9, 6).t())
        self.permuted = nn.Parameter(torch.randn(4, 9, 3).permute(2, 0, 1))
        self.sliced = nn.Parameter(torch.randn(8, 12)[:, :9].detach())  # with gaps

    def forward(self, x):
        y = self.conv(x.view(-1, 1, 1, 5).expand(-1, -1, 5, -1)).mean((2, 3))
        y = (y @ self.transposed @ self.sliced.t()).tanh()
        return square(y) + square(torch.einsum("abc,dc->ad", self.permuted, self.sliced))


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.7))
        self.one = nn.Parameter(torch.tensor([0.3]))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.both = nn.Parameter(torch.empty(3, 0))
        self.linear = nn.Linear(5, 1)

    def forward(self, x):
        return square(self.linear(x) * self.scalar + self.one) + self.empty.sum() + self.both.sum()


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.single, self.fine = nn.Linear(5, 4), nn.Linear(4, 3).double()
        self.more = nn.Linear(3, 2)

    def forward(self, x):
        return square(self.more(self.fine(self.single(x).tanh().double()).float()))


class Sparse(nn.Module):
    def __init__(self, sparse=True):
        super().__init__()
        self.embedding = nn.Embedding(11, 5, sparse=sparse)
        self.bag = nn.EmbeddingBag(11, 5, sparse=sparse)
        self.linear = nn.Linear(5, 3)

    def forward(self, x):
        tokens = (x.abs() * 7).long() % 11
        return square(self.linear(self.embedding(tokens).mean(1) + self.bag(tokens)))


class Weights(Sparse):
    """An embedding that is the head as well: its gradient is sparse plus dense."""

    def __init__(self, sparse=True):
        super().__init__(sparse)
        self.linear = nn.Linear(5, 11, bias=False)
        self.linear.weight = self.embedding.weight


MODELS = dict(complex=Complex, ordered=Ordered, small=Small, mixed=Mixed, sparse=Sparse, tied=Weights)


def build(kind, reference=False):
    torch.manual_seed(0)
    cls = MODELS[kind]
    return cls(False) if reference and issubclass(cls, Sparse) else cls()


def make(form, model, optimizer):
    if form == "wrap":
        model, optimizer = shardstep.wrap(model, optimizer, timeout=20, bucket_cap_mb=0.0003)
        return model, model, optimizer
    ddp = shardstep.DistributedDataParallel(model, timeout=20, bucket_cap_mb=0.0003)
    return ddp, model, shardstep.ShardedOptimizer(optimizer, ddp) if form == "class" else optimizer


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}


def data(rank, step, k):
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(1000 * step + 10 * rank + k))


def train_body(rank, world, form, kind, name):
    """Clipping with one norm type after the other. The reference's gradients are dense, as torch clips no sparse ones."""
    reference, mine = build(kind, True), build(kind)
    strides = {n: p.stride() for n, p in mine.named_parameters()}
    o, mo = OPTIMIZERS[name](reference.parameters()), OPTIMIZERS[name](mine.parameters())
    called, module, mo = make(form, mine, mo)
    orders = [2.0, 1.0, 3.0, float("inf")]
    if kind == "small":
        orders.pop()  # torch has no inf norm of nothing
    for step, order in enumerate(orders):
        for r in range(world):
            for k in range(2):
                (reference(data(r, step, k)) / (2 * world)).backward()
        for k in range(2):
            with called.no_sync() if k == 0 else contextlib.nullcontext():
                (called(data(rank, step, k)) / 2).backward()
        totals = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.3, norm_type=order) for m in (reference, module)]
        torch.testing.assert_close(*totals, rtol=1e-5, atol=0)
        for optimizer in (o, mo):
            optimizer.step()
            optimizer.zero_grad()
    for (n, a), (_, b) in zip(reference.named_parameters(), module.named_parameters()):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        torch.testing.assert_close(b, a, rtol=2e-5, atol=2e-6, msg=lambda m, n=n: f"{n}: {m}")
        assert b.stride() == strides[n] or n == "sliced"  # which is packed


@every_form
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_parameters_of_every_kind_train_as_in_one_process(form, kind, name):
    ranks.run(2, train_body, form, kind, name)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", ["AdamW", "Adagrad"])
def test_parameters_of_every_kind_with_other_optimizers_and_three_ranks(kind, name):
    ranks.run(3, train_body, "wrap", kind, name)


def edits_body(rank, world):
    """What users do to complex gradients, on the reduced one; a complex factor too."""
    edits = [lambda g: g.mul_(0.5), lambda g: g.mul_(0.5 + 1j), lambda g: g.mul_(torch.tensor(2 - 1j)), lambda g: g.div_(3),
             lambda g: g.add_(torch.ones_like(g), alpha=0.1), lambda g: g.copy_(torch.full_like(g, 2 + 3j)), lambda g: g.neg_(),
             lambda g: g.zero_(), lambda g: g.add_(1j), lambda g: g.mul_(g)]
    for edit in edits:
        reference, mine = build("complex"), build("complex")
        model, optimizer = shardstep.wrap(mine, torch.optim.SGD(mine.parameters(), lr=0.1), timeout=20, debug=True)
        for r in range(world):
            (reference(data(r, 0, 0)) / world).backward()
        model(data(rank, 0, 0)).backward()
        for m in (reference, model):
            edit(m.a.grad)
            edit(m.b.grad)
        for p, q in ((model.a, reference.a), (model.b, reference.b)):
            for order in (2, 1, float("inf")):
                torch.testing.assert_close(p.grad.norm(order), q.grad.norm(order), rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(model.full_grad(p), q.grad, rtol=1e-5, atol=1e-6)
        model.unwrap()


def test_complex_gradients_can_be_edited():
    ranks.run(2, edits_body)
    ranks.run(3, edits_body)


def state_body(rank, world, cls):
    """The state of complex parameters: taken over from a warm optimizer, and given to one; as pairs of real numbers."""
    reference, mine = build("complex"), build("complex")
    optimizers = [OPTIMIZERS[cls](m.parameters()) for m in (reference, mine)]
    for m, o in ((reference, optimizers[0]), (mine, optimizers[1])):
        m(data(0, 0, 0)).backward()
        o.step()
        o.zero_grad()
    model, sharded = shardstep.wrap(mine, optimizers[1], timeout=20)
    for step in range(2):
        for r in range(world):
            (reference(data(r, step, 1)) / world).backward()
        model(data(rank, step, 1)).backward()
        for o in (optimizers[0], sharded):
            o.step()
            o.zero_grad()
        if step == 0:
            saved = sharded.state_dict()
            sharded.load_state_dict(saved)
    for a, b in zip(reference.parameters(), model.parameters()):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_state_of_complex_parameters_moves(cls):
    ranks.run(2, state_body, cls)


def refused_body(rank, world):
    half = nn.Module()
    half.weight = nn.Parameter(torch.zeros(3, dtype=torch.complex32))
    with pytest.raises(shardstep.UsageError) as caught:
        shardstep.wrap(half)
    return str(caught.value)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_complex_half_is_refused_by_name():
    assert all("'weight' is torch.complex32" in message for message in ranks.run(2, refused_body))
