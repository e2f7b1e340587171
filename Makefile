# What a person or CI does with this tree. `make help` is the contract.

PREFIX ?= /usr
DESTDIR ?=
PYTHON ?= python3
VENV ?= .venv
NODE ?= auto

libdir = $(DESTDIR)$(PREFIX)/lib/gpuprestart
bindir = $(DESTDIR)$(PREFIX)/bin
docdir = $(DESTDIR)$(PREFIX)/share/doc/gpuprestart
catalogdir = $(DESTDIR)$(PREFIX)/lib/systemd/catalog

.PHONY: help
help:  ## Say what can be made
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

.PHONY: setup
setup: $(VENV)/ready  ## Install everything that tests and demo need (as root, on Debian or Ubuntu)

$(VENV)/ready: pyproject.toml tests/node/setup.sh
	tests/node/setup.sh
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --editable '.[test]'
	touch $@

.PHONY: test
test: setup  ## Run everything: linters, types, unit tests, node tests
	$(VENV)/bin/python -m pytest

.PHONY: unit
unit: setup  ## Run what needs no node; takes seconds
	$(VENV)/bin/python -m pytest -m 'not node'

.PHONY: cases
cases: setup  ## Run every case and list id, test and result
	$(VENV)/bin/python -m pytest --cases

.PHONY: demo
demo: setup  ## Watch three starts on the simulated node (NODE=none: in a chroot)
	$(VENV)/bin/python -m tests.node.demo --node=$(NODE)

# What the properties are held against; once they have passed, they are not tried again until any of it changes.
PROPERTIES = gpuprestart/*.py gpuprestart/host/*.py tests/conftest.py tests/unit/*.py

.PHONY: soak
soak: setup  ## Try the properties at length and 1000 starts in a row; an hour at most, the next call goes on from there
	@passed=build/soak/properties-$$(cat $(PROPERTIES) | sha256sum | cut -c1-16); test -e $$passed || { \
	    $(VENV)/bin/python -m pytest -m hypothesis --hypothesis-profile=long && mkdir -p build/soak && touch $$passed; }
	$(VENV)/bin/python -m tests.node.soak

.PHONY: man
man:  ## Make the manual pages
	python3 packaging/man.py

.PHONY: format
format: setup  ## Lay out the code as the linter wants it
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

.PHONY: install
install:  ## Install program, launcher, catalog, units and examples below DESTDIR and PREFIX
	install -d $(libdir)/gpuprestart/host $(bindir) $(catalogdir) $(docdir)/examples
	install -m 644 gpuprestart/*.py $(libdir)/gpuprestart
	install -m 644 gpuprestart/host/*.py $(libdir)/gpuprestart/host
	sed 's|@LIBDIR@|$(PREFIX)/lib/gpuprestart|' packaging/launcher.in > $(bindir)/gpuprestart
	chmod 755 $(bindir)/gpuprestart
	install -m 644 units/gpuprestart.catalog $(catalogdir)
	install -m 644 README.md LICENSE CHANGELOG.md $(docdir)
	cd units && find . -type f ! -name gpuprestart.catalog -exec install -D -m 644 {} $(abspath $(docdir))/examples/{} \;

.PHONY: clean
clean:  ## Remove what was built here; the node's root stays in the cache
	rm -rf $(VENV) build dist *.egg-info
