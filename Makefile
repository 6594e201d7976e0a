# `make` lists the targets. GNU make 3.81, which macOS has, is enough.
ifeq ($(origin PYTHON),command line)
# `make export PYTHON=python`: that one has what the target needs, and nothing is installed
BIN := $(shell $(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("scripts"))')
else
BIN := .venv/bin
PYTHON := $(BIN)/python
# Stamps: the package with what it needs, which is all that the demo takes, then all that developers need, and what one target alone needs
PACKAGE := .venv/.package
INSTALLED := .venv/.installed
BENCH := .venv/.bench
MUTANTS := .venv/.mutants
endif
MIN_PYTHON := $(shell sed -n 's/^min_python *= *//p' settings.ini)
PYTHONS := python3 $(addprefix python,$(shell sed -n 's/^pythons *= *//p' settings.ini)) python
USABLE := import sys, venv, ensurepip; sys.exit(sys.version_info < tuple(map(int, "$(MIN_PYTHON)".split("."))))
# One thread is fastest for models as small as the tests', and they never log to a server. What is compiled once is kept
TEST_ENV := OMP_NUM_THREADS=1 WANDB_MODE=offline MPLBACKEND=Agg PYTHONDONTWRITEBYTECODE=
# Pages need the pictures that Agg does not show
PAGE_ENV := OMP_NUM_THREADS=1 WANDB_MODE=offline
# Notebooks with cells that are `slow`, as a regular expression: `make pages` runs them whole, `make test` the others
WITH_SLOW := $(shell grep -rlE '"#\| *slow' --include='*.ipynb' nbs | paste -sd '|' -)
# By file, in the order of tests/conftest.py. Many cases wait for other processes, so four workers on two cores; the quick ones do not
BY_FILE := --dist loadfile --no-loadscope-reorder
.PHONY: help demo test cases bench pages snippets check versions mutants foreign clients docs export readme clean bump

help: ## list what can be made
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

demo: $(PACKAGE) ## see what fastaccum does, in a run of a minute on this machine
	@echo 'One small net, trained in six ways: about a minute on an idle processor'
	@$(BIN)/fastaccum-demo

# A machine with a GPU may have no network: `make test DEVICE=cuda` runs the numeric tests on it, in the checkout as it is,
# with the Python that has PyTorch and fastai there (PYTHON=...)
ifdef DEVICE
PYTHON := $(firstword $(wildcard $(PYTHON)) python3)
test:
	$(TEST_ENV) CUBLAS_WORKSPACE_CONFIG=:4096:8 DEVICE=$(DEVICE) $(PYTHON) -m pytest \
		$(shell $(PYTHON) -c 'import xdist' 2>/dev/null && echo --numprocesses 4 --dist loadfile)
bench:
	$(TEST_ENV) $(PYTHON) -m bench --device $(DEVICE)
else
test: $(INSTALLED) ## check that generated files are up to date, run the notebooks that have no slow cells, and one case of each test that is not slow (5 minutes); DEVICE=cuda: all numeric ones on a GPU
	@echo 'The quick checks: about 5 minutes on two cores'
	$(PYTHON) tools/export.py --check
	$(TEST_ENV) $(BIN)/nbdev-test --n-workers 2 --path-re '^(?!.*($(WITH_SLOW))$$)'
	QUICK=1 $(TEST_ENV) $(PYTHON) -m pytest -n 2 $(BY_FILE)

cases: $(INSTALLED) ## every case of every test (some 20 minutes); REST=1: what `make test` leaves out, as few as have each row of each list
	$(if $(REST),REST=1) $(TEST_ENV) $(PYTHON) -m pytest -n 4 $(BY_FILE)

bench: $(INSTALLED) $(BENCH) ## measure speed, memory, exactness, host syncs, growth and batch sizes (some twenty minutes); make the pages of it; DEVICE=cuda: on a GPU
	$(TEST_ENV) $(PYTHON) -m bench
	$(TEST_ENV) $(PYTHON) -m bench.batch_size
	$(TEST_ENV) $(PYTHON) -m bench.small_batches
	$(TEST_ENV) $(PYTHON) -m bench.growth
	$(TEST_ENV) $(PYTHON) -m bench.prices
	$(PAGE_ENV) $(BIN)/jupyter-execute --inplace nbs/benchmarks.ipynb nbs/coming_from.ipynb nbs/tutorials/how_exact.ipynb nbs/tutorials/find_batch_size.ipynb nbs/tutorials/when_not_to.ipynb nbs/tutorials/any_gpu.ipynb
	$(PYTHON) tools/export.py
endif

clients: .venv/clients/.installed ## do the clients of fastai and other libraries' losses, models and optimizers work with accumulation, and what other trainers' tests claim? (ten minutes); PACKAGES="tsai timm"
	$(TEST_ENV) .venv/clients/bin/python -W ignore -m bench.clients $(PACKAGES)
	$(PAGE_ENV) $(BIN)/jupyter-execute --inplace nbs/works_with.ipynb
	$(PYTHON) tools/export.py

pages: $(INSTALLED) ## run the notebooks that have slow cells, with all of them (ten minutes)
	$(TEST_ENV) $(BIN)/nbdev-test --n-workers 3 --flags slow --path-re '($(WITH_SLOW))$$'

snippets: $(INSTALLED) ## type the pages for users from top to bottom, as a reader would (ten minutes); REST=1: not those that do the same as notebooks
	$(if $(REST),REST=1) $(PYTHON) tools/snippets.py $(PAGES)

check: REST := 1
check: cases pages snippets ## what `make test` leaves out: these three with REST=1 (35 minutes)

versions: ## do the tests of `make test` pass with the lowest and newest versions that are promised, and each PyTorch between? 6 GB and five minutes each; ONLY="lowest newest"; INSTALL=1: make their environments
	$(or $(wildcard $(PYTHON)),python3) tools/versions.py $(if $(INSTALL),--install) $(ONLY)

mutants: $(INSTALLED) $(MUTANTS) ## do the tests notice a change of the code? Of all modules (many hours), or MODULES="scaler events"; MOST=20 mutants of each (an hour)
	$(TEST_ENV) $(if $(MOST),MOST=$(MOST)) $(PYTHON) tools/mutants.py $(MODULES)

foreign: $(INSTALLED) ## do the fits of fastai's notebooks come out the same in micro-batches and in smaller loader batches? (an hour); FASTAI=path of a checkout, else it is cloned
	$(TEST_ENV) $(PYTHON) tools/foreign.py $(FASTAI)

docs: $(INSTALLED) ## build the site in _docs from the notebooks (Python 3.11 or newer)
	$(PYTHON) tools/docs.py

export: $(INSTALLED) ## clean the notebooks; make the modules and README.md from them
	$(PYTHON) tools/export.py

readme: $(INSTALLED) ## make README.md from nbs/index.ipynb
	$(PYTHON) tools/readme.py

bump: $(INSTALLED) ## raise the version's last part, or PART=minor, PART=major
	$(PYTHON) tools/bump.py $(PART)

clean: ## remove what building, testing and the demo leave behind (.venv stays)
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .hypothesis _mutants _proc _docs _md demo
	find bench fastaccum nbs tests tools -type d \( -name __pycache__ -o -name .ipynb_checkpoints -o -name models \
		-o -name runs -o -name wandb \) -prune -exec rm -rf {} +

# The clients stand in an environment of their own, which sees what .venv has: some of them want older versions
.venv/clients/.installed: $(INSTALLED) bench/clients/requirements.txt
	$(PYTHON) -m venv .venv/clients
	.venv/clients/bin/python -c "import site; print(site.getsitepackages()[0])" | { read here; \
		$(PYTHON) -c "import site; print(site.getsitepackages()[0])" > $$here/base.pth; }
	.venv/clients/bin/python -m pip install -r bench/clients/requirements.txt
	@touch $@

ifdef PACKAGE
# The environment, with the first Python that will do; installed again when what it depends on has changed
$(PACKAGE): settings.ini setup.py pyproject.toml
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
		for p in $(PYTHONS); do if $$p -c '$(USABLE)' 2>/dev/null; then break; fi; p=; done; \
		if [ -z "$$p" ]; then echo 'Needs Python >= $(MIN_PYTHON) with its venv module (Debian, Ubuntu: the package python3-venv).' \
			'One at another place: make PYTHONS=/path/to/python3'; exit 1; fi; \
		echo "Making .venv with $$p: 6.5 GB and some minutes on Linux, where PyTorch comes with CUDA; far less on macOS"; $$p -m venv --clear .venv; }
	$(BIN)/python -m pip install -e .
	@touch $@

$(INSTALLED): $(PACKAGE)
	@echo 'Adding what developers need to .venv: .6 GB, some minutes'
	$(BIN)/python -m pip install -e '.[dev]'
	@touch $@

$(BENCH) $(MUTANTS): $(INSTALLED)
	$(BIN)/python -m pip install -e '.[$(@:.venv/.%=%)]'
	@touch $@
endif
