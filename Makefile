# `make demo` and `make test` need Python (3.11 or newer), a C compiler and nothing else.
# PYTHON chooses the interpreter; each has an environment of its own. JOBS: how many processes run the tests.
ifndef PYTHON
PYTHON := $(shell for p in python3.11 python3; do if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo $$p; break; fi; done)
VENV := .venv
else
VENV := .venv-$(shell $(PYTHON) -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
endif
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

SOURCES := pyproject.toml setup.py $(wildcard ceedtap/native/*.c ceedtap/native/*.h) ceedtap/native/build.py

.PHONY: demo test bench notebooks lint docs fuzz clean

demo: $(VENV)/ready
	$(BIN)/ceedtap demo

test: $(VENV)/ready-test
	$(BIN)/python -m pytest -n $(or $(JOBS),2) --dist loadfile $(PYTEST_ARGS)

bench: $(VENV)/ready
	for script in benchmarks/bench_*.py; do $(BIN)/python $$script || exit 1; done

# Executes the notebooks in place, or those named by NOTEBOOKS.
notebooks: $(VENV)/ready-test
	$(BIN)/python notebooks/execute.py $(NOTEBOOKS)

# Long runs; a short sample of each is among the tests. INPUTS chooses how long.
fuzz: $(VENV)/ready-test
	$(BIN)/python tests/fuzz/fuzz_protocol.py --inputs $(or $(INPUTS),1000000)
	$(BIN)/python tests/fuzz/fuzz_ceed.py
	$(BIN)/python tests/fuzz/fuzz_codegen.py
	$(BIN)/python tests/fuzz/fuzz_recording.py
	$(BIN)/python tests/fuzz/fuzz_taps.py --programs 10000

lint: $(VENV)/ready-lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The documentation site, in site/. Warnings are errors. The code is read, not imported, so nothing is built for it.
docs: $(VENV)/ready-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "-- open site/index.html"

clean:
	rm -rf .venv .venv-* build site dist *.egg-info ceedtap/native/_native.c ceedtap/native/_native*.so
	find . -name __pycache__ -prune -exec rm -rf {} +

# The requirements of one extra of pyproject.toml. Installing the extra through the package would build the package again.
extra = $$($(BIN)/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['$(1)'])")

$(VENV)/made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "ceedtap needs Python 3.11 or newer, got '$(PYTHON)'; use make $(MAKECMDGOALS) PYTHON=/path/to/python3"; exit 1; }
	@echo "-- making an environment in $(VENV)"
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/ready: $(VENV)/made $(SOURCES)
	@echo "-- installing ceedtap and building its native extension (the first time this downloads about 300 MB)"
	$(BIN)/pip install --quiet --editable '.[mesh,plot]'
	$(BIN)/ceedtap install-libceed
	@touch $@

$(VENV)/ready-test: $(VENV)/ready
	@echo "-- installing what the tests need"
	$(BIN)/pip install --quiet $(call extra,test)
	@touch $@

$(VENV)/ready-lint: $(VENV)/ready-test
	$(BIN)/pip install --quiet $(call extra,lint)
	@touch $@

$(VENV)/ready-docs: $(VENV)/made pyproject.toml
	@echo "-- installing what the documentation needs"
	$(BIN)/pip install --quiet $(call extra,docs)
	@touch $@
