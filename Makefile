# The one entry. `make demo` and `make test` work on a bare Debian 12, as root, with git, make and
# apt: each installs what is missing, first the packages, then everything from PyPI into .venv.

VENV := .venv
CONNECTORS_VENV := .venv-connectors
PINS := pyproject.toml setup.py constraints.txt make/venv.sh mount/fuse/compiled_reader.pyx

# Python to make .venv with; the default is the first of these that is 3.11 or later.
PYTHON ?=
export PYTHON

# A Python that has the connectors' packages; the default is one made for the purpose.
KVFS_CONNECTORS_PYTHON ?= $(CURDIR)/$(CONNECTORS_VENV)/bin/python
export KVFS_CONNECTORS_PYTHON

# Each server and command would compile all of kvfs again, a quarter of a second each time.
unexport PYTHONDONTWRITEBYTECODE

# Flags for the demo and for pytest, e.g. make demo DEMO="--bytes 4GiB", make test TESTS=tests/core.
DEMO ?=
# A file with proofs, which is waited for; without it all of them run behind this shell.
PROOF ?=
# The commit from which on `make mutants` looks at what changed.
SINCE ?= HEAD~1
# A connector whose own code the demo runs, on kvfs and on a plain directory: lmcache.
CONNECTOR ?=
TESTS ?=

.PHONY: help demo test test-connectors check proof mutants pins deb release lint connectors install-connectors system clean

help:
	@echo "make demo    a small pool beside a plain directory: checked, filled over, killed (two minutes)"
	@echo "make demo CONNECTOR=lmcache"
	@echo "             the same with LMCache's own code, beside a plain directory (a minute or two)"
	@echo "make test    lint, types and all tests but the connectors'"
	@echo "make test-connectors"
	@echo "             the tests that run real connectors; 1.2 GB of downloads the first time"
	@echo "make proof   the long proofs; their output goes to docs/dev/proof-*.txt"
	@echo "make mutants small edits in what changed since the last commit, and which no test finds"
	@echo "make pins    hashes of the versions in constraints.txt, after a change of one"
	@echo "make deb     a Debian package, dist/kvfs_VERSION_ARCH.deb (docs/install.md)"
	@echo "make release all that a release consists of, in bare roots; in dist/release (docs/dev/release.md)"
	@echo "make clean   remove what the others made in this folder"

ifeq ($(CONNECTOR),)
demo: $(VENV)/.runtime
	$(VENV)/bin/kvfs demo $(DEMO)
else
demo: $(VENV)/.runtime install-connectors
	$(VENV)/bin/python -m tests.connectors.demo $(CONNECTOR) $(DEMO)
endif

# Four workers on two cores: each waits for its server, or a device, half of the time. The tests are
# sorted already, the longest first (tests/conftest.py).
PYTEST := $(VENV)/bin/python -m make.second_look $(VENV)/bin/pytest -n 4 --dist loadscope --no-loadscope-reorder

test: lint
	$(PYTEST) --ignore=tests/connectors $(TESTS)

test-connectors: lint connectors
	$(PYTEST) tests/connectors

check: test

lint: $(VENV)/.test
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

deb:
	sh make/system.sh make/packages-runtime.txt make/packages-deb.txt
	sh make/deb.sh

release:
	sh make/system.sh make/packages-release.txt
	sh make/release.sh

proof: $(VENV)/.test connectors
	sh make/system.sh make/packages-proof.txt
	$(VENV)/bin/python -m make.proofs $(or $(PROOF),--background)

mutants: $(VENV)/.test
	$(VENV)/bin/python -m make.mutants --since=$(SINCE)

system:
	sh make/system.sh make/packages-runtime.txt make/packages-test.txt

$(VENV)/.runtime: $(PINS) make/packages-runtime.txt
	sh make/system.sh make/packages-runtime.txt
	sh make/venv.sh $(VENV) ""
	touch $@

# The packages that only tests need come while pip compiles: apt waits for the network and the disk.
$(VENV)/.test: $(PINS) make/packages-runtime.txt make/packages-test.txt
	sh make/system.sh make/packages-runtime.txt
	sh make/venv.sh $(VENV) "[test]" & venv=$$!; \
	sh make/system.sh make/packages-test.txt; system=$$?; \
	wait $$venv && [ $$system = 0 ]
	touch $(VENV)/.runtime $@

connectors: $(VENV)/.test install-connectors

# install.sh is done at once when nothing changed.
install-connectors: $(VENV)/.runtime
ifeq ($(KVFS_CONNECTORS_PYTHON),$(CURDIR)/$(CONNECTORS_VENV)/bin/python)
	@[ -f $(CONNECTORS_VENV)/connectors-installed ] || echo "Installing the connectors: 1.2 GB of downloads"
	PYTHON=$(VENV)/bin/python sh tests/connectors/install.sh $(CONNECTORS_VENV)
endif

pins: $(VENV)/.runtime
	PYTHON=$(VENV)/bin/python sh make/pins.sh

clean:
	rm -rf $(VENV) $(CONNECTORS_VENV) .kernels build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -f mount/fuse/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
