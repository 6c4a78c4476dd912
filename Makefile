# make        everything needed to use moegguf from this folder
# make run    the bundled demo model, with a budget of half its experts
# make test   the tests          make lint   style and types
# make tsan, make asan           the native tests under a sanitizer
# make bench MODEL=FILE          what the README's table was measured with

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip --disable-pip-version-check --quiet
READY  := $(VENV)/.ready
SOURCES := pyproject.toml tools/vendor.py $(wildcard patches/* moegguf/native/*.cpp moegguf/native/*.h \
           moegguf/native/*/*.cpp moegguf/native/*/*.h) \
           moegguf/native/CMakeLists.txt
CMAKE_ARGS ?=

.PHONY: all run test lint tsan asan bench clean

all: $(READY)

$(VENV)/.tools: tools/check_machine.py
	@$(PYTHON) tools/check_machine.py
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@echo "installing build tools into $(VENV)"
	@$(PIP) install "scikit-build-core>=0.11,<2" "cmake>=3.25" ninja
	@touch $@

# The bindings without a library of their own: ours takes its place.
$(VENV)/.bindings: $(VENV)/.tools patches/UPSTREAM tools/vendor.py
	@echo "installing the llama.cpp bindings"
	@sdist=$$($(PY) tools/vendor.py --print-sdist) && \
	    CMAKE_ARGS="-DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF" $(PIP) install "$$sdist"
	@touch $@

$(READY): $(VENV)/.bindings $(SOURCES)
	@echo "building llama.cpp and the expert store (the first time takes some minutes)"
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" CMAKE_ARGS="$(CMAKE_ARGS)" \
	    $(PIP) install --no-build-isolation --editable ".[test]"
	@touch $@

run: $(READY)
	@$(VENV)/bin/moegguf run demo "What does moegguf do?" --expert-cache 50% --verbose

test: $(READY)
	@$(PY) -m pytest

$(VENV)/.lint: $(READY)
	@$(PIP) install $$($(PY) tools/check_machine.py --extra lint)
	@touch $@

lint: $(VENV)/.lint
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/clang-format --dry-run -Werror moegguf/native/*.cpp moegguf/native/*.h moegguf/native/*/*.cpp moegguf/native/*/*.h

tsan: $(READY)
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PY) tools/sanitize.py thread

asan: $(READY)
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PY) tools/sanitize.py address

bench: $(READY)
	@$(VENV)/bin/moegguf bench -m $(MODEL) --against mmap --memory-limit 4GiB -p 512 -n 32 -r 2

clean:
	rm -rf $(VENV) build/native build/tsan build/asan build/ubsan build/test-rpc
