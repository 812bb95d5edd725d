# `make demo` and `make test` need Python 3.11 or newer and nothing else.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
INSTALLED_MLX := $(VENV)/.installed-mlx
SEED ?= 0
RUN ?= runs/sudoku-6x6-seed-$(SEED)

.PHONY: install demo demo-mail test test-fast test-mlx faults check format docs bench clean

install: $(INSTALLED)

# The torch wheel is large; `sync` lets the first checkpoint not wait for it to reach the disk.
$(INSTALLED): pyproject.toml constraints/dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=...")'
	@echo 'Setting up $(VENV); this is done once and takes a minute or two.'
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints/dev.txt -e '.[dev]'
	@sync
	@touch $(INSTALLED)

# MLX is optional: its wheels need macOS 14 on Apple Silicon, or glibc 2.35 on Linux.
$(INSTALLED_MLX): $(INSTALLED)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints/dev.txt -e '.[dev,mlx]'
	@touch $(INSTALLED_MLX)

demo: install
	@$(BIN)/trm train sudoku-6x6 seed=$(SEED) --run $(RUN)
	@$(BIN)/trm predict $(RUN) --example 35 --steps

# Made-up mail: train, classify, explain, and one message that is unsure.
demo-mail: install
	@test -d data/sample-mail || $(BIN)/trm email samples data/sample-mail
	@test -d runs/sample-mail || $(BIN)/trm email train data/sample-mail --run runs/sample-mail
	$(BIN)/trm email classify runs/sample-mail data/sample-mail/travel/001.eml data/sample-mail/spam/002.eml
	$(BIN)/trm email explain runs/sample-mail data/sample-mail/spam/002.eml
	printf 'Subject: Hello\n\nSee you on Monday. Best regards\n' | $(BIN)/trm email classify runs/sample-mail -
	@echo 'An answer with a question mark is unsure; - is standard input.'

# Slow tests share the cores, four at a time because they often wait; those that measure time or fill memory
# have the machine for themselves.
test: test-fast
	$(BIN)/python -m pytest -m 'slow and not alone' -n 4 --dist worksteal
	$(BIN)/python -m pytest -m 'slow and alone'

test-fast: install
	$(BIN)/python -m pytest -m 'not slow' -n 2 --dist worksteal

# What `make test` skips without MLX. An import that fails must not skip it here, too.
test-mlx: $(INSTALLED_MLX)
	$(BIN)/python -c 'import mlx.core'
	$(BIN)/python -m pytest -m mlx -n 2 --dist worksteal

# Everything that is broken on purpose, in full: about an hour, and a table of tried and survived at the end.
faults: install
	TRM_FAULTS=full $(BIN)/python -m pytest tests/faults

# mypy reads the types of MLX.
check: $(INSTALLED_MLX)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: install
	$(BIN)/python tests/command_reference.py > docs/commands.md
	$(BIN)/python tests/key_reference.py > docs/keys.md

bench: install
	$(BIN)/python bench/sudoku_generation.py
	$(BIN)/python bench/training_step.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
