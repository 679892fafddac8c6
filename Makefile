# Everything here works on a fresh machine with Python 3.11 or later, a C++ compiler and make.
#
#   make run    install, fetch the default model, answer a prompt
#   make test   install, run the tests
#   make lint   formatting, lint, types, and the floors that may import each other
#   make bench  speed beside llama.cpp, and the time of a start-up
#
# PYTHON=python3.12 picks the interpreter, VENV=/some/folder where packages are installed.

PYTHON ?= python3
VENV ?= .venv
MODEL ?= smollm2-135m
PROMPT ?= Why is the sky blue? Answer in two sentences.

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check

# What the installed package is made from, besides Python files: those are used where they lie.
SOURCES := pyproject.toml CMakeLists.txt $(shell find src -path '*/csrc/*' -type f)

.DELETE_ON_ERROR:
.PHONY: help run test lint bench clean

help:
	@sed -n 's/^#   //p' Makefile

run: $(VENV)/.installed
	@$(BIN)/trimaran models pull $(MODEL)
	@echo
	@echo "> $(PROMPT)"
	@$(BIN)/trimaran generate --chat --model $(MODEL) --temperature 0 "$(PROMPT)"
	@echo
	@echo "Trimaran is installed in $(VENV). What to do next:"
	@echo "  $(BIN)/trimaran serve                             an OpenAI-compatible server, with a page"
	@echo "  $(BIN)/trimaran chat                              talk with the model"
	@echo "  $(BIN)/trimaran generate \"Once upon a time\"       continue a text"
	@echo "  $(BIN)/trimaran generate --input requests.jsonl   answer many requests at once"
	@echo "  $(BIN)/trimaran info                              CPU, instruction set, kernels"

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.installed-dev
	@status=0; \
	for check in "ruff check ." "ruff format --check ." mypy "lint-imports --no-logo"; do \
	    echo "$(BIN)/$$check"; \
	    $(BIN)/$$check || status=1; \
	done; \
	exit $$status

bench: $(VENV)/.installed-test
	$(BIN)/python bench/startup.py
	$(BIN)/python bench/cpu_peers.py --engines trimaran llama.cpp $(ARGS)

clean:
	rm -rf $(VENV) build dist

# ---------------------------------------------------------------------- installation

# The tools that build the package are installed beside it, not in an isolated environment of
# their own: then the C++ build is kept, and only what changed is compiled again.
$(VENV)/.tools: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "Trimaran needs Python 3.11 or later, and $(PYTHON) is older or missing;" \
	         "name another: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { \
	    echo "$(PYTHON) can't make a virtual environment; on Debian and Ubuntu install the" \
	         "package python3-venv" >&2; exit 1; }
	@command -v $${CXX:-c++} >/dev/null || \
	    echo "There is no C++ compiler, so the fast kernels will be missing; on Debian and" \
	         "Ubuntu install the package g++, then 'make clean' and once more." >&2
	$(PIP) install $$($(BIN)/python -c "import tomllib; \
	    print(*tomllib.load(open('pyproject.toml', 'rb'))['build-system']['requires'])") \
	    cmake ninja
	@touch $@

$(VENV)/.installed: $(VENV)/.tools $(SOURCES)
	$(PIP) install --no-build-isolation --editable .
	@touch $@

$(VENV)/.installed-%: $(VENV)/.tools $(SOURCES)
	$(PIP) install --no-build-isolation --editable '.[$*]'
	@touch $(VENV)/.installed $@
