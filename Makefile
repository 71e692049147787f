# make quickstart   train a small ViT on real images, from raw files to a table of results, in a few minutes
# make test         what would be broken first, in about five minutes on two cores
# make test-thorough  the other tests: more layouts, kills at random moments, damaged files, notebooks, trackers, examples
# make test-core    the first ring alone, without extras, verification and examples
# make test-fakecuda  the trainer on GPUs that do not exist: placement, waits, order and memory's lifetime, without kernels
# make test-oldest  what depends on versions, with the oldest Python and libraries that pyproject.toml allows
# make check        format, lint, types and the rule which room may import which
# make check-ratios whether something has become much slower, in a minute and a half: ratios, no times
# make bench-gpu    everything that is to be measured on a GPU, into docs/measurements; OPTIONS=--help lists its options
#
# Each target sets up what it needs: an environment in .venv, from PYTHON (3.11 or later). test-oldest has its own.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python

.PHONY: quickstart test test-thorough test-core test-fakecuda test-oldest check check-ratios bench-gpu clean
.DELETE_ON_ERROR:

# Environments are set up with `pip --no-compile`: what is imported, Python compiles at its first import, which takes less
# than half a minute, and all that is installed most of one. With this variable, as many images have it, it would do so at
# each start of a program, for six seconds.
unexport PYTHONDONTWRITEBYTECODE

quickstart: $(VENV)/.installed
	$(RUN) -m dali_train quickstart

# Tests wait for processes to start, stop or be missed: on two cores three files side by side leave them little idle.
# After the crash of one xdist's scheduler may begin its test again for ever, or leave others out: the run ends instead.
SIDE_BY_SIDE := -m pytest --numprocesses 3 --max-worker-restart 0

test: $(VENV)/.installed
	$(RUN) $(SIDE_BY_SIDE) -m "not thorough" -p tests.processor_time tests

test-thorough: $(VENV)/.thorough
	$(RUN) $(SIDE_BY_SIDE) -m thorough

test-core: $(VENV)/.installed
	$(RUN) $(SIDE_BY_SIDE) tests --ignore tests/extras --ignore tests/verification

test-fakecuda: $(VENV)/.installed
	$(RUN) $(SIDE_BY_SIDE) --dist worksteal tests/fakecuda

# Debian 12's own Python is 3.11.2, which differs from later ones in what it pickles; without it, PYTHON.
OLDEST := .venv-oldest
OLDEST_PYTHON ?= $(shell /usr/bin/python3.11 -c 'import ensurepip; print("/usr/bin/python3.11")' 2>/dev/null || echo $(PYTHON))
# What touches NumPy's numbers, serialisation, DALI, DDP and timm. The rest does not depend on versions, or `make test` sees it fail as well.
OLDEST_TESTS := $(addprefix tests/,sampling/test_sampling.py checkpoint/test_checkpoint.py training/test_optimizers.py training/test_training.py loading/test_pipeline.py \
	extras/test_dali_reader.py loading/test_augment.py extras/test_export.py)

test-oldest: $(OLDEST)/.installed
	$(OLDEST)/bin/python $(SIDE_BY_SIDE) $(OLDEST_TESTS)

# Each lower bound of a dependency becomes the version.
$(OLDEST)/.installed: pyproject.toml
	@echo "setting up $(OLDEST) from $(OLDEST_PYTHON): about 6 GB, a few minutes on a fast connection"
	$(OLDEST_PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' \
		| sed 's/>=/==/' >$(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint $(OLDEST)/constraints.txt \
		--editable . 'pytest>=8' 'pytest-xdist>=3.5' 'pytest-timeout>=2.3'
	@touch $@

check: $(VENV)/.installed
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports

# Also where PYTHON has torch, timm and DALI but no package index can be reached: then nothing is installed.
# OPTIONS: those of `python -m tools.bench.gpu --help`, such as OPTIONS='--archive ILSVRC2012.tar --minutes 15'.
bench-gpu:
	@if $(PYTHON) -c 'import torch, timm, nvidia.dali, crc32c, tqdm, psutil, pytest' 2>/dev/null; \
	then PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON) -m tools.bench.gpu $(OPTIONS); \
	else $(MAKE) $(VENV)/.installed && $(RUN) -m tools.bench.gpu $(OPTIONS); fi

check-ratios: $(VENV)/.installed
	$(RUN) -m tools.bench.check_ratios

# Nearly all of the download is torch with CUDA; it runs without a GPU as well.
$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "dali_train needs Python 3.11 or later, $(PYTHON) is " + sys.version.split()[0] + ": make PYTHON=python3.12")'
	@echo "setting up $(VENV): about 6 GB, a few minutes on a fast connection"
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-compile --editable '.[dev]'
	@touch $@

# Without Ray: its test starts a cluster and takes one to two minutes of two idle cores.
EXAMPLES := $(filter-out examples/ray/%,$(wildcard examples/*/requirements.txt))

$(VENV)/.thorough: $(VENV)/.installed $(EXAMPLES)
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-compile --editable '.[thorough]' $(addprefix --requirement ,$(EXAMPLES))
	@touch $@

clean:
	rm -rf $(VENV) $(OLDEST) build *.egg-info
