# `make demo` and `make test` set everything up inside this checkout; only pip's cache lies outside.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# DeepSpeed and torch compile and cache in the home directory unless told otherwise.
export TORCH_EXTENSIONS_DIR ?= $(CURDIR)/.cache/torch_extensions
export TRITON_CACHE_DIR ?= $(CURDIR)/.cache/triton
export TORCHINDUCTOR_CACHE_DIR ?= $(CURDIR)/.cache/inductor
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: setup operators demo test test-cuda test-nvme crash-points chaos printed-commands test-versions lint types fuzz check docs figures prove-gpu pack-gpu clean

setup: $(VENV)/.installed

# torch goes first: packages that depend on it then keep the build that is there. TORCH_PIP_ARGS may choose another
# build, such as one without CUDA. Modules that a demo never imports are not compiled.
$(VENV)/.demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV) || { echo "On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	$(BIN)/pip install --quiet --no-compile $(TORCH_PIP_ARGS) --constraint constraints.txt torch numpy
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable '.[here]'
	touch $@

# The demo needs none of what the tests and the docs do.
$(VENV)/.installed: $(VENV)/.demo
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[here,dev,docs]'
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true # not all files of packages are Python of this version
	touch $@

# DeepSpeed's operator for communication on the CPU takes a compiler half a minute: once, and in no launch that is timed.
# Without a compiler DeepSpeed goes without it.
operators: $(VENV)/.demo
	@DS_ACCELERATOR=cpu $(BIN)/python -c "from deepspeed.accelerator import get_accelerator as a; \
		a().create_op_builder('ShareMemCommBuilder').load(verbose=False)" >/dev/null 2>&1 || \
		echo "DeepSpeed's CPU operator could not be built; gloo alone is used."

# The demo's ranks communicate through gloo: compiling DeepSpeed's operator takes longer than this search.
demo: $(VENV)/.demo
	rm -rf demo-output && mkdir -p demo-output
	CXX=none $(BIN)/optuna-dsat tune examples/gpt/train.py examples/gpt/ds_config.json \
		--study gpt-demo --storage sqlite:///demo-output/study.db --output-dir demo-output \
		--device-memory 900MiB --zero-stages 0 1 2 3 --max-trials 8 --confirm 1 \
		-- --deepspeed_config examples/gpt/ds_config.json

# Whole searches, other launches and those on clusters are a row each, one after the other in one of the three processes; the
# other tests are shared out. Three keep two cores busy, as launches mostly wait. TEST_ARGS="tests/launch" runs some.
test: setup operators .cache/environments/deepspeed-0.16.9/.installed
	$(BIN)/python -m pytest -n 3 --dist loadfile --durations=10 $(TEST_ARGS)

# Ends or fails the command at every statement, file and process of a study, and checks what comes of it: an hour or two. A
# sample is part of the tests. CRASH_ARGS="--all" tries each pass of a loop, too.
crash-points: setup
	$(BIN)/python -m tests.crash_points $(CRASH_ARGS)

# Kills tuners, warm parents, agents and ranks of real launches at random moments. CHAOS_ARGS="--kills 20 --seed 1".
chaos: setup operators
	$(BIN)/python -m benchmarks.chaos $(CHAOS_ARGS)

# The CUDA path end to end, on a machine without a GPU: tests/cuda, with a CUDA build of torch and a stand-in for the driver
# (CONTRIBUTING.md says what it downloads). `===` takes no build with a suffix, such as "+cpu" from a folder or an index
# that pip is told of. CUDA_VENV names an environment that is there already, in the place of one of this checkout.
CUDA_VENV := .venv-cuda
test-cuda: setup $(if $(filter .venv-cuda,$(CUDA_VENV)),.venv-cuda/.installed)
	OPTUNA_DSAT_CUDA_VENV=$(CUDA_VENV) $(BIN)/python -m pytest tests/cuda $(TEST_CUDA_ARGS)

.venv-cuda/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-cuda || { echo "On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	.venv-cuda/bin/pip install --quiet $(TORCH_CUDA_PIP_ARGS) $(shell sed -n 's/^torch==/torch===/p' constraints.txt) numpy
	.venv-cuda/bin/pip install --quiet --constraint constraints.txt --editable '.[here,huggingface,lightning]'
	.venv-cuda/bin/python -c "import torch; assert torch.version.cuda, 'this torch is no CUDA build: see CONTRIBUTING.md'"
	touch $@

# Builds DeepSpeed's operator for offload to NVMe (libaio-dev), which takes minutes, and runs its tests. `make test` does once it is built.
test-nvme: setup operators
	OPTUNA_DSAT_BUILD=all $(BIN)/python -m pytest tests/launch/test_nvme.py

# Tunes every example, and scripts of many kinds, and runs what is printed: it trains with the best config. A few are tests.
printed-commands: setup operators
	OPTUNA_DSAT_PRINTED_COMMANDS=all $(BIN)/python -m pytest tests/system/test_printed_commands.py

# Environments as scripts have them: torch, a DeepSpeed and what the examples import, and nothing of optuna-dsat.
DEEPSPEED_VERSIONS := 0.14.5 0.15.4 0.16.9 0.17.6 0.18.3 0.19.8
.cache/environments/deepspeed-%/.installed: constraints.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet $(TORCH_PIP_ARGS) $(shell sed -n 's/^torch==/torch==/p' constraints.txt) numpy setuptools ninja
	$(@D)/bin/pip install --quiet --no-build-isolation deepspeed==$* $(EXAMPLES_NEED)
	touch $@

# Every job of tests/system/test_versions.py with every version, and the table of docs/how-to/environments.md.
# The Trainer of transformers 4 asks for a warm-up of no steps, which DeepSpeed 0.19 refuses.
test-versions: EXAMPLES_NEED = $(if $(filter 0.19%,$*),transformers,'transformers<5') accelerate pyyaml
test-versions: setup operators $(DEEPSPEED_VERSIONS:%=.cache/environments/deepspeed-%/.installed)
	OPTUNA_DSAT_VERSIONS=all $(BIN)/python -m pytest tests/system/test_versions.py $(TEST_ARGS)
	$(BIN)/python -m docs.generate.versions

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy optuna_dsat samplers pruners tests

check: test lint types

# Inputs that nobody would type, thousands of them: each has to end in one line and a documented exit code.
FUZZ_EXAMPLES := 700
fuzz: setup
	OPTUNA_DSAT_FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) $(BIN)/python -m pytest tests/cli/test_fuzzed_input.py

# The documentation, in build/docs/index.html; no network is needed. A warning is an error.
docs: setup
	$(BIN)/python -m docs.generate.options
	$(BIN)/python -m docs.generate.config_keys
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/docs

# What docs/explanation/methods.md shows: searched and drawn anew.
figures: setup
	$(BIN)/python -m docs.generate.figures

# On a machine with a GPU: shows there, in parts of nine minutes, what only a GPU can show; again and again until it says
# that all is over. It takes the interpreter of this checkout where there is one; PYTHON chooses another. WHEELS is the
# folder that `make pack-gpu` filled, for a machine without a network. See docs/prove-gpu.md.
STATE := prove-gpu-output
WHEELS :=
PROVE_PYTHON = $(if $(filter file default,$(origin PYTHON)),$(firstword $(wildcard $(BIN)/python) $(PYTHON)),$(PYTHON))
prove-gpu:
	@$(PROVE_PYTHON) -m benchmarks.prove_gpu --state $(STATE) $(if $(WHEELS),--wheels $(WHEELS)) $(PROVE_ARGS)

pack-gpu:
	@$(PROVE_PYTHON) -m benchmarks.prove_gpu.pack --into $(or $(WHEELS),prove-gpu-wheels) $(PACK_ARGS)

clean:
	rm -rf $(VENV) .venv-cuda .cache demo-output prove-gpu-wheels build *.egg-info .pytest_cache .mypy_cache .ruff_cache
