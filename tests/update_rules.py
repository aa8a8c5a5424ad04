"""What the tests of the CPU kernels and of the CUDA kernels share."""

import pytest
import torch

# torch's own kernels use FMA, and its vectorised casts have these NaN bits, only with AVX2 or AVX-512.
needs_torch_with_fma = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="torch runs without FMA here"
)

SGD_OPTIONS = {
    "plain": dict(lr=0.1),
    "decay": dict(lr=0.1, weight_decay=0.01),
    "momentum": dict(lr=0.1, momentum=0.9),
    "dampening": dict(lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.1),
    "nesterov": dict(lr=0.03, momentum=0.8, nesterov=True),
    "nesterov_decay": dict(lr=0.03, momentum=0.8, nesterov=True, weight_decay=0.01),
    "maximize": dict(lr=0.1, momentum=0.9, weight_decay=0.01, maximize=True),
}
