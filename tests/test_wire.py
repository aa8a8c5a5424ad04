"""What goes over the wire: one reduce-scatter and one all-gather per bucket and step, however many micro-batches, and
nothing in ``no_sync``. Counted by ``stats()``, whose keys are part of the interface."""

import contextlib

import fakes
import pytest
import ranks
import shardstep
import torch
import torch.distributed as dist
from torch import nn

COUNTERS = {
    "steps", "closes", "backwards", "launched_early", "launched_at_end", "launched_at_close", "late_rounds", "exposed_seconds",
    "overlapped_seconds", "update_seconds", "wait_seconds", "reduce_scatter_bytes", "all_gather_bytes", "control_bytes",
    "reduce_scatters", "all_gathers", "wire_bytes",
}
MEMORY = {"params", "grads", "padding", "master", "carry", "optimizer"}
TOP = {"step", "total", "skipped_steps", "memory", "buckets", "transport", "rank", "world"}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 100), nn.Tanh(), nn.Linear(100, 64), nn.Tanh(), nn.Linear(64, 7))


def wrapped(transport="shm", bucket_cap_mb=0.02, **options):
    model = net()
    return fakes.wrap(
        dist.get_rank(), model, torch.optim.AdamW(model.parameters(), lr=1e-3), transport=transport,
        bucket_cap_mb=bucket_cap_mb, timeout=20, **options)


def window(model, optimizer, micros, sync="last", clip=False):
    for k in range(micros):
        quiet = sync == "never" or (sync == "last" and k + 1 < micros)
        with model.no_sync() if quiet else contextlib.nullcontext():
            model(torch.ones(2, 64)).square().sum().backward()
    if clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def expected_bytes(model, world):
    """(W-1)/W of the buckets, padding included: gradients for the reduce-scatter, parameters for the all-gather."""
    buckets = model._engine.core.buckets()
    elements = sum(bucket["segment"] * world for bucket in buckets)
    numel = sum(p.numel() for p in model.parameters())
    assert numel <= elements <= numel + len(buckets) * (world * 128 + 1024)
    size = 2 if model[0].weight.dtype == torch.bfloat16 else 4
    return elements * 4 * (world - 1) // world, elements * size * (world - 1) // world


def counted_body(rank, world, transport, param_dtype):
    model, optimizer = wrapped(transport, param_dtype=param_dtype)
    buckets = model.stats()["buckets"]
    assert buckets > 2
    for micros in (1, 3, 8):
        for sync in ("last", "never"):
            for clip in (False, True):
                window(model, optimizer, micros, sync, clip)
                step = model.stats()["step"]
                assert (step["steps"], step["backwards"]) == (1, micros)
                assert step["reduce_scatters"] == step["all_gathers"] == buckets, step
                assert step["late_rounds"] == 0
                launches = step["launched_early"], step["launched_at_end"], step["launched_at_close"]
                assert sum(launches) == buckets, step
                assert (launches[2] == buckets) == (sync == "never"), step
                if transport == "shm":
                    reduced, gathered = expected_bytes(model, world)
                    assert (step["reduce_scatter_bytes"], step["all_gather_bytes"]) == (reduced, gathered)
                assert step["wire_bytes"] == step["reduce_scatter_bytes"] + step["all_gather_bytes"]
    total = model.stats()["total"]
    assert total["steps"] == 12 and total["reduce_scatters"] == 12 * buckets
    model.unwrap()


@pytest.mark.parametrize("transport", ["shm", "c10d", "nccl"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_each_bucket_is_reduced_and_gathered_once_per_step_for_any_number_of_micro_batches(world, transport):
    ranks.run(world, counted_body, transport, None)


def test_parameters_of_two_bytes_are_gathered_as_two_bytes():
    ranks.run(2, counted_body, "shm", torch.bfloat16)


def alone_body(rank, world):
    model, optimizer = wrapped()
    window(model, optimizer, 3, clip=True)
    step = model.stats()["step"]
    assert step["wire_bytes"] == step["control_bytes"] == 0
    model.unwrap()


def test_one_rank_alone_sends_nothing():
    ranks.run(1, alone_body)


def quiet_body(rank, world, transport):
    model, optimizer = wrapped(transport)
    window(model, optimizer, 1)
    kinds = ("reduce_scatter_bytes", "all_gather_bytes", "control_bytes", "closes", "reduce_scatters", "overlapped_seconds",
             "exposed_seconds")
    before = model.stats()["total"]
    with model.no_sync():
        for _ in range(5):
            model(torch.ones(2, 64)).square().sum().backward()
    model.set_requires_gradient_sync(False)
    model(torch.ones(2, 64)).square().sum().backward()
    model.set_requires_gradient_sync(True)
    after = model.stats()["total"]
    assert {kind: after[kind] - before[kind] for kind in kinds} == dict.fromkeys(kinds, 0)
    assert after["backwards"] - before["backwards"] == 6
    optimizer.step()
    model.unwrap()


@pytest.mark.parametrize("transport", ["shm", "c10d", "nccl"])
def test_no_sync_sends_nothing_and_waits_for_nobody(transport):
    ranks.run(2, quiet_body, transport)


def late_body(rank, world):
    """Every backward synchronises: the first one's gradients are sent, later ones go in a second round, and are learnt."""
    model, optimizer = wrapped()
    buckets = model.stats()["buckets"]
    seen = []
    for _ in range(4):
        window(model, optimizer, 3, sync="always")
        step = model.stats()["step"]
        seen.append((step["late_rounds"], step["reduce_scatters"] / buckets))
    model.unwrap()
    return seen


def test_gradient_that_came_late_is_carried_in_one_more_round_and_then_waited_for():
    for seen in ranks.run(2, late_body):
        assert seen[0][0] <= 1 and 1 <= seen[0][1] <= 3, seen
        assert seen[-1] == (0, 1.0), seen  # a bucket that received late gradient is launched later from then on


def extra_body(rank, world):
    """A rank that synchronises twice while the other does once: one late round, counted on both."""
    model, optimizer = wrapped()
    window(model, optimizer, 1)
    window(model, optimizer, 2 if rank == 0 else 1, sync="always")
    step = model.stats()["step"]
    model.unwrap()
    return step["late_rounds"], step["reduce_scatters"], model is not None


def test_late_rounds_are_counted_alike_on_every_rank():
    first, second = ranks.run(2, extra_body)
    assert first == second and first[0] <= 1, (first, second)


def accumulate_body(rank, world):
    model, optimizer = wrapped(accumulate=4)
    for _ in range(2):
        for _ in range(4):
            model(torch.ones(2, 64)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        step = model.stats()["step"]
        assert step["reduce_scatters"] == model.stats()["buckets"] and step["launched_at_close"] == 0
    for _ in range(3):  # a shorter window
        model(torch.ones(2, 64)).square().sum().backward()
    optimizer.step()
    assert model.stats()["step"]["launched_at_close"] == model.stats()["step"]["reduce_scatters"] == model.stats()["buckets"]
    model.unwrap()


def test_accumulate_synchronises_every_kth_backward():
    ranks.run(2, accumulate_body)


def empty_body(rank, world):
    model, optimizer = wrapped()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    step = model.stats()["step"]
    assert step["wire_bytes"] == step["reduce_scatters"] == step["all_gathers"] == 0
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before))
    model.unwrap()


def test_step_without_any_gradient_is_a_no_op_on_the_wire():
    ranks.run(2, empty_body)


def part_body(rank, world):
    """Only buckets with gradient are sent."""
    model, optimizer = wrapped(bucket_cap_mb=0.0001)
    model[0](torch.ones(2, 64)).sum().backward()
    optimizer.step()
    step = model.stats()["step"]
    assert 0 < step["reduce_scatters"] <= 2 and step["all_gathers"] <= 2 < model.stats()["buckets"]
    model.unwrap()


def test_buckets_nobody_used_stay_at_home():
    ranks.run(2, part_body)


def replicated_body(rank, world):
    model = shardstep.DistributedDataParallel(net(), transport="shm", bucket_cap_mb=0.02)
    buckets = model.stats()["buckets"]
    for _ in range(2):
        with model.no_sync():
            model(torch.ones(2, 64)).sum().backward()
        model(torch.ones(2, 64)).sum().backward()
    total = model.stats()["total"]
    assert total["reduce_scatters"] == total["all_gathers"] == 2 * buckets
    model.unwrap()


def test_replicated_mode_sends_each_bucket_once_per_synchronising_backward():
    ranks.run(2, replicated_body)


def keys_body(rank, world):
    model, optimizer = wrapped()
    fresh = model.stats()
    window(model, optimizer, 2)
    stats = model.stats()
    assert set(fresh) == set(stats) == TOP
    assert set(stats["step"]) == set(stats["total"]) == set(fresh["total"]) == COUNTERS
    assert set(stats["memory"]) == MEMORY
    assert (stats["rank"], stats["world"], stats["transport"]) == (rank, world, "shm")
    for key, value in stats["step"].items():
        assert isinstance(value, float if key.endswith("seconds") else int) and value >= 0, key
    assert stats["step"]["exposed_seconds"] > 0 and stats["step"]["update_seconds"] > 0
    documentation = type(model).stats.__doc__
    model.unwrap()
    return documentation


def test_keys_of_stats_are_stable_and_documented():
    documentation = ranks.run(2, keys_body)[0]
    missing = [key for key in (COUNTERS | MEMORY | TOP) if key not in documentation]
    assert not missing, missing
