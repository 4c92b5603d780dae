"""Kills at random moments, and several processes at once: a few seeds; and what is left behind."""

import contextlib
import os
import subprocess
import sys
import time
from fnmatch import fnmatch
from pathlib import Path

import pytest
from filelock import FileLock
from fuzz import kills

from spindle import paths, recipes
from spindle.bench import report
from spindle.errors import SpindleError

COUNT = 20
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="forks a process that has threads")


@on_linux
def test_after_a_kill_the_same_works_and_what_is_there_is_old_or_new():
    command = [sys.executable, str(Path(kills.__file__)), "--count", str(COUNT)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    told = run.stdout.replace(":", ",").split(", ")
    assert "findings 0" in run.stdout and any("each line record" in one for one in told)
    assert run.stderr == ""  # the bar is for terminals


@pytest.mark.parametrize("at_work", [False, True])
def test_what_a_killed_fetch_left_goes_though_the_model_is_there(tmp_path, monkeypatch, at_work):
    """Killed after it has put the model in its place; who holds the lock is at work."""
    monkeypatch.setenv("SPINDLE_CACHE", str(tmp_path))
    monkeypatch.setattr(recipes, "deep_flaw", lambda directory: None)
    recipe = recipes.RECIPES["smollm2"]
    models = recipes.place(recipe).parent
    left = models / f".{recipe.name}.staging-left"
    left.mkdir(parents=True)
    (left / "model.gguf").write_text("x")
    with FileLock(models / f".{recipe.name}.lock") if at_work else contextlib.nullcontext():
        assert recipes.fetch(recipe, show=False) == recipes.place(recipe)
    assert left.exists() == at_work


@pytest.mark.parametrize("age_s, kept", [(10, True), (2 * paths.LEFTOVER_S, False)])
def test_what_a_killed_build_left_goes_when_it_is_old(tmp_path, age_s, kept):
    """One that is younger may be that of a process that is at work."""
    left = tmp_path / "build" / f".made.so{paths.STAGING}left"
    left.mkdir(parents=True)
    (left / "unit.o").write_text("x")
    then = time.time() - age_s
    os.utime(left, (then, then))
    paths.sweep(tmp_path / "build", f"*{paths.STAGING}*")
    assert left.exists() == kept
    with paths.staging_beside(tmp_path / "build" / "made.so") as folder:
        assert folder.is_dir() and folder.parent == tmp_path / "build"
        assert fnmatch(folder.name, f"*{paths.STAGING}*")
    assert not folder.exists()


@pytest.mark.parametrize("age_s, kept", [(10, True), (2 * paths.LEFTOVER_S, False)])
def test_what_a_killed_record_left_goes_when_it_is_old(tmp_path, age_s, kept):
    left, file = tmp_path / f"{report.PART}1", tmp_path / "figures.json"
    left.write_text("[1, 2")
    then = time.time() - age_s
    os.utime(left, (then, then))
    report.publish([1], "", file)
    assert file.read_text() == "[\n  1\n]\n"
    assert left.exists() == kept


def test_a_record_keeps_what_its_file_was(tmp_path):
    """Its mode; a link stays one; and what is no file is written to."""
    file, link = tmp_path / "figures.json", tmp_path / "link.json"
    file.write_text("old")
    file.chmod(0o640)
    link.symlink_to(file)
    report.publish([], "", link)
    assert link.is_symlink() and file.read_text() == "[]\n"
    assert file.stat().st_mode & 0o777 == 0o640
    report.publish([], "", Path(os.devnull))
    assert sorted(os.listdir(tmp_path)) == ["figures.json", "link.json"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_record_that_does_not_fit_leaves_the_old_one(tmp_path, monkeypatch):
    file = tmp_path / "figures.json"
    file.write_text("old")
    write = Path.write_text

    def full(self, text, **options):
        write(self, text[:5], **options)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(SpindleError, match=r"figures.json: No space left on device"):
        report.publish(list(range(100)), "", file)
    assert file.read_text() == "old" and os.listdir(tmp_path) == ["figures.json"]
    with pytest.raises(SpindleError, match=r"/dev/full: No space left on device"):
        report.publish([], "", Path("/dev/full"))


@on_linux
def test_a_kill_that_leaves_half_a_file_is_a_finding(tmp_path, monkeypatch):
    """What was there before: the file is emptied, then written."""
    it = kills.Record(tmp_path, old=True)
    it.file.write_text("")
    with pytest.raises(ValueError):
        it.check_between()
    it.file.write_text("[1]")
    with pytest.raises(AssertionError, match="neither old nor new"):
        it.check_between()
