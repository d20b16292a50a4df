# Contributor commands. Everything runs in .venv, made by the first target that needs it.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: demo test lint fast faults bench clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --force-reinstall -c constraints.txt docstring_parser_fork  # pydoclint's; shares its folder with docstring_parser
	touch $(STAMP)

demo: $(STAMP)  ## shard a toy model with torch's own DCP, export it, print the report's path
	$(BIN)/shardwright demo

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pydoclint flows tasks validators reports
	$(BIN)/codespell flows tasks validators reports tests docs README.md CHANGELOG.md Makefile

fast: $(STAMP)  ## the tests that take seconds
	$(BIN)/python -m pytest -q -n 2 --durations=15 -m "not slow and not cases"

test: lint fast  ## everything: lint, fast tests, then slow ones and the recorded cases
	$(BIN)/python -m pytest -q -n 3 --durations=15 -m "slow or cases"

faults: $(STAMP)  ## plant every fault; what evidence shows which, printed and kept in docs/
	$(BIN)/python -m tests.faults.table
	$(BIN)/python -m tests.faults.evidence

bench: $(STAMP)  ## ratios to cp; GB=16 for another size
	$(BIN)/python -m tests.benchmarks.export --gb $(or $(GB),4)
	$(BIN)/python -m tests.benchmarks.quantize --gb $(or $(GB),4)

clean:
	rm -rf .venv runs demo build *.egg-info
