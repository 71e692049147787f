# make quickstart   train a small ViT on real images, from raw files to a table of results, in a few minutes
# make test         everything that must hold, on this machine
# make check        format, lint, types and the rule which room may import which
# make check-ratios whether something has become much slower, in a minute and a half: ratios, no times
# make bench-gpu    everything that is to be measured on a GPU, into docs/measurements; see below
#
# Each target sets up what it needs: an environment in .venv, from PYTHON (3.11 or later).

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python

.PHONY: quickstart test check check-ratios bench-gpu clean
.DELETE_ON_ERROR:

quickstart: $(VENV)/.installed
	$(RUN) tools/quickstart.py

test: $(VENV)/.installed
	$(RUN) -m pytest

check: $(VENV)/.installed
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports

# Also where python3 has torch, timm and DALI but no package index can be reached: then nothing is installed.
#   make bench-gpu DATA_ARCHIVE=ILSVRC2012.tar            make bench-gpu DATA_ORIGINAL=DATASET DATA_256=DATASET
# REPORT: where the report goes. PARTS: only these, for a sitting that is too short for all; the report grows.
REPORT := docs/measurements
BENCH_GPU := tools/bench_gpu.py --out $(REPORT) $(if $(DATA_ARCHIVE),--archive $(DATA_ARCHIVE)) \
	$(if $(DATA_ORIGINAL),--original $(DATA_ORIGINAL)) $(if $(DATA_400),--stored-400 $(DATA_400)) \
	$(if $(DATA_256),--stored-256 $(DATA_256)) $(if $(DATA_RAW),--raw-256 $(DATA_RAW)) $(if $(PARTS),--parts $(PARTS))

bench-gpu:
	@if $(PYTHON) -c 'import torch, timm, nvidia.dali, tyro, crc32c, tqdm, psutil, pytest' 2>/dev/null; \
	then PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON) $(BENCH_GPU); \
	else $(MAKE) $(VENV)/.installed && $(RUN) $(BENCH_GPU); fi

check-ratios: $(VENV)/.installed
	$(RUN) tools/check_ratios.py

# Nearly all of the download is torch with CUDA; it runs without a GPU as well.
$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "dali_train needs Python 3.11 or later, $(PYTHON) is " + sys.version.split()[0] + ": make PYTHON=python3.12")'
	@echo "setting up $(VENV): about 6 GB, a few minutes on a fast connection"
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info
