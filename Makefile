# What a person or CI does with this tree. `make help` is the contract.

PREFIX ?= /usr
DESTDIR ?=
PYTHON ?= python3
VENV ?= .venv
NODE ?= auto

# What distributions have in different places, and the folder with modules to install beside the program, if any.
ZSHDIR ?= $(PREFIX)/share/zsh/site-functions
LICENSEDIR ?= $(PREFIX)/share/doc/gpuprestart/licenses
BUNDLE ?=

VERSION := $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' gpuprestart/__init__.py)

libdir = $(DESTDIR)$(PREFIX)/lib/gpuprestart
sharedir = $(DESTDIR)$(PREFIX)/share
docdir = $(sharedir)/doc/gpuprestart
etcdir = $(DESTDIR)/etc/gpuprestart

.PHONY: help
help:  ## Say what can be made
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

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

.PHONY: test-packages
test-packages: setup  ## Build the packages, install them on fresh nodes, upgrade, remove, purge
	$(VENV)/bin/python -m pytest tests/packages

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

.PHONY: bench
bench: setup  ## Measure it beside what people use today, in ratios (about eight minutes)
	$(VENV)/bin/python -m tests.bench

.PHONY: documents
documents: setup  ## Draw the pictures in docs/ anew, and run its commands anew
	$(VENV)/bin/python -m tests.picture_of_decisions
	$(VENV)/bin/python -m tests.node.captures
	$(VENV)/bin/python -m tests.node.captures_history
	$(VENV)/bin/python -m tests.node.test_documents --renew

.PHONY: man
man: build/man/ready  ## Make the manual pages

build/man/ready: $(wildcard docs/man/*.md) packaging/man.py gpuprestart/__init__.py
	python3 packaging/man.py
	touch $@

.PHONY: format
format: setup  ## Lay out the code as the linter wants it
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

# The one list of what belongs to an installation; both packages are made of it.
.PHONY: install
install: man  ## Install program, manual, policy, completions, catalog, examples below DESTDIR and PREFIX
	install -d $(libdir)/gpuprestart/host $(DESTDIR)$(PREFIX)/bin
	install -m 644 gpuprestart/*.py $(libdir)/gpuprestart
	install -m 644 gpuprestart/host/*.py $(libdir)/gpuprestart/host
	install -m 755 packaging/before-removal $(libdir)
	sed 's|@LIBDIR@|$(PREFIX)/lib/gpuprestart|' packaging/launcher.in > $(DESTDIR)$(PREFIX)/bin/gpuprestart
	chmod 755 $(DESTDIR)$(PREFIX)/bin/gpuprestart
	# An administrator's own policy is never written over.
	test -e $(etcdir)/policy.toml || install -D -m 644 units/policy.toml $(etcdir)/policy.toml
	install -D -m 644 packaging/tmpfiles.d/gpuprestart.conf $(DESTDIR)$(PREFIX)/lib/tmpfiles.d/gpuprestart.conf
	install -D -m 644 units/gpuprestart.catalog $(DESTDIR)$(PREFIX)/lib/systemd/catalog/gpuprestart.catalog
	install -D -m 644 build/man/gpuprestart.8 $(sharedir)/man/man8/gpuprestart.8
	install -D -m 644 build/man/gpuprestart.toml.5 $(sharedir)/man/man5/gpuprestart.toml.5
	install -D -m 644 packaging/gpuprestart.schema.json $(sharedir)/gpuprestart/gpuprestart.schema.json
	install -D -m 644 packaging/completions/gpuprestart.bash $(sharedir)/bash-completion/completions/gpuprestart
	install -D -m 644 packaging/completions/gpuprestart.fish $(sharedir)/fish/vendor_completions.d/gpuprestart.fish
	install -D -m 644 packaging/completions/gpuprestart.zsh $(DESTDIR)$(ZSHDIR)/_gpuprestart
	install -D -m 644 LICENSE $(DESTDIR)$(LICENSEDIR)/LICENSE
	install -d $(docdir)
	install -m 644 README.md CHANGELOG.md $(docdir)
	cd units && find . -type f ! -name gpuprestart.catalog -exec install -D -m 644 {} $(abspath $(docdir))/examples/{} \;
ifneq ($(BUNDLE),)
	cd $(BUNDLE)/modules && find . -name '*.py' -exec install -D -m 644 {} $(abspath $(libdir))/{} \;
	install -m 644 $(BUNDLE)/licenses/* $(DESTDIR)$(LICENSEDIR)
endif

# Packages ------------------------------------------------------------------------------------------------------------

# A package built twice is the same package: all times in it are that of the entry in Debian's changelog, and what is in
# the source archive has no owner, no umask and no order of its own.
epoch = $(shell dpkg-parsechangelog -l packaging/debian/changelog -S Timestamp)
source = gpuprestart-$(VERSION)
# What the makers of packages read of the environment is set here, and nothing else.
clean_env = env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=$(abspath build) LC_ALL=C.UTF-8 SOURCE_DATE_EPOCH=$(epoch)
pinned = $(shell sed -n 's/^$(1)==\([^ ]*\) .*/\1/p' packaging/bundle.txt)

build/bundle/ready: $(VENV)/ready packaging/bundle.txt packaging/bundle.py
	rm -rf build/bundle build/wheels
	$(VENV)/bin/python -m pip download --quiet --no-deps --require-hashes --only-binary :all: --platform any \
	    --implementation py --abi none --python-version 3.9 --dest build/wheels --requirement packaging/bundle.txt
	$(VENV)/bin/python packaging/bundle.py build/wheels build/bundle
	touch $@

.PHONY: source
source: setup man build/bundle/ready
	tar --create --sort=name --format=gnu --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX --mtime=@$(epoch) \
	    --exclude=__pycache__ --exclude=ready --transform='s,^,$(source)/,' Makefile README.md CHANGELOG.md LICENSE \
	    gpuprestart units docs packaging build/man build/bundle | gzip --no-name > build/$(source).tar.gz

.PHONY: deb
deb: source  ## Build the package for Debian and Ubuntu into dist/
	rm -rf build/deb
	mkdir -p build/deb dist
	tar -C build/deb -xf build/$(source).tar.gz
	cp -a build/deb/$(source)/packaging/debian build/deb/$(source)
	# Nothing is compiled, so the compilers that Debian otherwise wants for any build need not be there.
	cd build/deb/$(source) && $(clean_env) dpkg-buildpackage --build=binary --no-sign --no-check-builddeps
	mv build/deb/*.deb dist

.PHONY: rpm
rpm: source  ## Build the package for Fedora, RHEL and their kin into dist/
	rm -rf build/rpm
	mkdir -p build/rpm dist
	sed 's/@VERSION@/$(VERSION)/; s/@NVIDIA_ML_PY@/$(call pinned,nvidia-ml-py)/; s/@TOMLI@/$(call pinned,tomli)/' \
	    packaging/rpm/gpuprestart.spec > build/rpm/gpuprestart.spec
	# Without --nodeps it would look for make and python3 in rpm's own records, which Debian does not keep.
	$(clean_env) rpmbuild --quiet -bb --nodeps --define '_topdir $(abspath build/rpm)' --define '_sourcedir $(abspath build)' \
	    --define 'source_date_epoch_from_changelog 0' --define 'use_source_date_epoch_as_buildtime 1' \
	    --define 'clamp_mtime_to_source_date_epoch 1' --define '_buildhost localhost' \
	    --define '_binary_payload w19.zstdio' build/rpm/gpuprestart.spec
	mv build/rpm/RPMS/noarch/*.rpm dist

.PHONY: dist
dist: setup  ## Build wheel and source distribution into dist/
	SOURCE_DATE_EPOCH=$(epoch) $(VENV)/bin/python -m build --outdir dist

.PHONY: clean
clean:  ## Remove what was built here; the node's root stays in the cache
	rm -rf $(VENV) build dist *.egg-info
