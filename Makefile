# Every target works on a fresh clone: it first builds .venv from the pins, and reuses it while they stay the same.
PYTHON ?= python3
BIN    := .venv/bin
READY  := .venv/ready-$(shell cksum < requirements.txt | cut -d' ' -f1)

.PHONY: venv demo test test-slow lint format docs clean
venv: $(READY)

$(READY): requirements.txt
	$(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

demo: venv          ## train the small Stable Diffusion 3 pipeline on five rewards
	$(BIN)/python integrations/diffusion_nft/train.py --config tiny

test: venv          ## everything but the slow checks, on two cores
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow"

test-slow: venv     ## the slow checks alone
	$(BIN)/python -m pytest -m slow

lint: venv          ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: venv        ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: venv          ## build the documentation into site/
	$(BIN)/mkdocs build --strict

clean:              ## remove what make built; runs/ stays
	rm -rf .venv site dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
