import logging
import os
import shutil
from pathlib import Path

# Set before torch starts its threads: several workers share the machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import transformers
from support import GATES, RELEASED, RELEASED_NAMES


@pytest.fixture(params=GATES, ids=["ungated", "headwise", "elementwise"])
def gate(request):
    return request.param


@pytest.fixture(params=RELEASED_NAMES)
def released(request, tmp_path) -> Path:
    """A copy of one released checkpoint, free to be changed."""
    return Path(shutil.copytree(RELEASED / request.param, tmp_path / request.param))


@pytest.fixture
def log(caplog):
    """What is logged, by transformers too, whose logger passes nothing on to the root."""
    transformers.utils.logging.add_handler(caplog.handler)
    with caplog.at_level(logging.WARNING):
        yield caplog
    transformers.utils.logging.remove_handler(caplog.handler)
