"""The wheel holds every package and data file, and works where nothing else of the source tree is."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built without network, and away from the source tree, which must stay as it is."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    tree = "tar --exclude=__pycache__ -cf - soap simulator search profiles pyproject.toml README.md LICENSE | tar -xf - -C "
    subprocess.run(tree + str(source), shell=True, cwd=ROOT, check=True)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, cwd=out, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.glob("*.whl")
    return path


def test_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = (path for path in (ROOT / "soap").rglob("*") if path.is_file() and not {"__pycache__", ".mypy_cache"} & set(path.parts))
    assert names == {path.relative_to(ROOT).as_posix() for path in files}


def test_wheel_declares_commands_and_license(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (entry_points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
    text = archive.read(entry_points).decode()
    for command in ("search", "run", "simulate", "diff"):
        assert f"soap-{command} = soap.cli.{command}:main" in text
    assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())


def test_wheel_works_alone(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:  # a pure wheel: what pip does, without asking for its dependencies
        archive.extractall(target)
    program = f"""
import sys; sys.path.insert(0, {str(target)!r})
import json, soap
cluster = soap.load_cluster("p100-4x4")
print(json.dumps([soap.__file__, cluster.device_count, "torch" in sys.modules]))
"""
    done = subprocess.run([sys.executable, "-I", "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [str(target / "soap" / "__init__.py"), 16, False]
