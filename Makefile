# What a newcomer needs: `make demo` and `make test`. `make help` lists the rest.
#
# Everything is installed into .venv (PYTHON=python3.12 chooses the interpreter when it is made).
# Paths below are relative, so that the folder's own name may hold spaces.

PYTHON ?= python3
JOBS ?= $(shell nproc)

# Programs of .venv come first. Not for making .venv itself.
IN_VENV := PATH="$(CURDIR)/.venv/bin:$$PATH"
# One pip at a time, also under `make -j`.
INSTALL := flock .venv/pip.lock .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
DONE := .venv/done

# Thousands of ranks need not compile the same modules, so their bytecode is kept.
PYTEST := env -u PYTHONDONTWRITEBYTECODE python -m pytest
# A file's tests go to one worker, in the order of the folders: tests/unit, whose files are quick, comes last.
SPREAD = -n $$(($(JOBS) + 2)) --dist loadfile --no-loadscope-reorder --ignore=tests/clusters

CSRC := $(shell find csrc)
CPP_TESTS := $(shell find tests/cpp tests/fakes)
CPP_FILES := $(shell find csrc tests/cpp tests/fakes -name '*.h' -o -name '*.cc' -o -name '*.inc')

# A rank of the demos has one thread, alone or not, as if each core were a device.
ONE_THREAD := OMP_NUM_THREADS=1 TF_NUM_INTRAOP_THREADS=1 TF_NUM_INTEROP_THREADS=1 TF_CPP_MIN_LOG_LEVEL=2
KERAS_DEMO := --width 4 --epochs 10

.PHONY: help demo demo-keras demo-elastic style test test-rest test-all run-cpp run-quick run-clusters run-long \
        test-tf-versions lint tidy sanitize tsan asan bench soak docs docs-site ptx wheel install dev clean

help:
	@echo 'make demo              train on handwritten digits with one rank, then with two'
	@echo 'make demo-keras        the same with Keras on TensorFlow'
	@echo 'make demo-elastic      the first one while ranks are killed and join'
	@echo 'make test              the quick tests: all of C++, and Python without what takes long'
	@echo 'make test-all          every test: those, the long ones, and those on Slurm, Kubernetes, Ray and Spark'
	@echo 'make test-tf-versions  the TensorFlow tests on older releases, from a wheel'
	@echo 'make style             formats, ruff, types, spelling, layers of Python'
	@echo 'make lint              that, other rules, and thread-safety annotations'
	@echo 'make sanitize          the C++ tests under ThreadSanitizer and AddressSanitizer + UBSan'
	@echo 'make soak              elastic training for minutes: kills and chaos'
	@echo 'make bench             benchmarks (JSON lines)'
	@echo 'make docs              write docs/api, docs/knobs.md and docs/options.md'
	@echo 'make docs-site         build the site from the pages: build/site/html/index.html'
	@echo 'make ptx               compile the GPU kernels (csrc/gpu/*.cu) and assemble them'
	@echo 'make wheel             build a wheel in build/wheel, and try it in an empty environment'
	@echo 'make dev               install everything that the above need into .venv'
	@echo 'make clean             remove what was built; .venv stays'

demo: $(DONE)/core $(DONE)/demo
	$(IN_VENV) $(ONE_THREAD) python examples/torch_digits.py
	$(IN_VENV) $(ONE_THREAD) hvdlite-run --report demo-output/report.html -np 2 python examples/torch_digits.py
	@echo
	@echo 'demo-output/loss.png     two ranks learn what one learns; how well, and how fast'
	@echo 'demo-output/report.html  where the time of each rank went; open it in a browser'
	@echo 'examples/torch_digits.py the script: look for the lines with hvd'

demo-keras: $(DONE)/core $(DONE)/demo-keras
	$(IN_VENV) $(ONE_THREAD) python examples/keras_digits.py $(KERAS_DEMO)
	$(IN_VENV) $(ONE_THREAD) hvdlite-run -np 2 python examples/keras_digits.py $(KERAS_DEMO)

demo-elastic: $(DONE)/core $(DONE)/demo
	$(IN_VENV) python examples/elastic_demo.py

# What the tests need is compiled and installed side by side, where Python's packages are not there yet.
test: $(DONE)/tools
	+@$(MAKE) -j 2 $(DONE)/core $(DONE)/test build/cpp/hvdlite_tests
	+@$(MAKE) -j 2 --keep-going run-cpp run-quick

# What `make test` leaves: the tests marked `long`, and those of cluster systems.
test-rest: $(DONE)/core $(DONE)/test $(DONE)/test-clusters build/cpp/hvdlite_tests
	+@$(MAKE) -j 2 --keep-going run-clusters run-long

test-all: test
	+@$(MAKE) test-rest

# C++ runs beside Python, and the cluster systems, which mostly wait, beside the long tests. Of the
# first of each pair the last line is shown, or all of it if it fails.

run-cpp:
	@build/cpp/hvdlite_tests >build/cpp_tests.log 2>&1 || { cat build/cpp_tests.log; false; }
	@echo "C++: $$(tail -n 1 build/cpp_tests.log)"

run-clusters:
	@$(IN_VENV) $(PYTEST) tests/clusters >build/clusters.log 2>&1 </dev/null || { cat build/clusters.log; false; }
	@echo "cluster systems: $$(tail -n 1 build/clusters.log)"

run-quick:
	$(IN_VENV) $(PYTEST) $(SPREAD) -m 'not long' tests </dev/null

run-long:
	$(IN_VENV) $(PYTEST) $(SPREAD) -m long tests </dev/null

test-tf-versions: $(DONE)/dev
	$(IN_VENV) python tests/tensorflow_versions.py

# What takes seconds.
style: $(DONE)/core $(DONE)/dev
	$(IN_VENV) ruff check .
	$(IN_VENV) ruff format --check .
	$(IN_VENV) mypy
	$(IN_VENV) clang-format --dry-run --Werror $(CPP_FILES)
	$(IN_VENV) codespell
	$(IN_VENV) lint-imports --no-cache --no-logo

lint: style tidy
	$(IN_VENV) python -m pytest -q tests/unit/test_architecture_rules.py tests/unit/test_stub.py

# The checks of .clang-tidy, and Clang's -Wthread-safety over the annotations of base/mutex.h.
tidy: build/cpp/hvdlite_tests $(DONE)/dev
	$(IN_VENV) run-clang-tidy.py -quiet -p build/cpp -j $(JOBS) '^(?!.*/_core\.dir/)'

sanitize: tsan asan

tsan: build/tsan/hvdlite_tests
	TSAN_OPTIONS="exitcode=66 second_deadlock_stack=1 $$TSAN_OPTIONS" $<

asan: build/asan/hvdlite_tests
	ASAN_OPTIONS="detect_leaks=1 $$ASAN_OPTIONS" UBSAN_OPTIONS="print_stacktrace=1" $<

bench: $(DONE)/core $(DONE)/test
	$(IN_VENV) python benchmarks/allreduce.py
	$(IN_VENV) python benchmarks/latency.py
	$(IN_VENV) python benchmarks/peers.py
	$(IN_VENV) python benchmarks/step.py
	$(IN_VENV) python benchmarks/c10d.py
	$(IN_VENV) python benchmarks/elastic.py
	$(IN_VENV) python benchmarks/tensorflow_ops.py
	$(IN_VENV) python benchmarks/overhead.py

soak: $(DONE)/core
	$(IN_VENV) python tests/elastic/soak.py
	$(IN_VENV) python tests/parallel/torch/modes/virtual_proof.py

docs: $(DONE)/core $(DONE)/docs
	$(IN_VENV) python tools/settings_doc.py
	$(IN_VENV) python tools/api_doc.py

# Any warning is an error. The environment is made anew: a page also depends on the names in docs/api.
docs-site: $(DONE)/docs
	$(IN_VENV) sphinx-build -q -E -W --keep-going -c tools/docs_site -d build/site/doctrees . build/site/html

ptx: $(DONE)/test $(DONE)/ptx
	$(IN_VENV) python tools/make_ptx.py
	$(IN_VENV) python -m pytest -q tests/unit/test_ptx.py

# It needs no framework, so that `make wheel PYTHON=python3.13` is quick in a fresh clone.
wheel: $(DONE)/tools
	$(INSTALL) build
	rm -rf build/wheel
	$(IN_VENV) python tests/wheel_smoke.py

dev: $(DONE)/core $(DONE)/dev

clean:
	rm -rf build dist $(DONE)

# What is installed. Python files need no step: the install points at this folder.

$(DONE)/venv:
	.venv/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv
	mkdir -p $(DONE)
	touch $@

$(DONE)/tools: constraints.txt | $(DONE)/venv
	$(INSTALL) scikit-build-core pybind11 cmake ninja
	touch $@

$(DONE)/core: $(CSRC) pyproject.toml | $(DONE)/tools
	@echo 'hvdlite is compiled, which takes some minutes'
	@$(IN_VENV) CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(INSTALL) --no-build-isolation --no-deps -e .
	touch $@

# The extras of the hvdlite that is installed already. Tests also need tf_keras, without what it asks
# for: `tensorflow`, the wheel for GPUs, which would overwrite tensorflow-cpu.
$(DONE)/demo $(DONE)/demo-keras $(DONE)/docs $(DONE)/test $(DONE)/test-clusters $(DONE)/ptx $(DONE)/dev: $(DONE)/%: pyproject.toml constraints.txt | $(DONE)/core
	$(INSTALL) 'hvdlite[$*]'
	$(if $(filter test,$*),$(INSTALL) --no-deps tf-keras)
	touch $@

# The C++ test program, three ways: with the core of the module, in its build folder, and with sanitizers.
# Sixteen sources are compiled as one, in less than half of the time.

build/cpp/hvdlite_tests: $(CSRC) $(CPP_TESTS) | $(DONE)/core
	$(IN_VENV) cmake -DHVDLITE_TESTS=ON --log-level=WARNING build/cpp
	$(IN_VENV) cmake --build build/cpp --target hvdlite_tests --parallel $(JOBS)
	touch $@

build/tsan/hvdlite_tests: FLAGS := -DHVDLITE_SANITIZE=thread
build/asan/hvdlite_tests: FLAGS := -DHVDLITE_SANITIZE=address
build/tsan/hvdlite_tests build/asan/hvdlite_tests: build/%/hvdlite_tests: $(CSRC) $(CPP_TESTS) | $(DONE)/tools
	$(IN_VENV) cmake -S csrc -B build/$* -G Ninja -DHVDLITE_MODULE=OFF -DHVDLITE_TESTS=ON \
	  -DCMAKE_UNITY_BUILD=ON -DCMAKE_UNITY_BUILD_BATCH_SIZE=16 \
	  $(FLAGS) -DCMAKE_MAKE_PROGRAM="$(CURDIR)/.venv/bin/ninja" --log-level=WARNING
	$(IN_VENV) cmake --build build/$* --target hvdlite_tests --parallel $(JOBS)
	touch $@
