"""What happens when a rank dies, stops, gives up, differs or misuses the API: a clear error on every rank within its bound,
and nothing left behind."""

import contextlib
import ctypes
import gc
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import pytest
import ranks
import shardstep
import torch
import torch.distributed as dist
from torch import nn

TRANSPORTS = ("shm", "c10d")
pytestmark = pytest.mark.timeout(120)

#: A death is noticed within a second; the rest is for a machine with fewer cores than ranks.
NOTICED = 2.5


class Net(nn.Module):
    def __init__(self, width=64, layers=3):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.inside = None  # called in the middle of the forward

    def forward(self, x):
        for k, layer in enumerate(self.layers):
            x = layer(x).tanh()
            if k == 0 and self.inside is not None:
                x = self.inside(x)
        return x


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, act):
        ctx.act = act
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.act()
        return grad, None


class Intercepted:
    """A ``_C.Engine`` that calls ``act`` before (or after) one of its methods."""

    def __init__(self, core, method, act, after=False):
        self.__dict__.update(core=core, method=method, act=act, after=after)

    def __getattr__(self, name):
        value = getattr(self.core, name)
        if name != self.method:
            return value

        def call(*args):
            if not self.after:
                self.act()
            result = value(*args)
            if self.after:
                self.act()
            return result

        return call

    def __setattr__(self, name, value):
        setattr(self.core, name, value)


PHASES = ("forward", "backward", "before step", "reduce", "update", "gather", "after gather")


def arm(phase, model, optimizer, act):
    """Makes ``act`` happen in this phase of the next step."""
    engine = model._engine
    if phase == "forward":
        model.inside = lambda x: act() or x
    elif phase == "backward":
        model.inside = lambda x: InBackward.apply(x, act)
    elif phase == "before step":
        return act
    elif phase == "reduce":  # inside the C code: the others wait in step() for what this rank is reducing
        engine.core = Intercepted(engine.core, "close", lambda: threading.Timer(0.01, act).start())
    elif phase == "update":
        engine.core = Intercepted(engine.core, "update", act)
    elif phase == "gather":
        engine.core = Intercepted(engine.core, "gather", act)
    elif phase == "after gather":
        engine.core = Intercepted(engine.core, "gather", act, after=True)
    return lambda: None


def wrapped(transport, timeout=60.0, width=64, layers=3, optimizer=torch.optim.AdamW, **options):
    model = Net(width, layers)
    return shardstep.wrap(
        model, optimizer(model.parameters(), lr=1e-3), transport=transport, timeout=timeout, bucket_cap_mb=0.02, **options)


def one_step(model, optimizer, rank, before_step=lambda: None):
    width = model.layers[0].in_features
    model(torch.full((2, width), rank + 1.0)).square().mean().backward()
    before_step()
    optimizer.step()
    optimizer.zero_grad()


def resources():
    """What this process holds of the kernel: mappings of shared memory, and descriptors that a transport could have left."""
    maps = [line.split(maxsplit=5)[-1] for line in open("/proc/self/maps") if "memfd" in line or "/dev/shm" in line]
    fds = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            fds.append(os.readlink(f"/proc/self/fd/{fd}"))
    return maps, [fd for fd in fds if "memfd" in fd or "pidfd" in fd or "/dev/shm" in fd], sum("socket" in fd for fd in fds)


def assert_nothing_left(before, after, what=None):
    assert after[:2] == before[:2], (what, before, after)
    assert after[2] <= before[2], (what, before, after)  # Gloo closes its own socket to a rank that died


def pid_of(rank, world):
    pids = [None] * world
    dist.all_gather_object(pids, os.getpid())
    return pids[rank]


# -- death ------------------------------------------------------------------------------------------------------------


def death_body(rank, world, transport, phase, folder):
    before = resources()
    model, optimizer = wrapped(transport)
    one_step(model, optimizer, rank)
    victim = world - 1

    def die():
        pathlib.Path(folder, "died").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    before_step = lambda: None  # noqa: E731
    if rank == victim:
        before_step = arm(phase, model, optimizer, die)
    try:
        for _ in range(500):  # a death after my last wait for the victim is noticed in the next step
            one_step(model, optimizer, rank, before_step)
        raise AssertionError("survived the death of a peer")
    except shardstep.Error as error:
        noticed, caught = time.monotonic(), (type(error).__name__, error.rank, str(error))
    again = time.monotonic()
    repeated = []
    for call in (lambda: one_step(model, optimizer, rank), optimizer.step, lambda: model.full_grad(model.layers[0].weight),
                 model.abort_window):
        with pytest.raises(shardstep.Error) as info:
            call()
        repeated.append((type(info.value).__name__, str(info.value)))
    again = time.monotonic() - again
    died = float(pathlib.Path(folder, "died").read_text())
    model.unwrap()
    model = optimizer = call = info = before_step = None
    torch.ones(1, requires_grad=True).sum().backward()  # torch keeps what a failed backward left in its queue until the next
    gc.collect()
    return caught, noticed - died, repeated, again, before, resources()


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_killed_rank_is_named_at_once_and_nothing_is_left(transport, phase, tmp_path):
    world = 3 if phase in ("backward", "reduce", "gather") else 2
    outcomes = ranks.outcomes(world, death_body, transport, phase, str(tmp_path), timeout=60)
    assert outcomes[-1][:2] == ("died", signal.SIGKILL), outcomes[-1]
    for outcome in outcomes[:-1]:
        assert outcome[0] == "ok", outcome[-1]
        (kind, rank, text), seconds, repeated, again, before, after = outcome[1]
        assert kind == "PeerLostError" and rank == world - 1 and f"rank {rank} has " in text, text
        assert seconds < NOTICED, seconds
        assert again < 1.0 and all(kind == "PeerLostError" for kind, _ in repeated), (again, repeated)
        if transport == "shm":
            assert_nothing_left(before, after)


def sweep_body(rank, world, transport, delay):
    """Dies by a timer, wherever that finds it, in a step of large buckets."""
    model, optimizer = wrapped(transport, width=512)
    one_step(model, optimizer, rank)
    with model.no_sync():  # so that everything is reduced in the step
        model(torch.ones(2, 512)).square().mean().backward()
    if rank == world - 1:
        signal.setitimer(signal.ITIMER_REAL, delay)  # SIGALRM's default is death
    begin = time.monotonic()
    with pytest.raises(shardstep.PeerLostError) as info:
        for _ in range(1000):
            one_step(model, optimizer, rank)
    assert info.value.rank == world - 1
    assert time.monotonic() - begin < delay + NOTICED
    return str(info.value)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_death_at_any_moment_of_a_step_is_noticed(transport):
    for delay in (0.001, 0.004, 0.013, 0.05):
        survivor, victim = ranks.outcomes(2, sweep_body, transport, delay, timeout=30)
        assert victim[:2] == ("died", signal.SIGALRM), victim
        assert survivor[0] == "ok", survivor[-1]


def exits_body(rank, world, transport, how):
    model, optimizer = wrapped(transport)
    one_step(model, optimizer, rank)
    if rank == world - 1:
        if how == "raise":
            raise ValueError("this rank has had enough")
        os._exit(3)
    try:
        one_step(model, optimizer, rank)
    except shardstep.Error as error:
        return type(error).__name__, error.rank, str(error)


@pytest.mark.parametrize("transport, how", [("shm", "raise"), ("shm", "exit"), ("c10d", "exit")])
def test_exception_that_ends_a_rank_ends_the_others_wait(transport, how):
    *survivors, last = ranks.outcomes(3, exits_body, transport, how, timeout=40)
    assert last[0] == ("error" if how == "raise" else "died")
    for survivor in survivors:
        assert survivor[0] == "ok", survivor[-1]
        kind, rank, text = survivor[1]
        assert "rank 2 has " in text, text
        # after an orderly end one survivor may hear of it from the other
        assert (kind, rank) == ("PeerLostError", 2) or (how == "raise" and kind == "AbortedError"), (kind, rank, text)


def stopped_body(rank, world, transport, timeout):
    model, optimizer = wrapped(transport, timeout)
    one_step(model, optimizer, rank)
    victim = world - 1
    pid = pid_of(victim, world)
    if rank == victim:
        model.inside = lambda x: InBackward.apply(x, lambda: os.kill(os.getpid(), signal.SIGSTOP))
    begin = time.monotonic()
    try:
        one_step(model, optimizer, rank)
        result = None
    except shardstep.Error as error:
        result = type(error).__name__, error.rank, str(error), time.monotonic() - begin, isinstance(error, TimeoutError)
    if rank == 0:
        time.sleep(0.5)  # the other survivors have had their turn
        os.kill(pid, signal.SIGCONT)
    return result


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_stopped_rank_is_a_timeout_that_names_it(transport, world):
    outcomes = ranks.outcomes(world, stopped_body, transport, 1.0, timeout=40)
    results = [outcome[1] for outcome in outcomes if outcome[0] == "ok"]
    assert len(results) == world, outcomes
    kinds = [result[0] for result in results]
    assert "TimeoutError" in kinds[:-1] and set(kinds[:-1]) <= {"TimeoutError", "AbortedError"}, results
    for kind, rank, text, seconds, builtin in results[:-1]:
        assert 0.8 < seconds < 1.0 + NOTICED, (seconds, text)
        assert "step()" in text and "1 s" in text and (kind != "TimeoutError" or builtin), text
        if transport == "shm":  # c10d knows that some peer is late, not which
            assert f"rank {world - 1}" in text and (kind != "TimeoutError" or rank == world - 1), text
            assert f"rank {world - 1} has not sent bucket" in text and "'layers." in text, text
    assert kinds[-1] in ("AbortedError", "TimeoutError", "PeerLostError"), results[-1]  # it is told when it comes back


def absent_body(rank, world, transport):
    model, optimizer = wrapped(transport, 1.0)
    one_step(model, optimizer, rank)
    if rank == world - 1:
        time.sleep(3.0)
        return None
    model(torch.ones(2, 64)).square().mean().backward()
    begin = time.monotonic()
    with pytest.raises(shardstep.TimeoutError) as info:
        optimizer.step()
    seconds = time.monotonic() - begin
    begin = time.monotonic()
    with pytest.raises(shardstep.TimeoutError):
        optimizer.step()
    return str(info.value), info.value.rank, seconds, time.monotonic() - begin


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rank_that_never_arrives_is_a_timeout(transport):
    present, absent = ranks.outcomes(2, absent_body, transport, timeout=30)
    assert present[0] == absent[0] == "ok", present[-1]
    text, rank, seconds, again = present[1]
    assert "step()" in text and (transport == "c10d" or (rank == 1 and "rank 1" in text)), text
    assert 0.8 < seconds < 1.0 + NOTICED and again < 0.5


def bucket_body(rank, world):
    """Replicated: the wait is for a bucket's gradients, and the message names its parameters."""
    model = shardstep.DistributedDataParallel(Net(), transport="shm", timeout=1.0, bucket_cap_mb=0.02)
    if rank == 1:
        time.sleep(2.5)
        return None
    with pytest.raises(shardstep.TimeoutError) as info:
        model(torch.ones(2, 64)).square().mean().backward()
    return str(info.value)


def test_replicated_backward_times_out_too():
    text = ranks.run(2, bucket_body, fresh=True)[0]
    assert "rank 1" in text and "the end of backward" in text


# -- differences ------------------------------------------------------------------------------------------------------


def model_of(kind, odd):
    torch.manual_seed(0)
    model = nn.Sequential()
    model.first = nn.Linear(4, 4)
    model.second = nn.Linear(4, 4 + (odd and kind == "shape"))
    options = {}
    if odd and kind == "dtype":
        model.second.weight.data = model.second.weight.data.double()
    elif odd and kind == "count":
        model.third = nn.Linear(4, 4)
    elif odd and kind == "fewer":
        del model.second
    elif odd and kind == "order":
        model = nn.Sequential()
        model.second, model.first = nn.Linear(4, 4), nn.Linear(4, 4)
    elif odd and kind == "requires_grad":
        model.second.weight.requires_grad_(False)
    elif odd and kind == "strides":
        model.second.weight.data = model.second.weight.data.t().contiguous().t()
    elif odd and kind == "buffer":
        model.second.register_buffer("count", torch.zeros(3))
    elif odd and kind in DIFFERENT_OPTIONS:
        options = DIFFERENT_OPTIONS[kind]
    return model, options


DIFFERENT_OPTIONS = {
    "bucket_cap_mb": {"bucket_cap_mb": 0.5}, "transport": {"transport": "c10d"}, "accumulate": {"accumulate": 2},
    "param_dtype": {"param_dtype": torch.bfloat16},
}
NAMED = {
    "shape": "second.weight", "dtype": "second.weight", "count": "third.weight", "fewer": "second.weight",
    "order": "second.weight", "requires_grad": "second.weight", "strides": "second.weight", "buffer": "second.count",
}


def different_body(rank, world, kinds):
    errors = []
    for kind in kinds:
        gc.collect()
        model, options = model_of(kind, odd=rank == world - 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = resources()
        begin = time.monotonic()
        try:
            shardstep.wrap(model, optimizer, **{"transport": "shm", **options})
            errors.append((kind, "nothing", "", 0.0))
        except shardstep.Error as error:
            errors.append((kind, type(error).__name__, str(error), time.monotonic() - begin))
        assert type(model) is nn.Sequential
        assert_nothing_left(before, resources(), kind)
        # and the ranks can go on
        model, _ = model_of("same", False)
        model, optimizer = shardstep.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), transport="shm", timeout=20)
        optimizer.step()
        model.unwrap()
    return errors


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_differ_get_the_same_error_at_once(world):
    results = ranks.run(world, different_body, [*NAMED, *DIFFERENT_OPTIONS])
    for per_kind in zip(*results):
        kind = per_kind[0][0]
        assert {type_name for _, type_name, _, _ in per_kind} == {"MismatchError"}, per_kind
        assert len({text for _, _, text, _ in per_kind}) == 1, per_kind
        text = per_kind[0][2]
        assert NAMED.get(kind, kind) in text and "rank 0" in text and f"rank {world - 1}" in text, text
        assert max(seconds for *_, seconds in per_kind) < 10.0


def misuse_body(rank, world, kind):
    model, _ = model_of("same", False)
    options = {"transport": "shm"}
    if rank == 1 and kind == "argument":
        options["timeout"] = -1
    elif rank == 1:
        model.odd = nn.Parameter(torch.ones(3).to(torch.float8_e4m3fn))
    with pytest.raises(shardstep.Error) as info:
        shardstep.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
    return type(info.value).__name__, str(info.value)


@pytest.mark.parametrize("kind", ["argument", "parameter"])
def test_misuse_on_one_rank_is_told_on_the_others(kind):
    (other, told), (own, text) = ranks.run(2, misuse_body, kind)
    named = "timeout" if kind == "argument" else "odd"
    assert own == "UsageError" and named in text and other == "MismatchError" and named in told and "rank 1" in told


def divide_factor_body(rank, world):
    model, optimizer = wrapped("shm")
    model.set_gradient_divide_factor(1.0 + rank)
    with pytest.raises(shardstep.MismatchError, match="set_gradient_divide_factor") as info:
        one_step(model, optimizer, rank)
    return str(info.value)


def test_different_divide_factors_are_a_mismatch_on_all_ranks():
    ranks.run(2, divide_factor_body, fresh=True)


# -- misuse, which one process is enough to show ----------------------------------------------------------------------


def tiny(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    return shardstep.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


def step_or_forward(model, optimizer):
    """The next forward, or else the next step."""
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()


def reassign(model):
    model[2].weight = nn.Parameter(torch.ones(2, 4))


def replace_module(model):
    model[2] = nn.Linear(4, 2)


def delete(model):
    del model[2].weight
    model[2].weight = torch.ones(2, 4)


def cast_submodule(model):
    model[2].double()


def cast_to(model):
    model[2].to(torch.bfloat16)


def other_dtype(model):
    model[2].weight.data = model[2].weight.data.double()


def other_shape(model):
    model[2].weight.data = torch.ones(5, 4)


def assigning_load(model):
    model[2].load_state_dict({"weight": torch.ones(2, 4), "bias": torch.ones(2)}, assign=True)


@pytest.mark.parametrize(
    "change",
    [reassign, replace_module, delete, cast_submodule, cast_to, other_dtype, other_shape, assigning_load])
@pytest.mark.parametrize("when", ["before forward", "before step"])
def test_parameter_changed_after_wrapping_is_named(change, when):
    model, optimizer = tiny()
    step_or_forward(model, optimizer)
    optimizer.zero_grad()
    before = [p.detach().clone() for p in model._engine.params[:2]]
    if when == "before step":
        model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(shardstep.UsageError, match=r"2\.weight"):
        change(model)  # a gradient that cannot be cast with its parameter is noticed here already
        if when == "before step":
            optimizer.step()
        else:
            step_or_forward(model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, model._engine.params))
    model.unwrap()


@pytest.mark.parametrize("cast", [
    lambda m: m.double(), lambda m: m.half(), lambda m: m.bfloat16(), lambda m: m.to(torch.float64), lambda m: m.to("meta"),
    lambda m: m.to(dtype=torch.bfloat16), lambda m: m.to_empty(device="meta")])
def test_casting_or_moving_a_wrapped_model_is_refused(cast):
    model, optimizer = tiny()
    with pytest.raises(shardstep.UsageError, match="before wrapping"):
        cast(model)
    model.float().cpu().to(torch.float32)  # these change nothing
    step_or_forward(model, optimizer)
    model.unwrap().double()


def test_second_wrap_and_shared_submodules_are_refused():
    model, optimizer = tiny()
    for again in (lambda: shardstep.wrap(model), lambda: shardstep.DistributedDataParallel(model)):
        with pytest.raises(shardstep.UsageError, match="wrapped already"):
            again()
    other = nn.Sequential(nn.Linear(3, 3), model[2])
    with pytest.raises(shardstep.UsageError, match=r"'1\.weight'.*wrapped already"):
        shardstep.wrap(other)
    with pytest.raises(shardstep.UsageError, match="sharded already"):
        shardstep.ShardedOptimizer(optimizer, model)
    step_or_forward(model, optimizer)
    shardstep.wrap(other, ignored_params=list(model[2].parameters())).unwrap()
    model.unwrap()
    shardstep.wrap(other).unwrap()
    with pytest.raises(shardstep.UsageError, match="not wrapped"):
        model = nn.Linear(2, 2)
        shardstep.ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)


def with_parameter(parameter):
    model = nn.Sequential(nn.Linear(3, 3))
    model.register_parameter("odd", parameter)
    return model


UNUSABLE = {
    "meta": lambda: with_parameter(nn.Parameter(torch.ones(2, device="meta"))),
    "sparse": lambda: with_parameter(nn.Parameter(torch.eye(3).to_sparse())),
    "csr": lambda: with_parameter(nn.Parameter(torch.eye(3).to_sparse_csr())),
    "expanded": lambda: with_parameter(nn.Parameter(torch.ones(1).expand(4))),
    "expanded matrix": lambda: with_parameter(nn.Parameter(torch.ones(3, 1).expand(3, 4))),
    "overlapping": lambda: with_parameter(nn.Parameter(torch.ones(10).as_strided((3, 4), (2, 1)))),
    "lazy": lambda: with_parameter(nn.parameter.UninitializedParameter()),
    "float8": lambda: with_parameter(nn.Parameter(torch.ones(3).to(torch.float8_e4m3fn))),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", UNUSABLE)
def test_parameter_that_cannot_be_trained_is_refused_by_name(kind):
    model = UNUSABLE[kind]()
    with pytest.raises(shardstep.UsageError, match="odd"):
        shardstep.wrap(model)
    assert type(model) is nn.Sequential
    del model._parameters["odd"]
    shardstep.wrap(model).unwrap()


def test_frozen_integer_and_complex_parameters_are_left_alone():
    model = nn.Sequential(nn.Linear(3, 3))
    model.whole = nn.Parameter(torch.arange(3), requires_grad=False)
    model.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64), requires_grad=False)
    model, optimizer = shardstep.wrap(model, torch.optim.SGD(model[0].parameters(), lr=0.1))
    step_or_forward(model, optimizer)
    assert torch.equal(model.whole, torch.arange(3))
    model.unwrap()


def test_two_parameters_over_one_memory_are_refused_by_name():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = nn.Parameter(model[0].weight.data.view(3, 3))
    with pytest.raises(shardstep.UsageError, match=r"0\.weight.*1\.weight"):
        shardstep.wrap(model)


def test_optimizers_over_other_parameters_are_refused():
    model = nn.Sequential(nn.Linear(3, 3))
    stranger = nn.Linear(2, 2)
    with pytest.raises(shardstep.UsageError, match=r"param group 1.*shape \(2, 2\)"):
        shardstep.wrap(model, torch.optim.SGD(
            [{"params": model.parameters()}, {"params": stranger.parameters()}], lr=0.1))
    assert type(model) is nn.Sequential
    unattached = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = shardstep.wrap(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    model(torch.ones(2, 3)).sum().backward()
    before = model[0].weight.detach().clone()
    with pytest.raises(shardstep.UsageError, match=r"SGD.step\(\).*0\.weight"):
        unattached.step()
    assert torch.equal(before, model[0].weight)
    with pytest.raises(shardstep.UsageError, match="shape"):
        optimizer.add_param_group({"params": list(stranger.parameters())})
    model.unwrap()
    with pytest.raises(shardstep.UsageError, match="unwrapped"):
        optimizer.step()


WRONG = {
    "transport": ["nccl-over-pigeon", None, 3],
    "timeout": [-1, 0, float("nan"), "soon", None],
    "accumulate": [0, -1, 1.5, "2", True],
    "param_dtype": [torch.int8, torch.float64, "bfloat16", 16],
    "bucket_cap_mb": [-1, 0, float("nan"), float("inf"), "25", True],
    "process_group": ["world", 3],
    "ignored_params": [3],
    "optimizer": ["sgd", torch.optim.SGD],
}


@pytest.mark.parametrize("argument", WRONG)
def test_wrong_argument_is_named(argument):
    for value in WRONG[argument]:
        model = nn.Linear(3, 3)
        with pytest.raises(shardstep.UsageError, match=argument):
            shardstep.wrap(model, **{argument: value})
        assert type(model) is nn.Linear
    with pytest.raises(shardstep.UsageError, match="torch.nn.Module"):
        shardstep.wrap([1])


@pytest.mark.parametrize("factor", [0, -1.0, float("nan"), float("inf")])
def test_wrong_divide_factor_is_refused(factor):
    model, optimizer = tiny()
    with pytest.raises(shardstep.UsageError, match="divide factor"):
        model.set_gradient_divide_factor(factor)
    model.unwrap()


# -- Ctrl-C -----------------------------------------------------------------------------------------------------------


def interrupt_body(rank, world, transport, where):
    model, optimizer = wrapped(transport)
    one_step(model, optimizer, rank)
    if rank == 1:
        time.sleep(2.5)
        return None
    model(torch.ones(2, 64)).square().mean().backward()
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        if where == "step":
            optimizer.step()
        else:
            model.full_grad(model.layers[0].weight)
    seconds = time.monotonic() - begin - 0.5
    begin = time.monotonic()
    with pytest.raises((shardstep.Error, KeyboardInterrupt)):
        optimizer.step()
    model.unwrap()
    return seconds, time.monotonic() - begin


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ctrl_c_ends_a_wait_within_a_second(transport):
    for where in ("step", "full_grad"):
        seconds, again = ranks.run(2, interrupt_body, transport, where, fresh=True)[0]
        assert seconds < 1.0 + 0.5 and again < 0.5, (seconds, again)


# -- fork -------------------------------------------------------------------------------------------------------------


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, i):
        return torch.full((64,), float(i % 3))


def fork_body(rank, world, transport):
    model, optimizer = wrapped(transport, 20.0)
    plain = Net()
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    multiprocessing.current_process()._config["daemon"] = False  # or it may not have workers
    for _ in range(2):
        loader = torch.utils.data.DataLoader(Numbers(), 2, num_workers=2, multiprocessing_context="fork")
        batches = []
        for k, batch in enumerate(loader):  # workers come and go in mid-window
            batches.append(batch)
            with model.no_sync() if k % 2 else contextlib.nullcontext():
                model(batch * (rank + 1)).square().mean().backward()
        for other in range(world):
            for batch in batches:
                (plain(batch * (other + 1)).square().mean() / world).backward()
        optimizer.step()
        optimizer.zero_grad()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    for p, q in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)

    model(torch.ones(2, 64)).square().mean().backward()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        answers = []
        for call in (optimizer.step, lambda: model.full_grad(model.layers[0].weight), model.abort_window,
                     lambda: model.layers[0].weight.grad.norm(), lambda: model(torch.ones(2, 64)).sum().backward(),
                     lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)):
            try:
                call()
                answers.append("nothing")
            except shardstep.UsageError as error:
                answers.append("fork" if "fork" in str(error) else str(error))
            except BaseException as error:
                answers.append(repr(error))
        with torch.no_grad():
            answers.append(type(model(torch.ones(2, 64))).__name__)  # evaluating is allowed
        os.write(write, "\n".join(answers).encode())
        with contextlib.suppress(Exception):
            model.unwrap()
            del model, optimizer
            gc.collect()
        os._exit(7)
    os.close(write)
    answers = b"".join(iter(lambda: os.read(read, 4096), b"")).decode().split("\n")
    os.close(read)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    optimizer.step()
    for _ in range(world):
        (plain(torch.ones(2, 64)).square().mean() / world).backward()
    plain_optimizer.step()
    for p, q in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
    model.unwrap()
    return answers


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_forked_child_cannot_disturb_and_the_parent_goes_on(transport):
    for answers in ranks.run(2, fork_body, transport, fresh=True):
        assert answers == ["fork"] * 6 + ["Tensor"], answers


# -- ends in odd orders -----------------------------------------------------------------------------------------------


def pss():
    ctypes.CDLL(None).malloc_trim(0)  # what is free is not to be counted
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))


def settled_pss():
    """What was launched and dropped keeps its memory until Gloo has sent it."""
    last = pss()
    for _ in range(40):
        time.sleep(0.03)
        now = pss()
        if abs(now - last) < 1e6:
            break
        last = now
    return now


def large(transport="shm", **options):
    """4 M parameters: 16 MB, whose return shows."""
    model = nn.Sequential(nn.Linear(1024, 2048, bias=False), nn.Linear(2048, 1024, bias=False))
    return shardstep.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-3), transport=transport, timeout=20, **options)


def unwrap_first(model, optimizer):
    model.unwrap()
    del optimizer


def unwrap_in_mid_window(model, optimizer):
    with model.no_sync():
        model(torch.ones(1, 1024)).sum().backward()
    model.unwrap()
    assert all(p.grad is None for p in model.parameters())
    model(torch.ones(1, 1024)).sum().backward()


def launched_and_dropped(model, optimizer):
    model(torch.ones(1, 1024)).sum().backward()


def model_before_optimizer(model, optimizer):
    del model
    gc.collect()


def optimizer_before_model(model, optimizer):
    del optimizer
    gc.collect()
    model(torch.ones(1, 1024)).sum().backward()


def cycle(model, optimizer):
    model.myself, optimizer.model = [model], model
    optimizer.step()


def group_destroyed_first(model, optimizer):
    dist.destroy_process_group()
    model.unwrap()


def kept_tensors(model, optimizer):
    model(torch.ones(1, 1024)).sum().backward()
    weight, gradient = model[0].weight, model[0].weight.grad
    model.unwrap()
    with contextlib.suppress(shardstep.UsageError):
        gradient.sum()
    assert float(weight.detach().sum()) == float(weight.detach().sum())


ENDINGS = [unwrap_first, unwrap_in_mid_window, launched_and_dropped, model_before_optimizer, optimizer_before_model, cycle,
           kept_tensors, group_destroyed_first]


SENT = ("launched_and_dropped", "model_before_optimizer", "optimizer_before_model", "kept_tensors")


def endings_body(rank, world, transport):
    report = []
    for ending in (unwrap_first, *ENDINGS):  # the first once more: what is allocated only once is not looked at
        gc.collect()
        before = resources(), settled_pss()
        model, optimizer = large(transport)
        model(torch.ones(1, 1024)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        during = pss()
        alive = weakref.ref(model), weakref.ref(optimizer), weakref.ref(model._engine), weakref.ref(model[0].weight)
        ending(model, optimizer)
        del model, optimizer
        gc.collect()
        freed, left = [ref() is None for ref in alive], resources()
        if ending is not group_destroyed_first:
            dist.barrier()
        report.append((ending.__name__, freed, before[0], left, before[1], during, settled_pss()))
    return report[1:]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ends_in_any_order_free_everything(transport):
    for report in ranks.run(2, endings_body, transport, fresh=True, timeout=90):
        for name, dead, before, after, pss_before, pss_during, pss_after in report:
            assert all(dead), (name, dead)
            assert pss_during - pss_before > 30e6, name
            if name != "group_destroyed_first":
                if transport == "shm":
                    assert_nothing_left(before, after, name)
                # c10d: a collective that a peer did not join keeps its memory until Gloo's own timeout (csrc/transport/c10d.h)
                if transport == "shm" or name not in SENT:
                    assert pss_after - pss_before < 6e6, (name, pss_before, pss_during, pss_after)


SCRIPT = textwrap.dedent(
    """
    import faulthandler, os, sys, threading, time
    faulthandler.enable()
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch, torch._dynamo, torch.distributed as dist
    from torch import nn
    import shardstep

    transport, folder = sys.argv[1:]
    ENDINGS = ["launched", "destroy"]
    if transport == "shm":
        ENDINGS += ["no_sync", "cycle", "exception", "thread"]
    for ending in ENDINGS:
        begin = time.monotonic()
        pids = []
        for rank in range(2):
            pid = os.fork()
            if pid == 0:
                break
            pids.append(pid)
        if pid == 0:
            break
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(ending, *codes, round(time.monotonic() - begin, 1), flush=True)
    else:
        sys.exit(0)

    # a rank, which leaves through the interpreter's own finalisation
    store = dist.FileStore(os.path.join(folder, ending), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model, optimizer = shardstep.wrap(model, torch.optim.AdamW(model.parameters()), transport=transport, bucket_cap_mb=0.01)
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    if ending == "launched":
        model(torch.ones(2, 64)).sum().backward()
        sys.modules["torch"].kept = (optimizer, model(torch.ones(2, 64)))  # outlives this module's globals
        del model
    elif ending == "no_sync":
        with model.no_sync():
            model(torch.ones(2, 64)).sum().backward()
        del optimizer
    elif ending == "cycle":
        model.myself = [model, optimizer]
        del model, optimizer
    elif ending == "destroy":
        dist.destroy_process_group()
    elif ending == "exception":
        del store
        sys.stderr = open(os.devnull, "w")
        raise SystemExit(5)
    elif ending == "thread":
        threading.Thread(target=lambda: model(torch.ones(2, 64)).sum().backward()).start()
    """)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_interpreter_may_end_at_any_point(transport, tmp_path):
    script = tmp_path / "ends.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(script), transport, str(tmp_path)], capture_output=True, text=True, timeout=200,
                          env=environment)
    lines = done.stdout.split("\n")[:-1]
    assert len(lines) == (6 if transport == "shm" else 2) and done.returncode == 0, done.stdout + done.stderr
    for line in lines:
        expected = "5 5" if line.startswith("exception") else "0 0"
        assert f" {expected} " in line, done.stdout + done.stderr
    print(done.stdout)
    assert "Traceback" not in done.stderr and "Fatal" not in done.stderr, done.stderr
    assert not [name for name in os.listdir("/dev/shm") if "shardstep" in name]
