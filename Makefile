# make quickstart   installs and runs the first experiment
# make test         installs and runs the test suite
# make test-fast    without tests of programs and laws of single methods
# make test-thorough  the tests that make test leaves out
# make test-all     both
# make lint         ruff, mypy, and whether pages and flagfiles are up to date
# make pages        brings the pages of results, the table of settings and the
#                   stored flagfiles up to date
# make lock         writes requirements.lock anew
# make dist         builds the source archive and the wheel into dist/
# make clean        removes what these made, runs/ excepted
#
# Everything is installed into .venv here. Variables: PYTHON (an interpreter,
# 3.11 or newer), EXTRAS (more extras, as in EXTRAS=tfds,tensorboard),
# PYTEST_FLAGS, QUICKSTART_WORKDIR and QUICKSTART_FLAGS.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.SUFFIXES:
.DELETE_ON_ERROR:

VENV := .venv
# Programs in a virtual environment name it in their first line, which fails
# where the path has a space: so always through the interpreter.
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip --disable-pip-version-check -qq

PYTHON ?=
EXTRAS ?=
# A worker that dies ends the suite: xdist can wait for ever for its tests.
PYTEST_FLAGS ?= -n 2 --max-worker-restart=0 --dist loadgroup -q
QUICKSTART_WORKDIR ?= runs/quickstart
QUICKSTART_FLAGS ?=

comma := ,
empty :=
space := $(empty) $(empty)
# The file that says which extras are installed: $(call stamp,extra).
stamp = $(VENV)/installed-$(subst $(space),$(comma),$(strip core $(1) $(subst $(comma),$(space),$(EXTRAS))))

.PHONY: help quickstart test test-fast test-thorough test-all lint pages lock dist clean
help:
	@sed -n '/^#/!q;s/^# \{0,1\}//p' Makefile

quickstart: $(call stamp,)
	@$(RUN) experiments/digits_dirdir.py \
	  "--workdir=$(QUICKSTART_WORKDIR)" $(QUICKSTART_FLAGS)

test: $(call stamp,test)
	@$(RUN) -m pytest -m 'not thorough' $(PYTEST_FLAGS)

test-fast: $(call stamp,test)
	@$(RUN) -m pytest -m 'not (programs or laws or thorough)' $(PYTEST_FLAGS)

test-thorough: $(call stamp,test)
	@$(RUN) -m pytest -m thorough $(PYTEST_FLAGS)

test-all: $(call stamp,test)
	@$(RUN) -m pytest $(PYTEST_FLAGS)

lint: $(call stamp,dev)
	@$(RUN) -m ruff check .
	@$(RUN) -m mypy
	@$(RUN) -m fedjax_ssl tables \
	  --write_flagfiles=experiments/flagfiles --check
	@$(RUN) experiments/pages.py --check
	@$(RUN) .ci/check_docs.py
	@for script in .ci/run launch/*.sh; do bash -n "$$script"; done

pages: $(call stamp,)
	@$(RUN) -m fedjax_ssl tables --write_flagfiles=experiments/flagfiles
	@$(RUN) experiments/pages.py

# Meant for Linux on x86-64 with Python 3.11, the oldest one supported.
lock: | $(RUN)
	@echo "Resolving versions ..."
	@$(PIP) install --dry-run --ignore-installed --report $(VENV)/report.json \
	  -e '.[dev,tfds]'
	@{ sed '/^#/!d' requirements.lock; $(RUN) -c "$$LIST" \
	  $(VENV)/report.json; } > $(VENV)/lock
	@mv $(VENV)/lock requirements.lock
	@echo "requirements.lock: $$(grep -c == requirements.lock) packages"

define LIST
import json, sys
for item in sorted(
    (i['metadata'] for i in json.load(open(sys.argv[1]))['install']),
    key=lambda m: m['name'].lower()):
  if item['name'].replace('-', '_') != 'fedjax_ssl':
    print(item['name'] + '==' + item['version'].partition('+')[0])
endef
export LIST

dist: $(call stamp,dev)
	@rm -rf build dist
	@$(RUN) -m build --outdir dist . >/dev/null
	@ls dist

clean:
	@rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache \
	  .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The lock is known to resolve on the Pythons named here; newer ones get the
# newest versions that the ranges of setup.py admit.
$(VENV)/installed-%: setup.py requirements.lock | $(RUN)
	@echo "Installing fedjax_ssl [$*] into $(VENV), a minute or two ..."
	@extras='$*'; extras="$${extras#core}"; extras="$${extras#,}"; \
	lock=(-c requirements.lock); \
	$(RUN) -c 'import sys; sys.exit(sys.version_info >= (3, 14))' || lock=(); \
	$(PIP) install "$${lock[@]}" -e ".$${extras:+[$$extras]}"
	@touch '$@'

$(RUN):
	@ok='import sys; sys.exit(sys.version_info < (3, 11))'; \
	for python in $(PYTHON) $(if $(PYTHON),,python3 python3.13 python3.12 \
	    python3.11); do \
	  if "$$python" -c "$$ok" 2>/dev/null; then found="$$python"; break; fi; \
	done; \
	if [ -z "$${found:-}" ]; then \
	  echo "fedjax_ssl needs Python 3.11 or newer; found" \
	    "$$({ $(or $(PYTHON),python3) --version || echo none; } 2>&1 \
	    | tail -n 1). Name one: make PYTHON=/path/to/python3.12" >&2; \
	  exit 1; \
	fi; \
	echo "Making $(VENV) with $$("$$found" --version) ..."; \
	"$$found" -m venv $(VENV) || { rm -rf $(VENV); echo "No virtual" \
	  "environment. On Debian and Ubuntu: apt install python3-venv" >&2; \
	  exit 1; }
