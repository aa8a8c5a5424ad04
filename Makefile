# make train, make test: each sets up what it needs first, and a second run repeats none of that.
#
# The active python3 is used when its environment already has torch 2.10 or newer; otherwise .venv is made, with a
# pinned torch. Options:
#   make train NPROC=4 ARGS="--steps 100 --impl ddp"
#   make test ARGS="-k window -x"
#   make sanitize SANITIZE_TESTS=tests/test_engine.py

TORCH_PIN = torch==2.13.0
NPROC ?= 2
ARGS ?=
# Those that reach every file of the extension, and little else: instrumented code is slow. Tests that build C programs
# of their own (tests/test_*_c.py) choose their own sanitizers.
SANITIZE_TESTS ?= tests/test_window.py tests/test_optimizer.py tests/test_wire.py tests/test_bits.py
SOURCES := $(sort $(shell find csrc cuda -name '*.[ch]' -o -name '*.cpp' -o -name '*.cu' -o -name '*.py'))

FITTING_TORCH := from importlib.metadata import version; \
	assert tuple(map(int, version('torch').split('.')[:2])) >= (2, 10)
ifeq ($(shell python3 -c "$(FITTING_TORCH)" 2>/dev/null && echo yes),yes)
ENVIRONMENT := $(shell python3 -c "import sys; print(sys.prefix)")
PYTHON := python3
else
ENVIRONMENT := .venv
PYTHON := .venv/bin/python
endif

# In the environment, so that it goes when the environment goes. It names the checkout that was installed last.
INSTALLED := $(ENVIRONMENT)/.shardstep-installed

# torchrun would set it too, with a warning: each rank computes on one core.
export OMP_NUM_THREADS ?= 1

BENCHMARKS := compare transport update scale
QUICK ?= --quick

.PHONY: train test test-gpu cuda bench soak install lint sanitize clean

train: $(INSTALLED)
	$(PYTHON) -m torch.distributed.run --standalone --nproc-per-node $(NPROC) examples/train_text.py $(ARGS)

test: $(INSTALLED)
	$(PYTHON) -m pytest tests $(ARGS)

# What runs on a GPU only; without one these tests are skipped, and counted.
test-gpu: $(INSTALLED)
	$(PYTHON) -m pytest tests -m gpu $(ARGS)

# The CUDA kernels by themselves, for every architecture, into build/cuda-werror. Needs nvcc, no GPU and no torch.
cuda:
	python3 cuda/build_cuda.py --werror $(ARGS)

# Two minutes each; all their options: python benchmarks/compare.py --help. Results go to build/benchmarks. The whole grid,
# about 40 minutes, into the README: make bench QUICK= ARGS="--out benchmarks/results" && python benchmarks/report.py --write
bench: $(INSTALLED)
	set -e; for name in $(BENCHMARKS); do $(PYTHON) benchmarks/$$name.py $(QUICK) $(ARGS); done

# Thirty random kills of a training run, which has to end as if there had been none. About five minutes on two cores.
soak: $(INSTALLED)
	$(PYTHON) tests/soak.py $(ARGS)

install: $(INSTALLED)

.venv/bin/python:
	python3 -m venv .venv
	.venv/bin/python -m pip install "$(TORCH_PIN)"

ifneq ($(shell cat $(INSTALLED) 2>/dev/null),$(CURDIR))
.PHONY: $(INSTALLED)
endif
$(INSTALLED): setup.py pyproject.toml $(SOURCES) | $(filter .venv/bin/python,$(PYTHON))
	$(PYTHON) -m pip install "setuptools>=77"
	$(PYTHON) -m pip install --no-build-isolation --editable ".[test]"
	echo $(CURDIR) > $@

# The tests of the extension again, with an instrumented build that the environment never sees. The sanitizer's run
# time has to come before Python; libstdc++ beside it, or exceptions cross it unseen. Importing torch alone leaks.
# Instrumented code draws warnings that the code as it ships does not deserve.
sanitize: $(INSTALLED)
	rm -rf build/sanitize
	SANITIZE=address SHARDSTEP_WERROR=0 $(PYTHON) setup.py --quiet build --build-lib build/sanitize
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONPATH=build/sanitize \
		$(PYTHON) -m pytest $(SANITIZE_TESTS) $(ARGS)

lint: $(INSTALLED)
	$(PYTHON) -m pip install --quiet "ruff>=0.9"
	$(PYTHON) -m ruff check .
	SHARDSTEP_WERROR=1 $(PYTHON) setup.py --quiet build --build-lib build/lint

clean:
	rm -rf build python/shardstep.egg-info
	find python -name '_C*.so' -o -name '_cuda.so' | xargs rm -f
	rm -f $(INSTALLED)
