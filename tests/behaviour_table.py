"""What torch DDP, FSDP2 and shardstep do in cases that users have reported: each cell of README's table is the outcome of
running its case on two ranks.

    python tests/behaviour_table.py            # prints the table
    python tests/behaviour_table.py --write    # puts it into README.md

A case gets a ``System`` and returns what it saw, which is compared with what is right on every rank. ``P`` has two vectors of
ones; the input of rank r is full of r + 1, so one use of a vector on each of two ranks has mean gradient 1.5.
"""

import contextlib
import copy
import pathlib
import re
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from boom import Boom
from torch import nn
from torch.utils.checkpoint import checkpoint

README = pathlib.Path(__file__).resolve().parents[1] / "README.md"
BEGIN, END = "<!-- made by tests/behaviour_table.py -->\n", "<!-- end -->\n"
SYSTEMS = ("torch DDP", "FSDP2", "shardstep")
#: A collective that a peer does not join ends after so many seconds.
SECONDS = 1.5
_kept = []


class P(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

    def forward(self, x, use="ab"):
        return sum((getattr(self, name) * x).sum() for name in use)

    def half(self, x):
        return self.forward(x / 2)


class System:
    """One of the three, on this rank."""

    def __init__(self, name, rank, world, group):
        self.name, self.rank, self.world, self.group = name, rank, world, group
        self.x = torch.full((2,), rank + 1.0)

    def wrap(self, model, optimizer=None, lr=1.0):
        """(what is called, the optimizer)"""
        make = optimizer or torch.optim.SGD
        if self.name == "torch DDP":
            return nn.parallel.DistributedDataParallel(model, process_group=self.group), make(model.parameters(), lr=lr)
        if self.name == "FSDP2":
            from torch.distributed.device_mesh import DeviceMesh
            from torch.distributed.fsdp import fully_shard

            fully_shard(model, mesh=DeviceMesh.from_group(self.group, "cpu"))
            return model, make(model.parameters(), lr=lr)
        import shardstep

        return shardstep.wrap(model, make(model.parameters(), lr=lr), process_group=self.group, timeout=SECONDS)

    @contextlib.contextmanager
    def no_sync(self, called):
        if self.name == "FSDP2":
            called.set_requires_gradient_sync(False)
            yield
            called.set_requires_gradient_sync(True)
        else:
            with called.no_sync():
                yield

    def sync(self, called, on):
        """The flag by itself, as trainers set it."""
        if self.name == "torch DDP":
            called.require_backward_grad_sync = on
        else:
            called.set_requires_gradient_sync(on)

    def gradients(self, called, module):
        """The mean gradient that each parameter will be stepped with, from its first element."""
        found = []
        for p in module.parameters():
            if self.name == "shardstep":
                g = called.full_grad(p)
            else:
                g = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            found.append(None if g is None else round(g.flatten()[0].item(), 3))
        return found


def whole(t):
    return t.full_tensor() if hasattr(t, "full_tensor") else t


# -- cases: (what is done, what is right) -----------------------------------------------------------------------------

CASES = []


def case(what, right):
    def register(function):
        CASES.append((what, right, function))
        return function

    return register


@case("a parameter is used only in an earlier micro-batch, under `no_sync`", [1.5, 1.5])
def early_only(s):
    m = P()
    called, _ = s.wrap(m)
    with s.no_sync(called):
        called(s.x, "a").backward()
    called(s.x, "b").backward()
    return s.gradients(called, m)


@case("synchronisation is switched on between a forward and its backward", [3.0, 3.0])
def flipped(s):
    m = P()
    called, _ = s.wrap(m)
    s.sync(called, False)
    called(s.x).backward()
    loss = called(s.x)
    s.sync(called, True)
    loss.backward()
    return s.gradients(called, m)


@case("ranks use different parameters (a branch on the data)", [0.5, 1.0])
def branch(s):
    m = P()
    called, _ = s.wrap(m)
    called(s.x, "ab"[s.rank]).backward()
    return s.gradients(called, m)


@case("a parameter that no rank uses, twice", [1.5, None])
def unused(s):
    m = P()
    called, optimizer = s.wrap(m)
    for _ in range(2):
        optimizer.zero_grad()
        called(s.x, "a").backward()
    return s.gradients(called, m)


@case("a layer is unfrozen after wrapping", [1.5, 1.5])
def unfrozen(s):
    m = P()
    m.b.requires_grad_(False)
    called, _ = s.wrap(m)
    called(s.x, "a").backward()
    m.zero_grad()
    m.b.requires_grad_(True)
    called(s.x).backward()
    return s.gradients(called, m)


@case("two backwards of one forward (`retain_graph`)", [3.0, 3.0])
def retained(s):
    m = P()
    called, _ = s.wrap(m)
    loss = called(s.x)
    loss.backward(retain_graph=True)
    loss.backward()
    return s.gradients(called, m)


@case("two forwards, one backward, with BatchNorm", True)
def batchnorm(s):
    m = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    called, _ = s.wrap(m)
    x = torch.tensor([[1.0, 2.0], [3.0, 5.0]]) * (s.rank + 1)
    called(x).sum().backward()
    (called(x) - called(-x)).pow(2).sum().backward()
    return all(torch.isfinite(torch.tensor(g)) for g in s.gradients(called, m))


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


@case("re-entrant checkpointing of a layer used twice", True)
def reentrant(s):
    torch.manual_seed(0)
    m = Twice()
    plain = copy.deepcopy(m)
    called, _ = s.wrap(m)
    called(s.x.clone().requires_grad_()).sum().backward()
    for r in range(s.world):
        (plain(torch.full((2,), r + 1.0, requires_grad=True)).sum() / s.world).backward()
    return s.gradients(called, m) == [round(p.grad.flatten()[0].item(), 3) for p in plain.parameters()]


@case("an exception in a backward is caught, and training goes on", [1.5, 1.5])
def boom(s):
    m = P()
    called, optimizer = s.wrap(m)
    with contextlib.suppress(ValueError):
        (Boom.apply(called(s.x, "a")) + called(s.x, "b")).backward()
    optimizer.zero_grad()
    called(s.x).backward()
    return s.gradients(called, m)


@case("two models, whose backwards run in another order on the other rank", [1.5, 15.0])
def two_models(s):
    models = P(), P()
    called = [s.wrap(m)[0] for m in models]
    losses = [called[0](s.x), called[1](10 * s.x)]
    for k in (0, 1) if s.rank == 0 else (1, 0):
        losses[k].backward()
    return [s.gradients(c, m)[0] for c, m in zip(called, models)]


@case("a rank skips one micro-batch (`continue`)", [2.0, 2.0])
def skipped(s):
    m = P()
    called, _ = s.wrap(m)
    for k in range(2):
        if s.rank == 1 and k == 0:
            continue
        called(s.x).backward()
    return s.gradients(called, m)


@case("a rank forgets to leave `no_sync`", [1.5, 1.5])
def forgotten(s):
    m = P()
    called, _ = s.wrap(m)
    with s.no_sync(called) if s.rank == 0 else contextlib.nullcontext():
        called(s.x).backward()
    return s.gradients(called, m)


@case("a method other than `forward` is called and differentiated", [0.75, 0.75])
def other_method(s):
    m = P()
    called, _ = s.wrap(m)
    (called.module if s.name == "torch DDP" else called).half(s.x).backward()
    return s.gradients(called, m)


@case("`p.grad.norm()` on one rank only, to log it", [1.5, 1.5])
def logged(s):
    m = P()
    called, optimizer = s.wrap(m)
    called(s.x).backward()
    if s.rank == 0:
        whole(m.a.grad.norm()).item()
    optimizer.step()
    return [round(2 - whole(p).flatten()[0].item() - 1, 3) for p in m.parameters()]


@case("`GradScaler`, and an inf in one element: all ranks skip the step", [[1.0, 1.0], 4.0])
def scaler(s):
    m = P()
    called, optimizer = s.wrap(m)
    scale = torch.amp.GradScaler("cpu", init_scale=8.0)
    x = torch.tensor([1.0, float("inf")])
    scale.scale((m if s.name != "torch DDP" else called)(x)).backward()
    scale.unscale_(optimizer)
    scale.step(optimizer)
    scale.update()
    return [whole(m.a.detach()).tolist(), scale.get_scale()]


@case("`clip_grad_norm_` of torch, over several micro-batches", 3.0)
def clipped(s):
    m = P()
    called, _ = s.wrap(m)
    with s.no_sync(called):
        called(s.x / 2).backward()
    called(s.x / 2).backward()
    return round(whole(torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)).item(), 3)


@case("a 0-dim parameter", [1.5])
def scalar(s):
    m = nn.Module()
    m.scale = nn.Parameter(torch.tensor(1.0))
    m.forward = lambda x: m.scale * x.mean()
    called, _ = s.wrap(m)
    called(s.x).backward()
    return s.gradients(called, m)


@case("`copy.deepcopy` of the model, for an average of weights", True)
def copied(s):
    m = P()
    called, _ = s.wrap(m)
    twin = copy.deepcopy(called)
    if s.rank == 0:  # alone
        twin(s.x).backward()
    called(s.x).backward()
    return s.gradients(called, m) == [1.5, 1.5]


@case("names of parameters, and `isinstance(model, Net)`", True)
def names(s):
    called, _ = s.wrap(P())
    return isinstance(called, P) and list(called.state_dict()) == ["a", "b"]


@case("the optimizer's state is divided between the ranks", True)
def divided(s):
    m = nn.Linear(256, 256)
    called, optimizer = s.wrap(m, torch.optim.AdamW)
    called(torch.ones(1, 256)).sum().backward()
    optimizer.step()
    state = [v for entry in optimizer.state.values() for k, v in entry.items() if k.startswith("exp")]
    held = sum((v.to_local() if hasattr(v, "to_local") else v).numel() for v in state)
    return held <= 1.01 * 2 * 257 * 256 / s.world


@case("how often gradients travel in a step of 4 micro-batches, without `no_sync`", 1)
def sent(s):
    called, optimizer = s.wrap(nn.Linear(64, 64))

    def step():
        for _ in range(4):
            called(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    reduces = ("shardstep::reduce bucket 0", "c10d::allreduce_", "c10d::_reduce_scatter_base_")
    return sum(event.name in reduces for event in profile.events())


# -- running them -----------------------------------------------------------------------------------------------------


def outcome(function, system):
    try:
        return "value", function(system)
    except Exception as error:
        hung = re.search("[Tt]imed out|did not arrive|has waited", str(error))
        return ("hangs", None) if hung else ("raises", type(error).__name__)


def run_system(rank, world, name):
    """The outcomes of all cases on this rank."""
    outcomes = []
    groups = [dist.new_group(timeout=timedelta(seconds=SECONDS)) for _ in CASES]
    for group, (_, _, function) in zip(groups, CASES):
        torch.manual_seed(0)
        dist.barrier()  # some case has ended in an error on one rank and in a wait on the other
        outcomes.append(outcome(function, System(name, rank, world, group)))
    _kept.extend(groups)  # the last reference to a group waits for what is pending in it
    return outcomes


def judge(right, outcomes):
    """The text of a cell from the outcomes on all ranks."""
    kinds = {kind for kind, _ in outcomes}
    if "hangs" in kinds:
        return "hangs"
    if "raises" in kinds:
        return f"raises {next(value for kind, value in outcomes if kind == 'raises')}"
    values = [value for _, value in outcomes]
    if all(value == right for value in values):
        return str(right) if type(right) is int else "right"
    if isinstance(right, bool):
        return "no"
    if isinstance(right, int):
        return str(max(values))
    return f"**wrong**: {' and '.join(dict.fromkeys(_text(value) for value in values))}"


def _text(value):
    return "/".join("none" if v is None else _text(v) for v in value) if isinstance(value, list) else f"{value:g}"


def table():
    import ranks

    columns = [ranks.run(2, run_system, name, fresh=True, timeout=120.0) for name in SYSTEMS]
    lines = ["| | " + " | ".join(SYSTEMS) + " |", "|---|" + "---|" * len(SYSTEMS)]
    for k, (what, right, _) in enumerate(CASES):
        cells = [judge(right, [outcomes[k] for outcomes in column]) for column in columns]
        lines.append(f"| {what} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def in_readme():
    text = README.read_text()
    return text[text.index(BEGIN) + len(BEGIN) : text.index(END)]


if __name__ == "__main__":
    import ranks

    made = table()
    ranks.shutdown()
    print(made)
    if "--write" in sys.argv:
        text = README.read_text()
        README.write_text(text[: text.index(BEGIN) + len(BEGIN)] + made + text[text.index(END) :])
