# Every target makes .venv by itself; the second call finds it ready. SET=gpu takes the GPU's pinned set.
SHELL := bash
.DEFAULT_GOAL := help
SET ?= cpu
BIN := .venv/bin
ARGS ?=

.PHONY: help setup demo test test-fast lint clean

help: ## what there is to make
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | column -t -s $$'\t'

setup: ## .venv with everything pinned (SET=cpu or gpu)
	@scripts/setup.sh $(SET)

demo: setup ## the whole way on this machine: raise a drafter, serve, measure, improve, swap
	@$(BIN)/eaglenest demo $(ARGS)

test: lint ## lint and every test
	@$(BIN)/python -m pytest $(ARGS)

test-fast: setup ## the tests that start no service and no engine
	@$(BIN)/python -m pytest -m "not slow" $(ARGS)

lint: setup ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

clean: ## stop the services, remove .venv and caches; what runs/ holds stays
	@if [ -x $(BIN)/eaglenest ]; then $(BIN)/eaglenest down; fi
	@rm -rf .venv build dist *.egg-info platform/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
