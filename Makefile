# The commands that CONTRIBUTING.md, .pre-commit-config.yaml and .ci/run use. `make` lists them.
# With REPORTS=DIR the tests leave their JUnit reports there; with STEPS=FILE each step adds its seconds to that file.
export REPORTS STEPS
export NO_MKDOCS_2_WARNING := 1 # MkDocs Material would advertise on each build
step := tools/step.sh
junit = $(if $(REPORTS),--junitxml=$(REPORTS)/$(1).xml)

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 24

setup: ## the package, editable, with everything that the other targets need; into the active environment
	@$(step) setup pip install -e '.[dev]' -c tests/constraints.txt

check: test lint types ## the usual checks, before each change lands

test: ## the usual tests
	@$(step) tests pytest -n auto $(call junit,tests)

lint: ## ruff
	@$(step) "ruff check" ruff check .
	@$(step) "ruff format" ruff format --check .

types: pyright ## pyright, strict

mypy: ## mypy, strict, as pre-commit runs it
	@$(step) mypy mypy

pyright:
	@$(step) pyright pyright

docs: ## links of Markdown files, and the commands and code blocks that they give
	@$(step) docs pytest -n auto tests/test_docs.py tests/test_code_blocks.py

site: ## the site, with the API reference, into site/; links that lead nowhere fail
	@$(step) site mkdocs build --quiet

site-serve: ## the site at http://127.0.0.1:8000, built again after each change
	@mkdocs serve --no-strict

check-long: test-slow bench site test-integrations test-peers ## the long suites

environments: ## other frameworks and clients, each with an environment; vLLM and llama-server; a browser: kept in a cache
	@$(step) "environments: browser" tools/integrations/install_browser.sh
	@$(step) "environments: integrations" tools/integrations/run.sh --install
	@$(step) "environments: servers" tools/peers/install.sh

test-slow: ## tests that are marked slow
	@$(step) "slow tests" pytest -m slow -n auto $(call junit,slow)

test-integrations: environments ## the tests of adapters and clients, each in its environment
	@$(step) integrations tools/integrations/run.sh

test-peers: environments ## the tests against vLLM and llama-server
	@$(step) peers pytest -m peers $(call junit,peers)

bench: ## a subset of the exactness benchmark; benchmarks/ has the others
	@$(step) exactness python benchmarks/exactness.py --prompts 2 --seeds 1 --max-tokens 48

.PHONY: help setup check test lint types mypy pyright docs site site-serve check-long environments test-slow test-integrations test-peers bench
