# Each command makes .venv with the versions of requirements.txt when it has to;
# from then on it starts at once. Variables to set on the command line:
#   PYTHON=/path/to/python3.12         the Python that .venv is made with
#   OPTIONS="-k mxfp4"                 passed on to pytest, JupyterLab, the evaluation, or
#                                      progress: OPTIONS="--json ../alice/workbook"
#   JOBS=8                             test processes (default 3)

.PHONY: demo chat test test-all test-real test-agents test-cluster test-engine test-course test-bits lab read workbook progress mine book export figures
.PHONY: check sizes evaluate clean help
.DEFAULT_GOAL := help

VENV := .venv
PY := $(VENV)/bin/python
CANDIDATES := python3.13 python3.12 python3.11 python3 python
PYTHON = $(shell for name in $(CANDIDATES); do \
	"$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& { echo "$$name"; break; }; done)
# The stamp's name holds a checksum, so that a checkout's file times do not matter.
STAMP := $(VENV)/.installed-$(firstword $(shell cat requirements.txt pyproject.toml | cksum))
# Tests that wait leave a core to others: three processes keep two cores busy.
JOBS := 3
# Tests start hundreds of processes, each of which would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

help:
	@echo "For learners"
	@echo "  make demo          ask the embedded model what 47 + 85 is"
	@echo "  make chat          talk to SmolLM2, a small real model"
	@echo "  make chat MODEL=   talk to the embedded model"
	@echo "  make lab           open your workbook, the chapters with empty blanks"
	@echo "  make read          open the reading edition, the chapters with our versions"
	@echo "  make progress      tell which blanks are yours, and right"
	@echo "  make mine          ask an engine with your functions in it: PROMPT=\"...\""
	@echo "  make workbook      refresh the workbook's text; what you wrote stays"
	@echo "  make book          build the course as a web site into book/"
	@echo
	@echo "For those who change SimpleLLM"
	@echo "  make test          run the tests and every chapter"
	@echo "  make test-engine   run the tests of the engine alone"
	@echo "  make test-course   run the tests of the course alone"
	@echo "  make test-all      run also the variants that make test leaves out"
	@echo "  make test-real     run small real models, from PyPI, against transformers"
	@echo "  make test-agents   run agents, from npm and PyPI, against a server"
	@echo "  make test-cluster  run three nodes of a Ray cluster, where Ray is installed"
	@echo "  make test-bits     run the tests of equal bits as on an AVX2 processor"
	@echo "  make check         look for drift, format, lint and type errors"
	@echo "  make export        write simplellm/*.py from the chapters"
	@echo "  make figures       draw the chapters' figures again"
	@echo "  make sizes         tell what the package is made of: folders, lines, imports"
	@echo "  make evaluate      measure the embedded model on held-out problems"
	@echo "  make clean         remove .venv and everything that was built"

demo: $(STAMP)
	@$(VENV)/bin/simplellm "What is 47 + 85?" --reasoning-effort high

MODEL := smollm2
chat: $(STAMP)
	@$(VENV)/bin/simplellm chat $(MODEL)

test: $(STAMP)
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) --dist loadfile \
		--no-loadscope-reorder $(OPTIONS)

test-engine: override OPTIONS += -m "not course and not exhaustive and not real and not agents and not cluster"
test-course: override OPTIONS += -m "course and not exhaustive"
test-engine test-course: test

test-all: override OPTIONS += -m "not real and not agents and not cluster"
test-all: test

# Models with their published weights, as packages of which nothing is run, and
# llama.cpp, which is run; and tokenizers and chat templates: 450 MB.
test-real: $(STAMP)
	@$(PY) tools/record_real.py --install
	OMP_NUM_THREADS=2 $(PY) -m pytest -n 0 -m real tests/test_real_weights.py \
		tests/test_real_texts.py tests/course/test_workbook.py $(OPTIONS)

# Codex, Claude Code and others, unmodified, in build/agents: 1.3 GB.
test-agents: $(STAMP)
	@$(PY) tools/record_clients.py --install
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 0 -m agents tests/test_agents.py $(OPTIONS)

# Needs the extra [ray], which nothing else does: make does not install it.
test-cluster: $(STAMP)
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 0 -rs -m cluster tests/test_cluster.py $(OPTIONS)

# NumPy, PyTorch and their libraries choose kernels by a processor's instructions, and
# sums in another order have other bits. (oneDNN's 8-bit products are wrong below VNNI.
# PyTorch sees the processor itself, not this limit, and would use them.)
test-bits: export OPENBLAS_CORETYPE = Haswell
test-bits: export ATEN_CPU_CAPABILITY = avx2
test-bits: export FBGEMM_ENABLE_INSTRUCTIONS = AVX2
test-bits: export MKL_ENABLE_INSTRUCTIONS = AVX2
test-bits: export ONEDNN_MAX_CPU_ISA = AVX2_VNNI
test-bits: override OPTIONS += -m bits
test-bits: test

LAB = JUPYTER_CONFIG_PATH="$(CURDIR)/.jupyter" $(PY) -m jupyter lab \
	--LabApp.extra_labextensions_path="$(CURDIR)/.jupyter/labextensions" $(OPTIONS)

# What a reader needn't see of the workbook's folder.
HIDDEN = $(foreach name,course figures *.py *.toml AGENTS.md teaching.md,--ContentsManager.hide_globs="$(name)")

lab: $(STAMP)
	@test -e workbook/test_blanks.py || $(PY) tools/workbook.py make
	$(LAB) --ServerApp.root_dir="$(CURDIR)/workbook" $(HIDDEN) \
		--LabApp.default_url=/lab/tree/index.md

read: $(STAMP)
	$(LAB) --LabApp.default_url=/lab/tree/chapters/index.md

book: $(STAMP)
	@$(PY) tools/book.py build

export: $(STAMP)
	@$(PY) tools/export.py

workbook: $(STAMP)
	@$(PY) tools/workbook.py make

# Its exit status 1, of a workbook that is not done, is no error here.
progress: $(STAMP)
	@$(PY) tools/workbook.py progress $(OPTIONS) || test $$? -eq 1

PROMPT := What is 47 + 85?
mine: $(STAMP)
	@$(PY) tools/workbook.py mine "$(PROMPT)" $(OPTIONS)

figures: $(STAMP)
	SAVE_FIGURES=1 OMP_NUM_THREADS=1 $(PY) -m pytest chapters -n $(JOBS) \
		--dist loadfile -o chapter_seconds=180 $(OPTIONS)

check: $(STAMP)
	$(PY) tools/export.py --check
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy

sizes: $(STAMP)
	@$(PY) tools/sizes.py

evaluate: $(STAMP)
	$(PY) tools/embedded/evaluate.py $(OPTIONS)

clean:
	rm -rf $(VENV) book build dist *.egg-info .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(STAMP):
	@test -n "$(PYTHON)" || { \
		echo "SimpleLLM needs Python 3.11 or newer; found none of: $(CANDIDATES)." >&2; \
		echo "Install one, or name it: make PYTHON=/path/to/python3.12" >&2; \
		exit 1; }
	@echo "Setting up $(VENV) with $(PYTHON); this downloads about 3 GB, once."
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install --disable-pip-version-check -r requirements.txt
	@$(PY) -m pip install --disable-pip-version-check --quiet --no-deps \
		--no-build-isolation --editable .
	@# jupytext knows a chapter's kernel by its interpreter, so name that in full.
	@$(PY) -m ipykernel install --sys-prefix >/dev/null
	@rm -f $(VENV)/.installed-*
	@touch $@
