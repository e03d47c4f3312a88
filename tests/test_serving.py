"""What benchmarks/serving.py finds: engines give transformers' tokens. `bash tests/run.sh serving` installs them."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import serving


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    llama_cpp = Path(os.environ["LLAMA_CPP"]).resolve() if os.environ.get("LLAMA_CPP") else None
    # Where no engine is installed the real model would take minutes and show little.
    models = serving.MODELS if importlib.util.find_spec("vllm") else ["small"]
    return serving.measure(tmp_path_factory.mktemp("serving"), serving.WAYS, llama_cpp, models)


@pytest.mark.parametrize("way", serving.WAYS, ids=lambda way: f"{way.engine}: {way.name}")
def test_an_engine_gives_the_tokens_of_transformers(rows, way):
    own = [row for row in rows if (row["engine"], row["way"]) == (way.engine, way.name)]
    assert len(own) in (2, 2 * len(way.models))
    for row in own:
        if "not_run" in row:
            pytest.skip(row["not_run"])
        if way.name == "its own Qwen3-Next, from the export":
            assert "No Qwen3Next layer found" in row["failed"]
        elif way.name == "Qwen3.5 export":
            if way.engine == "llama.cpp":
                assert "GGML_ASSERT(buffer) failed" in row["failed"]
        else:
            assert row["same"], row
            assert row["logprob_difference"] < (1e-3 if way.engine == "llama.cpp" else 1e-4), row


def test_the_plugin_shows_transformers_the_classes(monkeypatch):
    import transformers

    from gated_qwen import GatedQwenForCausalLM, vllm

    for name in vllm.modeling.__all__:
        monkeypatch.setattr(transformers, name, None, raising=False)
    vllm.register()
    vllm.register()
    assert transformers.GatedQwenForCausalLM is GatedQwenForCausalLM
