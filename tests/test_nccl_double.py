"""The nccl transport through doubles of NCCL and of a GPU (tests/fakes): what it asks of them, and what it does when they fail.

Parity over it is in test_parity.py. Nothing here ran on a GPU.
"""

import contextlib
import os
import re
import signal
import time

import fakes
import pytest
import ranks
import shardstep
import torch
from torch import nn

pytestmark = pytest.mark.timeout(60)


def network(width=24):
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2))


def wrapped(bucket_cap_mb=0.001, timeout=30.0, width=24):
    model = network(width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return shardstep.wrap(model, optimizer, transport="nccl", bucket_cap_mb=bucket_cap_mb, timeout=timeout)


def step(model, optimizer, rank, seed=0):
    generator = torch.Generator().manual_seed(seed * 100 + rank)
    model(torch.randn(4, 8, generator=generator)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def alone(world, steps, width=24):
    """One process that sees every rank's data."""
    model = network(width)
    for seed in range(steps):
        for rank in range(world):
            generator = torch.Generator().manual_seed(seed * 100 + rank)
            (model(torch.randn(4, 8, generator=generator)).square().mean() / world).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
                p.grad = None
    return [p.detach() for p in model.parameters()]


# -- what it asks of NCCL -----------------------------------------------------------------------------------------


def counted(rank, world, version, steps, bucket_cap_mb):
    with fakes.gpus(rank) as nccl:
        nccl.version, nccl.largest_group = version, 0
        before = nccl.now()
        try:
            model, optimizer = wrapped(bucket_cap_mb)
            for seed in range(steps):
                step(model, optimizer, rank, seed)
            result = [p.detach().clone() for p in model.parameters()]
            buckets = model.stats()["buckets"]
            kept = next(model.parameters())
            model.unwrap()
            while_kept = nccl.since(before)
            still = kept.detach().clone()
            del model, optimizer
            return result, buckets, while_kept, torch.equal(still, result[0]), nccl.largest_group
        finally:
            nccl.version = 22703


@pytest.mark.parametrize("version", [21800, 21903, 22703])
def test_memory_is_registered_where_the_version_can_and_given_back(version):
    expected = alone(2, 3)
    for result, buckets, counts, same, _ in ranks.run(2, counted, version, 3, 0.001):
        for got, want in zip(result, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)
        assert same and buckets > 2
        windows, handles = (1, 0) if version >= 22700 else (0, 1) if version >= 21900 else (0, 0)
        assert (counts["windows"], counts["windows_gone"]) == (windows, windows)
        assert (counts["registered"], counts["deregistered"]) == (handles, handles)
        assert counts["mem_alloc"] == (version >= 21900)
        assert counts["mem_free"] == 0  # the weights are still there
        assert (counts["finalized"], counts["destroyed"], counts["aborted"]) == (1, 1, 0)
        assert counts["errors"] == counts["outside_group"] == 0


def freed(rank, world):
    with fakes.gpus(rank) as nccl:
        before = nccl.now()
        model, optimizer = wrapped()
        step(model, optimizer, rank)
        model.unwrap()
        kept = next(model.parameters()).detach()
        del model, optimizer
        import gc

        gc.collect()
        first = nccl.since(before)["mem_free"]
        del kept
        gc.collect()
        return first, nccl.since(before)["mem_free"]


def test_memory_goes_back_when_the_last_tensor_over_it_goes():
    assert ranks.run(2, freed) == [(0, 1)] * 2


def test_small_buckets_share_a_group_and_large_ones_do_not():
    steps = 2
    for _, buckets, counts, _, largest in ranks.run(2, counted, 22703, steps, 0.001):
        assert counts["collectives"] == 2 * steps * buckets  # one reduce-scatter and one all-gather each
        assert 1 < largest <= buckets
        assert counts["groups"] < counts["collectives"]


def late_and_different(rank, world, busy):
    """Ranks launch at other times: one in its backwards, one in its step; the double insists on the same groups."""
    with fakes.gpus(rank) as nccl:
        nccl.busy = busy
        try:
            model, optimizer = wrapped()
            for seed in range(4):
                with model.no_sync() if (rank + seed) % 2 else contextlib.nullcontext():
                    generator = torch.Generator().manual_seed(seed * 100 + rank)
                    model(torch.randn(4, 8, generator=generator)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            result = [p.detach().clone() for p in model.parameters()]
            model.unwrap()
            return result, nccl.errors
        finally:
            nccl.busy = 0


@pytest.mark.parametrize("busy", [0, 3])
def test_groups_are_alike_whenever_ranks_launch(busy):
    """Also when NCCL is busy for a while with what it was given."""
    for result, errors in ranks.run(2, late_and_different, busy):
        for got, want in zip(result, alone(2, 4), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)
        assert errors == 0


def subgroups(rank, world):
    """Two pairs of ranks train each for themselves, at the same time."""
    import torch.distributed as dist

    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    with fakes.gpus(rank):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = shardstep.wrap(model, optimizer, transport="nccl", process_group=pairs[rank // 2])
        for seed in range(2):
            step(model, optimizer, rank % 2, seed)
        result = [p.detach().clone() for p in model.parameters()]
        model.unwrap()
        return result


def test_subgroups_have_communicators_of_their_own():
    expected = alone(2, 2)
    for result in ranks.run(4, subgroups):
        for got, want in zip(result, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)


# -- what it refuses ----------------------------------------------------------------------------------------------


def refused(rank, world, version=22703, identity=None, library=None):
    with fakes.gpus(rank, identity, library) as nccl:
        nccl.version = version
        try:
            wrapped()
        except shardstep.Error as error:
            return type(error).__name__, str(error)
        finally:
            nccl.version = 22703


def test_an_old_version_is_refused_by_number():
    for name, text in ranks.run(2, refused, 21703):
        assert name == "TransportError"
        assert re.search(r"on rank 0: NCCL 2\.17\.3 \(.*libdoubles\.so\) is too old: shardstep needs 2\.18\.0 or newer", text)


def test_a_missing_library_is_said_with_the_remedy():
    for name, text in ranks.run(2, refused, library="/nowhere/libnccl.so.2"):
        assert name == "TransportError"
        assert "NCCL was not found" in text and "/nowhere/libnccl.so.2" in text and "SHARDSTEP_NCCL" in text


def test_a_library_that_is_not_nccl_is_said_so():
    import _ctypes

    for name, text in ranks.run(2, refused, library=_ctypes.__file__):
        assert name == "TransportError" and "is not NCCL: it has no ncclGetVersion" in text


def test_ranks_on_one_gpu_are_refused_by_name():
    for name, text in ranks.run(2, refused, identity="GPU-1234"):
        assert name == "UsageError"
        assert "ranks 0 and 1 are on the same GPU (GPU-1234)" in text and "set_device" in text


def on_the_cpu(rank, world):
    model = network()
    try:
        shardstep.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), transport="nccl")
    except shardstep.UsageError as error:
        return str(error)


def test_a_model_on_the_cpu_is_told_what_to_use():
    for world in (1, 2):
        for text in ranks.run(world, on_the_cpu):
            assert "transport='nccl' moves tensors between GPUs, and this model is on the CPU" in text
            assert "transport='auto'" in text


def test_a_model_over_several_devices_is_refused_by_name():
    from shardstep import _device

    with pytest.raises(shardstep.UsageError, match="parameter 'a' is on cpu and parameter 'b' on meta; .* one device"):
        _device.device_of(["a", "b"], [torch.zeros(1), torch.zeros(1, device="meta")])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_said_so():
    from shardstep import _C

    with pytest.raises(shardstep.UsageError, match="no device cuda:0: .*not linked with support for cuda"):
        _C.open_device("cuda:0", "/nowhere/_cuda.so", None)


# -- failures -----------------------------------------------------------------------------------------------------


def asynchronous_error(rank, world):
    with fakes.gpus(rank) as nccl:
        model, optimizer = wrapped(timeout=20.0)
        step(model, optimizer, rank)
        if rank == 1:
            nccl.fail_at = 3  # the reduce-scatters of the second step
        for seed in range(1, 4):
            step(model, optimizer, rank, seed)


def test_an_asynchronous_error_raises_on_every_rank():
    outcomes = ranks.outcomes(2, asynchronous_error, timeout=30)
    assert [outcome[:2] for outcome in outcomes] == [("error", "AbortedError"), ("error", "TransportError")], outcomes
    assert "NCCL says: remote process exited" in outcomes[1][2] and "bucket" in outcomes[1][2]
    assert "rank 1" in outcomes[0][2] and "remote process exited" in outcomes[0][2]
    assert all(outcome[3] < 10.0 for outcome in outcomes)


def killed(rank, world, when):
    with fakes.gpus(rank):
        model, optimizer = wrapped(timeout=30.0)
        step(model, optimizer, rank)
        if rank == 1:
            if when == "backward":
                model(torch.ones(4, 8)).sum().backward()
            os.kill(os.getpid(), signal.SIGKILL)
        started = time.monotonic()
        try:
            step(model, optimizer, rank, 1)
        except shardstep.PeerLostError as error:
            return time.monotonic() - started, error.rank, str(error)


@pytest.mark.parametrize("when", ["between steps", "backward"])
def test_a_killed_rank_is_reported_at_once(when):
    outcomes = ranks.outcomes(2, killed, when, timeout=30)
    assert outcomes[0][0] == "ok", outcomes
    seconds, rank, text = outcomes[0][1]
    assert rank == 1 and seconds < 3.0 and "the process of rank 1 has ended" in text


def stuck_collective(rank, world):
    """Rank 1's device never gets the collective that rank 0's waits for: only rank 0 launches, by the transport alone."""
    from shardstep import _C
    from shardstep._groups import Group, open_transport

    with fakes.gpus(rank):
        from shardstep import _device

        group = Group()
        model = nn.Linear(64, 64)
        started = time.monotonic()
        engine = _C.Engine(
            params=[model.weight], names=["weight"], param_dtypes=bytes(1), grad_dtypes=bytes(1),
            transport=open_transport("nccl", group, 1.5, _device.device_of([], [])), bucket_bytes=1 << 20, sharded=True,
            accumulate=1, device=_device.device_of([], []).capsule,
        )
        engine.place(memoryview(bytes(4)).cast("i"), memoryview(bytes(4)).cast("i"), None)
        if rank == 1:
            time.sleep(4.0)
            return None
        model.weight.sum().backward()
        try:
            engine.close(1)
        except shardstep.TimeoutError as error:
            return time.monotonic() - started, str(error)


def test_a_timeout_names_the_ranks_that_did_not_come():
    (seconds, text), _ = ranks.run(2, stuck_collective, fresh=True)
    assert 1.4 < seconds < 5.0 and "rank 1 was not seen there" in text, text


def leaves_without_a_word(rank, world):
    with fakes.gpus(rank):
        model, optimizer = wrapped()
        step(model, optimizer, rank)
        model(torch.ones(4, 8)).sum().backward()  # launched, never closed
        if rank == 0:
            model.unwrap()  # while peers may never come
    return True


def test_the_end_never_hangs():
    started = time.monotonic()
    assert ranks.run(2, leaves_without_a_word, fresh=True) == [True, True]
    assert time.monotonic() - started < 20.0


# -- streams ------------------------------------------------------------------------------------------------------


def side_streams(rank, world, ignored, unused):
    """Backwards that run on streams of their own, and a layer that only one rank uses, whose slot the other clears."""
    doubles = fakes.loaded()
    with fakes.gpus(rank) as nccl:
        torch.manual_seed(6)
        layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        optimizer = torch.optim.AdamW(layers.parameters(), lr=0.1)
        model, optimizer = shardstep.wrap(layers, optimizer, transport="nccl", timeout=20.0)
        streams = [doubles.dd_framework_stream(k) for k in range(2)]
        doubles.dd_ignore_waits(ignored)
        before = nccl.now()
        try:
            for seed in range(3):
                for number, layer in enumerate(model):
                    if unused and number == 2 and rank != seed % world:
                        continue
                    generator = torch.Generator().manual_seed(seed * 100 + rank * 10 + number)
                    x = torch.randn(4, 8, generator=generator)
                    with fakes.stream(streams[number % 2]), model.no_sync():
                        layer(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return [p.detach().clone() for p in model.parameters()], nccl.since(before)["ahead"]
        finally:
            doubles.dd_ignore_waits(0)
            model.unwrap()


def side_streams_alone(world, unused):
    torch.manual_seed(6)
    model = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    for seed in range(3):
        for rank in range(world):
            for number, layer in enumerate(model):
                if unused and number == 2 and rank != seed % world:
                    continue
                generator = torch.Generator().manual_seed(seed * 100 + rank * 10 + number)
                (layer(torch.randn(4, 8, generator=generator)).square().mean() / world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def test_gradients_from_several_streams_are_waited_for():
    expected = side_streams_alone(2, True)
    for found, ahead in ranks.run(2, side_streams, 0, True):
        assert ahead == 0  # collectives that something of another stream was not ordered before
        for got, want in zip(found, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ignored", [1, 2], ids=["communication", "caller"])
def test_a_missing_wait_shows_as_a_wrong_number(ignored):
    """Of the doubles themselves: waits of the communication stream, or of the caller's, that count for nothing."""
    expected = side_streams_alone(2, True)
    found = ranks.run(2, side_streams, ignored, True, fresh=True)
    assert any(not torch.allclose(got, want, rtol=1e-3) for rank, _ in found for got, want in zip(rank, expected))
    assert ignored != 1 or all(ahead > 0 for _, ahead in found)


def reads_of_a_step(rank, world, clip):
    with fakes.gpus(rank):
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model, optimizer = shardstep.wrap(model, optimizer, transport="nccl", clip_grad_norm=clip, param_dtype=torch.bfloat16)
        before = fakes.loaded().dd_reads()
        for seed in range(2):
            generator = torch.Generator().manual_seed(seed * 100 + rank)
            with model.no_sync():
                model(torch.randn(4, 8, generator=generator).bfloat16()).square().mean().backward()
            model(torch.randn(4, 8, generator=generator).bfloat16()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        model.unwrap()
        return fakes.loaded().dd_reads() - before


def test_a_step_does_not_wait_for_the_device():
    assert ranks.run(2, reads_of_a_step, None) == [0, 0]
    assert ranks.run(2, reads_of_a_step, 1.0) == [0, 0]


def clipped(rank, world, transport, name, skip):
    cls, options = {"adamw": (torch.optim.AdamW, dict(lr=0.05)), "sgd": (torch.optim.SGD, dict(lr=0.05, momentum=0.9))}[name]
    model = network()
    model, optimizer = fakes.wrap(
        rank, model, cls(model.parameters(), **options), transport=transport, clip_grad_norm=0.05, skip_nonfinite=skip,
        bucket_cap_mb=0.001,
    )
    told = []
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed * 100 + rank)
        loss = model(torch.randn(4, 8, generator=generator)).square().mean()
        (loss * (float("inf") if skip and seed == 2 and rank == 1 else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        told.append((optimizer.grad_norm, optimizer.step_was_skipped))
    steps = [float(s["step"]) for s in optimizer.state.values() if "step" in s]
    result = [p.detach().clone() for p in model.parameters()]
    skipped = optimizer.skipped_steps, model.stats()["skipped_steps"]
    model.unwrap()
    return result, told, skipped, steps


@pytest.mark.filterwarnings("ignore:skip_nonfinite")
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("world", [1, 3])
def test_clipping_and_skipping_on_the_device_do_what_they_do_on_the_host(world, name, skip):
    for ours, host in zip(*(ranks.run(world, clipped, t, name, skip) for t in ("nccl", "shm")), strict=True):
        (result, told, skipped, steps), (expected, told_there, *counts) = ours, host
        for got, want in zip(result, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-8)
        for (norm, was_skipped), (want, was_skipped_there) in zip(told, told_there, strict=True):
            assert norm == pytest.approx(want, rel=1e-12, nan_ok=True) and was_skipped is was_skipped_there
        assert [skipped, steps] == counts
        assert skipped == ((1, 1) if skip and world > 1 else (0, 0)) and told[0][0] > 0.05
