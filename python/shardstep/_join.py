"""``join``: training on inputs of which ranks have different numbers, with torch's ``Join``.

A rank that has run out of inputs shadows the others. They announce what they are about to do together, and it takes part:

- replicated: at the end of a backward that synchronises; and, where buffers follow, of their broadcast at a window's first
  forward.
- sharded: at every close (a step; a clip or a read before it). In a step the rank goes on to update its part of the weights
  and of the optimizer's state, with the hyper-parameters of the ranks that still train.

So micro-batches cost nothing, and a rank may leave its loop anywhere. Only where others may be in the same ``Join`` (torch's
ZeroRedundancyOptimizer), whose part comes once per announcement, the broadcast's is the window's one.
"""

import contextlib
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, JoinHook

from shardstep._engine import AT_JOINED, AT_READ, Engine
from shardstep._errors import AbortedError, MismatchError, UsageError

if TYPE_CHECKING:
    from shardstep._optim import ShardedOptimizer

#: What is announced: a broadcast of buffers; a close (sharded) or the end of a backward (replicated); or both.
BUFFERS, CLOSE, BUFFERS_AND_CLOSE = range(3)
HAS_JOINED = -1


class Member:
    """A model or an optimizer in a join context."""

    def __init__(self, joinable: Any, engine: Engine):
        self._joinable = weakref.ref(joinable)
        self._before = joinable._join_config
        self.engine = weakref.ref(engine)

    @property
    def config(self) -> Any:
        """What torch's ``Join`` has given it; None until then."""
        joinable = self._joinable()
        return joinable._join_config if joinable is not None and joinable._join_config is not self._before else None

    def announce(self) -> Any:
        return Join.notify_join_context(self._joinable())


class Context:
    """What of one torch ``Join`` is ours: several models, and their optimizers."""

    def __init__(self, divide_by_initial_world_size: bool):
        self._divide_by_initial = divide_by_initial_world_size
        self._members: list[Member] = []
        self._factors: dict[Engine, float] = {}  # the divide factors without join, of each engine
        self._announced: set[Engine] = set()  # those whose backward to come has been announced with its buffers
        self.alone = False  # has the Join one joinable only?
        self.source = 0  # the rank whose buffers become everyone's: the last one that still trains

    # -- members ------------------------------------------------------------------------------------------------------

    def takes(self, engine: Engine) -> bool:
        """Is it a context of this engine's group that torch is still putting together?"""
        groups = {member.engine().group.process_group for member in self._members if member.engine() is not None}
        return groups == {engine.group.process_group} and all(member.config is None for member in self._members)

    def add(self, joinable: Any, engine: Engine) -> Member:
        member = Member(joinable, engine)
        self._members.append(member)
        self._factors.setdefault(engine, engine.core.divide_factor)
        engine.set_uneven(self)
        return member

    @property
    def engines(self) -> "list[Engine]":
        return list(self._factors)

    @property
    def enabled(self) -> bool:
        return any(member.config is not None and member.config.enable for member in self._members)

    def first(self) -> Member:
        for member in self._members:
            if member.config is not None and member.config.is_first_joinable:
                return member
        raise UsageError(
            "Join([...]) has to begin with a model or an optimizer of shardstep's, because its windows are announced, not its "
            "forwards"
        )

    # -- ranks that train ---------------------------------------------------------------------------------------------

    def broadcast_buffers(self, engine: Engine) -> None:
        """Replicated, at a window's first forward. Collective."""
        if engine.core.sync and not self.alone:
            self._announce(engine, BUFFERS_AND_CLOSE)
            self._announced.add(engine)
        else:
            self._announce(engine, BUFFERS)
        engine.buffers.broadcast(self.source)

    def before_close(self, engine: Engine) -> None:
        """Before every exchange of a close. Collective."""
        if engine in self._announced:
            self._announced.discard(engine)
        elif self.enabled:
            self._announce(engine, CLOSE)

    def share(self, engine: Engine, optimizer: "ShardedOptimizer | None") -> "ShardedOptimizer":
        """After the close of a step: the optimizer that is stepped, with the same hyper-parameters on all ranks. Collective."""
        mine, optimizers = None, engine.optimizers()
        if optimizer is not None:
            groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
            mine = optimizers.index(optimizer), groups
        answers = engine.group.gather((mine, [len(o.param_groups) for o in optimizers]))
        which, groups = next(answer for answer, _ in answers if answer is not None)
        if any(which >= len(counts) or counts[which] != len(groups) for _, counts in answers):
            raise MismatchError(
                "optimizers have got other param groups inside join() on some ranks; add them on all ranks, before join()"
            )
        if optimizer is None:
            for group, values in zip(optimizers[which].param_groups, groups):
                group.update(values)
        return optimizers[which]

    def _announce(self, engine: Engine, what: int) -> None:
        work = self.first().announce()
        if work is not None:
            work.wait(timedelta(seconds=engine.timeout))
        self._agree(engine.group, self.engines.index(engine), what)

    def _agree(self, group: Any, number: int, what: int) -> "tuple[int, int]":
        """(which engine, what). Collective."""
        mine = torch.tensor([number, what])
        everyone = [torch.empty_like(mine) for _ in range(group.world)]
        dist.all_gather(everyone, mine, group=group.process_group)
        answers = {rank: tuple(answer.tolist()) for rank, answer in enumerate(everyone) if answer[0] != HAS_JOINED}
        agreed = set(answers.values())
        if len(agreed) != 1:
            raise MismatchError(
                f"inside join(), ranks {', '.join(map(str, answers))} still train but are not at the same place; those that "
                "have inputs must run the same forwards, backwards and steps under the same no_sync()"
            )
        number, what = agreed.pop()
        self.source = max(answers)
        if not self._divide_by_initial:
            engine = self.engines[number]
            engine.core.set_divide_factor(self._factors[engine] * len(answers) / group.world)
        return number, what

    # -- ranks that have joined ---------------------------------------------------------------------------------------

    def shadow(self, group: Any) -> None:
        """Takes part in what the others have announced. Collective."""
        number, what = self._agree(group, HAS_JOINED, HAS_JOINED)
        engine = self.engines[number]
        if what != CLOSE and not engine.sharded:
            engine.buffers.broadcast(self.source)
        if what != BUFFERS:
            self.shadow_close(engine)

    def shadow_close(self, engine: Engine) -> None:
        try:
            if not engine.sharded:
                engine.average_without_mine()
            elif engine.close_once(AT_JOINED):
                self.share(engine, None).shadow_step()
        except AbortedError:  # the others have given the window up, and begin another one or none
            pass

    def finish(self, is_last_joiner: bool) -> None:
        """All ranks have joined: the models of a rank that joined last become everyone's. Collective."""
        for engine in self.engines:
            last = [rank for rank, mine in enumerate(engine.group.gather(is_last_joiner)) if mine]
            engine.core.set_divide_factor(self._factors[engine])
            engine.set_uneven(None)
            if not engine.sharded:
                engine.broadcast_parameters(last[-1])
            elif len(last) < engine.group.world:  # gradients that the others have kept or dropped
                engine.close(AT_READ) if is_last_joiner else engine.close_once(AT_JOINED)
            if engine.buffers.follow:
                engine.buffers.broadcast(last[-1])


class ShadowHook(JoinHook):
    """Of several hooks in a context the first one's works."""

    def __init__(self, context: Context, member: Member, engine: Engine):
        self._context = context
        self._member = member
        self._group = engine.group

    def main_hook(self) -> None:
        if self._context.first() is self._member:
            self._context.shadow(self._group)

    def post_hook(self, is_last_joiner: bool) -> None:
        if self._context.first() is self._member:
            self._context.finish(is_last_joiner)


_latest: "weakref.ref[Context] | None" = None


def join_hook(joinable: Any, engine: Engine, divide_by_initial_world_size: bool = True, **_: Any) -> JoinHook:
    """``Joinable.join_hook``, which torch's ``Join`` calls for each of its joinables in turn."""
    global _latest
    if engine.group.borrowed is not None:
        raise UsageError(
            "join() needs a process group besides the one over which the model communicates; use Gloo for CPU tensors, or "
            "transport='shm'"
        )
    context = _latest() if _latest is not None else None
    if context is None or not context.takes(engine):
        context = Context(divide_by_initial_world_size)
        _latest = weakref.ref(context)
    return ShadowHook(context, context.add(joinable, engine), engine)


@contextlib.contextmanager
def joining(engine: Engine, join: Join) -> "Iterator[None]":
    """``join``'s context, of one model."""
    context = engine.uneven
    context.alone = True
    try:
        with join:
            yield
    finally:
        if engine.uneven is context and not engine.closed:  # left by an exception
            engine.set_uneven(None)

