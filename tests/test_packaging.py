"""The package as users install it: a wheel, `pip install .`, an editable install, each imported by a new process."""

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARTS = ("configuration", "modeling", "conversion", "diagnostics", "training", "demo")
CHECK = (
    "import gated_qwen, importlib.util, transformers\n"
    f"for part in {PARTS}:\n"
    "    module = importlib.import_module('gated_qwen.' + part)\n"
    "    print(module.__file__)\n"
    "    assert importlib.util.find_spec(part) is None, part\n"
    "assert transformers.AutoConfig.for_model('gated_qwen').model_type == 'gated_qwen'\n"
)


def run(*command, cwd):
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy, so that building leaves nothing in the real one."""
    ignored = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "tests")
    return Path(shutil.copytree(ROOT, tmp_path_factory.mktemp("checkout") / "gated_qwen", ignore=ignored))


def new_environment(folder: Path) -> Path:
    """A virtual environment that sees the installed dependencies; returns its python."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    # As plain path entries: what is installed editable there stays behind.
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "dependencies.pth").write_text("\n".join(sorted(paths)))
    return python


def install(python: Path, *arguments, cwd):
    pip = [sys.executable, "-m", "pip", "--python", python, "--quiet", "--disable-pip-version-check"]
    run(*pip, "install", "--no-deps", "--no-build-isolation", "--ignore-installed", *arguments, cwd=cwd)


def test_the_wheel_holds_one_top_level_package(checkout, tmp_path):
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, checkout, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names} == {"gated_qwen", wheel.name.rsplit("-", 3)[0] + ".dist-info"}
    for name in ("pytorch_model.bin", "config.json", "tokenizer.json", "expected.safetensors"):
        assert f"gated_qwen/demo/checkpoint/{name}" in names

    python = new_environment(tmp_path / "env")
    install(python, wheel, cwd=tmp_path)
    places = run(python, "-c", CHECK, cwd=tmp_path).split()
    assert all(place.startswith(str(tmp_path / "env")) for place in places)


def test_pip_install(checkout, tmp_path):
    python = new_environment(tmp_path / "env")
    install(python, checkout, cwd=tmp_path)
    places = run(python, "-c", CHECK, cwd=tmp_path).split()
    assert all(place.startswith(str(tmp_path / "env")) for place in places)
    # From the checkout's own folder python finds `gated_qwen/` there first, and the parts beside it.
    run(python, "-c", "import gated_qwen.demo", cwd=checkout)
    assert "demo" in run(tmp_path / "env" / "bin" / "gated-qwen", "--help", cwd=tmp_path)


def test_editable_install(checkout, tmp_path):
    python = new_environment(tmp_path / "env")
    install(python, "--editable", checkout, cwd=tmp_path)
    places = run(python, "-c", CHECK, cwd=tmp_path).split()
    assert all(place.startswith(str(checkout)) for place in places)
