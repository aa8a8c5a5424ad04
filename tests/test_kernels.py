"""The CPU kernels, each variant this processor can run, held to torch's numbers (or a closed form), mostly to the bit."""

import ctypes
import shutil
from ctypes import POINTER, c_char_p, c_double, c_float, c_int, c_int64, c_void_p

import numpy as np
import pytest
import torch
from c_build import build_shared
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from update_rules import SGD_OPTIONS, needs_torch_with_fma

F32, F64, BF16, F16 = range(4)
LOW_DTYPES = {BF16: torch.bfloat16, F16: torch.float16}
VARIANTS = ("portable", "avx2", "avx512")

deterministic = settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


class AdamArgs(ctypes.Structure):
    _fields_ = [
        ("param", c_void_p),
        ("low", c_void_p),
        ("low_dtype", c_int),
        ("grad", c_void_p),
        ("grad_scale", c_float),
        ("exp_avg", c_void_p),
        ("exp_avg_sq", c_void_p),
        ("max_exp_avg_sq", c_void_p),
        ("lr", c_double),
        ("beta1", c_double),
        ("beta2", c_double),
        ("eps", c_double),
        ("weight_decay", c_double),
        ("step", c_double),
        ("decoupled", c_int),
        ("maximize", c_int),
        ("tail", c_int64),
    ]


class SgdArgs(ctypes.Structure):
    _fields_ = [
        ("param", c_void_p),
        ("low", c_void_p),
        ("low_dtype", c_int),
        ("grad", c_void_p),
        ("grad_scale", c_float),
        ("momentum_buffer", c_void_p),
        ("lr", c_double),
        ("momentum", c_double),
        ("dampening", c_double),
        ("weight_decay", c_double),
        ("nesterov", c_int),
        ("maximize", c_int),
        ("first", c_int),
    ]


def kernel(*argtypes):
    return ctypes.CFUNCTYPE(None, *argtypes)


class Kernels(ctypes.Structure):
    _fields_ = [
        ("isa", c_char_p),
        ("reduce_f32", kernel(c_void_p, POINTER(c_void_p), c_int, c_int64)),
        ("reduce_f64", kernel(c_void_p, POINTER(c_void_p), c_int, c_int64)),
        ("sumsq_f32", kernel(c_void_p, c_int64, c_int64, c_void_p)),
        ("sumsq_f64", kernel(c_void_p, c_int64, c_int64, c_void_p)),
        ("copy_through", kernel(c_void_p, c_void_p, c_int64)),
        ("scale_f32", kernel(c_void_p, c_float, c_int64)),
        ("scale_f64", kernel(c_void_p, c_double, c_int64)),
        ("add_scaled_f32", kernel(c_void_p, c_void_p, c_float, c_int64)),
        ("add_scaled_f64", kernel(c_void_p, c_void_p, c_double, c_int64)),
        ("f32_to_bf16", kernel(c_void_p, c_void_p, c_int64)),
        ("f32_to_f16", kernel(c_void_p, c_void_p, c_int64)),
        ("bf16_to_f32", kernel(c_void_p, c_void_p, c_int64)),
        ("f16_to_f32", kernel(c_void_p, c_void_p, c_int64)),
        ("add_bf16", kernel(c_void_p, c_void_p, c_int64)),
        ("add_f16", kernel(c_void_p, c_void_p, c_int64)),
        ("adam", kernel(POINTER(AdamArgs), c_int64)),
        ("sgd", kernel(POINTER(SgdArgs), c_int64)),
    ]


@pytest.fixture(scope="session")
def library():
    folder = "csrc/kernels"
    sources = ["dispatch.c", "kernels_portable.c", "kernels_avx2.c", "kernels_avx512.c"]
    path = build_shared("kernels", [f"{folder}/{source}" for source in sources] + ["tests/c/kernels_export.c"])
    loaded = ctypes.CDLL(str(path))
    loaded.ss_kernels_get.restype = POINTER(Kernels)
    loaded.ss_kernels_get.argtypes = [c_char_p]
    loaded.test_adam_tail.restype = c_int64
    loaded.test_adam_tail.argtypes = [c_int64] * 3
    yield loaded
    shutil.rmtree(path.parent)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Small tensors: torch's threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", params=VARIANTS)
def kernels(library, request):
    table = library.ss_kernels_get(request.param.encode())
    if not table:
        pytest.skip(f"this processor does not run the {request.param} kernels")
    return table.contents


def bits(tensor):
    """The tensor's bits as integers, so that comparisons tell NaNs and signs of zero apart."""
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def assert_same_bits(actual, expected):
    different = (bits(actual) != bits(expected)).nonzero().flatten()
    assert len(different) == 0, (
        f"{len(different)} of {actual.numel()} differ, first at {different[0]}: "
        f"{actual[different[0]]} instead of {expected[different[0]]}"
    )


def randn(n, seed, dtype=torch.float32):
    """Element-aligned only (offset by one element), as a piece of a bucket may be."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n + 1, generator=generator, dtype=dtype)[1:]


# ---- Dispatch ----


def test_best_variant_is_the_default(library):
    available = [isa for isa in VARIANTS if library.ss_kernels_get(isa.encode())]
    assert available[0] == "portable"
    assert library.ss_kernels_get(None).contents.isa.decode() == available[-1]
    capability = torch.backends.cpu.get_cpu_capability()
    if capability in ("AVX2", "AVX512"):
        assert capability.lower() in available


def test_unknown_variant_is_null(library):
    assert not library.ss_kernels_get(b"sse9")


# ---- Casts ----


@needs_torch_with_fma
@pytest.mark.parametrize("low", LOW_DTYPES)
def test_every_low_precision_value_widens_as_in_torch(kernels, low):
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    actual = torch.empty(65536)
    (kernels.bf16_to_f32 if low == BF16 else kernels.f16_to_f32)(actual.data_ptr(), patterns.data_ptr(), 65536)
    assert_same_bits(actual, patterns.view(LOW_DTYPES[low]).float())


@pytest.mark.parametrize("n", [0, 1, 17, 255, 256, 1000])
@pytest.mark.parametrize("low", LOW_DTYPES)
def test_adding_low_precision_rounds_as_torch_does(kernels, low, n):
    sums, terms = randn(n, 3), randn(n, 4).to(LOW_DTYPES[low])
    expected = sums + terms.float()
    (kernels.add_bf16 if low == BF16 else kernels.add_f16)(sums.data_ptr(), terms.data_ptr(), n)
    assert_same_bits(sums, expected)


@needs_torch_with_fma
@pytest.mark.parametrize("low", LOW_DTYPES)
def test_narrowing_rounds_as_in_torch(kernels, low):
    # Every upper half (sign, exponent, leading mantissa) with lower halves round the ties of both formats, and noise.
    upper = np.arange(65536, dtype=np.uint32)[:, None] << 16
    lower = np.array([0, 1, 0xFFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x3001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    noise = np.random.default_rng(0).integers(0, 2**32, 500_003, dtype=np.uint32)
    source = torch.from_numpy(np.concatenate([(upper | lower).ravel(), noise]).view(np.float32))
    actual = torch.empty(source.numel(), dtype=LOW_DTYPES[low])
    cast = kernels.f32_to_bf16 if low == BF16 else kernels.f32_to_f16
    cast(actual.data_ptr(), source.data_ptr(), source.numel())
    assert_same_bits(actual, source.to(LOW_DTYPES[low]))
    for n in range(1, 40):  # the same where the vector loop leaves a remainder
        actual.zero_()
        cast(actual.data_ptr(), source[-n:].data_ptr(), n)
        assert_same_bits(actual[:n], source[-n:].to(LOW_DTYPES[low]))
        assert actual[n] == 0


# ---- Reductions ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n_src", [1, 2, 3, 4, 7])
def test_reduce_sums_in_order(kernels, dtype, n_src):
    reduce = kernels.reduce_f32 if dtype == torch.float32 else kernels.reduce_f64
    for n in (0, 1, 15, 16, 33, 64, 1000):
        for into in (*range(n_src), None):
            sources = [randn(n, seed, dtype) * 10.0**seed for seed in range(n_src)]
            expected = sources[0].clone()
            for source in sources[1:]:
                expected += source
            dst = torch.zeros(n, dtype=dtype) if into is None else sources[into]
            reduce(dst.data_ptr(), (c_void_p * n_src)(*[s.data_ptr() for s in sources]), n_src, n)
            assert_same_bits(dst, expected)


def lanes_one_by_one(x, phase):
    lanes = np.zeros(16)
    for i, value in enumerate(x.double().numpy()):
        lanes[(phase + i) % 16] += value * value
    return lanes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sum_of_squares_is_exact_per_lane_however_the_tensor_is_cut(kernels, dtype):
    sumsq = kernels.sumsq_f32 if dtype == torch.float32 else kernels.sumsq_f64
    x = randn(1013, 1, dtype) * 1e15
    expected = lanes_one_by_one(x, 3)
    for cuts in ([], [1], [13], [5, 40, 41, 200], [16, 512], [500, 1012]):
        lanes = np.zeros(16)
        for start, end in zip([0, *cuts], [*cuts, x.numel()], strict=True):
            sumsq(x[start:end].data_ptr(), end - start, 3 + start, lanes.ctypes.data)
        assert np.array_equal(lanes, expected)
    norm = torch.linalg.vector_norm(x.double())
    assert lanes.sum() == pytest.approx(float(norm) ** 2, rel=1e-12)


@pytest.mark.parametrize("position", [0, 20, 36])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_sum_of_squares_is_not_finite_when_an_element_is_not(kernels, position, value):
    x = torch.ones(37)
    x[position] = value
    lanes = np.zeros(16)
    kernels.sumsq_f32(x.data_ptr(), 37, 5, lanes.ctypes.data)
    assert not np.isfinite(lanes[(5 + position) % 16])
    assert np.isfinite(lanes).sum() == 15


@pytest.mark.parametrize("n", [0, 1, 63, 4095, 4096, 4097, 4096 + 255, 65536 + 17])
@pytest.mark.parametrize("to, source", [(0, 0), (1, 0), (0, 5), (63, 9), (64, 1)])
def test_copy_through_copies_those_bytes_and_no_others(kernels, n, to, source):
    generator = torch.Generator().manual_seed(n)
    data = torch.randint(256, (n + 128,), generator=generator, dtype=torch.uint8)
    target = torch.full((n + 192,), 77, dtype=torch.uint8)
    expected = target.clone()
    expected[to : to + n] = data[source : source + n]
    kernels.copy_through(target.data_ptr() + to, data.data_ptr() + source, n)
    assert torch.equal(target, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scale_and_add_scaled_round_as_torch_does(kernels, dtype):
    scale, add_scaled = (
        (kernels.scale_f32, kernels.add_scaled_f32)
        if dtype == torch.float32
        else (kernels.scale_f64, kernels.add_scaled_f64)
    )
    for n in (0, 1, 7, 31, 1000):
        x, carry = randn(n, 1, dtype), randn(n, 2, dtype)
        scaled = x * 0.3
        added = x.clone()
        add_scaled(added.data_ptr(), carry.data_ptr(), 0.3, n)
        assert_same_bits(added, carry + scaled)
        scale(x.data_ptr(), 0.3, n)
        assert_same_bits(x, scaled)


# ---- Adam and AdamW ----


class Adam:
    """The kernel with its state, one parameter, stepped in pieces cut at ``cuts``."""

    def __init__(self, library, kernels, param, decoupled, low=None, cuts=(), **options):
        self.library, self.kernels, self.param, self.low, self.cuts = library, kernels, param.clone(), low, cuts
        self.options = dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, amsgrad=False, maximize=False)
        self.options |= options
        self.decoupled, self.steps = decoupled, 0
        self.exp_avg, self.exp_avg_sq, self.max_exp_avg_sq = (torch.zeros_like(param) for _ in range(3))

    def step(self, grad, grad_scale=1.0):
        o = self.options
        self.steps += 1
        numel = self.param.numel()
        for start, end in zip([0, *self.cuts], [*self.cuts, numel], strict=True):
            args = AdamArgs(
                param=self.param[start:].data_ptr(),
                low=None if self.low is None else self.low[start:].data_ptr(),
                low_dtype=F32 if self.low is None else {v: k for k, v in LOW_DTYPES.items()}[self.low.dtype],
                grad=grad[start:].data_ptr(),
                grad_scale=grad_scale,
                exp_avg=self.exp_avg[start:].data_ptr(),
                exp_avg_sq=self.exp_avg_sq[start:].data_ptr(),
                max_exp_avg_sq=self.max_exp_avg_sq[start:].data_ptr() if o["amsgrad"] else None,
                lr=o["lr"],
                beta1=o["betas"][0],
                beta2=o["betas"][1],
                eps=o["eps"],
                weight_decay=o["weight_decay"],
                step=self.steps,
                decoupled=self.decoupled,
                maximize=o["maximize"],
                tail=self.library.test_adam_tail(numel, start, end - start),
            )
            self.kernels.adam(args, end - start)


def torch_adam(param, decoupled, **options):
    cls = torch.optim.AdamW if decoupled else torch.optim.Adam
    parameter = torch.nn.Parameter(param.clone())
    return parameter, cls([parameter], fused=True, **{"weight_decay": 0.0, **options})


def check_adam(library, kernels, n, steps, decoupled, cuts=(), grad_scale=1.0, seed=0, **options):
    param = randn(n, seed) * 0.02
    ours = Adam(library, kernels, param, decoupled, cuts=cuts, **options)
    parameter, optimizer = torch_adam(param, decoupled, **options)
    for t in range(steps):
        grad = randn(n, 1000 * seed + t + 1) * 1e-3
        parameter.grad = grad * grad_scale
        optimizer.step()
        ours.step(grad, grad_scale)
    state = optimizer.state[parameter]
    assert_same_bits(ours.exp_avg, state["exp_avg"])
    assert_same_bits(ours.exp_avg_sq, state["exp_avg_sq"])
    if options.get("amsgrad"):
        assert_same_bits(ours.max_exp_avg_sq, state["max_exp_avg_sq"])
    assert_same_bits(ours.param, parameter.detach())


@needs_torch_with_fma
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("decoupled", [0, 1], ids=["adam", "adamw"])
def test_adam_equals_fused_torch_at_every_length(library, kernels, decoupled, amsgrad):
    for n in [*range(1, 50), 255, 256, 257, 1000, 5003]:
        check_adam(library, kernels, n, 4, decoupled, seed=n, weight_decay=0.1, amsgrad=amsgrad)


@needs_torch_with_fma
@pytest.mark.parametrize("decoupled", [0, 1], ids=["adam", "adamw"])
def test_adam_equals_fused_torch_over_many_steps(library, kernels, decoupled):
    check_adam(library, kernels, 1003, 300, decoupled, weight_decay=0.01, lr=3e-3)


@needs_torch_with_fma
@deterministic
@given(data=st.data())
def test_adam_equals_fused_torch_for_any_options(library, kernels, data):
    def draw(low, high):
        return data.draw(st.floats(low, high))

    check_adam(
        library,
        kernels,
        data.draw(st.integers(1, 100)),
        3,
        data.draw(st.sampled_from([0, 1])),
        seed=data.draw(st.integers(0, 99)),
        grad_scale=data.draw(st.sampled_from([1.0, 0.5, 0.3, 1e-4])),
        lr=draw(0, 1),
        betas=(data.draw(st.sampled_from([0.0, 0.3, 0.5, 0.9, 0.95])), draw(0, 0.9999)),
        eps=data.draw(st.sampled_from([1e-8, 1e-6, 1e-3])),
        weight_decay=data.draw(st.sampled_from([0.0, 0.01, 0.3])),
        amsgrad=data.draw(st.booleans()),
        maximize=data.draw(st.booleans()),
    )


@needs_torch_with_fma
@pytest.mark.parametrize("cuts", [[3], [64], [500, 996, 1001], [997, 1000]])
def test_adam_does_not_depend_on_the_cut(library, kernels, cuts):
    check_adam(library, kernels, 1003, 5, 1, cuts=cuts, weight_decay=0.1)


def test_adam_tail_counts_the_last_elements_of_the_parameter(library):
    for numel in range(40):
        in_tail = [i >= numel - numel % 8 for i in range(numel)]
        for start in range(numel + 1):
            for end in range(start, numel + 1):
                assert library.test_adam_tail(numel, start, end - start) == sum(in_tail[start:end])


def test_infinite_gradient_reaches_the_weight_as_in_torch(library, kernels):
    param, grad = torch.ones(40), torch.ones(40)
    grad[3], grad[39] = float("inf"), float("nan")
    ours = Adam(library, kernels, param, 1)
    ours.step(grad)
    parameter, optimizer = torch_adam(param, 1)
    parameter.grad = grad
    optimizer.step()
    assert torch.equal(ours.param.isnan(), parameter.isnan())
    assert ours.param.isnan().nonzero().flatten().tolist() == [3, 39]


# ---- SGD ----


def run_sgd(kernels, param, grads, low=None, grad_scale=1.0, **options):
    param, buffer = param.clone(), torch.full_like(param, float("nan"))  # a first step must not read the buffer
    for t, grad in enumerate(grads):
        args = SgdArgs(
            param=param.data_ptr(),
            low=None if low is None else low.data_ptr(),
            low_dtype=BF16,
            grad=grad.data_ptr(),
            grad_scale=grad_scale,
            momentum_buffer=buffer.data_ptr() if options.get("momentum") else None,
            first=t == 0,
            **options,
        )
        kernels.sgd(args, param.numel())
    return param, buffer


@needs_torch_with_fma
@pytest.mark.parametrize("foreach", [None, False], ids=["default", "loop"])
@pytest.mark.parametrize("options", SGD_OPTIONS.values(), ids=SGD_OPTIONS)
def test_sgd_equals_torch_at_every_length(kernels, options, foreach):
    for n in [*range(1, 40), 256, 1003]:
        param = randn(n, n)
        grads = [randn(n, 1000 + t) for t in range(5)]
        parameter = torch.nn.Parameter(param.clone())
        optimizer = torch.optim.SGD([parameter], foreach=foreach, **options)
        for grad in grads:
            parameter.grad = grad * 0.3
            optimizer.step()
        ours, buffer = run_sgd(kernels, param, grads, grad_scale=0.3, **options)
        assert_same_bits(ours, parameter.detach())
        if options.get("momentum"):
            assert_same_bits(buffer, optimizer.state[parameter]["momentum_buffer"])


@needs_torch_with_fma
@pytest.mark.parametrize("options", SGD_OPTIONS.values(), ids=SGD_OPTIONS)
def test_sgd_equals_fused_torch_at_multiples_of_eight(kernels, options):
    param, grads = randn(1000, 1), [randn(1000, 2 + t) for t in range(5)]
    parameter = torch.nn.Parameter(param.clone())
    optimizer = torch.optim.SGD([parameter], fused=True, **options)
    for grad in grads:
        parameter.grad = grad.clone()
        optimizer.step()
    assert_same_bits(run_sgd(kernels, param, grads, **options)[0], parameter.detach())


# ---- Low-precision weights ----


@needs_torch_with_fma
@pytest.mark.parametrize("low_dtype", LOW_DTYPES.values(), ids=["bf16", "f16"])
@pytest.mark.parametrize("n", [1, 8, 255, 256, 257, 1003])
def test_adam_keeps_the_master_and_stores_its_rounded_copy(library, kernels, low_dtype, n):
    master = randn(n, 1) * 0.02
    low = master.to(low_dtype)
    ours = Adam(library, kernels, master, 1, low=low, weight_decay=0.1)
    parameter, optimizer = torch_adam(master, 1, weight_decay=0.1)
    for t in range(3):
        grad = randn(n, 2 + t)
        parameter.grad = grad.clone()
        optimizer.step()
        ours.step(grad)
        assert_same_bits(ours.param, parameter.detach())
        assert_same_bits(low, parameter.detach().to(low_dtype))


@needs_torch_with_fma
@pytest.mark.parametrize("low_dtype", LOW_DTYPES.values(), ids=["bf16", "f16"])
def test_adam_starts_from_what_the_user_wrote(library, kernels, low_dtype):
    n, written = 1003, torch.tensor([0, 7, 300, 301, 1002])
    master = randn(n, 1) * 0.02
    low = master.to(low_dtype)
    low[written] = torch.tensor([1.0, -2.0, 0.0, 3.5, 100.0], dtype=low_dtype)
    start = master.clone()
    start[written] = low[written].float()
    parameter, optimizer = torch_adam(start, 1, weight_decay=0.1)
    grad = randn(n, 2)
    parameter.grad = grad.clone()
    optimizer.step()
    ours = Adam(library, kernels, master, 1, low=low, weight_decay=0.1)
    ours.step(grad)
    assert_same_bits(ours.param, parameter.detach())
    assert_same_bits(low, parameter.detach().to(low_dtype))


@needs_torch_with_fma
def test_sgd_starts_from_what_the_user_wrote(kernels):
    master, grad = randn(1003, 1), randn(1003, 2)
    low = master.bfloat16()
    low[[0, 500, 1002]] = 2.0
    start = master.clone()
    start[[0, 500, 1002]] = 2.0
    expected = start.clone()
    optimizer = torch.optim.SGD([torch.nn.Parameter(expected)], lr=0.1, momentum=0.9)
    optimizer.param_groups[0]["params"][0].grad = grad.clone()
    optimizer.step()
    ours, _ = run_sgd(kernels, master, [grad], low=low, lr=0.1, momentum=0.9)
    assert_same_bits(ours, expected)
    assert_same_bits(low, expected.bfloat16())


def test_written_nan_is_adopted_and_an_overwritten_nan_is_forgotten(library, kernels):
    master = torch.full((20,), 0.5)
    master[3] = float("nan")
    low = master.bfloat16()
    low[3] = 0.25  # the user repairs a weight
    low[11] = float("nan")  # and breaks another
    ours = Adam(library, kernels, master, 1, low=low)
    ours.step(torch.ones(20))
    assert low.isnan().nonzero().flatten().tolist() == [11]
    assert ours.param[3] == pytest.approx(0.25 - 1e-3)  # the first Adam step moves by lr
