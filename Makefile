# The two commands: `make serve` and `make test`. Both install what they need first.
PYTHON ?= python3
# Where no GPU is present, PyTorch's CPU wheels save gigabytes: pass their index here if your pip
# does not find them by itself, e.g. `make serve TORCH_INDEX=<the CPU index on PyTorch's site>`.
TORCH_INDEX ?=
ARGS ?=
# Test processes side by side; each works on small tensors with one thread.
WORKERS ?= 2
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python
BIN := .venv/bin

.PHONY: install native clients serve test test-optimized lint format clean

install: native
	@$(BIN)/specserve pull demo

.venv/.installed: requirements.lock pyproject.toml hatch_build.py
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if (3, 11) <= v[:2] <= (3, 13) else f"specserve needs Python 3.11 to 3.13, this is {v.major}.{v.minor}: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

# Compiles what changed of the native kernels; where that fails, the torch path serves and says so.
native: .venv/.installed
	-@$(BIN)/python kernels/specserve_kernels/build_native.py

.venv/.clients: .venv/.installed tests/clients/requirements.lock tests/clients/older.lock tests/clients/package-lock.json
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/clients/requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .venv/older_clients -r tests/clients/older.lock
	-@if command -v npm >/dev/null; then npm ci --silent --ignore-scripts --no-audit --no-fund --prefix tests/clients; fi
	@touch $@

# Clients that tests talk to a server with: where one is missing, its tests are skipped and say so.
clients: .venv/.clients

serve: install
	$(BIN)/specserve serve $(ARGS)

# Without the demo model its tests are skipped and say so, so that a failed pull stops nothing here.
test: native clients
	-@$(BIN)/specserve pull demo
	$(PYTEST) -m pytest -n $(WORKERS) $(ARGS)

test-optimized: native clients
	-@$(BIN)/specserve pull demo
	$(PYTEST) -O -m pytest -n $(WORKERS) $(ARGS)

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format:
	$(BIN)/ruff format . && $(BIN)/ruff check --fix .

clean:
	rm -rf .venv tests/clients/node_modules dist build kernels/specserve_kernels/_native
