"""The CUDA kernels, held to torch's numbers or a closed form: compiled for the host, and on a GPU where there is one.

For the host it is the same functions, with loops for the grid, and must have the same bits as torch on a CPU. On a GPU only the
powers of the bias correction may be rounded otherwise, so that Adam may differ by 2 ulp.
"""

import shutil

import numpy as np
import pytest
import torch
from cuda_kernels import ROOT, CudaKernels, adam_tail, build_for_host
from update_rules import SGD_OPTIONS, needs_torch_with_fma

LOW = [torch.bfloat16, torch.float16]
#: Lengths round packs (8), and one of several chunks (16,384) with a ragged end.
LENGTHS = [0, 1, 7, 8, 9, 15, 17, 64, 255, 16_384, 3 * 16_384 + 5]


@pytest.fixture(scope="module", params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def cuda(request):
    if request.param == "cuda":
        yield CudaKernels(ROOT / "python/shardstep/_cuda.so", "cuda")
    else:
        library = build_for_host()
        yield CudaKernels(library, "cpu")
        shutil.rmtree(library.parent)


def bits(tensor):
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def assert_same_bits(actual, expected):
    actual, expected = actual.detach().cpu(), expected.detach().cpu()
    different = (bits(actual) != bits(expected)).nonzero().flatten()
    assert len(different) == 0, (
        f"{len(different)} of {actual.numel()} differ, first at {different[0]}: "
        f"{actual[different[0]]} instead of {expected[different[0]]}"
    )


def assert_close(cuda, actual, expected, ulp=2):
    """The same bits on the host, at most ``ulp`` apart on a GPU."""
    if cuda.device.type == "cpu":
        return assert_same_bits(actual, expected)
    apart = (bits(actual.detach().cpu()).long() - bits(expected.detach().cpu()).long()).abs()
    assert apart.max() <= ulp, f"{apart.max()} ulp apart, at {apart.argmax()}"


def randn(n, seed, dtype=torch.float32):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def placed(cuda, tensors, offset=0):
    """Copies of tensors on the device, each in a buffer of its own: ``offset`` elements after a multiple of 256 bytes, with a
    guard before and after. Gives the copies and a function that asserts that the guards are whole."""
    copies, guards = [], []
    for tensor in tensors:
        buffer = torch.full((tensor.numel() + 256,), 7.0, dtype=tensor.dtype, device=cuda.device)
        begin = 128 + offset
        copy = buffer[begin : begin + tensor.numel()]
        copy.copy_(tensor)
        copies.append(copy)
        guards += [buffer[:begin], buffer[begin + tensor.numel() :]]

    def guarded():
        assert all(bool((guard == 7.0).all()) for guard in guards)

    return copies, guarded


# ---- Updates ----


ADAM = dict(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1)


def torch_adam(param, options, decoupled, amsgrad):
    parameter = torch.nn.Parameter(param.clone())
    kwargs = {key: value for key, value in options.items() if not key.startswith("beta")}
    betas = (options["beta1"], options["beta2"])
    cls = torch.optim.AdamW if decoupled else torch.optim.Adam
    return parameter, cls([parameter], betas=betas, amsgrad=amsgrad, fused=True, **kwargs)


class Adam:
    """Parameters of several lengths, each cut into pieces, stepped by one call per step; beside them torch's."""

    def __init__(
        self, cuda, lengths, cuts=(), offset=0, decoupled=True, amsgrad=False, low=None, grad=torch.float32, **options
    ):
        self.cuda, self.cuts, self.grad_dtype, self.low_dtype = cuda, cuts, grad, low
        self.options = {**ADAM, **options}
        self.row = {**self.options, "decoupled": decoupled}
        self.offset, self.checks = offset, []
        initial = [randn(n, n) * 0.02 for n in lengths]
        self.reference = [torch_adam(p, self.options, decoupled, amsgrad) for p in initial]
        self.params = self._placed(initial)
        self.lows = self._placed([p.to(low) for p in initial]) if low else [None] * len(initial)
        self.states = [self._placed([torch.zeros_like(p) for p in initial]) for _ in range(3 if amsgrad else 2)]
        self.steps = torch.zeros(len(initial), 1 + len(cuts), device=cuda.device)

    def _placed(self, tensors):
        copies, check = placed(self.cuda, tensors, self.offset)
        self.checks.append(check)
        return copies

    def step(self, t, factor=1.0, **scalars):
        """``factor``: what grad_scale and the scalars in device memory come to, for torch."""
        grads = [(randn(p.numel(), 1000 * t + p.numel()) * 1e-3).to(self.grad_dtype) for p in self.params]
        ours = self._placed(grads)
        pieces = []
        for i, (param, grad, low) in enumerate(zip(self.params, ours, self.lows)):
            ends = [*(min(cut, param.numel()) for cut in self.cuts), param.numel()]
            for j, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
                pieces.append({
                    "param": param[begin:end], "grad": grad[begin:end], "low": None if low is None else low[begin:end],
                    "state": [s[i][begin:end] for s in self.states], "step": self.steps[i, j],
                    "tail": adam_tail(param.numel(), begin, end), **scalars.get("piece", {}),
                })
        self.cuda.update("adam", pieces, [self.row], **{k: v for k, v in scalars.items() if k != "piece"})
        for (parameter, optimizer), grad in zip(self.reference, grads):
            parameter.grad = grad.float() * factor
            optimizer.step()

    def check(self):
        for i, (parameter, optimizer) in enumerate(self.reference):
            if parameter.numel() == 0:
                continue
            assert_close(self.cuda, self.params[i], parameter)
            names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
            for name, state in zip(names, self.states, strict=False):
                assert_close(self.cuda, state[i], optimizer.state[parameter][name])
            if self.low_dtype:
                assert_same_bits(self.lows[i], self.params[i].cpu().to(self.low_dtype))
        for check in self.checks:
            check()


@needs_torch_with_fma
@pytest.mark.parametrize("amsgrad", [False, True], ids=["", "amsgrad"])
@pytest.mark.parametrize("decoupled", [0, 1], ids=["adam", "adamw"])
@pytest.mark.parametrize("offset", [0, 1, 4])
def test_adam_equals_fused_torch_at_every_length_and_alignment(cuda, decoupled, amsgrad, offset):
    run = Adam(cuda, LENGTHS, offset=offset, decoupled=decoupled, amsgrad=amsgrad)
    for t in range(3):
        run.step(t)
    run.check()


@needs_torch_with_fma
@pytest.mark.parametrize("low", LOW, ids=["bf16", "f16"])
@pytest.mark.parametrize("grad", [torch.float32, torch.bfloat16], ids=["f32-grad", "bf16-grad"])
@pytest.mark.parametrize("offset", [0, 3])
def test_adam_with_low_precision_weights_and_gradients(cuda, low, grad, offset):
    run = Adam(cuda, LENGTHS, offset=offset, low=low, grad=grad)
    for t in range(3):
        run.step(t)
    run.check()


@needs_torch_with_fma
def test_adam_reads_bfloat16_gradients_for_float32_weights(cuda):
    run = Adam(cuda, LENGTHS, grad=torch.bfloat16)
    run.step(1)
    run.check()


@needs_torch_with_fma
@pytest.mark.parametrize("cuts", [[3], [64, 65], [500, 996, 1001]])
def test_adam_does_not_depend_on_the_cut(cuda, cuts):
    run = Adam(cuda, [1003, 1000, 20], cuts=cuts)
    for t in range(4):
        run.step(t)
    run.check()


@needs_torch_with_fma
def test_more_pieces_than_one_launch_takes(cuda):
    run = Adam(cuda, [n % 37 for n in range(600)])
    run.step(0)
    run.step(1)
    run.check()
    assert bool((run.steps == 2).all())


@needs_torch_with_fma
@pytest.mark.parametrize(
    "options", [dict(weight_decay=0.0), dict(maximize=True), dict(beta1=0.3, beta2=0.5), dict(lr=0.0), dict(eps=1e-3)],
    ids=lambda o: next(iter(o)),
)
@pytest.mark.parametrize("decoupled", [0, 1], ids=["adam", "adamw"])
def test_adam_options(cuda, options, decoupled):
    run = Adam(cuda, [1003], decoupled=decoupled, **options)
    for t in range(3):
        run.step(t)
    run.check()


@needs_torch_with_fma
def test_adam_over_many_steps(cuda):
    run = Adam(cuda, [203], lr=3e-3)
    for t in range(200):
        run.step(t)
    if cuda.device.type == "cpu":
        run.check()
    else:  # 2 ulp a step may add up
        torch.testing.assert_close(run.params[0].cpu(), run.reference[0][0].detach(), rtol=1e-5, atol=1e-7)


@needs_torch_with_fma
def test_each_piece_has_its_own_options_and_step_count(cuda):
    params, grad = [randn(100, seed) for seed in range(2)], randn(100, 9)
    options = [ADAM, {**ADAM, "lr": 0.1, "weight_decay": 0.0}]
    references = [torch_adam(p, o, True, False) for p, o in zip(params, options)]
    (ours, (device_grad,)), _ = (placed(cuda, params)[0], placed(cuda, [grad])[0]), None
    states = [[torch.zeros(100, device=cuda.device) for _ in range(2)] for _ in params]
    steps = torch.zeros(2, device=cuda.device)
    for turn in [(0, 1), (1,), (0, 1)]:
        pieces = [
            {"param": ours[i], "grad": device_grad, "state": states[i], "step": steps[i : i + 1], "options": i,
             "tail": adam_tail(100, 0, 100)} for i in turn
        ]
        cuda.update("adam", pieces, [{**o, "decoupled": 1} for o in options])
        for i in turn:
            references[i][0].grad = grad.clone()
            references[i][1].step()
    assert steps.tolist() == [2, 3]
    for i in range(2):
        assert_close(cuda, ours[i], references[i][0])


@needs_torch_with_fma
def test_the_factors_of_the_gradient_are_multiplied(cuda):
    run = Adam(cuda, [1003], weight_decay=0.0, eps=1e-3)
    run.step(0, 0.5 * 0.25 * 0.125, scale=cuda.scalar(0.5), clip=cuda.scalar(0.25), piece={"grad_scale": 0.125})
    run.step(1, 0.25, clip=cuda.scalar(0.25))
    run.check()


@needs_torch_with_fma
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("low", [None, *LOW], ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("options", SGD_OPTIONS.values(), ids=SGD_OPTIONS)
def test_sgd_equals_torch(cuda, options, low, offset):
    lengths = [1, 9, 1003, 16_384 + 3]
    params = [torch.nn.Parameter(randn(n, n)) for n in lengths]
    optimizer = torch.optim.SGD(params, **options)
    ours, guarded = placed(cuda, params, offset)
    buffers, _ = placed(cuda, [torch.full((n,), torch.nan) for n in lengths], offset)  # a first step must not use it
    lows = placed(cuda, [p.to(low) for p in params], offset)[0] if low else [None] * len(params)
    steps = torch.zeros(len(params), 1, device=cuda.device)
    momentum = "momentum" in options
    for t in range(3):
        grads = [randn(n, 100 * t + n) for n in lengths]
        device_grads, _ = placed(cuda, grads, offset)
        pieces = [
            {"param": p, "grad": g, "low": w, "state": [b] if momentum else [], "step": s if momentum else None}
            for p, g, w, b, s in zip(ours, device_grads, lows, buffers, steps)
        ]
        cuda.update("sgd", pieces, [options], scale=cuda.scalar(0.3))
        for p, g in zip(params, grads):
            p.grad = g * 0.3
        optimizer.step()
    guarded()
    for p, mine, low_weight, buffer in zip(params, ours, lows, buffers):
        assert_same_bits(mine, p)
        if momentum:
            assert_same_bits(buffer, optimizer.state[p]["momentum_buffer"])
        if low:
            assert_same_bits(low_weight, p.detach().to(low))
    assert steps.flatten().tolist() == [3.0 * momentum] * len(params)


@needs_torch_with_fma
@pytest.mark.parametrize("low", LOW, ids=["bf16", "f16"])
@pytest.mark.parametrize("offset", [0, 1])
def test_the_update_starts_from_what_the_user_wrote(cuda, low, offset):
    n, written = 1003, [0, 7, 300, 301, 1002]
    run = Adam(cuda, [n], low=low, offset=offset)
    values = torch.tensor([1.0, -2.0, 0.0, 3.5, 100.0], dtype=low)
    run.lows[0][torch.tensor(written, device=cuda.device)] = values.to(cuda.device)
    with torch.no_grad():
        run.reference[0][0][written] = values.float()
    run.step(1)
    run.check()


def test_a_skipped_step_changes_nothing_and_does_not_count(cuda):
    run = Adam(cuda, [1003, 0, 5], low=torch.bfloat16)
    run.step(0)
    everything = [*run.params, *run.lows, *(t for s in run.states for t in s), run.steps]
    before = [t.clone() for t in everything]
    run.step(1, skip=cuda.scalar(1, torch.int32))
    for tensor, old in zip(everything, before):
        assert_same_bits(tensor.flatten(), old.flatten())
    assert run.steps.flatten().tolist() == [1, 1, 1]  # that of an empty piece too
    run.step(2, skip=cuda.scalar(0, torch.int32))
    assert run.steps.flatten().tolist() == [2, 2, 2]


@needs_torch_with_fma
def test_what_follows_a_skipped_step_is_as_if_it_had_not_been(cuda):
    run = Adam(cuda, [1003])
    reference = run.reference
    for t, skipped in enumerate([0, 1, 0]):
        run.reference = [] if skipped else reference
        run.step(t, skip=cuda.scalar(skipped, torch.int32))
    run.check()


REFUSED = {
    "a negative length": (dict(n=-1), "an argument of the CUDA kernels is missing or out of range"),
    "no second moment": (dict(state=[0]), "an argument of the CUDA kernels is missing or out of range"),
    "no step count": (dict(step=None), "an argument of the CUDA kernels is missing or out of range"),
    "options that are not there": (dict(options=1), "an argument of the CUDA kernels is missing or out of range"),
    "a float16 gradient": (dict(grad=torch.float16), "no CUDA kernel for these element types"),
    "low precision in FP64": (dict(low=torch.float64), "no CUDA kernel for these element types"),
}


@pytest.mark.parametrize("change, message", REFUSED.values(), ids=REFUSED)
def test_a_refused_update_changes_nothing(cuda, change, message):
    def good():
        zeros = [torch.zeros(8, device=cuda.device) for _ in range(4)]
        return {"param": zeros[0], "grad": zeros[1] + 1, "state": zeros[2:], "step": cuda.scalar(0, torch.float32)}

    pieces = [good(), good()]
    for key, value in change.items():
        if isinstance(value, torch.dtype):
            value = torch.zeros(8, dtype=value, device=cuda.device)
        pieces[1][key] = pieces[1]["state"][:1] if key == "state" else value
    with pytest.raises(RuntimeError, match=message):
        cuda.update("adam", pieces, [ADAM])
    assert float(pieces[0]["param"].sum()) == 0 and float(pieces[0]["step"]) == 0


def test_too_little_workspace_is_refused(cuda):
    zeros = torch.zeros(4, 8, device=cuda.device)
    piece = {"param": zeros[0], "grad": zeros[1], "state": zeros[2:], "step": cuda.scalar(0, torch.float32)}
    with pytest.raises(RuntimeError, match="too little workspace"):
        cuda.update("adam", [piece], [ADAM], workspace=torch.empty(63, dtype=torch.uint8, device=cuda.device))


# ---- Norms ----


def sum_of_squares(x):
    return float((x.cpu().double().numpy().astype(np.longdouble) ** 2).sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("offset", [0, 1])
def test_sums_of_squares(cuda, dtype, offset):
    tensors, _ = placed(cuda, [randn(n, n, dtype) * 100 for n in LENGTHS], offset)
    for in_param in (0, 16, 3, 16_384 + 48):
        sums = cuda.sums_of_squares(tensors, [in_param] * len(tensors)).tolist()
        assert sums == pytest.approx([sum_of_squares(x) for x in tensors], rel=1e-14)


def test_sums_of_squares_of_more_ranges_than_one_launch_takes(cuda):
    tensors = [randn(n % 41, n).to(cuda.device) for n in range(600)]
    scales = [1.0 + n / 7 for n in range(600)]
    sums = cuda.sums_of_squares(tensors, scales=scales).tolist()
    assert sums == pytest.approx([sum_of_squares(x) * s * s for x, s in zip(tensors, scales)], rel=1e-14)


def test_a_sum_of_squares_neither_overflows_nor_vanishes(cuda):
    for value in (3e38, 1e-45):
        x = torch.full((1000,), value).to(cuda.device)
        assert float(cuda.sums_of_squares([x])) == pytest.approx(1000 * float(x[0].double()) ** 2, rel=1e-14)


def test_where_a_parameter_is_cut_moves_the_sum_by_rounding_only(cuda):
    x = randn(100_003, 1).to(cuda.device)
    whole = float(cuda.sums_of_squares([x]))
    for cut in (16, 16_384, 50_000, 99_984):
        parts = cuda.sums_of_squares([x[:cut], x[cut:]], [0, cut])
        assert float(parts.sum()) == pytest.approx(whole, rel=1e-15)


def test_sums_of_squares_have_the_same_bits_in_every_run(cuda):
    tensors = [randn(n, n).to(cuda.device) for n in LENGTHS]
    first = cuda.sums_of_squares(tensors)
    for _ in range(3):
        assert_same_bits(cuda.sums_of_squares(tensors), first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_sum_is_not_finite_when_an_element_is_not(cuda, dtype, value):
    for position in (0, 8, 16_383, 16_384, 40_000):
        tensors = [torch.ones(40_001, dtype=dtype, device=cuda.device) for _ in range(3)]
        tensors[1][position] = value
        assert cuda.sums_of_squares(tensors).isfinite().tolist() == [True, False, True]


@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 30.0, 1e6])
def test_clip_coefficient_is_torchs(cuda, max_norm):
    grads = [randn(n, n) for n in (300, 7, 0, 1)]
    parameters = [torch.nn.Parameter(torch.zeros_like(g, dtype=torch.float64)) for g in grads]
    for p, g in zip(parameters, grads):
        p.grad = 0.5 * g.double()
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    sums = cuda.sums_of_squares([g.to(cuda.device) for g in grads])
    ours, coefficient = cuda.clip(sums, max_norm, scale=cuda.scalar(-0.5))
    assert float(ours) == pytest.approx(float(norm), rel=1e-14)
    clipped = parameters[0].grad / (0.5 * grads[0].double())
    assert float(coefficient) == pytest.approx(float(clipped[0]), rel=1e-13)
    assert float(coefficient) <= 1


@pytest.mark.parametrize("value, coefficient", [(float("nan"), float("nan")), (float("inf"), 0.0)])
def test_clip_coefficient_of_a_norm_that_is_not_finite(cuda, value, coefficient):
    p = torch.nn.Parameter(torch.zeros(1))
    p.grad = torch.tensor([value])
    torch.nn.utils.clip_grad_norm_([p], 1.0)
    assert (p.grad / value).isnan().all()  # whatever the coefficient, the gradient becomes NaN
    sums = torch.tensor([4.0, value], dtype=torch.float64, device=cuda.device)
    norm, ours = cuda.clip(sums, 1.0)
    np.testing.assert_equal([float(norm), float(ours)], [value, coefficient])
    assert float(cuda.clip(sums, 1.0, only_finite=True)[1]) == 1.0


def test_clip_of_no_gradients(cuda):
    norm, coefficient = cuda.clip(torch.empty(0, dtype=torch.float64, device=cuda.device), 1.0)
    assert float(norm) == 0 and float(coefficient) == 1


@pytest.mark.parametrize(
    "norm, found_inf, skip",
    [(1.0, None, 0), (1.0, 0.0, 0), (1.0, 1.0, 1), (float("nan"), None, 1), (float("inf"), 0.0, 1)],
)
def test_skip_flag(cuda, norm, found_inf, skip):
    found_inf = None if found_inf is None else cuda.scalar(found_inf, torch.float32)
    assert int(cuda.skip(cuda.scalar(norm), found_inf)) == skip


# ---- Elements ----


@pytest.mark.parametrize("offset", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_zero_and_copy_touch_their_ranges_only(cuda, dtype, offset):
    sources = [randn(n, n, dtype) for n in LENGTHS]
    copies, guarded = placed(cuda, sources, offset)
    targets, targets_guarded = placed(cuda, [torch.ones_like(s) for s in sources], 3)
    cuda.elements("cast", [(t, c, 0) for t, c in zip(targets, copies)], dtype, dtype)
    for target, source in zip(targets, sources):
        assert_same_bits(target, source)
    cuda.elements("zero", [(t, None, 0) for t in copies], dtype)
    assert all(not bool(t.any()) for t in copies)
    guarded()
    targets_guarded()


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scale_and_add_scaled_round_as_torch_does(cuda, dtype, offset):
    xs, carries = [randn(n, 1 + n, dtype) for n in LENGTHS], [randn(n, 2 + n, dtype) for n in LENGTHS]
    ours, guarded = placed(cuda, xs, offset)
    device_carries, _ = placed(cuda, carries, offset)
    cuda.elements("add_scaled", [(x, c, 0.3) for x, c in zip(ours, device_carries)], dtype)
    for x, mine, carry in zip(xs, ours, carries):
        assert_same_bits(mine, carry + x * 0.3)
    expected = [x.cpu() * (0.1 * i) for i, x in enumerate(ours)]
    cuda.elements("scale", [(x, None, 0.1 * i) for i, x in enumerate(ours)], dtype)
    for mine, value in zip(ours, expected):
        assert_same_bits(mine, value)
    guarded()


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_add_rounds_as_torch_does(cuda, dtype, offset):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    sums, terms = [randn(n, n, wide) for n in LENGTHS], [randn(n, 7 + n, dtype) for n in LENGTHS]
    ours, guarded = placed(cuda, sums, offset)
    device_terms, _ = placed(cuda, terms, offset)
    cuda.elements("add", [(x, y, 0) for x, y in zip(ours, device_terms)], dtype)
    for mine, x, y in zip(ours, sums, terms):
        assert_same_bits(mine, x + y.to(wide))
    guarded()


@needs_torch_with_fma
@pytest.mark.parametrize("low", LOW, ids=["bf16", "f16"])
def test_every_low_precision_value_widens_as_in_torch(cuda, low):
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(low)
    wide = torch.empty(65536, device=cuda.device)
    cuda.elements("cast", [(wide, patterns.to(cuda.device), 0)], torch.float32, low)
    assert_same_bits(wide, patterns.float())


@needs_torch_with_fma
@pytest.mark.parametrize("low", LOW, ids=["bf16", "f16"])
def test_narrowing_rounds_as_in_torch(cuda, low):
    # Every upper half (sign, exponent, leading mantissa) with lower halves round the ties of both formats: normal and
    # subnormal numbers, overflow, infinities, NaNs.
    upper = np.arange(65536, dtype=np.uint32)[:, None] << 16
    lower = np.array([0, 1, 0xFFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x3001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    source = torch.from_numpy((upper | lower).ravel().view(np.float32))
    actual = torch.empty(source.numel(), dtype=low, device=cuda.device)
    cuda.elements("cast", [(actual, source.to(cuda.device), 0)], low, torch.float32)
    assert_same_bits(actual, source.to(low))


@needs_torch_with_fma
@pytest.mark.parametrize("low", LOW, ids=["bf16", "f16"])
def test_adopting_takes_over_what_was_written_and_nothing_else(cuda, low):
    master = randn(1003, 1)
    weights = master.to(low)
    weights[[0, 9, 1002]] = torch.tensor([2.0, float("nan"), float("inf")], dtype=low)
    expected = master.clone()
    expected[[0, 9, 1002]] = weights.float()[[0, 9, 1002]]
    ours = master.to(cuda.device)
    cuda.elements("adopt", [(ours, weights.to(cuda.device), 0)], low)
    assert_same_bits(ours, expected)


@pytest.mark.parametrize(
    "name, dtypes",
    [("scale", [torch.bfloat16]), ("add_scaled", [torch.float16]), ("adopt", [torch.float32]),
     ("cast", [torch.float64, torch.float32]), ("cast", [torch.float16, torch.bfloat16])],
)
def test_what_there_is_no_kernel_for_is_refused(cuda, name, dtypes):
    x = torch.zeros(4, dtype=torch.float64, device=cuda.device)
    with pytest.raises(RuntimeError, match="no CUDA kernel for these element types"):
        cuda.elements(name, [(x, x, 1.0)], *dtypes)
