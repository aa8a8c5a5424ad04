"""torch's own machinery around a wrapped model: torch.compile, the profiler, autocast, activation checkpointing, samplers and
loaders, subgroups, threads."""

import contextlib
import copy
import multiprocessing
import threading

import pytest
import ranks
import shardstep
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

FORMS = ["wrap", "class", "replicated"]
every_form = pytest.mark.parametrize("form", FORMS)


def attach(form, model, lr=0.1, optimizer=torch.optim.SGD, **options):
    """(what is called, the optimizer)"""
    options.setdefault("timeout", 20.0)
    optimizer = optimizer(model.parameters(), lr=lr)
    if form == "wrap":
        return shardstep.wrap(model, optimizer, **options)
    called = shardstep.DistributedDataParallel(model, **options)
    return called, shardstep.ShardedOptimizer(optimizer, called) if form == "class" else optimizer


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 16)

    def forward(self, x):
        return torch.relu(self.layer(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = Block(), nn.Linear(16, 1)

    def forward(self, x):
        return self.last(self.first(x))


def weights(module):
    return [p.detach().float().clone() for p in module.parameters()]


# -- torch.compile: B80 -----------------------------------------------------------------------------------------------


def counts():
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"], dict(counters["graph_break"])


def train_compiled(forward, called, optimizer, rank, windows=3):
    """Windows of three micro-batches; shapes change inside every one, also in the first. Graphs after each window."""
    graphs = []
    for window in range(windows):
        for k in range(3):
            g = torch.Generator().manual_seed(100 * window + 10 * k + rank)
            x = torch.randn(3 + (window + k) % 3, 8, generator=g)
            with contextlib.nullcontext() if k == 2 else called.no_sync():
                forward(x).float().pow(2).mean().backward()
        torch.nn.utils.clip_grad_norm_(called.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        graphs.append(counts()[0])
    return graphs


def compiled(form, when, how, dtype=None):
    """(what is called, the wrapped module, the optimizer)"""
    options = {"param_dtype": dtype} if form == "wrap" else {}
    torch.manual_seed(0)
    model = Net()
    if when == "not at all":
        called, optimizer = attach(form, model, **options)
        return called, called, optimizer
    if when == "before, all of it":  # what is wrapped is torch.compile's module
        called, optimizer = attach(form, torch.compile(model, **how), **options)
        return called, called, optimizer
    if when == "before, called directly":  # the module made before is called, and knows nothing of the wrap
        forward = torch.compile(model, **how)
        called, optimizer = attach(form, model, **options)
        return forward, called, optimizer
    if when == "before, in place":
        model.compile(**how)
    if when == "before, layers":
        model.first.compile(**how)
        model.last = torch.compile(model.last, **how)
    called, optimizer = attach(form, model, **options)
    if when == "after":
        return torch.compile(called, **how), called, optimizer
    if when == "after, in place":
        called.compile(**how)
    if when == "in a function":  # which is where the graph ends, as with FSDP2
        how = {**how, "fullgraph": False}
        return torch.compile(lambda x: called(x) * 1.0, **how), called, optimizer
    return called, called, optimizer


WRAPPED = ["before, all of it", "before, called directly", "before, in place", "before, layers", "after", "after, in place"]


def compile_body(rank, world, form, dtype, cases):
    import torch._dynamo

    reference_forward, reference, o = compiled(form, "not at all", {}, dtype)
    train_compiled(reference_forward, reference, o, rank)
    for when in cases:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        forward, called, optimizer = compiled(form, when, {"backend": "eager", "fullgraph": form == "wrap"}, dtype)
        graphs = train_compiled(forward, called, optimizer, rank)
        breaks = counts()[1]
        functions = 2 if when == "before, layers" else 1
        around = 1 if when == "in a function" else 0
        assert 2 * functions <= graphs[0] <= 2 * (functions + around), (when, graphs)  # static, then dynamic shapes
        assert graphs == graphs[:1] * len(graphs), (when, graphs)
        assert form != "wrap" or len(breaks) == around, (when, breaks)
        for a, b in zip(weights(reference), weights(called)):
            assert torch.equal(a, b), (when, (a - b).abs().max())


@pytest.mark.parametrize("form, dtype", [("wrap", None), ("wrap", torch.bfloat16), ("class", None), ("replicated", None)])
def test_compiled_forward_trains_alike_and_is_compiled_once(form, dtype):
    cases = WRAPPED + ["in a function"] if form == "wrap" else ["before, all of it", "before, in place", "after"]
    ranks.run(2, compile_body, form, dtype, cases)


def aot_body(rank, world, backend, dtype):
    import torch._dynamo

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    reference_forward, reference, o = compiled("wrap", "not at all", {}, dtype)
    train_compiled(reference_forward, reference, o, rank)
    with contextlib.ExitStack() as stack:
        if backend == "inductor":
            import torch._inductor.config

            # no pool of compiling processes, and no test of each instruction set that the processor says to have
            stack.enter_context(torch._inductor.config.patch({"compile_threads": 1, "cpp.vec_isa_ok": True}))
            if rank == 0:  # the other finds it in inductor's cache
                plain = torch.compile(Net().to(dtype))
                for rows in (3, 4):
                    plain(torch.ones(rows, 8, dtype=dtype)).sum().backward()
                torch._dynamo.reset()
                torch._dynamo.utils.counters.clear()
            dist.barrier()
        forward, called, optimizer = compiled("wrap", "after", {"fullgraph": True, "backend": backend}, dtype)
        graphs = train_compiled(forward, called, optimizer, rank)
    assert graphs == [2, 2, 2]
    for a, b in zip(weights(reference), weights(called)):
        torch.testing.assert_close(b, a, rtol=1e-5 if dtype is None else 1e-2, atol=1e-6 if dtype is None else 4e-3)


@pytest.mark.parametrize("backend, dtype", [("aot_eager", None), ("aot_eager", torch.bfloat16), ("inductor", torch.bfloat16)])
def test_compiled_backward_trains_as_eager(backend, dtype):
    ranks.run(2, aot_body, backend, dtype, timeout=200.0)


def reading_body(rank, world):
    """Dynamo must not be told that there is no gradient where the user's own compiled code looks at it."""
    called, optimizer = attach("wrap", Net(), param_dtype=torch.bfloat16)
    called(torch.ones(2, 8)).float().sum().backward()

    def halve():
        for p in called.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)

    before = called.full_grad(called.last.bias).item()
    torch.compile(halve, backend="eager")()
    assert called.full_grad(called.last.bias).item() == before / 2 == 1.0


def test_compiled_code_of_the_users_sees_gradients():
    ranks.run(2, reading_body)


def hidden_body(rank, world):
    """A backward on another thread while this one compiles in a forward: its gradient counts."""
    import torch._dynamo

    called, optimizer = attach("wrap", Net(), param_dtype=torch.bfloat16)
    late = []

    def backend(graph, inputs):
        if not late:
            assert all(p.grad is None for p in called.parameters())  # hidden
            thread = threading.Thread(target=lambda: loss.backward())
            thread.start()
            thread.join()
            late.append(True)
        return graph

    called(torch.ones(2, 8)).float().sum().backward()
    loss = called(torch.ones(2, 8)).float().sum()
    called.compile(backend=backend)
    out = called(torch.ones(2, 8)).float().sum()
    assert late and all(p.grad is not None for p in called.parameters())
    out.backward()
    assert called.full_grad(called.last.bias).item() == 6.0


def test_backward_beside_a_compilation_is_counted():
    ranks.run(2, hidden_body)


def compiled_autograd_body(rank, world, form):
    import torch._dynamo

    called, optimizer = attach(form, Net())
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        with pytest.raises(shardstep.UsageError, match="compiled autograd.*compiled_autograd False"):
            called(torch.ones(2, 8)).sum().backward()
    optimizer.zero_grad()
    called(torch.ones(2, 8)).sum().backward()
    assert called.full_grad(next(reversed(list(called.parameters())))).item() == 2.0


@every_form
def test_compiled_autograd_is_refused_by_name_and_leaves_nothing_behind(form):
    ranks.run(2, compiled_autograd_body, form)


# -- torch.profiler ---------------------------------------------------------------------------------------------------


def profile_body(rank, world, transport):
    called, optimizer = attach("wrap", Net(), transport=transport, bucket_cap_mb=0.0003)
    buckets = called.stats()["buckets"]
    assert buckets > 1

    def step():
        called(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    names = {event.name for event in profile.events() if event.name.startswith("shardstep::")}
    expected = {f"shardstep::{what} bucket {b}" for what in ("reduce", "gather") for b in range(buckets)}
    assert names == expected | {f"shardstep::update bucket {b}" for b in range(buckets)} | {"shardstep::close"}
    assert all(event.time_range.elapsed_us() >= 0 for event in profile.events())


@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_profiler_names_reduce_update_and_gather_of_every_bucket(transport):
    ranks.run(2, profile_body, transport)


# -- autocast and checkpointing ---------------------------------------------------------------------------------------


def against_ddp(rank, world, form, run, make=Net, steps=3, **options):
    """``run(called, step)`` trains torch DDP and ours alike: the bits must be the same at two ranks."""
    torch.manual_seed(0)
    theirs = make()
    ours = copy.deepcopy(theirs)
    ddp = nn.parallel.DistributedDataParallel(theirs)
    o = torch.optim.SGD(ddp.parameters(), lr=0.1)
    called, optimizer = attach(form, ours, **options)
    for model, opt in ((ddp, o), (called, optimizer)):
        for step in range(steps):
            torch.manual_seed(10 * step + rank)
            run(model, step)
            opt.step()
            opt.zero_grad()
    torch.manual_seed(0)
    assert not torch.equal(next(make().parameters()), next(ours.parameters()))
    for a, b in zip(theirs.parameters(), ours.parameters()):
        assert torch.equal(a, b), (a - b).abs().max()


def under_autocast(model, step):
    with torch.autocast("cpu", torch.bfloat16):
        out = model(torch.randn(4, 8))
        assert out.dtype == torch.bfloat16
    out.float().pow(2).mean().backward()


def whole_step_under_autocast(model, step):
    with torch.autocast("cpu", torch.bfloat16):  # the backward too, which torch advises against and people do
        for k in range(2):
            with model.no_sync() if k == 0 else contextlib.nullcontext():
                model(torch.randn(4, 8)).float().pow(2).mean().backward()


class Checkpointed(nn.Module):
    """Dropout, nested checkpoints and a layer used twice, half of it inside."""

    def __init__(self, reentrant):
        super().__init__()
        self.layer, self.inner, self.reentrant = nn.Linear(8, 8), nn.Linear(8, 8), reentrant
        self.dropout = nn.Dropout(0.3)

    def part(self, x):
        x = checkpoint(lambda y: torch.tanh(self.inner(y)), x, use_reentrant=self.reentrant)
        return self.dropout(torch.relu(self.layer(x)))

    def forward(self, x):
        x = checkpoint(self.part, x, use_reentrant=self.reentrant)
        return self.layer(checkpoint(self.part, x, use_reentrant=self.reentrant))


def checkpointed(model, step):
    for k in range(2):
        with model.no_sync() if k == 0 else contextlib.nullcontext():
            model(torch.randn(4, 8, requires_grad=True)).pow(2).mean().backward()


@every_form
@pytest.mark.parametrize("run", [under_autocast, whole_step_under_autocast])
def test_autocast_has_the_bits_of_ddp(form, run):
    ranks.run(2, against_ddp, form, run)


def checkpointed_body(rank, world, form, reentrant):
    """torch DDP cannot do this with re-entrant checkpoints, so the reference is a model without its own hooks."""
    torch.manual_seed(0)
    theirs = Checkpointed(reentrant)
    ours = copy.deepcopy(theirs)
    o = torch.optim.SGD(theirs.parameters(), lr=0.1)
    called, optimizer = attach(form, ours)
    theirs.no_sync = contextlib.nullcontext
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        checkpointed(theirs, step)
        for p in theirs.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        torch.manual_seed(10 * step + rank)
        checkpointed(called, step)
        for opt in (o, optimizer):
            opt.step()
            opt.zero_grad()
    for a, b in zip(theirs.parameters(), ours.parameters()):
        assert torch.equal(a, b), (a - b).abs().max()


@every_form
@pytest.mark.parametrize("reentrant", [False, True])
def test_nested_checkpoints_with_dropout_change_no_bit(form, reentrant):
    ranks.run(2, checkpointed_body, form, reentrant)


# -- loaders ----------------------------------------------------------------------------------------------------------


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, i):
        assert torch.utils.data.get_worker_info() is not None  # in a worker, forked after the wrap
        return torch.full((8,), float(i))


def loader_body(rank, world, form):
    from torch.utils.data import DataLoader, DistributedSampler

    multiprocessing.current_process()._config["daemon"] = False  # or it may not have workers
    torch.manual_seed(0)
    reference = Net()
    o = torch.optim.SGD(reference.parameters(), lr=1e-4)
    called, optimizer = attach(form, copy.deepcopy(reference), lr=1e-4)
    for epoch in range(2):
        loaders = []
        for r in range(world):
            sampler = DistributedSampler(Numbers(), world, r, shuffle=True, seed=3)
            sampler.set_epoch(epoch)
            if r == rank:  # forked in mid-window
                mine = DataLoader(Numbers(), 3, sampler=sampler, num_workers=2, multiprocessing_context="fork", timeout=20)
            loaders.append([torch.full((3, 8), 1.0) * torch.tensor([[float(i)] for i in part])
                            for part in torch.tensor(list(sampler)).split(3)])
        with called.no_sync():
            called(torch.ones(1, 8)).sum().backward()
        reference(torch.ones(1, 8)).sum().backward()
        for step, batch in enumerate(mine):
            assert torch.equal(batch, loaders[rank][step])
            called(batch).mean().backward()
            for part in loaders:
                (reference(part[step]).mean() / world).backward()
            for opt in (o, optimizer):
                opt.step()
                opt.zero_grad()
    for a, b in zip(reference.parameters(), called.parameters()):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)


@every_form
def test_distributed_sampler_and_forked_loader_workers(form):
    ranks.run(2, loader_body, form)


# -- groups and threads -----------------------------------------------------------------------------------------------


def subgroup_body(rank, world, form, transport):
    """Ranks 0 and 2 train one model and rank 1 another, at its own pace."""
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    members = [0, 2] if rank != 1 else [1]
    torch.manual_seed(rank)  # rank 0's weights count
    model = Net()
    called, optimizer = attach(form, model, transport=transport, process_group=groups[rank == 1])
    torch.manual_seed(members[0])
    reference = Net()
    assert all(torch.equal(a, b) for a, b in zip(reference.parameters(), model.parameters()))
    o = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(2 + rank % 2):
        called(torch.full((2, 8), 1.0 + rank)).sum().backward()
        for r in members:
            (reference(torch.full((2, 8), 1.0 + r)).sum() / len(members)).backward()
        norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0) for m in (reference, called)]
        torch.testing.assert_close(norms[1], norms[0], rtol=1e-5, atol=0)
        for opt in (o, optimizer):
            opt.step()
            opt.zero_grad()
    assert called.stats()["world"] == len(members)
    for a, b in zip(reference.parameters(), model.parameters()):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)


@every_form
@pytest.mark.parametrize("transport", ["auto", "c10d"])
def test_subgroups_train_apart_from_each_other(form, transport):
    ranks.run(3, subgroup_body, form, transport)


def borrowed_body(rank, world):
    from shardstep import _groups

    kept = _groups._backend_for_cpu
    _groups._backend_for_cpu = lambda group: "mpi"  # which cannot make a second group of some ranks by themselves
    try:
        called, optimizer = attach("wrap", Net(), transport="c10d")
        with pytest.raises(shardstep.UsageError, match=r"this mpi process group already.*process_group of its own"):
            attach("wrap", Net(), transport="c10d")
        called(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        called.unwrap()
        attach("wrap", Net(), transport="c10d")[0].unwrap()
    finally:
        _groups._backend_for_cpu = kept


def test_two_models_over_one_group_that_cannot_be_doubled_are_refused():
    ranks.run(2, borrowed_body)


def threads_body(rank, world, form, transport):
    """One model per thread; which thread comes first is each rank's own affair. And the backward of a model that was called
    on another thread."""
    torch.manual_seed(0)
    references = [Net() for _ in range(3)]
    pairs = [attach(form, copy.deepcopy(m), transport=transport) for m in references]
    errors = []

    def train(called, optimizer, factor):
        try:
            for step in range(5):
                loss = called(torch.full((2, 8), factor * (step + rank))).sum()
                backward = threading.Thread(target=loss.backward)
                backward.start()
                backward.join()
                optimizer.step()
                optimizer.zero_grad()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(*pair, 0.1 * (k + 1))) for k, pair in enumerate(pairs)]
    for thread in threads if rank == 0 else reversed(threads):
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    for k, (reference, (called, _)) in enumerate(zip(references, pairs)):
        o = torch.optim.SGD(reference.parameters(), lr=0.1)
        for step in range(5):
            for r in range(world):
                (reference(torch.full((2, 8), 0.1 * (k + 1) * (step + r))).sum() / world).backward()
            o.step()
            o.zero_grad()
        for a, b in zip(reference.parameters(), called.parameters()):
            torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ["wrap", "class"])
@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_models_train_on_threads_of_their_own(form, transport):
    ranks.run(2, threads_body, form, transport)
