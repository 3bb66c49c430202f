# Needs python3 >= 3.11 with venv, make, and g++ with Python's headers (torch.compile builds C++).
# Everything else is installed into .venv, at the versions of constraints.txt.

PYTHON ?= python3
JOBS ?= 2

BIN := .venv/bin
READY := .venv/.ready
LOWEST_READY := .venv-lowest/.ready

# The lowest versions that pyproject.toml claims, where they are tested.
# huggingface_hub is not claimed: the lowest transformers needs an older one.
LOWEST := transformers==5.17.0 huggingface_hub==1.33.0

# One thread a worker, and no network: tests make their own small models.
TESTING := HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1

.PHONY: demo test lint format bench test-lowest clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --upgrade -c constraints.txt pip
	$(BIN)/python -m pip install -c constraints.txt --build-constraint constraints.txt -e '.[dev]'
	touch $@

demo: $(READY)
	$(BIN)/python examples/demo.py

# Two runs make the whole suite: first what must run by itself (the house rules, and whatever
# measures time, memory or a process), then everything else in parallel, one file to a worker.
test: lint
	$(TESTING) $(BIN)/pytest tests/test_house.py tests -m alone
	$(TESTING) $(BIN)/pytest -n $(JOBS) --dist loadfile -m "not alone"

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(READY)
	$(BIN)/python benchmarks/bench_quantize.py

test-lowest: $(LOWEST_READY)
	$(TESTING) .venv-lowest/bin/pytest -n $(JOBS) --dist loadfile tests/hf tests/calibrate tests/tune

$(LOWEST_READY): pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv .venv-lowest
	{ for pin in $(LOWEST); do echo "$$pin"; done; \
	  grep -v $(foreach pin,$(LOWEST),-e '^$(firstword $(subst ==, ,$(pin)))==') constraints.txt; \
	} > .venv-lowest/constraints.txt
	.venv-lowest/bin/python -m pip install --upgrade -c .venv-lowest/constraints.txt pip
	.venv-lowest/bin/python -m pip install -c .venv-lowest/constraints.txt \
	  --build-constraint constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv .venv-lowest .pytest_cache .ruff_cache .hypothesis build dist
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
